"""Random streams of replicas: generators keyed by seed, step, replica and name."""

from __future__ import annotations

import numpy as np

_SHARED, _REPLICA = 0, 1  # kinds of random streams


def random_stream(seed: int, step: int, replica_id: int | None, name: str) -> np.random.Generator:
    """Return the generator of (seed, step, replica, name); None is the stream all share.

    Equal keys give equal numbers, whatever else was drawn. Different keys are independent.

    Source:
        numpy.random.SeedSequence, O'Neill's seed_seq hashing of the whole key.

    Example:
        >>> a = random_stream(0, 3, 1, "dropout")
        >>> b = random_stream(0, 3, 1, "dropout")
        >>> a.random() == b.random()
        True
    """
    kind = (_SHARED, 0) if replica_id is None else (_REPLICA, replica_id)
    key = (seed, step, *kind, *name.encode())
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
