"""Click-through rates: two hashed models learn from labels that come long after the prediction.

uvicorn --factory examples.click_through:make_app    # pip install -e ".[web,checkpoint]" river
uvicorn --factory examples.click_through:make_worker --workers 4 --port 8001
POST /clicks/predict {"input": [7, 1, 3, 20]}: ids of a user, an ad, a site, an hour; the answer has
an id. When it is known whether there was a click: POST /clicks/label {"id": ..., "target": 1}.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry
from river.drift import ADWIN
from starlette.applications import Starlette
from starlette.routing import Mount

import aioreplica as ar
from aioreplica.integrations.asgi import OnlineService
from aioreplica.integrations.fastapi import lifespan

DATA, MODELS = Path(os.environ.get("CLICKS", "click_data")), ("clicks", "buys")
LIKE, NUM_ROWS = np.zeros(4, np.int64), 2**16


def rows_of(inputs: Any) -> Any:  # multiplicative hashing of each id and field to 16 bits
    mixed = (inputs * len(LIKE) + np.arange(len(LIKE))).astype(np.uint64)
    return (mixed * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(48)).astype(np.int64)


def predict(snapshot: Any, inputs: Any) -> Any:
    return 1 / (1 + np.exp(-snapshot["table"][rows_of(inputs)].sum(axis=1)))


def make_service(name: str, strategy: ar.Strategy, registry: CollectorRegistry) -> OnlineService:
    with strategy.scope():
        table, optimizer = ar.Variable(np.zeros(NUM_ROWS)), ar.optimizers.Adagrad(0.1)

    async def step(_ctx: ar.ReplicaContext, batch: Any) -> None:
        slope = predict({"table": table.value}, batch["input"]) - batch["target"]
        slices = ar.IndexedSlices(slope.repeat(4), rows_of(batch["input"]).ravel(), (NUM_ROWS,))
        await optimizer.apply_gradients([(ar.Weighted(slices, len(slope)), table)])

    learner = ar.online.OnlineLearner(
        strategy, step, {"table": table, "optimizer": optimizer},
        max_batch=256, max_delay_s=0.05, queue_size=10_000,
        journal=ar.online.Journal(DATA / f"{name}.db", label_ttl_s=86_400),
        checkpoints=ar.CheckpointManager(DATA / name), publish_to=DATA / f"{name}.model",
        step_check=ar.online.StepLimits(change=100.0),
        prequential=ar.online.Prequential(predict, {"auc": ar.metrics.AUC()}, detector=ADWIN),
    )  # fmt: skip
    options: Any = {"input_like": LIKE, "target_like": 0.0, "registry": registry, "model": name}
    return OnlineService(learner, predict, **options)


def make_app() -> Starlette:
    DATA.mkdir(parents=True, exist_ok=True)
    ar.set_lane_options(background=True)  # learn on cores that nothing else needs
    strategy, registry = ar.MirroredStrategy(["cpu:0"]), CollectorRegistry()
    services = [make_service(name, strategy, registry) for name in MODELS]
    routes = [Mount(f"/{name}", each) for name, each in zip(MODELS, services, strict=True)]
    return Starlette(routes=routes, lifespan=lifespan(*services))


def make_worker() -> Starlette:  # what it predicts is labelled by the whole example, to /learn
    readers = [ar.online.SnapshotReader(DATA / f"{name}.model") for name in MODELS]
    services = [OnlineService(reader, predict, input_like=LIKE) for reader in readers]
    routes = [Mount(f"/{name}", each) for name, each in zip(MODELS, services, strict=True)]
    return Starlette(routes=routes, lifespan=lifespan(*services))
