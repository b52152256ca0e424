"""Retention: the steps that are removed after a save."""

from __future__ import annotations

from collections.abc import Container, Sequence


def steps_to_remove(
    newest_first: Sequence[int],
    *,
    max_to_keep: int | None,
    keep_every: int | None,
    pinned: Container[int] = (),
) -> list[int]:
    """Return the steps that are not kept.

    Args:
        newest_first: All steps, the one saved last first.
        max_to_keep: How many of the newest are kept; None keeps all.
        keep_every: Steps that it divides are kept for good, beside those.
        pinned: Steps that are kept until somebody unpins them, beside those.

    Example:
        >>> steps_to_remove([50, 40, 30, 20, 10], max_to_keep=2, keep_every=20)
        [30, 10]
    """
    if max_to_keep is None:
        return []
    others = [step for step in newest_first if keep_every is None or step % keep_every]
    newest = set(newest_first[:max_to_keep])
    return [step for step in others if step not in newest and step not in pinned]
