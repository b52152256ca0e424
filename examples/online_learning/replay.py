"""A client: it replays a stream that river ships, predicts each example, then sends its target.

    python -m examples.online_learning.replay --url http://127.0.0.1:8000 --rate 50

Beside it, river's own model predicts and learns the same examples in the same order. The accuracy
of both is prequential: of predictions made before the example was learned. Every few passes the
meaning of the target turns round, so that there is a drift for the service to detect.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
from river import datasets, linear_model, preprocessing

from .model import FEATURES

WINDOW = 200
TELL_EVERY = 25


def stream(passes: int | None, turn_every: int) -> Iterator[tuple[dict[str, float], bool]]:
    """Yield the examples of all passes; None goes on for ever."""
    for number in itertools.count() if passes is None else range(passes):
        is_turned = number // turn_every % 2 == 1
        for features, target in datasets.Phishing():
            yield features, bool(target) != is_turned


class Comparison:
    """River's model beside the service: who was right, all in all and lately."""

    def __init__(self) -> None:
        self.model = preprocessing.StandardScaler() | linear_model.LogisticRegression()
        self.version: int | None = None  # of the service, when river's model began at nothing
        self.num_seen = 0
        self.num_right = 0
        self.num_right_river = 0
        self._lately: deque[tuple[bool, bool]] = deque(maxlen=WINDOW)

    def add(self, features: dict[str, float], target: bool, predicted: bool) -> None:
        """Count an example that the service has predicted, and let river predict and learn it."""
        theirs = bool(self.model.predict_one(features)) == target
        self.model.learn_one(features, target)
        ours = predicted == target
        self.num_seen += 1
        self.num_right += ours
        self.num_right_river += theirs
        self._lately.append((ours, theirs))

    def figures(self) -> dict[str, Any]:
        """Return what the page and the last line show."""
        seen = max(self.num_seen, 1)
        lately = sum(theirs for _, theirs in self._lately) / max(len(self._lately), 1)
        return {
            "seen": self.num_seen,
            "began_at_version": self.version or 0,
            "accuracy": round(self.num_right / seen, 5),
            "accuracy_river": round(self.num_right_river / seen, 5),
            "river": round(lately, 5),
        }


async def post(client: httpx.AsyncClient, path: str, body: Any, **headers: str) -> Any:
    """Send until it is answered: a service that restarts, or is full, is asked again."""
    while True:
        try:
            answer = await client.post(path, json=body, headers=headers)
        except httpx.TransportError:
            await asyncio.sleep(0.5)
            continue
        if answer.status_code in {429, 503}:
            await asyncio.sleep(float(answer.headers.get("retry-after", "1")))
            continue
        answer.raise_for_status()
        return answer.json()


async def replay(options: argparse.Namespace) -> Comparison:
    """Replay the stream; every example has a key, so that none is learned twice."""
    token = os.environ.get("ONLINE_LEARNING_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    run, comparison = os.urandom(6).hex(), Comparison()
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(base_url=options.url, headers=headers, trust_env=False) as client:
        due = loop.time()
        for features, target in stream(options.passes, options.turn_every):
            inputs = [features[name] for name in FEATURES]
            found = await post(client, "/predict", {"input": inputs})
            if comparison.version is None:
                comparison.version = found["version"]
            comparison.add(features, target, found["prediction"]["phishing"] > 0.5)
            body = {"input": inputs, "target": float(target)}
            key = f"{run}-{comparison.num_seen}"
            await post(client, "/learn", body, **{"idempotency-key": key})
            if comparison.num_seen % TELL_EVERY == 0:
                await post(client, "/replay", comparison.figures())
            due = max(due + 1 / options.rate, loop.time())
            await asyncio.sleep(due - loop.time())
        await post(client, "/replay", comparison.figures())
    return comparison


async def replay_until_eof(options: argparse.Namespace) -> None:
    """Replay until the other end of the standard input is closed, as a killed process does."""
    replaying = asyncio.create_task(replay(options))
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), replaying.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await replaying


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.online_learning.replay")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--rate", type=float, default=50.0, help="examples per second, at most")
    parser.add_argument("--passes", type=int, help="over the stream; else until it is stopped")
    parser.add_argument("--turn-every", type=int, default=2, metavar="N", help="drift after N")
    parser.add_argument("--until-eof", action="store_true", help="end with the standard input")
    options = parser.parse_args(arguments)
    with contextlib.suppress(KeyboardInterrupt):
        if options.until_eof:
            asyncio.run(replay_until_eof(options))
            return
        print(json.dumps(asyncio.run(replay(options)).figures()))


if __name__ == "__main__":
    main()
