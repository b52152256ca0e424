"""A model that learns online, in Starlette: the service is mounted like any application.

pip install -e ".[examples,web]" && python examples/online_starlette.py
curl -H "content-type: application/json" -d '{"input": [1, 2]}' http://127.0.0.1:8000/model/predict
"""

from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

import aioreplica as ar
from aioreplica.integrations.asgi import OnlineService
from aioreplica.online import OnlineLearner


def make_service() -> OnlineService:
    """Return a service that fits a straight line, example by example."""
    strategy = ar.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        weights = ar.Variable(np.zeros(2), name="weights")
        optimizer = ar.optimizers.SGD(0.5)

    async def step(_ctx: ar.ReplicaContext, batch: Any) -> float:
        errors = batch["input"] @ weights.value - batch["target"]
        slope = ar.Weighted(batch["input"].T @ errors, len(errors))
        await optimizer.apply_gradients([(slope, weights)])
        return float(np.mean(errors**2)) if len(errors) else 0.0

    def predict(snapshot: Any, inputs: Any) -> Any:
        return inputs @ snapshot[weights]

    learner = OnlineLearner(
        strategy,
        step,
        {"weights": weights, "optimizer": optimizer},
        max_batch=32,
        max_delay_s=0.01,
        queue_size=1000,
    )
    return OnlineService(learner, predict, input_like=np.zeros(2), target_like=0.0)


async def hello(_request: Request) -> Response:
    return PlainTextResponse("Ask /model/predict.")


def make_app() -> Starlette:
    service = make_service()
    return Starlette(
        routes=[Route("/", hello), Mount("/model", app=service)], lifespan=service.lifespan
    )


if __name__ == "__main__":
    ar.set_logical_devices("cpu", 2)
    ar.set_lane_options(background=True)  # learn on cores that nothing else needs
    uvicorn.run(make_app(), timeout_graceful_shutdown=5)
