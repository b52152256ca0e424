"""The pictures of the page on the architecture, one function each."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from .drawing import Picture

SETTINGS = Path(__file__).resolve().parents[2] / "pyproject.toml"
CENTRAL = {
    "testing": "loop",
    "strategies": "meeting",
    "device_loop": "meeting",
    "replica": "meeting",
    "collectives": "meeting",
    "values": "value",
    "devices": "device",
}
"""Kinds of the boxes of the packages a step passes through."""


def step(pen: Picture) -> None:
    """One step, from a batch to updated variables: who does what, from top to bottom."""
    for x, width, name in ((10, 104, "your task"), (134, 196, "event loop"), (350, 140, "devices")):
        kind = {"event loop": "loop", "devices": "device"}.get(name, "frame")
        pen.box(x, 10, width, 386, name, kind=kind, top=True)
    pen.box(18, 44, 88, 34, "async for")
    pen.box(144, 44, 176, 34, "input splits the batch")
    pen.arrow((142, 61), (108, 61))
    pen.box(18, 98, 88, 34, "await run")
    pen.arrow((106, 115), (142, 115))
    for number, x in enumerate((144, 236)):
        pen.box(x, 98, 84, 34, f"replica {number}", kind="value")
    for number, y in enumerate((90, 126)):
        pen.box(360, y, 120, 30, f"ops on part {number}")
        pen.arrow((320, 106 + 16 * number), (358, y + 15))
    for x in (186, 278):
        pen.arrow((x, 132), (x, 176))
    pen.arrow((420, 156), (420, 168), (322, 168))
    pen.box(144, 178, 176, 54, ("the last to arrive", "merges for all"), kind="meeting")
    pen.box(360, 184, 120, 42, ("large arrays,", "in blocks"))
    pen.arrow((320, 198), (358, 198))
    pen.arrow((358, 212), (322, 212))
    pen.arrow((232, 232), (232, 254))
    pen.box(144, 256, 176, 54, ("new versions, built", "beside the old ones"), kind="value")
    pen.arrow((232, 310), (232, 334))
    pen.box(144, 336, 176, 48, ("results are put", "together by leaves"))
    pen.arrow((142, 360), (108, 360))
    pen.box(18, 343, 88, 34, "PerReplica")


def meeting(pen: Picture) -> None:
    """Three kinds of waiters bring their calls to one meeting point."""
    ways = (
        ("task of an async step", "TaskWaiter:", "awaits a future"),
        ("device thread", "ThreadWaiter:", "parks at a gate"),
        ("op of an async step", "OpWaiter:", "the loop calls"),
    )
    for number, (who, waiter, how) in enumerate(ways):
        x = 10 + 163 * number
        pen.label(x + 77, 22, f"replica {number}", anchor="middle")
        pen.label(x + 77, 40, who, anchor="middle", soft=True, size=13)
        pen.box(x, 50, 154, 30, "Call #3", kind="value")
        pen.arrow((x + 77, 80), (x + 77, 96))
        pen.box(x, 98, 154, 46, (waiter, how))
        pen.arrow((x + 77, 144), (x + 77, 164))
    pen.box(10, 166, 480, 206, "MeetingPoint", kind="meeting", top=True)
    pen.box(24, 198, 220, 64, ("Rendezvous:", "Generation #3, 0 missing"), kind="plain")
    pen.arrow((244, 214), (268, 214))
    pen.box(270, 198, 206, 34, "never complete: Mismatch")
    pen.arrow((134, 262), (134, 288))
    pen.label(142, 280, "complete", soft=True)
    pen.box(24, 290, 220, 34, "Collective.perform(calls)")
    pen.arrow((244, 307), (268, 307))
    pen.box(270, 282, 206, 50, ("Pending:", "a task awaits the rest"))
    pen.label(250, 358, "one part for each", anchor="middle")
    pen.arrow((134, 324), (134, 353), (180, 353))
    pen.arrow((373, 332), (373, 353), (318, 353))
    for number in range(3):
        x = 87 + 163 * number
        pen.arrow((x, 372), (x, 392))
    pen.label(250, 410, "every waiter takes its member's part", anchor="middle", soft=True)


def layers(pen: Picture) -> None:
    """The packages; each may import those below it."""
    settings = tomllib.loads(SETTINGS.read_text(encoding="utf-8"))["tool"]["importlinter"]
    (contract,) = (each for each in settings["contracts"] if each["id"] == "layers")
    y = 10
    for layer in contract["layers"]:
        names = [name.strip(" ()") for name in re.split("[|:]", layer)]
        if names[0].startswith("_"):
            continue
        width = (480 - 8 * (len(names) - 1)) / len(names)
        for place, name in enumerate(names):
            kind = CENTRAL.get(name, "plain")
            pen.box(10 + place * (width + 8), y, width, 28, name, kind=kind, code=True)
        y += 34


def optimizer_step(pen: Picture) -> None:
    """An optimizer step: five functions lead from contributions to what is published."""
    nouns = (
        ("Contribution, of each replica", "device"),
        ("MergedGradient, of each variable", "meeting"),
        ("StagedWrite: new values beside the old", "value"),
        ("variables, slots, iterations, loss scale", "value"),
    )
    ways = (
        (("sum_gradients", "float32/64: left to the rule"),),
        (
            ("unscale_and_check", "a pass only for a norm"),
            ("clip", ""),
            ("apply", "one Block after the other"),
        ),
        (("publish", "one reference swap"),),
    )
    y = 10
    for number, (noun, kind) in enumerate(nouns):
        pen.box(10, y, 480, 34, noun, kind=kind)
        y += 34
        for name, remark in ways[number] if number < len(ways) else ():
            pen.arrow((60, y), (60, y + 28))
            pen.label(76, y + 19, name, code=True)
            pen.label(240, y + 19, remark, soft=True)
            y += 30


def save(pen: Picture) -> None:
    """Saving a checkpoint: a cut on the event loop, files on threads, one name commits."""
    pen.box(10, 10, 222, 426, "event loop", kind="loop", top=True)
    pen.box(258, 10, 232, 426, 'threads of lane "checkpoint"', kind="device", top=True)
    pen.box(22, 42, 198, 34, "read_state: entries, gates")
    pen.arrow((121, 76), (121, 90))
    cut = ("take_cut: gates closed,", "no step under way; Cut =", "references and copies")
    pen.box(22, 92, 198, 68, cut, kind="meeting")
    pen.arrow((121, 160), (121, 174))
    pen.box(22, 176, 198, 34, "gates open, steps go on")
    pen.label(32, 230, "wait=False returns here", soft=True)
    stages: tuple[tuple[tuple[str, ...], str], ...] = (
        (("names never used before",), ""),
        (("each file: sum, write,", "read back, compare, sync;", "memory is let go"), ""),
        (("sync the folder",), ""),
        (("manifest: write, sync",), ""),
        (("rename the manifest",), "saved"),
        (("sync the folder",), "durable"),
        (("remove old steps",), ""),
    )
    y = 78
    for number, (lines, told) in enumerate(stages):
        height = 12 + 18 * len(lines)
        pen.box(270, y, 208, height, lines, kind="value" if told == "saved" else "plain")
        if told:
            pen.arrow((270, y + 15), (222, y + 15))
            pen.label(216, y + 20, told, anchor="end")
        y += height
        if number < len(stages) - 1:
            pen.arrow((374, y), (374, y + 16))
        if told == "saved":
            pen.line((10, y + 8), (490, y + 8), dashed=True, kind="meeting")
        y += 18
    pen.arrow((220, 193), (245, 193), (245, 93), (268, 93))
    pen.label(22, 258, "Errors above the line:", soft=True)
    pen.label(22, 276, "...NotCommittedError", soft=True)
    pen.label(22, 402, "below it:", soft=True)
    pen.label(22, 420, "...UncertainError", soft=True)


def restore(pen: Picture) -> None:
    """Restoring a checkpoint: everything is read and checked before anything changes."""
    pen.box(10, 10, 222, 288, "event loop", kind="loop", top=True)
    pen.box(258, 10, 232, 288, 'threads of lane "checkpoint"', kind="device", top=True)
    pen.box(270, 42, 208, 48, ("newest_first: manifests,", "lengths of files"))
    pen.arrow((270, 66), (246, 66), (246, 82), (222, 82))
    pen.box(22, 66, 198, 48, ("make_plan: what fits what,", "what matches nothing"))
    pen.arrow((220, 104), (246, 104), (246, 122), (268, 122))
    pen.box(270, 104, 208, 48, ("read_tensors: each against", "its sum"))
    pen.arrow((374, 152), (374, 186), (222, 186))
    lines = (
        "apply_plan: gates closed",
        "1. what may refuse",
        "2. a write for each store",
        "3. slots not made yet",
    )
    pen.box(22, 150, 198, 90, lines, kind="meeting")
    pen.arrow((121, 240), (121, 252))
    pen.box(22, 254, 198, 34, "gates open")
    pen.label(270, 232, "A damaged step is passed", soft=True)
    pen.label(270, 250, "over before anything has", soft=True)
    pen.label(270, 268, "changed.", soft=True)


def learner(pen: Picture) -> None:
    """An example on its way through an online learner."""
    pen.box(10, 10, 480, 92, "intake", kind="frame", top=True)
    names = ("submit", "validate", "place", "commit")
    for number, name in enumerate(names):
        x = 22 + 116 * number
        pen.box(x, 42, 92, 46, (name, "fsync") if name == "commit" else name)
        if number:
            pen.arrow((x - 24, 65), (x - 2, 65))
    pen.box(370, 122, 92, 34, "journal", kind="value")
    pen.arrow((416, 88), (416, 120))
    pen.arrow((370, 139), (282, 139))
    pen.label(326, 132, "backlog", anchor="middle", soft=True)
    pen.box(180, 122, 100, 34, "queue", kind="value")
    pen.arrow((394, 88), (394, 108), (230, 108), (230, 120))
    pen.arrow((230, 156), (230, 174))
    pen.box(10, 176, 480, 142, "engine", kind="meeting", top=True)
    pen.box(100, 190, 378, 34, "savepoint, step, check")
    ends = (
        ("right:", "snapshot, tickets,", "records"),
        ("wrong:", "put back, learned", "in halves"),
        ("wrong alone:", "dead letter"),
    )
    for number, lines in enumerate(ends):
        x = 22 + 156 * number
        pen.box(x, 246, 144, 62, lines)
    for x in (130, 230, 406):
        pen.arrow((x, 224), (x, 244))
    pen.arrow((270, 246), (270, 226))


def sources(pen: Picture) -> None:
    """From the user's object to batches: what reading a distributed dataset passes through."""
    down = (
        ("what the user has", "plain"),
        ("Source", "value"),
        ("Source of batches", "value"),
        ("Source of PerReplica", "value"),
    )
    ways = ("find_source", "map, batch, prefetch", "split, deal, zip")
    for number, (name, kind) in enumerate(down):
        y = 10 + 68 * number
        pen.box(10, y, 180, 34, name, kind=kind)
        if number < len(ways):
            pen.arrow((40, y + 34), (40, y + 66))
            pen.label(52, y + 55, ways[number], code=True)
    up = (
        (214, ("pass: async generators",), "plain"),
        (142, ("ReadAhead: one task,", "a bounded queue"), "loop"),
        (68, ("Epoch: one pass", "as a loop sees it"), "loop"),
        (10, ("DistributedDataset",), "meeting"),
    )
    below = 0
    for y, lines, kind in up:
        height = 10 + 24 * len(lines) - 6 * (len(lines) - 1)
        pen.box(290, y, 200, height, lines, kind=kind)
        if below:
            pen.arrow((390, below), (390, y + height + 2))
        below = y
    pen.arrow((190, 231), (288, 231))
    pen.label(238, 223, "read(start)", anchor="middle", code=True, size=13)


def observers(pen: Picture) -> None:
    """Who tells of which events, and who is told."""
    tellers: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("ReplicaGroup", ("run_began, run_ended, fault,", "replica_began, replica_ended")),
        ("Collectives, Handle", ("call_made",)),
        ("MeetingPoint", ("wait_began, wait_ended,", "merge_began, merge_ended")),
        ("Lane", ("op_queued, op_started, op_ended",)),
        ("values", ("write_published",)),
        ("strategy.events", ("event_added",)),
    )
    y = 10
    for who, events in tellers:
        height = 34 + 18 * len(events)
        pen.box(10, y, 284, height, kind="meeting" if "M" in who else "plain")
        pen.label(20, y + 20, who)
        for number, line in enumerate(events):
            pen.label(20, y + 40 + 18 * number, line, code=True, soft=True)
        pen.arrow((294, y + height / 2), (338, y + height / 2))
        y += height + 8
    pen.box(340, 10, 150, y - 18, "Observers", kind="value", top=True)
    told = (("Recorder", "of the strategy"), ("the testing kit", ""), ("what the", "program added"))
    for number, lines in enumerate(told):
        pen.box(352, 60 + 84 * number, 126, 56, [line for line in lines if line])
