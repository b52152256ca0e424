"""Processes that only predict, from what the learner's process publishes.

    ONLINE_LEARNING_MODEL=online_data/model \\
        uvicorn --factory examples.online_learning.predicting:make_app --workers 4 --port 8001 \\
        --timeout-graceful-shutdown 5

Each worker maps the newest version read-only; nothing is sent between them and the learner.
ONLINE_LEARNING_HOSTS has the names under which clients may ask, with commas between them, such as
the public name of a proxy; ONLINE_LEARNING_TOKEN has the token.
"""

import os

from fastapi import FastAPI

from aioreplica.integrations.asgi import LOCAL_NAMES, OnlineService
from aioreplica.integrations.fastapi import lifespan, router
from aioreplica.online import SnapshotReader

from .model import INPUT, predict


def make_app() -> FastAPI:
    """Return the application of one worker."""
    reader = SnapshotReader(os.environ["ONLINE_LEARNING_MODEL"])
    token = os.environ.get("ONLINE_LEARNING_TOKEN")
    names = os.environ.get("ONLINE_LEARNING_HOSTS", "").split(",")
    hosts = [*LOCAL_NAMES, *(name.strip() for name in names if name.strip())]
    service = OnlineService(reader, predict, input_like=INPUT, token=token, hosts=hosts)
    # A description of the routes would be for everybody, also with a token.
    app = FastAPI(lifespan=lifespan(service), docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(router(service))
    return app
