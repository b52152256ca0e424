"""State of a model that every replica writes for itself: running statistics and the like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..context import PLACE, Place
from ..errors import ContextError
from ..values import Variable

Array = npt.NDArray[Any]


def new_state(array: Array, name: str) -> Variable:
    """Make a variable that replicas write for themselves.

    Read elsewhere it is the mean of what they hold; of what has no mean, the first replica's.
    """
    kind = "mean" if array.dtype.kind == "f" else "only_first_replica"
    return Variable(array, name=name, trainable=False, synchronization="on_read", aggregation=kind)


def write_state(values: Mapping[Variable, Array]) -> None:
    """Write variables, as one write: in a replica its components, elsewhere all of them.

    Raises:
        ValueError: If a shape or dtype does not fit.
        ContextError: If another strategy is in charge, or in an update function.

    Cancellation:
        CancelledError once the run is aborted, before anything is written.
    """
    if not values:
        return
    place = PLACE.get()
    if place.staging is not None:
        raise ContextError(
            f"State of a model was written in {place.describe()}, where one variable is updated. "
            "Call the model in the step, or in evaluation mode."
        )
    fitting = {}
    for variable, array in values.items():
        variable.require_owner_in_charge(place)
        fitting[variable] = variable.fitting(array)
    if place.replica is not None:
        place.replica.check_running()
    while True:  # replicas write from several threads
        bases = {variable: variable.components for variable in fitting}
        changes = {v: _changed(place, bases[v], array) for v, array in fitting.items()}
        if next(iter(fitting)).store.write(changes, bases, is_local=place.replica is not None):
            return


def require_outside_replicas(what: str) -> None:
    """Check that code runs outside every replica.

    Raises:
        ContextError: If it does not.
    """
    place = PLACE.get()
    if place.is_in_step:
        raise ContextError(
            f"{what} was called in {place.describe()}, but concerns all replicas. Call it before "
            "or after the run."
        )


def _changed(place: Place, old: tuple[Array, ...], array: Array) -> tuple[Array, ...]:
    """Return the components after a write: of a mean and the like, all are what is written."""
    own = np.array(array)
    own.flags.writeable = False
    if place.replica is None or len(old) == 1:
        return (own,) * len(old)
    new = list(old)
    new[place.replica.local_replica_id] = own
    return tuple(new)
