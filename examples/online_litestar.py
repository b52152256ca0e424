"""A model that learns online, in Litestar: the same service as in online_starlette.py.

pip install -e ".[examples,web]" litestar && python examples/online_litestar.py
"""

import uvicorn
from litestar import Litestar, asgi, get
from litestar.types import Receive, Scope, Send

import aioreplica as ar

try:
    from examples.online_starlette import make_service
except ModuleNotFoundError:  # run as a file
    from online_starlette import make_service


@get("/")
async def hello() -> str:
    return "Ask /model/predict."


def make_app() -> Litestar:
    service = make_service()

    @asgi("/model", is_mount=True, copy_scope=True)
    async def model(scope: Scope, receive: Receive, send: Send) -> None:
        await service(scope, receive, send)

    return Litestar([hello, model], lifespan=[service.lifespan])


if __name__ == "__main__":
    ar.set_logical_devices("cpu", 2)
    ar.set_lane_options(background=True)  # learn on cores that nothing else needs
    uvicorn.run(make_app(), timeout_graceful_shutdown=5)
