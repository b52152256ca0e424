"""Check the search of built pages: `python -m tests.docs.check_search FOLDER`; needs Node.js.

The scripts of the pages themselves are run. Words that users look for lead to a page for users,
and names as they are written in code to the reference.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

WORDS = {
    "gradient clipping": "training",
    "GPU": "installing",
    "mixed precision": "guide",
    "loss scaling": "training",
    "checkpoint": "checkpoints",
    "resume": "input",
    "shuffle": "input",
    "uvicorn": "embedding",
    "CancelledError": "guide",
}
"""A page that must be among the first results."""

NAMES = {
    "MirroredStrategy": "reference/strategies",
    "all_reduce": "reference/replica",
    "ArrayDataset": "reference/input",
}
"""The page that describes a name, and must be the first result."""

NOT_FIRST = ("decisions/", "architecture", "reference", "api_index")
NUM_FIRST = 8

PROGRAM = """
const fs = require("fs"), vm = require("vm");
const [folder, ...queries] = process.argv.slice(1);
const page = {
  localStorage: { setItem() {} }, location: { search: "" }, SPHINX_HIGHLIGHT_ENABLED: false,
  document: { getElementById: () => ({}), addEventListener() {} }, _: (text) => text,
};
page.window = page;
vm.createContext(page);
const run = (code) => vm.runInContext(code, page);
run(fs.readFileSync(folder + "/_static/language_data.js", "utf8"));
run(fs.readFileSync(folder + "/_static/searchtools.js", "utf8").replace(/^_ready\\(.*$/m, ""));
run("Search.setIndex = (index) => { Search._index = index; }");
run(fs.readFileSync(folder + "/searchindex.js", "utf8"));
const search = (query) =>
  run(`Search._performSearch(...Search._parseQuery(${JSON.stringify(query)}))`).reverse();
console.log(JSON.stringify(queries.map((query) => search(query).map((found) => found[0]))));
"""


def results(folder: Path, queries: list[str]) -> dict[str, list[str]]:
    """Return the pages that each query finds, the best first."""
    command = ["node", "-e", PROGRAM, str(folder), *queries]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(zip(queries, json.loads(done.stdout), strict=True))


def problems(folder: Path) -> Iterator[str]:
    """Yield what is wrong."""
    for query, pages in results(folder, [*WORDS, *NAMES]).items():
        first = pages[:NUM_FIRST]
        if query in NAMES:
            if pages[:1] != [NAMES[query]]:
                yield f"{query!r} does not lead to {NAMES[query]}, but to {first}"
            continue
        if WORDS[query] not in first:
            yield f"{query!r} does not lead to {WORDS[query]}, but to {first}"
        later = [page for page in pages if page.startswith(NOT_FIRST)]
        if later and pages[-len(later) :] != later:
            yield f"{query!r} leads to {later[0]} before pages for users: {pages}"


if __name__ == "__main__":
    found = list(problems(Path(sys.argv[1])))
    sys.exit("\n".join(found) if found else 0)
