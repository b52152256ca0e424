"""The pictures, one function each; `PICTURES` lists them with their titles and sizes."""

from __future__ import annotations

from collections.abc import Callable

from . import internals
from .drawing import PALETTES, Palette, Picture


def overview(pen: Picture) -> None:
    """One process: handlers and replicas on the event loop, array work on device threads."""
    pen.box(10, 10, 480, 216, "one process", kind="frame", top=True)
    pen.box(24, 42, 452, 84, "event loop", kind="loop", top=True)
    for number, name in enumerate(("handler", "replica 0", "replica 1", "replica 2")):
        kind = "plain" if number == 0 else "value"
        pen.box(38 + 108 * number, 74, 98, 36, name, kind=kind)
    for number in range(3):
        x = 195 + 108 * number
        pen.arrow((x - 12, 110), (x - 12, 152))
        pen.arrow((x + 12, 152), (x + 12, 110))
        pen.box(x - 49, 154, 98, 54, (f"cpu:{number}", "arrays"), kind="device")
    pen.box(38, 154, 98, 54, ("snapshot", "of weights"), kind="value")
    pen.arrow((87, 152), (87, 112))
    pen.label(
        250,
        248,
        "Replicas meet on the loop; arrays are worked on elsewhere.",
        anchor="middle",
        soft=True,
    )


def merge(pen: Picture) -> None:
    """Three replicas arrive at a collective one after the other and leave together."""
    lanes = (84, 250, 416)
    arrivals = (92, 126, 66)
    for number, (x, arrival) in enumerate(zip(lanes, arrivals, strict=True)):
        pen.label(x, 20, f"replica {number}", anchor="middle")
        pen.box(x - 58, 30, 116, arrival - 30 + 14, "computes", kind="device")
        pen.line((x, arrival + 14), (x, 168), dashed=True)
        pen.arrow((x, 164), (x, 176))
        pen.arrow((x, 226), (x, 244))
        pen.box(x - 58, 246, 116, 34, "goes on", kind="device")
    pen.label(416 + 8, 128, "waits", soft=True)
    pen.label(84 + 8, 152, "waits", soft=True)
    pen.box(
        20,
        178,
        460,
        48,
        (
            "all_reduce: runs once, when the last one has arrived,",
            "and adds up in the order of the replicas",
        ),
        kind="meeting",
    )


def contexts(pen: Picture) -> None:
    """Where code runs: cross-replica, replica and update context."""
    pen.box(10, 10, 480, 326, "your program: cross-replica context", kind="frame", top=True)
    pen.box(26, 42, 300, 28, "await strategy.run(step, args)", code=True)
    pen.arrow((110, 70), (110, 94))
    pen.arrow((270, 70), (270, 94))
    for number, x in enumerate((26, 186)):
        pen.box(x, 96, 148, 74, (f"step on replica {number}", "replica context"), kind="device")
    pen.label(346, 124, "each sees its own")
    pen.label(346, 142, "part of a value")
    pen.arrow((110, 170), (110, 192))
    pen.arrow((270, 170), (270, 192))
    pen.box(
        26,
        194,
        308,
        48,
        ("merge function of ctx.merge_call", "cross-replica context"),
        kind="meeting",
    )
    pen.label(346, 214, "sees all parts,")
    pen.label(346, 232, "runs once")
    pen.arrow((110, 242), (110, 266))
    pen.arrow((270, 242), (270, 266))
    for number, x in enumerate((26, 186)):
        pen.box(x, 268, 148, 54, (f"fn on component {number}", "update context"), kind="value")
    pen.label(346, 290, "extended.update:")
    pen.label(346, 308, "one component")


