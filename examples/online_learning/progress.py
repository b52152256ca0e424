"""What the page shows: figures of the newest steps, one point of each curve at a time."""

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from aioreplica.online import StepRecord

NUM_POINTS = 240
POINT_S = 0.5
NUM_EXAMPLES = 200  # that the loss is that of, about


class Progress:
    """Adds up what steps tell; the accuracy is a figure of the learner, of predictions before."""

    def __init__(self) -> None:
        self.points: deque[dict[str, Any]] = deque(maxlen=NUM_POINTS)
        self.replay: dict[str, Any] = {}  # what the client that replays a stream says
        self._newest: deque[StepRecord] = deque()
        self._num_newest = 0
        self._num_learned = 0
        self._began = time.monotonic()

    def add(self, record: StepRecord, figures: Mapping[str, float]) -> None:
        """Count a step, with the figures behind it; a point is made every half second."""
        self._newest.append(record)
        self._num_newest += record.num_examples
        self._num_learned += record.num_examples
        while self._num_newest - self._newest[0].num_examples >= NUM_EXAMPLES:
            self._num_newest -= self._newest.popleft().num_examples
        now = time.monotonic()
        if now - self._began < POINT_S:
            return
        self.points.append(
            {
                "number": record.last_number,
                "accuracy": figures.get("accuracy"),
                "loss": self._mean("loss"),
                "river": self.replay.get("river"),
                "rate": round(self._num_learned / (now - self._began), 1),
                "queue": record.queue_depth,
            }
        )
        self._began, self._num_learned = now, 0

    def report(self) -> dict[str, Any]:
        """Return what goes with each event."""
        return {"point": self.points[-1] if self.points else None, "replay": self.replay}

    def _mean(self, name: str) -> float:
        total = sum(record.scalars[name] * record.num_examples for record in self._newest)
        return round(total / self._num_newest, 5)
