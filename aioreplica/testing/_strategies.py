"""Strategies of schedule: who goes next, decided from a seed.

Each is a function of the options, which come in the order in which asyncio would take them: first
what is ready, then the steps of ops that are in flight, then the clock. Those that favour some
participants over others turn into a fair random walk when a run gets much longer than the program
was measured to be: a program that spins until another task gets on would spin for ever.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from random import Random
from typing import Final, final

from ._participants import Choose, Participant, SimTask, fifo

MASK: Final = (1 << 64) - 1
SEED_BITS: Final = 40  # what a token carries


def mix(*numbers: int) -> int:
    """Mix integers into one of `SEED_BITS` bits.

    Example:
        >>> mix(0, 1) != mix(1, 0)
        True

    Source:
        The finaliser of splitmix64 (Steele, Lea and Flood, 2014), once for each 64 bits.
    """
    state = 0
    for number in numbers:
        rest = abs(number) * 2 + (number < 0)
        while True:
            state = (state + (rest & MASK) + 0x9E3779B97F4A7C15) & MASK
            state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
            state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
            state ^= state >> 31
            rest >>= 64
            if not rest:
                break
    return state >> (64 - SEED_BITS)


PATIENCE: Final = 4
"""How many times its measured length a run may take before favourites lose their favour."""
EXTRA_DECISIONS: Final = 200
WAITS: Final = (1, 2, 3, 4, 6, 8)
"""For how many decisions participants are held."""
SPEEDS: Final = (1.0, 1 / 4, 1 / 16, 1 / 64)


def make_fifo(seed: int, length: int) -> Choose:
    """Make the strategy that asyncio itself follows."""
    return fifo


def make_random(seed: int, length: int) -> Choose:
    """Make a random walk: every option is as likely as any other."""
    rng = Random(seed).random
    return lambda options: int(rng() * len(options))


def _make_pct(seed: int, length: int, depth: int, *, redraws: bool = False) -> Choose:
    """Make a strategy of random priorities with `depth` - 1 changes.

    The most urgent participant goes on until it has to wait; at each change the one that would go
    on becomes the least urgent of all. The bound of the theory, 1/(n k**(depth-1)) for a bug of
    that depth among n participants and k decisions, is not promised here: `length` only estimates
    k, after many decisions the walk is random, and `redraws` draws priorities again.

    Args:
        seed: Decides all.
        length: How many decisions are expected.
        depth: How many constraints a bug may take.
        redraws: Whether a task that was woken gets a new priority. A wait parts a task into events
            that have other causes; with one priority for all of them, a bug that wants a task to
            be early before a wait and late after it takes a change at exactly that decision.

    Source:
        Burckhardt et al., A randomized scheduler with probabilistic guarantees of finding bugs,
        ASPLOS 2010; priorities by chains of events as in Ozkan et al., Randomized testing of
        distributed systems with probabilistic guarantees, OOPSLA 2018.
    """
    random = Random(seed)
    rng = random.random
    changes = {random.randrange(max(1, length)): at for at in range(1, depth)}
    patience = PATIENCE * length + EXTRA_DECISIONS
    urgency: list[float] = []
    has_run: set[int] = set()
    decisions = 0

    def choose(options: list[Participant]) -> int:
        nonlocal decisions
        decisions += 1
        if decisions > patience:
            return int(rng() * len(options))
        best, at = -1.0, 0
        for i, option in enumerate(options):
            index = option.index
            while index >= len(urgency):
                urgency.append(1.0 + rng())
            if index in has_run and option.args:  # type: ignore[attr-defined]  # a task
                has_run.remove(index)  # it was woken by a future, not by itself
                urgency[index] = 1.0 + rng()
            if urgency[index] > best:
                best, at = urgency[index], i
        if decisions in changes:
            urgency[options[at].index] = 1.0 / (1 + changes.pop(decisions))
            decisions -= 1
            return choose(options)
        if redraws and isinstance(options[at], SimTask):
            has_run.add(options[at].index)
        return at

    return choose


def make_pct1(seed: int, length: int) -> Choose:
    """Make priorities that never change."""
    return _make_pct(seed, length, 1)


def make_pct2(seed: int, length: int) -> Choose:
    """Make priorities that change once."""
    return _make_pct(seed, length, 2)


def make_pct3(seed: int, length: int) -> Choose:
    """Make priorities that change twice."""
    return _make_pct(seed, length, 3)


def make_woken2(seed: int, length: int) -> Choose:
    """Make priorities that are drawn again with each wake-up, and change once besides."""
    return _make_pct(seed, length, 2, redraws=True)


def make_woken3(seed: int, length: int) -> Choose:
    """Make priorities that are drawn again with each wake-up, and change twice besides."""
    return _make_pct(seed, length, 3, redraws=True)


def make_pos(seed: int, length: int) -> Choose:
    """Make partial order sampling: a random priority for every single step that waits.

    Source:
        Yuan, Yang and Gu, Partial order aware concurrency sampling, CAV 2018 (its basic form: what
        two steps of Python code share cannot be seen, so all are taken to conflict).
    """
    rng = Random(seed).random
    drawn: dict[int, float] = {}
    patience = PATIENCE * length + EXTRA_DECISIONS
    decisions = 0

    def choose(options: list[Participant]) -> int:
        nonlocal decisions
        decisions += 1
        if decisions > patience:
            return int(rng() * len(options))
        best, at = -1.0, 0
        for i, option in enumerate(options):
            priority = drawn.get(option.index)
            if priority is None:
                priority = drawn[option.index] = rng()
            if priority > best:
                best, at = priority, i
        del drawn[options[at].index]
        return at

    return choose


def make_holds(seed: int, length: int) -> Choose:
    """Make asyncio's own order, but for up to three participants held for a while each.

    What asyncio does next is a round in which everybody moves once; few other strategies stay
    close to that, and some bugs (two tasks that get out of each other's way for ever) need it.
    """
    random = Random(seed)
    span = max(2, length)
    holds = _draw_holds(random, (1, 1, 2, 3), (*WAITS, span, 4 * span), span)
    held: dict[int, int] = {}
    decisions = 0

    def choose(options: list[Participant]) -> int:
        nonlocal decisions
        while holds and holds[-1][0] <= decisions:
            held[options[random.randrange(len(options))].index] = holds.pop()[1]
        decisions += 1
        if held:
            free = [i for i, each in enumerate(options) if held.get(each.index, 0) < decisions]
            if not free:
                held.clear()
            elif len(free) < len(options):
                if len(free) == 1:
                    return free[0]
                return free[fifo([options[i] for i in free])]
        return fifo(options)

    return choose


def _draw_holds(
    random: Random, counts: Sequence[int], lengths: Sequence[int], span: int
) -> list[tuple[int, int]]:
    """Draw some stretches of decisions: the first, and the one after the last; the last on top."""
    holds = []
    for _ in range(random.choice(counts)):
        start = random.randrange(span)
        holds.append((start, start + random.choice(lengths)))
    return sorted(holds, reverse=True)


def make_late(seed: int, length: int) -> Choose:
    """Make a random walk that holds tasks for a while: most that were woken, and up to two others.

    A wake-up is lost where its task is cancelled, or what it was told has changed, before it goes
    on; in a plain random walk little happens in between.
    """
    random = Random(seed)
    rng = random.random
    span = max(2, length)
    chance = random.choice((0.5, 1.0))
    holds = _draw_holds(random, (0, 1, 1, 2), (*WAITS, span), span)
    until: dict[
        int, int
    ] = {}  # of those that wait to go on: the decision up to which they are held
    decisions = 0

    def choose(options: list[Participant]) -> int:
        nonlocal decisions
        while holds and holds[-1][0] <= decisions:
            until[options[random.randrange(len(options))].index] = holds.pop()[1]
        decisions += 1
        free = []
        for i, option in enumerate(options):
            end = until.get(option.index)
            if end is None and type(option) is SimTask and option.args:
                end = decisions + random.choice(WAITS) if rng() < chance else 0
                until[option.index] = end
            if end is None or end < decisions:
                free.append(i)
        at = free[int(rng() * len(free))] if free else int(rng() * len(options))
        until.pop(options[at].index, None)
        return at

    return choose


def make_speed(seed: int, length: int) -> Choose:
    """Make a random walk of participants that are 1, 4, 16 or 64 times slower than others.

    A task draws its speed anew when it is woken: it may be early before a wait and late after.
    """
    rng = Random(seed).random
    weights: dict[int, float] = {}
    has_run: set[int] = set()

    def choose(options: list[Participant]) -> int:
        ends, end = [], 0.0
        for option in options:
            index = option.index
            weight = weights.get(index)
            if weight is None or (index in has_run and option.args):  # type: ignore[attr-defined]
                has_run.discard(index)
                weight = weights[index] = SPEEDS[int(rng() * len(SPEEDS))]
            end += weight
            ends.append(end)
        at = min(bisect(ends, rng() * end), len(options) - 1)
        if type(options[at]) is SimTask:
            has_run.add(options[at].index)
        return at

    return choose


Maker = Callable[[int, int], Choose]

MAKERS: Final[tuple[Maker, ...]] = (
    make_fifo,
    make_random,
    make_pct1,
    make_pct2,
    make_pct3,
    make_pos,
    make_holds,
    make_woken2,
    make_woken3,
    make_late,
    make_speed,
)
"""By the number that stands for each in a token: only ever add to the end."""
FIFO, RANDOM, PCT1, PCT2, PCT3, POS, HOLDS, WOKEN2, WOKEN3, LATE, SPEED = range(11)
BY_DECISIONS: Final = (PCT1, PCT2, WOKEN2)
"""Those whose length is the number of decisions of a run, not of its steps: a change that falls on
a step without a choice is lost. With three changes more bugs are found if they are drawn widely."""

PORTFOLIO: Final = (
    PCT1, LATE, HOLDS, SPEED, WOKEN2, LATE, POS, HOLDS, RANDOM, LATE, WOKEN3
)  # fmt: skip
CYCLES: Final[dict[str, tuple[int, ...]]] = {
    "fifo": (FIFO,),
    "random": (RANDOM,),
    "pct": (PCT1, WOKEN2, WOKEN2, WOKEN3),
    "pos": (POS,),
    "portfolio": PORTFOLIO,
}
"""What schedule follows what, by name of strategy; the first of a portfolio is asyncio's own."""


def maker_of(strategy: str, at: int) -> int:
    """Return the number of the maker of the schedule number `at` of a strategy.

    Example:
        >>> maker_of("portfolio", 0) == FIFO
        True
    """
    cycle = CYCLES[strategy]
    if strategy == "portfolio":
        return FIFO if at == 0 else cycle[(at - 1) % len(cycle)]
    return cycle[at % len(cycle)]


STALE: Final = 2
"""After so many schedules in a row that had been run before, a strategy pauses."""
MAX_PAUSE: Final = 4
MAX_KNOWN: Final = 1_000_000


@final
class Rotation:
    """Decides which strategy makes the next schedule, and learns from what became of the last one.

    The strategies take turns. One that only repeats what was run before (static priorities have no
    more than n! orders of n tasks) pauses for longer and longer, and the others take over.

    Args:
        strategy: A key of `CYCLES`.
    """

    __slots__ = ("_at", "_cycle", "_known", "_pauses", "_stale")

    def __init__(self, strategy: str) -> None:
        self._cycle = CYCLES[strategy]
        self._at = 0 if strategy == "portfolio" else 1  # asyncio's own order has been run
        self._known: set[int] = set()
        self._stale: dict[int, int] = {}
        self._pauses: dict[int, int] = {}

    def next(self) -> int:
        """Return the number of the maker whose turn it is."""
        while True:
            maker = self._cycle[self._at % len(self._cycle)]
            self._at += 1
            pauses = self._pauses.get(maker, 0)
            if not pauses:
                return maker
            self._pauses[maker] = pauses - 1

    def ran(self, maker: int, order: bytes) -> None:
        """Learn who took each step of the schedule."""
        known, key = self._known, hash(order)
        if key not in known:
            self._stale[maker] = 0
            if len(known) < MAX_KNOWN:
                known.add(key)
            return
        self._stale[maker] = stale = self._stale.get(maker, 0) + 1
        if stale >= STALE:
            self._pauses[maker] = min(stale - STALE + 1, MAX_PAUSE)
