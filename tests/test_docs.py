"""The Python code of pages and notebooks runs, a study's tables agree with its records, and the
built site has no faults that a reader would stumble over."""

import html
import os
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import nbclient
import nbformat
import pandas as pd
import pytest

from tests.processes import run_python
from tread_zoo import __version__

ROOT = Path(__file__).parents[1]


def test_the_block_loop_of_the_concepts_page_gives_what_the_backbone_gives():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/concepts.md").read_text(), re.S)
    exec(code, names := {})  # it ends with an assertion
    assert names["out"].std() > 0


@pytest.mark.slow
def test_the_method_of_the_guide_trains_and_is_tested(tmp_path):
    """The page's file, as it stands, is the plug-in of its commands."""
    page = (ROOT / "docs/adding_a_method.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.S)[0]
    (tmp_path / "my_methods.py").write_text(code)
    given = ["plugins=[my_methods]", "routing=discard", "routing.selection_rate=0.25"]
    small = [
        "backbone=mamba",
        "backbone.depth=4",
        "backbone.hidden_size=16",
        "backbone.state_size=2",
    ]
    small += ["training.num_steps=2", "training.batch_size=4", "evaluation.num_images=4"]
    small += ["evaluation.metrics=[]", "sampler.num_steps=2", "run_dir=run"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    done = run_python(ROOT / "scripts/train.py", *given, *small, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    kit = ["-m", "pytest", "-p", "tread_zoo.testing.plugin", "-q", "--pyargs", "tread_zoo.testing"]
    chosen = ["--routing", "my_methods:discard", "-k", "tokens_return_whole or costs or image"]
    done = run_python(*kit, *chosen, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout
    assert "12 passed" in done.stdout


TABLES = ROOT / "docs/comparison"
RECORDS = sorted(file.parent.name for file in (ROOT / "docs").glob("**/page.py"))


@pytest.fixture
def load(monkeypatch):
    """Return a function that returns the names of a record's page.py."""
    monkeypatch.syspath_prepend(TABLES)
    files = runpy.run_path(str(TABLES / "tables.py"))["RECORDS"]
    return lambda record: runpy.run_path(str(files[record]))


@pytest.mark.parametrize("record", RECORDS)
def test_tables_are_those_of_their_records(load, record):
    names = load(record)
    pages = runpy.run_path(str(TABLES / "tables.py"))["pages"](names)
    texts = {file: file.read_text() for file in pages}
    assert pages == texts
    missing = [n for n, t in names["tables"]().items() if t not in "".join(texts.values())]
    assert missing == []


def test_an_entry_of_the_board_keeps_its_rules(load, tmp_path):
    names = load("board")
    runs = tmp_path / "runs.csv"
    runs.write_bytes(names["RUNS"].read_bytes())
    add, tables = names["add"], names["tables"]
    add.__globals__["RUNS"] = runs
    result = {"seed": range(5), "fid": [1.0, 1.1, 0.9, 1.05, 0.95], "kid": 0.1, "machine": "a CPU",
              "flops": 27.3e12, "flops_per_sample": 2e9}  # fmt: skip
    for broken in ({"flops": 30e12}, {"flops_per_sample": 5e9}, {"seed": [0, 1, 2, 3, 3]}):
        pd.DataFrame(result | broken).to_csv(tmp_path / "results.csv")
        with pytest.raises(ValueError, match=next(iter(broken))):
            add(tmp_path / "results.csv", "mine", "optimizer=muon")
    pd.DataFrame(result).to_csv(tmp_path / "results.csv")
    for _ in range(2):  # the second replaces the first
        add(tmp_path / "results.csv", "mine", "optimizer=muon")
    first = tables()["board"].splitlines()[2]
    assert first.startswith("| mine | 1.00 ± 0.10 | 0.100 | 5 | 2 | optimizer=muon |")
    assert tables()["board"].count("| mine |") == 1


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = "report.md"  # records of what was run, in the words of their time
GONE = ("rate_range", "carry_from", "sparsify", "rejoin=", "redraw=", "scan_order=unsorted")


def anchors_of(page):
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"\s", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_links_to_what_there_is_and_its_tables_are_whole(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    for link in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text):
        target, _, anchor = (link[0] or link[1]).partition("#")
        if "://" in target:
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors_of(file), f"{target}#{anchor}"
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        heads, _, *rows = (line.count("|") for line in table.replace("\\|", "").splitlines())
        assert rows, table
        assert set(rows) == {heads}, table
    if page.name not in (GENERATED, "log.md"):
        assert [word for word in GONE if word in text] == []


@pytest.mark.parametrize("name", ["route_train_look", "compare_and_read"])
def test_a_notebook_opens_in_colab_with_this_version(name):
    hook = runpy.run_path(str(ROOT / "docs/source_links.py"))["on_page_markdown"]
    page = SimpleNamespace(file=SimpleNamespace(src_path="index.md"))
    config = {"docs_dir": str(ROOT / "docs"), "repo_url": "https://github.com/someone/zoo"}
    path = f"examples/notebooks/{name}.ipynb"
    linked = hook((ROOT / "docs/index.md").read_text(), page, config)
    assert f"(https://colab.research.google.com/github/someone/zoo/blob/main/{path})" in linked
    assert f"%pip install -q tread_zoo=={__version__}\\n" in (ROOT / path).read_text()


MARKDOWN = re.compile(r"\]\(|\]\[|\*\*|`|<!--|\n[-*] |\| ?--")  # which stayed text
LITERAL = re.compile(r"<(pre|code|kbd|script|style)\b.*?</\1>|<!--.*?-->|<[^>]*>", re.S)


@pytest.mark.nightly
def test_the_built_site_shows_no_markdown_and_names_its_menu(tmp_path):
    """mkdocs itself is strict about links and anchors."""
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name, reason="pip install -e .[docs] builds the site")
    built = run_python("-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path, cwd=ROOT)
    assert built.returncode == 0, built.stderr
    assert 'class="doc-signature' in (tmp_path / "reference/tread_zoo/index.html").read_text()
    for file in tmp_path.rglob("*.html"):
        page = file.read_text()
        shown = html.unescape(LITERAL.sub("", page))
        assert MARKDOWN.findall(shown) == [], file
        entries = re.findall(r'class="md-(?:nav|tabs)__link[^>]*>(.*?)</(?:a|label)>', page, re.S)
        assert not {"", "None", "Table"} & {LITERAL.sub("", entry).strip() for entry in entries}


SHORTER = {  # what takes long in a notebook, and what is run in its place
    "route_train_look": {"num_steps, losses = 300": "num_steps, losses = 20", "(), 25)": "(), 2)"},
    "compare_and_read": {
        "training.num_steps=40": "training.num_steps=20 training.batch_size=8 sampler.num_steps=2",
        "backbone.depth=9": "backbone.depth=5",
    },
}


@pytest.mark.parametrize(
    "name",
    [pytest.param("route_train_look", marks=pytest.mark.slow),
     pytest.param("compare_and_read", marks=pytest.mark.nightly)],
)  # fmt: skip
def test_the_notebook_runs_and_draws(name, tmp_path, monkeypatch):
    folder = tmp_path / "examples" / "notebooks"  # what it writes stays here
    folder.mkdir(parents=True)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    text = (ROOT / "examples/notebooks" / f"{name}.ipynb").read_text()
    assert "image/png" not in text, "it is committed without outputs"
    for long, short in SHORTER[name].items():
        assert long in text
        text = text.replace(long, short)
    notebook = nbformat.reads(text, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": folder}}
    ).execute()
    assert "image/png" in nbformat.writes(notebook)
