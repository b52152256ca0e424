"""A folder of files as a source: lines by the names of their files, each once."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from aioreplica import testing as art
from aioreplica.online import FolderSource
from aioreplica.online import _folder_source as module

from .program import Counting, example


def write(folder: Path, name: str, text: str) -> None:
    with (folder / name).open("a", encoding="utf-8") as file:
        file.write(text)


async def read_all(source: FolderSource, after: str | None = None) -> list[Any]:
    """Return what a source has now, one read after the other."""
    found: list[Any] = []
    while True:
        try:
            async with asyncio.timeout(5.0):  # virtual
                pairs = await source.read(after=after)
        except TimeoutError:
            return found
        after = pairs[-1][0]
        found += [each for _, each in pairs]


def test_lines_come_in_the_order_of_names_and_once_they_end(tmp_path: Path) -> None:
    source = FolderSource(tmp_path / "made later")
    folder = tmp_path / "made later"

    async def main() -> None:
        assert await read_all(source) == []
        folder.mkdir()
        write(folder, "b.jsonl", "3\n\n4\n5")  # the last line has no end
        write(folder, "a.jsonl", "1\n2")  # there is a later file, so this one has
        write(folder, "c.txt", "9\n")
        assert await read_all(source) == [1, 2, 3, 4]
        write(folder, "b.jsonl", "0\n6\n")
        assert await read_all(source) == [1, 2, 3, 4, 50, 6]

    art.run(main)


def test_it_goes_on_behind_any_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINES", 2)
    for name in ("1.jsonl", "2.jsonl", "3 x.jsonl"):
        write(tmp_path, name, "".join(f"[{name[0]}, {i}]\n" for i in range(3)))
    source = FolderSource(tmp_path)

    async def main() -> None:
        everything, offsets = await read_all(source), list[str]()
        assert everything == [[n, i] for n in (1, 2, 3) for i in range(3)]
        after = None
        while len(offsets) < 9:
            pairs = await source.read(after=after)
            after = pairs[-1][0]
            offsets += [offset for offset, _ in pairs]
        for number, offset in enumerate(offsets, 1):
            assert await read_all(FolderSource(tmp_path), offset) == everything[number:]
        (tmp_path / "1.jsonl").unlink()  # it was read
        assert await read_all(source, offsets[2]) == everything[3:]

    art.run(main)


def test_empty_lines_do_not_end_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 8)
    write(tmp_path, "1.jsonl", "1\n" + "\n" * 20 + "2\n")
    write(tmp_path, "2.jsonl", "3\n")

    async def main() -> None:
        assert await read_all(FolderSource(tmp_path)) == [1, 2, 3]

    art.run(main)


def test_one_read_takes_the_lines_of_many_files_and_asks_once_what_each_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of many small files is read in a time that grows with their number, no faster."""
    asked, look = list[str](), Path.is_file

    def is_file(path: Path) -> bool:
        asked.append(path.name)
        return look(path)

    monkeypatch.setattr(module, "MAX_LINES", 10)
    monkeypatch.setattr(Path, "is_file", is_file)
    names = [f"{i:02}.jsonl" for i in range(40)]
    for i, name in enumerate(names):
        write(tmp_path, name, f"{i}\n")
    source = FolderSource(tmp_path)

    async def main() -> None:
        after, found = None, list[Any]()
        for _ in range(4):
            pairs = await source.read(after=after)
            after = pairs[-1][0]
            found += [each for _, each in pairs]
        assert found == [*range(40)]
        write(tmp_path, "40.jsonl", "40\n")
        assert await source.read(after=after) == [("3 40.jsonl", 40)]

    art.run(main)
    assert sorted(name for name in asked if name.endswith(".jsonl")) == [*names, "40.jsonl"]


def test_lines_before_a_file_that_cannot_be_read_are_read(tmp_path: Path) -> None:
    write(tmp_path, "1.jsonl", "1\n")
    write(tmp_path, "2.jsonl", "2\n")
    source = FolderSource(tmp_path)

    async def main() -> None:
        assert [each for _, each in await source.read(after=None)] == [1, 2]
        (tmp_path / "2.jsonl").unlink()
        (tmp_path / "2.jsonl").mkdir()  # the name is known as that of a file
        assert await source.read(after=None) == [("2 1.jsonl", 1)]
        with pytest.raises(IsADirectoryError):
            async with asyncio.timeout(5.0):  # virtual
                await source.read(after="2 1.jsonl")

    art.run(main)


def test_what_cannot_be_parsed_is_told_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"x": 1}\nno JSON\n\xff\n7\n')

    async def main() -> None:
        first, second, third, last = await read_all(FolderSource(tmp_path))
        assert (first, last) == ({"x": 1}, 7)
        assert isinstance(second, ValueError)
        assert isinstance(third, UnicodeDecodeError)
        [upper] = await read_all(FolderSource(tmp_path, pattern="*.csv", parse=str.upper))
        assert upper == "A,B\n"

    write(tmp_path, "a.csv", "a,b\n")
    art.run(main)


def test_a_file_that_shrinks_or_an_offset_of_something_else_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", "1\n2\n")
    source = FolderSource(tmp_path)

    async def main() -> None:
        with pytest.raises(ValueError, match=r"a\.jsonl has 4 bytes, and 9 of it were read"):
            await source.read(after="9 a.jsonl")
        with pytest.raises(ValueError, match="'1-0' is no offset of a FolderSource"):
            await source.read(after="1-0")

    art.run(main)


def test_a_file_that_comes_too_late_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "b.jsonl", "1\n")
    write(tmp_path, "c.jsonl", "3\n")
    source = FolderSource(tmp_path)

    async def main() -> None:
        with caplog.at_level(logging.WARNING, "aioreplica.online"):
            assert await read_all(source) == [1, 3]
            write(tmp_path, "d.jsonl", "4\n")
            assert await read_all(source, "2 c.jsonl") == [4]
            assert caplog.records == []
            write(tmp_path, "a.jsonl", "2\n")
            assert await read_all(source, "2 d.jsonl") == []
        assert [record.args for record in caplog.records] == [(tmp_path / "a.jsonl",)]

    art.run(main)


@pytest.mark.asyncio
async def test_a_learner_learns_a_folder(folder: Path) -> None:
    lines = "".join(f'{{"id": {i}, "mood": 0.0, "x": [{i}, {i}]}}\n' for i in range(5))
    write(folder, "a.jsonl", lines)

    def parsed(line: str) -> Any:
        return example(int(line.split(":")[1].split(",", maxsplit=1)[0]))

    async with Counting(folder, sources={"files": FolderSource(folder, parse=parsed)}) as program:
        while program.learner.statistics().learned_number < 5:
            await asyncio.sleep(0)
        assert program.learned() == [1] * 5
        assert repr(program.learner).startswith("<OnlineLearner")
    assert repr(FolderSource(folder)) == f"<FolderSource {folder / '*.jsonl'}>"
