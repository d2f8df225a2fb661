"""The Python of the pages and the notebooks runs, and a study's tables are of its records."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import nbclient
import nbformat
import pytest

from tread_zoo import __version__

ROOT = Path(__file__).parents[1]


def test_the_block_loop_of_the_concepts_page_gives_what_the_backbone_gives():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/concepts.md").read_text(), re.S)
    exec(code, names := {})  # it ends with an assertion
    assert names["out"].std() > 0


def test_the_tables_of_where_routing_pays_are_those_of_its_records():
    folder = ROOT / "docs/comparison/where_routing_pays"
    text = (folder / "README.md").read_text()
    assert runpy.run_path(str(folder / "page.py"))["filled"](text) == text


@pytest.mark.parametrize("name", ["route_train_look", "compare_and_read"])
def test_a_notebook_opens_in_colab_with_this_version(name):
    hook = runpy.run_path(str(ROOT / "docs/source_links.py"))["on_page_markdown"]
    page = SimpleNamespace(file=SimpleNamespace(src_path="notebooks.md"))
    config = {"docs_dir": str(ROOT / "docs"), "repo_url": "https://github.com/someone/zoo"}
    path = f"examples/notebooks/{name}.ipynb"
    html = hook((ROOT / "docs/notebooks.md").read_text(), page, config)
    assert f"(https://colab.research.google.com/github/someone/zoo/blob/main/{path})" in html
    assert f"%pip install -q tread_zoo=={__version__}\\n" in (ROOT / path).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["route_train_look", "compare_and_read"])
def test_the_notebook_runs_and_draws(name, tmp_path, monkeypatch):
    folder = tmp_path / "examples" / "notebooks"  # what it writes stays here
    folder.mkdir(parents=True)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "examples/notebooks" / f"{name}.ipynb", as_version=4)
    assert "image/png" not in nbformat.writes(notebook), "it is committed without outputs"
    nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": folder}}
    ).execute()
    assert "image/png" in nbformat.writes(notebook)
