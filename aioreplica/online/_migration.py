"""Migrations: how what an older program has written becomes that of this one, by spec version.

A program says with `spec_version` which form its examples and the keys of its state have. Rows of a
journal, checkpoints and published files have the version of the program that wrote them. They stay
as they are: what is older is migrated, version by version, whenever it is read.

Invariants:
    * Versions only go up: nothing that is newer than the program is read.
    * What is migrated to is checked before it is used: the keys against each other, the state
      against the checkpoint, examples against an `ExampleSpec`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import final

from .._functions import is_async, require_no_yield
from ..checkpoint import (
    CheckpointManager,
    DescribedState,
    Manifest,
    MisfitError,
    Savepoint,
    State,
    plain_data,
    read_state,
    relabelled,
)
from ..errors import CheckpointError, JournalError
from ..tree import Array, Tree
from ._example import ExampleSpec, as_example
from ._journal_format import Waiting

_VARIABLES = "variables/"
"""Begin of the keys of `variables` in a checkpoint; the rest is beside them under "online"."""
MAX_SHOWN = 200
"""How many characters of an example an error shows."""


@final
@dataclass(frozen=True, slots=True)
class Migration:
    """A step from one spec version to the next, see `OnlineLearner(migrate=)`.

    Keys are those of the learner's `variables`, such as `model/w`, or the first parts of some, such
    as `model`. What an optimizer keeps for a variable goes with it.

    Args:
        examples: Called with an example of the older version; returns that of the newer one. None
            if they are the same.
        renamed: Keys then, and now.
        added: Keys of the newer version that begin with the model's own initial values.
        removed: Keys that the newer version does not have any more.

    Raises:
        TypeError: If something is of the wrong type.
        ValueError: If a key is named twice.

    Example:
        >>> Migration(lambda row: {**row, "weight": 1.0}, renamed={"w": "model/w"})
        Migration(renamed={'w': 'model/w'}, added=(), removed=())
    """

    examples: Callable[[Tree], Tree] | None = field(default=None, repr=False)
    renamed: Mapping[str, str] = field(default_factory=dict)
    added: Collection[str] = ()
    removed: Collection[str] = ()

    def __post_init__(self) -> None:
        if self.examples is not None:
            if not callable(self.examples) or is_async(self.examples):
                raise TypeError(f"examples must be a plain function, got {self.examples!r}.")
            require_no_yield(self.examples, "Migration")
        if not isinstance(self.renamed, Mapping):
            raise TypeError(f"renamed must be a dict of keys by key, got {self.renamed!r}.")
        for name in ("added", "removed"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"{name} are several keys, got {getattr(self, name)!r}.")
        for keys in ([*self.renamed, *self.removed], [*self.renamed.values(), *self.added]):
            for key in keys:
                if not isinstance(key, str) or not key:
                    raise TypeError(f"Keys of a state are text, got {key!r}.")
            if len({*keys}) < len(keys):
                raise ValueError(f"A key is named twice by a Migration: {', '.join(sorted(keys))}.")

    def now(self, key: str) -> str | None:
        """Return a key of the older version as the newer one has it; None if it has not."""
        known = [*self.renamed, *self.removed]
        then = max((each for each in known if is_below(key, each)), key=len, default=None)
        if then is None:
            return key
        return None if then in self.removed else self.renamed[then] + key[len(then) :]


def is_below(key: str, other: str) -> bool:
    """Tell whether a key is another one, or begins with its parts."""
    return key == other or key.startswith(f"{other}/")


@final
class Schema:
    """The spec version of a program, and its ways from older ones.

    Args:
        version: The version.
        migrate: From each older version to the next.
        validate: Checks examples that were migrated, if it is an `ExampleSpec`: any other function
            takes what clients send, not what it has returned before.
        state: That of the program; None for one that only reads published files.

    Attributes:
        version: As above.
        initial: The values of all that was ever added, by key.

    Raises:
        TypeError: If something is of the wrong type.
        ValueError: If a version is no positive number, a step between two is missing, or something
            that was added or renamed is not in the state.
    """

    def __init__(
        self,
        version: object,
        migrate: object = None,
        validate: Callable[[Tree], Tree] | None = None,
        state: object = None,
    ) -> None:
        if isinstance(version, bool) or not isinstance(version, int):
            raise TypeError(f"spec_version must be an int, got {version!r}.")
        if version < 1:
            raise ValueError(f"spec_version must be at least 1, got {version}.")
        given = {} if migrate is None else migrate
        if not isinstance(given, Mapping):
            raise TypeError(f"migrate must be a dict of Migration by version, got {migrate!r}.")
        for number, step in given.items():
            if not isinstance(step, Migration):
                raise TypeError(
                    f"migrate[{number!r}] must be an ar.online.Migration, got {step!r}."
                )
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"The versions in migrate are ints, got {number!r}.")
        numbers = sorted(given)
        if numbers and (numbers[0] < 1 or numbers != [*range(numbers[0], version)]):
            raise ValueError(
                f"migrate has steps from the versions {numbers}, and spec_version is {version}. "
                "migrate[n] goes from n to n + 1: give one for each version from the first to "
                f"{version - 1}."
            )
        self.version = version
        self._steps: Mapping[int, Migration] = {number: given[number] for number in numbers}
        self._spec = validate if isinstance(validate, ExampleSpec) else None
        self.initial = {} if state is None else self._find_added(state)

    def _steps_from(self, version: int) -> list[tuple[int, Migration]]:
        """Return the steps from a version to that of the program.

        Raises:
            ValueError: If there are none.
        """
        if version > self.version:
            raise ValueError(
                f"has spec version {version}, and this program is of version {self.version}: start "
                "the program that wrote it, or a newer one"
            )
        if version < self.version - len(self._steps):
            first = f"begins with {min(self._steps)}" if self._steps else "was not given"
            raise ValueError(
                f"has spec version {version}, this program is of version {self.version}, and there "
                f"is no step from {version}: migrate= {first}"
            )
        return [(each, self._steps[each]) for each in range(version, self.version)]

    def check_beside(self, other: Schema, what: str) -> None:
        """Check that a model may learn the examples of another one's journal.

        Raises:
            ValueError: If it has another version, or other ways of examples.
        """
        if self.version != other.version:
            raise ValueError(
                f"{what} has spec_version {self.version}, and the learner {other.version}: they "
                "learn the same examples."
            )
        for number, step in self._steps.items():
            theirs = other._steps.get(number, Migration()).examples
            if step.examples is not None and step.examples is not theirs:
                raise ValueError(
                    f"{what} has migrate[{number}] with another `examples` than the learner, which "
                    "migrates them. Leave it out, or pass the same function."
                )

    # ---- examples ------------------------------------------------------------------------

    def example(self, given: Tree, version: int, what: str) -> Tree:
        """Return an example of a version as the program has it.

        Raises:
            JournalError: If there is no way, or what comes of it is no such example; names `what`
                it was.
        """
        found = self._migrated(given, version, what)
        if version != self.version and self._spec is not None:
            try:
                return as_example(self._spec(found))
            except ValueError as error:
                raise JournalError(
                    f"{what} was migrated from spec version {version} to {self.version}, and "
                    f"validate refuses it: {error} It became {_shown(found)}."
                ) from error
        return found

    def labelled(self, example: Tree, waiting: Waiting) -> Tree:
        """Return an example made of a prediction and its label, which `validate` looks at next.

        Raises:
            JournalError: If there is no way.
            ValueError: If a step raises, as it may where the label has another form.
        """
        what = f"The prediction {waiting.id!r}"
        return self._migrated(example, waiting.spec_version, what, ValueError)

    def _migrated(
        self, given: Tree, version: int, what: str, failed: type[Exception] = JournalError
    ) -> Tree:
        try:
            steps = self._steps_from(version)
        except ValueError as error:
            raise JournalError(f"{what} {error}.") from None
        found = given
        for number, step in steps:
            if step.examples is not None:
                try:
                    found = as_example(step.examples(found))
                except Exception as error:
                    raise failed(
                        f"{what} could not be migrated from spec version {number} to {number + 1}: "
                        f"{error!r}. It was {_shown(found)}."
                    ) from error
        return found

    # ---- keys ----------------------------------------------------------------------------

    def way_from(self, version: int, keys: Iterable[str], what: str) -> tuple[_Names, list[str]]:
        """Return a function from keys of a version to those of the program, and what was added.

        Args:
            version: Of what has the keys.
            keys: All of them.
            what: Names it in errors.

        Raises:
            CheckpointError: If there is no way, or a step does not fit the keys.
        """
        try:
            steps = self._steps_from(version)
        except ValueError as error:
            raise CheckpointError(f"{what} {error}.") from None
        left, added = [*keys], list[str]()
        for number, step in steps:
            _require_fit(step, left, f"{what}, of spec version {version},", number)
            left = [*filter(None, map(step.now, left)), *step.added]
            added = [*filter(None, map(step.now, added)), *step.added]

        def now(key: str) -> str | None:
            for _, step in steps:
                found = step.now(key)
                if found is None:
                    return None
                key = found
            return key

        return now, added

    async def restore(
        self,
        manager: CheckpointManager,
        state: DescribedState,
        step: int | None,
        facts: Facts,
        owner: Schema | None = None,
    ) -> int:
        """Restore a learner's checkpoint, None for the newest; an older one is adapted.

        Args:
            manager: Has it.
            state: That of the learner, with its facts.
            step: Which one.
            facts: What a checkpoint says beside the variables, restored with them.
            owner: That of the learner that has saved it, if it is another one: its steps count.

        Raises:
            CheckpointError: As `way_from` and `CheckpointManager.restore`; nothing has changed.
        """
        now, added = self.way_from(self.version, (), "")

        def adapt(manifest: Manifest) -> tuple[Manifest, list[str]]:
            nonlocal now, added
            fitted, now, added = (owner or self)._fitted(manifest)
            return fitted, [f"{_VARIABLES}{key}" for key in added]

        state.adapt = adapt
        number = await manager.restore(state, step)
        for key in added:
            if key in self.initial:
                self.initial[key].put_back()
        served = facts["served"]
        if served:
            arrays = {own: each for key, each in served["arrays"].items() if (own := now(key))}
            facts["served"] = {**served, "arrays": arrays}
        facts["spec_version"] = self.version
        return number

    def _fitted(self, manifest: Manifest) -> tuple[Manifest, _Names, list[str]]:
        record = manifest.entries.get("online")
        version = 1 if record is None else plain_data(record).get("spec_version", 1)
        keys = [key for key, each in manifest.entries.items() if not each.owner]
        own = [key[len(_VARIABLES) :] for key in keys if key.startswith(_VARIABLES)]
        now, added = self.way_from(version, own, f"Checkpoint {manifest.step}")

        def now_here(key: str) -> str | None:
            if not key.startswith(_VARIABLES):
                return key
            found = now(key[len(_VARIABLES) :])
            return None if found is None else _VARIABLES + found

        return relabelled(manifest, now_here), now, added

    def _find_added(self, state: object) -> dict[str, Savepoint]:
        found, later = read_state(state), [*self._steps.values()]
        made: dict[str, Savepoint] = {}
        for position, (number, step) in enumerate(self._steps.items(), 1):
            for key in [*step.renamed.values(), *step.added]:
                own: str | None = key
                for each in later[position:]:
                    own = None if own is None else each.now(own)
                if own is None:  # removed by a later one
                    continue
                parts = _objects(found, own)
                if not parts:
                    listed = ", ".join(map(repr, found.entries))
                    raise ValueError(
                        f"migrate[{number}] has the key {key!r}, which would be {own!r} now, and "
                        f"there is no such variable, optimizer or object. There are {listed}."
                    )
                if key in step.added:
                    made[own] = Savepoint(parts)
        return made

    def arrays(self, given: Mapping[str, Array], version: int, what: str) -> dict[str, Array]:
        """Return arrays of a published file by the keys of the program.

        Raises:
            CheckpointError: If there is no way, or something was added since.
        """
        if version == self.version:
            return dict(given)
        try:
            steps = self._steps_from(version)
        except ValueError as error:
            raise CheckpointError(f"{what} {error}.") from None
        found = dict(given)
        for number, step in steps:
            _require_fit(step, found, what, number)
            if step.added:
                raise CheckpointError(
                    f"{what} has spec version {version}, in which {', '.join(sorted(step.added))} "
                    f"is missing, added with version {number + 1}. Start the newer learner first."
                )
            found = {own: array for key, array in found.items() if (own := step.now(key))}
        return found


_Names = Callable[[str], str | None]
Facts = dict[str, Tree]  # plain data, see `Saving`


def _objects(state: State, key: str) -> dict[str, object]:
    """Return the variables, optimizers and other objects of a state that are below a key."""
    found: dict[str, object] = {
        own: composite for own, composite in state.composites.items() if is_below(own, key)
    }
    for own, entry in state.entries.items():
        is_object = entry.owner is None and (own in state.variables or entry.container is None)
        if is_below(own, key) and is_object and entry.object not in found:
            found[own] = entry.thing
    return found


def _require_fit(step: Migration, keys: Collection[str], what: str, number: int) -> None:
    listed = ", ".join(map(repr, sorted(keys)))
    for then in [*step.renamed, *step.removed]:
        if not any(is_below(key, then) for key in keys):
            raise MisfitError(
                f"{what} has no {then!r}, which migrate[{number}] renames or removes. It has "
                f"{listed}."
            )
    kept = [own for key in keys if (own := step.now(key))]
    for key in [*kept, *step.added]:
        if kept.count(key) + (key in step.added) > 1:
            raise MisfitError(
                f"{what} would have {key!r} twice after migrate[{number}]. It has {listed}."
            )


def _shown(example: Tree) -> str:
    text = repr(example)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
