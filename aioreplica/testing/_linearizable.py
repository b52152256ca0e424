"""Calls of one object by many tasks, and whether some order of them, one by one, explains them.

Each call has to seem to take effect at one moment between its begin and its end. So a call that
ended before another began comes first; those that overlap may come in any order that a model, the
same object for one caller, agrees with.

The search goes depth first over orders, and remembers which calls were taken with which state of
the model: what failed from there once, fails again.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, final

from .._functions import require_finished, require_no_yield

MAX_PICTURED: Final = 20
"""How many calls a picture has, those around the place where every order ends."""
MAX_SHOWN: Final = 60
"""How many characters a call has in a picture."""
UNKNOWN: Final = (asyncio.CancelledError, TimeoutError)
"""Errors of calls that may have taken effect nevertheless."""
PLAIN: Final = (int, float, complex, str, bytes, type(None))


@final
@dataclass(slots=True, eq=False)
class RecordedCall:
    """One call: who called what, and when, in events of the history.

    Attributes:
        who: The task.
        name: Method of the model.
        args: Passed on.
        kwargs: Passed on.
        began: Number of the event.
        ended: Number of the event; None while it goes on.
        result: Given back.
        error: Raised.
    """

    who: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    began: int
    ended: int | None = None
    result: Any = None
    error: BaseException | None = None

    @property
    def is_known(self) -> bool:
        """True if it has ended and must have taken effect, with this result."""
        return self.ended is not None and not isinstance(self.error, UNKNOWN)

    def __repr__(self) -> str:
        given = [*map(repr, self.args), *(f"{key}={value!r}" for key, value in self.kwargs.items())]
        if self.ended is None:
            end = "not ended"
        elif self.error is not None:
            end = f"raised {type(self.error).__name__}"
        else:
            end = repr(self.result)
        text = f"{self.name}({', '.join(given)}) -> {end}"
        return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


@final
class History:
    """Calls of one object, in the order in which they began and ended.

    Make it anew in each schedule, beside the object.

    Example:
        >>> import asyncio
        >>> async def main():
        ...     queue, history = asyncio.Queue(), History()
        ...     await history.call(queue.put, 1)
        ...     await history.call(queue.get)
        ...     return history
        >>> asyncio.run(main())
        <History | 2 calls, 2 ended>
    """

    def __init__(self) -> None:
        self._calls: list[RecordedCall] = []
        self._clock = count()

    @property
    def calls(self) -> Sequence[RecordedCall]:
        """The calls so far, in the order in which they began."""
        return tuple(self._calls)

    async def call(self, fn: Callable[..., object], /, *args: object, **kwargs: object) -> Any:
        """Call a function, and record when the call began and ended, and with what.

        Args:
            fn: A method of the object, plain or async. The model has one with its name.
            *args: Passed on.
            **kwargs: Passed on.

        Returns:
            What it returns.

        Raises:
            TypeError: If `fn` is not callable, or contains `yield`.
            BaseException: What it raises; recorded too.

        Cancellation:
            Passed on. A call that was cancelled, or raised `TimeoutError`, may have taken effect or
            not, and so may one that never ends.
        """
        if not callable(fn):
            raise TypeError(f"history.call needs a function, got {fn!r} ({type(fn).__name__}).")
        require_no_yield(fn, "history.call")
        made = RecordedCall(_current_name(), _name_of(fn), args, kwargs, next(self._clock))
        self._calls.append(made)
        try:
            result = fn(*args, **kwargs)
            require_finished(result, fn, "history.call")
            if inspect.isawaitable(result):
                result = await result
            made.result = result
        except BaseException as error:
            made.error = error
            raise
        finally:
            made.ended = next(self._clock)
        return result

    def __repr__(self) -> str:
        ended = sum(each.ended is not None for each in self._calls)
        return f"<History | {len(self._calls)} calls, {ended} ended>"


def linearizable(history: History, model: Callable[[], object]) -> Sequence[RecordedCall]:
    """Return an order of the calls of a history, one after the other, that explains their results.

    The model is called as the object was, in that order, and gives the same results: what it
    returns is equal to what was recorded, and where a call raised, it raises an error of the same
    class. Where a call would have to wait, the model raises any error: it does not come there.

    Args:
        history: Calls of one object.
        model: Makes the model: a plain object for one caller, with methods of the same names. Its
            state is copied; what was passed to the calls is not.

    Returns:
        Each call once; those that were cancelled or have not ended only where they took effect.

    Raises:
        AssertionError: If there is no such order, with a picture of the calls that overlap.
        TypeError: If `model` is not callable, or contains `yield`; or if `==` of two results says
            neither yes nor no, as of arrays.
        AttributeError: If the model has no method of a call's name.

    Example:
        >>> import asyncio
        >>> class Counter:
        ...     def __init__(self):
        ...         self.value = 0
        ...
        ...     def add(self):
        ...         self.value += 1
        ...         return self.value
        >>> async def main():
        ...     counter, history = Counter(), History()
        ...     await history.call(counter.add)
        ...     await history.call(counter.add)
        ...     return linearizable(history, Counter)
        >>> [call.result for call in asyncio.run(main())]
        [1, 2]

    Source:
        Herlihy and Wing (1990), Linearizability. The search is that of Wing and Gong (1993), with
        the memo of Lowe (2017), as in Porcupine.
    """
    if not isinstance(history, History):
        raise TypeError(f"Pass a History, got {history!r} ({type(history).__name__}).")
    if not callable(model):
        raise TypeError(f"The model is a class or a function that makes one, got {model!r}.")
    require_no_yield(model, "linearizable")
    start = model()
    require_finished(start, model, "linearizable")
    for call in history.calls:
        if not callable(getattr(start, call.name, None)):
            raise AttributeError(
                f"The model {type(start).__name__} has no method {call.name!r}, which task "
                f"{call.who!r} called. Give it one, or leave such calls out of the history."
            )
    search = OrderSearch(history.calls)
    found = search.run(start)
    if found is None:
        raise AssertionError(search.explanation(start))
    return found


@final
@dataclass(slots=True)
class Node:
    """A prefix of an order: which calls were taken, and the model after them."""

    taken: int
    model: Any
    choices: Iterator[int]
    call: int = -1


@final
@dataclass(slots=True)
class OrderSearch:
    """The search for an order of some calls.

    Attributes:
        calls: By their beginnings.
    """

    calls: Sequence[RecordedCall]
    _atoms: dict[int, object] = field(default_factory=dict)
    _seen: set[tuple[int, object]] = field(default_factory=set)
    _furthest: tuple[tuple[int, ...], object] = ((), None)

    def run(self, start: Any) -> Sequence[RecordedCall] | None:
        """Return an order that the model agrees with, or None."""
        for call in self.calls:
            for each in (*call.args, *call.kwargs.values(), call.result):
                self._atoms[id(each)] = each
        needed = sum(1 << i for i, call in enumerate(self.calls) if call.is_known)
        self._furthest = (), start
        path = [Node(0, start, self._next(0))]
        while path:
            node = path[-1]
            if node.taken & needed == needed:
                return [self.calls[each.call] for each in path[1:]]
            choice = next(node.choices, None)
            if choice is None:
                path.pop()
                continue
            after = self._after(node.model, self.calls[choice])
            taken = node.taken | 1 << choice
            if after is None or not self._is_new(taken, after.model):
                continue
            path.append(Node(taken, after.model, self._next(taken), choice))
            if len(path) - 1 > len(self._furthest[0]):
                self._furthest = tuple(each.call for each in path[1:]), after.model
        return None

    def _next(self, taken: int) -> Iterator[int]:
        """Yield the calls that may come next: none that has not come ended before they began."""
        first_end, first = None, (~taken & (taken + 1)).bit_length() - 1  # that is not taken
        for number in range(first, len(self.calls)):
            call = self.calls[number]
            if first_end is not None and call.began > first_end:
                break
            if call.is_known and not taken >> number & 1:
                assert call.ended is not None
                first_end = call.ended if first_end is None else min(first_end, call.ended)
        for number in range(first, len(self.calls)):
            if first_end is not None and self.calls[number].began > first_end:
                return
            if not taken >> number & 1:
                yield number

    def _after(self, model: object, call: RecordedCall) -> ModelAnswer | None:
        """Return the model after a call; None if it does not agree with its result."""
        answer = self.ask(model, call)
        return answer if answer.agrees(call) else None

    def ask(self, model: object, call: RecordedCall) -> ModelAnswer:
        """Call a copy of the model."""
        own = copy.deepcopy(model, dict(self._atoms))
        try:
            result = getattr(own, call.name)(*call.args, **call.kwargs)
        except Exception as error:  # noqa: BLE001 - an error is an answer, as a result is
            return ModelAnswer(own, None, error)
        return ModelAnswer(own, result, None)

    def _is_new(self, taken: int, model: object) -> bool:
        key = taken, frozen(model, self._atoms)
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    def explanation(self, start: object) -> str:
        """Return why there is no order, in words and as a picture."""
        order, model = self._furthest
        taken = sum(1 << each for each in order)
        headline = (
            f"No order of these {len(self.calls)} calls, one after the other, gives their results "
            f"from a new {type(start).__name__}:"
        )
        lines = [
            headline,
            "",
            *picture(self.calls, order),
            "",
        ]
        came = ", ".join(f"#{each + 1}" for each in order[-MAX_PICTURED:]) or "none"
        before = "... " if len(order) > MAX_PICTURED else ""
        lines.append(f"The longest order that does is {before}{came}. After it cannot come:")
        for number in self._next(taken):
            call = self.calls[number]
            if call.is_known:
                lines.append(f"  #{number + 1} {call!r}, because {self.ask(model, call).story()}")
        return "\n".join(lines)


@final
@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """Result of the model for a call, and the model after it."""

    model: Any
    result: Any
    error: Exception | None

    def agrees(self, call: RecordedCall) -> bool:
        """Tell whether this is what was recorded; anything is that does not raise if none was."""
        if not call.is_known:
            return self.error is None
        if call.error is not None or self.error is not None:
            return type(self.error) is type(call.error)
        try:
            return bool(self.result is call.result or self.result == call.result)
        except ValueError as error:  # NumPy's: the truth value of an array is ambiguous
            raise TypeError(
                f"Cannot tell whether {self.result!r}, which the model gives, is what {call!r} "
                f"gave: {error}. Let both return what `==` compares as a whole, such as a list."
            ) from error

    def story(self) -> str:
        """Return it in words."""
        if self.error is not None:
            return f"the model raises {type(self.error).__name__}: {self.error}".rstrip(": ")
        return f"the model gives {self.result!r}"


def frozen(value: Any, atoms: dict[int, Any]) -> Any:
    """Return a hashable value that is equal for equal states only.

    Args:
        value: A model, or a part of one.
        atoms: What was passed to calls, by id: the same where it is the same object.
    """
    kind = type(value)
    if kind in PLAIN or kind is bool:
        return kind, value
    if id(value) in atoms:
        return "atom", id(value)
    if kind in (list, tuple, deque):
        return kind, tuple(frozen(each, atoms) for each in value)
    if isinstance(value, dict) and (kind in DICTS or not has_hidden_state(kind)):
        pairs = value.items()  # in their order, which may decide what comes next
        items = tuple((frozen(key, atoms), frozen(each, atoms)) for key, each in pairs)
        fields = getattr(value, "__dict__", None)
        return kind, items, frozen(fields, atoms) if fields else None
    if kind in (set, frozenset):
        return kind, frozenset(frozen(each, atoms) for each in value)
    fields = getattr(value, "__dict__", None)
    if fields is None or not type(value).__flags__ & HEAP_TYPE or has_hidden_state(kind):
        return Same(value)
    return kind, frozen(fields, atoms)


DICTS: Final = (dict, OrderedDict, defaultdict)
"""Classes of which items are all that there is, but for attributes."""
HEAP_TYPE: Final = 1 << 9
"""Flag of a class that was made by a `class` statement."""


def has_hidden_state(kind: type) -> bool:
    """Tell whether objects of a class hold more than their `__dict__`: slots, a base's items."""
    return any(
        vars(each).get("__slots__") or not each.__flags__ & HEAP_TYPE
        for each in kind.__mro__[:-1]
        if each not in DICTS
    )