def versions(pen: Picture) -> None:
    """A write builds a new version beside the old one; readers keep what they took."""
    pen.label(10, 24, "time", soft=True)
    pen.arrow((50, 19), (490, 19))
    xs = (20, 180, 340)
    for number, x in enumerate(xs):
        pen.box(x, 96, 130, 44, (f"version {number}", "[read-only]"), kind="value")
    for x in xs[1:]:
        pen.box(x, 176, 130, 40, "built beside it", kind="device")
        pen.arrow((x + 65, 176), (x + 65, 142))
        pen.label(x + 73, 163, "swap", soft=True)
    pen.label(20, 201, "a step writes:")
    pen.box(20, 38, 236, 32, "snapshot: keeps version 0", kind="plain")
    pen.arrow((60, 70), (60, 94))
    pen.box(286, 38, 184, 32, "v.value: version 1", kind="plain")
    pen.line((316, 70), (316, 83))
    pen.arrow((316, 83), (270, 83), (270, 94))
    pen.label(20, 244, "Arrays never change; a version lives while it is read.", soft=True)


def device_loop(pen: Picture) -> None:
    """A device loop stays on the device threads for many steps, fed by queues."""
    pen.box(10, 10, 140, 262, "event loop", kind="loop", top=True)
    pen.box(22, 44, 116, 52, ("run_steps(step,", "batches, 100)"), kind="plain")
    pen.box(22, 112, 116, 44, "reads batches", kind="plain")
    pen.box(22, 214, 116, 44, ("outside:", "I/O, logging"), kind="plain")
    for number in range(4):
        pen.box(186 + 24 * number, 116, 20, 36, kind="value")
    pen.arrow((138, 134), (184, 134))
    pen.label(230, 108, "infeed", anchor="middle", soft=True)
    pen.box(320, 10, 170, 262, "device thread", kind="device", top=True)
    pen.arrow((282, 134), (330, 134))
    pen.arrow((138, 64), (330, 64))
    pen.label(234, 56, "one trip for all", anchor="middle", soft=True)
    for number, text in enumerate(("step 0", "step 1", "...", "step 99")):
        pen.box(332, 46 + 46 * number, 146, 34, text, kind="plain")
        if number < 3:
            pen.arrow((405, 80 + 46 * number), (405, 91 + 46 * number))
    pen.arrow((330, 238), (140, 238))
    pen.label(234, 228, "outside_compilation", anchor="middle", size=13, soft=True)
    pen.label(405, 256, "collectives block here", anchor="middle", size=12, soft=True)


Draw = Callable[[Picture], None]

PICTURES: dict[str, tuple[Draw, int, int, str]] = {
    "overview": (
        overview,
        500,
        258,
        "Handlers and replicas share an event loop; arrays are on devices",
    ),
    "merge": (merge, 500, 290, "Replicas arrive one by one at a collective and leave together"),
    "contexts": (contexts, 500, 346, "Cross-replica, replica and update context"),
    "versions": (versions, 500, 256, "Versions of a variable"),
    "device-loop": (device_loop, 500, 282, "A device loop and its infeed"),
    "step": (internals.step, 500, 406, "One step, from a batch to updated variables"),
    "meeting": (internals.meeting, 500, 420, "How calls of replicas become one merge"),
    "layers": (internals.layers, 500, 520, "The packages of the library in layers"),
    "optimizer-step": (internals.optimizer_step, 500, 306, "An optimizer step"),
    "save": (internals.save, 500, 446, "Saving a checkpoint"),
    "restore": (internals.restore, 500, 308, "Restoring a checkpoint"),
    "learner": (internals.learner, 500, 328, "An example in an online learner"),
    "sources": (internals.sources, 500, 258, "From a source to batches"),
    "observers": (internals.observers, 500, 420, "Who tells of what, and who is told"),
}


def drawn(name: str, palette: Palette) -> str:
    """Return a picture as the text of an SVG file."""
    draw, width, height, title = PICTURES[name]
    pen = Picture(width, height, title, palette)
    draw(pen)
    return pen.svg()


def files() -> dict[str, str]:
    """Return the content of every file by its name."""
    return {
        f"{name}-{theme}.svg": drawn(name, palette)
        for name in PICTURES
        for theme, palette in PALETTES.items()
    }
