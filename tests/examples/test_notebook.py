"""The notebook runs from top to bottom in a kernel, whose event loop is running all the while."""

import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"


def test_it_holds_no_outputs() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")

    assert set(re.findall(r'"outputs": (\[.*)', text)) == {"[],"} or '"outputs": []' in text
    assert '"output_type"' not in text
    assert '"execution_count": null' in text


@pytest.mark.xslow
def test_it_runs_from_top_to_bottom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)

    client = nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(NOTEBOOK.parents[1])}}
    )
    client.execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert {output["output_type"] for output in outputs} == {"stream"}
    assert {output["name"] for output in outputs} == {"stdout"}  # no warning, no log
    text = "".join(output["text"] for output in outputs)
    assert "weights [ 2. -1.] bias 0.5" in text
    assert "Replica 1 returned while replica 0 waits in barrier #1" in text