@final
class Same:
    """Stands for an object of which nothing is known: equal to itself only, and kept alive."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def picture(calls: Sequence[RecordedCall], order: Sequence[int]) -> list[str]:
    """Return a line for each call: its task, from when to when, and what it gave."""
    taken = set(order)
    stuck = next((i for i, call in enumerate(calls) if call.is_known and i not in taken), 0)
    first = max(0, min(stuck - MAX_PICTURED // 2, len(calls) - MAX_PICTURED))
    shown = range(first, min(len(calls), first + MAX_PICTURED))
    events = sorted(
        {calls[i].began for i in shown}
        | {end for i in shown if (end := calls[i].ended) is not None}
    )
    column = {event: 2 * number for number, event in enumerate(events)}
    width, who = 2 * len(events), max((len(calls[i].who) for i in shown), default=0)
    lines = [f"  ... {first} calls before"] if first else []
    for number in shown:
        call = calls[number]
        start = column[call.began]
        end = width if call.ended is None else column[call.ended]
        bar = " " * start + "|" + "-" * (end - start - 1) + ("|" if call.ended is not None else ">")
        lines.append(f"  #{number + 1:<3} {call.who:<{who}}  {bar:<{width + 1}}  {call!r}")
    after = len(calls) - shown.stop
    return [*lines, f"  ... {after} calls after"] if after else lines


def _current_name() -> str:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.current_thread().name if task is None else task.get_name()


def _name_of(fn: Any) -> str:
    while hasattr(fn, "func"):  # a partial
        fn = fn.func
    name = getattr(fn, "__name__", None)
    return str(name) if name is not None else type(fn).__name__
