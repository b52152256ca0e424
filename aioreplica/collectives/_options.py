"""Options of collectives."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import final

from ._compression import Compression

IMPLEMENTATIONS = ("auto", "mpi", "torch")


@final
@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """Options of collectives, for a strategy or for one call.

    Options of a call replace those of its strategy as a whole. Nothing here but `compression`
    changes a bit of any result.

    Attributes:
        bytes_per_pack: Small arrays are reduced together in packs of about this many bytes; 0
            chooses a size that fits into the cache.
        timeout_seconds: How long replicas wait for each other in one collective before the run
            ends with a StallError; None waits for ever.
        implementation: What carries values between workers: "mpi", "torch" (torch.distributed), or
            "auto", by what has launched the program. One worker needs none.
        compression: What is done to floating-point arrays on their way into a reduction; None
            reduces them as they are.

    Raises:
        ValueError: If a field is out of range.
        TypeError: If a field has the wrong type.

    Example:
        >>> CommunicationOptions(bytes_per_pack=1 << 20).timeout_seconds is None
        True

    Source:
        tf.distribute.experimental.CommunicationOptions, but for `compression`.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: str = "auto"
    compression: Compression | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        size, timeout = self.bytes_per_pack, self.timeout_seconds
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise TypeError(f"bytes_per_pack must be an int, got {size!r}.")
        if size < 0:
            raise ValueError(f"bytes_per_pack must be 0 (automatic) or more, got {size}.")
        if timeout is not None:
            if isinstance(timeout, bool) or not isinstance(timeout, Real):
                raise TypeError(f"timeout_seconds must be a number or None, got {timeout!r}.")
            if not 0 < timeout < math.inf:
                raise ValueError(
                    f"timeout_seconds must be above 0 and finite, got {timeout}. None waits for "
                    "ever."
                )
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got "
                f"{self.implementation!r}."
            )
        if self.compression is not None and not isinstance(self.compression, Compression):
            raise TypeError(
                f"compression must be an ar.collectives.Compression or None, got "
                f"{self.compression!r}."
            )

    def __repr__(self) -> str:
        """Show what differs from the usual options: tables of mismatches are wide enough."""
        changed = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"CommunicationOptions({', '.join(changed)})"


def require_options(options: object, where: str) -> None:
    """Check that what was passed as options is some.

    Raises:
        TypeError: If it is neither None nor a CommunicationOptions.
    """
    if options is not None and not isinstance(options, CommunicationOptions):
        raise TypeError(
            f"{where} takes options as an ar.CommunicationOptions or None, got {options!r}."
        )
