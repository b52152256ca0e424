"""Scripts that show a failure to others: on plain asyncio, and replayed under the kit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

RUNS: Final = 1_000
SECONDS: Final = 60
HANGS_S: Final = 5
ENDS: Final = {"DeadlockError": "hangs", "StarvationError": "hangs", "LeakError": "leaks"}
"""How the script calls what it can find without the kit; else an error by the name of its class."""
PLAIN: Final = '''"""Fails on plain asyncio with: {title}

{about}

Found by aioreplica.testing, which is not needed here. What varies from run to run is when events
from outside come: how long calls in pools take, how late timers fire, and when sockets are ready.
"""

import asyncio
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / {folder!r}))

from {module} import {top}

RUNS = {runs}
SECONDS = {seconds}  # when to stop before
HANGS_S = {hangs_s}  # when a run counts as hanging
EXPECTED = {expected!r}


class Loop(asyncio.SelectorEventLoop):
    """asyncio's own loop; events from outside come a little later."""

    def run_in_executor(self, executor, func, *args):
        before, after = random.random() / 500, random.random() / 500

        def late():
            time.sleep(before)
            try:
                return func(*args)
            finally:
                time.sleep(after)

        return super().run_in_executor(executor, late)

    def call_at(self, when, callback, *args, context=None):
        if when > self.time():
            when += random.random() / 100
        return super().call_at(when, callback, *args, context=context)

    def _process_events(self, event_list):  # what is left out is ready in the next round too
        super()._process_events([each for each in event_list if random.random() < 0.5])


async def watched():
    """Return how the program ended; "" if well."""
    unhandled = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    running = asyncio.ensure_future({program}())
    done, _ = await asyncio.wait({{running}}, timeout=HANGS_S)
    if not done:
        return "hangs"
    running.result()
    left = asyncio.all_tasks() - {{asyncio.current_task()}}
    return "leaks" if left or unhandled else ""


def run_once(seed):
    random.seed(seed)
    try:
        with asyncio.Runner(loop_factory=Loop) as runner:
            return runner.run(watched())
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return type(error).__name__


def main():
    start, number, failed, others = time.monotonic(), 0, [], {{}}
    while number < RUNS and time.monotonic() < start + SECONDS:
        ended = run_once(number)
        if ended == EXPECTED:
            failed.append(number)
        elif ended:
            others[ended] = others.get(ended, 0) + 1
        number += 1
    print(f"{{EXPECTED}} in {{len(failed)}} of {{number}} runs; others: {{others or 'none'}}")
    if failed:
        print(f"The first was run {{failed[0]}}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
'''
REPLAY: Final = '''"""Replays under aioreplica.testing: {title}

{about}
"""

import sys
from pathlib import Path

import aioreplica.testing as art

sys.path.insert(0, str(Path(__file__).resolve().parent / {folder!r}))

from {module} import {top}

if __name__ == "__main__":
    art.replay({program}, {token!r}{leaks})
'''


@final
@dataclass(frozen=True, slots=True)
class Program:
    """Program that a report is of.

    Attributes:
        main: Its function.
        ignored: What was not to count as a leak.
        needs_kit: Whether the kit's faults or cancellations may have a part in a failure.
    """

    main: Callable[..., Any]
    ignored: Any = ()
    needs_kit: bool = False

    def where(self) -> tuple[Path, str, str]:
        """Return the folder, the module and the name by which a script can import it.

        Raises:
            ValueError: If it is not a function of a module.
        """
        name = getattr(self.main, "__qualname__", "")
        module = sys.modules.get(getattr(self.main, "__module__", None) or "")
        found: object = module
        for part in name.split("."):
            found = getattr(found, part, None)
        file = getattr(module, "__file__", None)
        if not name or found is not self.main or module is None or file is None:
            raise ValueError(
                f"{name or self.main!r} cannot be imported by a script: it is not a function of a "
                "module. Explore a function at the top of a file; in pytest, --ar-replay replays "
                "the token."
            )
        spec = getattr(module, "__spec__", None)
        path = Path(file).resolve()
        dotted = path.stem if spec is None else spec.name
        folder = path.parents[len(dotted.split(".")) - (path.name != "__init__.py")]
        return folder, dotted, name


def save_scripts(
    target: Path, program: Program, title: str, about: Sequence[str], tokens: tuple[str, str]
) -> tuple[Path, ...]:
    """Write the scripts of a failure.

    Args:
        target: Where the one on plain asyncio goes; that of the kit goes beside it.
        program: What fails.
        title: The error, by the name of its class.
        about: Lines on the failure.
        tokens: That of the failure, and of fidelity "asyncio"; "" where there is none.

    Raises:
        ValueError: If a script cannot import the program.
    """
    folder, module, name = program.where()
    token, real = tokens
    values = {
        "title": _plain(title.splitlines()[0].removesuffix(": ")),
        "about": "\n".join(map(_plain, about)),
        "folder": os.path.relpath(folder, target.resolve().parent),
        "module": module,
        "top": name.partition(".")[0],
        "program": name,
    }
    written = []
    if real and not program.needs_kit:
        name_of_error = title.partition(":")[0]
        expected = ENDS.get(name_of_error, name_of_error)
        limits = {"runs": RUNS, "seconds": SECONDS, "hangs_s": HANGS_S}
        text = PLAIN.format(**values, **limits, expected=expected)
        target.write_text(text, encoding="utf-8")
        written.append(target)
    if token:
        beside = target.with_name(f"{target.stem}_replay{target.suffix}")
        text = REPLAY.format(**values, token=real or token, leaks=_leaks(program.ignored))
        beside.write_text(text, encoding="utf-8")
        written.append(beside)
    return tuple(written)


def _plain(line: str) -> str:
    """Return a line that may stand in a docstring."""
    return line.replace("\\", "\\\\").replace('"""', "'''")


def _leaks(ignored: Any) -> str:
    """Return the argument `leaks`; functions by their names, as they are compared."""
    given = ignored if isinstance(ignored, (tuple, list)) else (ignored,)
    names = [each if isinstance(each, str) else each.__qualname__ for each in given]
    if not names:
        return ""
    return f", leaks={(names[0] if ignored == 'ignore' else names)!r}"
