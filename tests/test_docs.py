"""The Python of the pages and the notebooks runs, a study's tables are of its records, and the
built site has nothing that a reader stumbles over."""

import itertools
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import nbclient
import nbformat
import numpy as np
import pandas as pd
import pytest

from tests.built_site import find_faults
from tests.processes import run_python
from tread_zoo import __version__, create_backbone
from tread_zoo.evaluation.flops import count_flops, training_flops

ROOT = Path(__file__).parents[1]


def test_the_block_loop_of_the_concepts_page_gives_what_the_backbone_gives():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/concepts.md").read_text(), re.S)
    exec(code, names := {})  # it ends with an assertion
    assert names["out"].std() > 0


@pytest.mark.slow
def test_the_flops_of_routed_runs_are_those_that_are_counted():
    page = (ROOT / "docs/routing.md").read_text()
    table = re.search(r"\| `routing\.…` \|(.*)\n\|[-|]*\n((?:\|.*\n)*)", page)
    names = table[1].replace("`", "").replace("|", " ").split()
    sizes = {"input_size": 32, "in_channels": 4, "num_classes": 1000}
    backbones = [create_backbone(f"{name}_tiny", **sizes) for name in names]
    dense = [count_flops(backbone, backward=True) for backbone in backbones]
    rows = [row for row in table[2].splitlines() if "schedule=" not in row]  # these have 17 rates
    for row in rows:
        words, *given = row.strip("| ").split(" | ")
        options = dict(word.split("=") for word in words.strip("`").split())
        options = {k: v if v.isalpha() else float(v) for k, v in options.items()}
        for backbone, whole, share in zip(backbones, dense, given, strict=True):
            routed = training_flops(backbone, backbone.build_routing(**options), 10_000)
            assert f"{routed / whole:.3f}" == share, (words, backbone.name)


PAYS = ROOT / "docs/comparison/where_routing_pays"


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(PAYS)
    return runpy.run_path(str(PAYS / "page.py"))


def test_the_tables_of_where_routing_pays_are_those_of_its_records(page):
    text = (PAYS / "README.md").read_text()
    assert page["filled"](text) == text


def planted_study():
    """Scores of three seeds and two draws: routing is ahead by 0.3 in one kind of features, in the
    other by chance, and guidance by 2 gains the dense network 0.2 more."""
    generator, rows = np.random.default_rng(0), []
    for seed, draw, arm, scale in itertools.product(range(3), (1, 2), ("dense", "routed"), (1, 2)):
        routed, guided = arm == "routed", scale > 1
        fid = 2 - 0.3 * routed - (0.1 if routed else 0.3) * guided
        common = {
            "seed": seed, "draw": draw, "arm": arm, "images": 1_024_000, "num_images": 1000,
            "scale": scale, "guidance": "cfg" if guided else "none", "kid": 0.5,
            "precision": 0.8 + 0.05 * guided, "recall": 0.8 - 0.05 * guided, "label_accuracy": 0.9,
        }  # fmt: skip
        rows.append({**common, "features": "features", "fid": fid + generator.normal(0, 0.01)})
        if not guided:
            noise = generator.normal(0, 0.3)
            rows.append({**common, "features": "cifar10_resnet56", "fid": 1 + noise})
    return pd.DataFrame(rows)


def test_a_planted_front_is_found(page, tmp_path):
    table = planted_study()
    line = page["fronts"](table).splitlines()[-1]
    seeds, dense, routed, apart, more = (cell.strip() for cell in line.split("|")[3:8])
    assert (seeds, apart.split()[-1]) == (
        "3",
        "behind" if float(routed) > float(dense) else "ahead",
    )
    assert float(more.split()[0]) == pytest.approx(0.2, abs=0.03)
    page["draw_fronts"](page["fronts_of"](table), tmp_path / "fronts.png")
    assert (tmp_path / "fronts.png").stat().st_size > 10_000


def test_two_kinds_of_features_may_judge_otherwise(page):
    scores = {"fid": [0.02, 0.05], "precision": 0.9, "recall": 0.9, "label_accuracy": [0.92, None]}
    real = pd.DataFrame({"features": ["features", "cifar10_resnet56"], **scores})
    text = page["spaces"](planted_study(), real)
    cells = [cell.strip() for cell in text.splitlines()[2].split("|")]
    assert cells[2:4] == ["dense", "3"]
    assert (cells[5], cells[7]) == ("ahead", "not settled")
    assert "0.920" in text


def test_an_answer_is_by_trainings_not_by_draws(page):
    """One pair settles nothing, however alike its draws are."""
    index = pd.MultiIndex.from_product([[0], [1, 2, 3, 4]])
    one = pd.Series([1.0, 1.01, 1.0, 1.01], index)
    assert "not settled" in page["answer"](one - 1, one)
    several = pd.MultiIndex.from_product([[0, 1, 2], [1, 2]])
    apart = pd.Series([-1, -1.01, -1.02, -1, -1.01, -1.0], several)
    assert "ahead** (n = 3)" in page["answer"](apart, 0 * apart)


def test_the_table_of_parts_is_that_of_its_records():
    folder = ROOT / "docs/comparison/parts"
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


FAULTS = {
    "markdown": [
        "<p>see [the guide](guide.md</p>", "<p>[the guide][guide]</p>", "<p>a **bold word</p>",
        "<p>an `option</p>", "<p>&lt;!-- a note --></p>", "<p>Two:\n- one\n- two</p>",
        "<p>| a | b |\n| --- | --- |</p>",
    ],
    "link": ['<a href="nowhere/">a</a>', '<a href="#nothing">a</a>', '<img src="no.png">'],
    "menu": [f'<a class="md-nav__link"><span>{name}</span></a>' for name in ("None", "Table", "")],
    "signature": [
        f'<div class="doc-signature"><pre><code>{text}</code></pre></div>'
        for text in (
            "f(a: int, ...)", "f(a: int, …)", "f(a: int = ...)", "f(a: int, b", "f(a: int) b: int",
            "f(" + ", ".join(f"argument_{i}: int" for i in range(6)) + ")", "a: int = ...",
        )
    ],
}  # fmt: skip
SOUND = """
<p id="here"><a href="#here">This</a>, <a href="page.html#here">that</a>, <code>**b](</code></p>
<label class="md-nav__link">Start</label>
<div class="doc-signature"><pre><code>a.f(
    b: tuple[int, ...], *, c: Callable[..., int] | None = None
) -> "int"</code></pre></div>
"""


@pytest.mark.parametrize(("kind", "html"), [(k, each) for k in FAULTS for each in FAULTS[k]])
def test_a_planted_fault_of_the_site_is_found(tmp_path, kind, html):
    (tmp_path / "page.html").write_text(SOUND)
    assert find_faults(tmp_path) == []
    (tmp_path / "page.html").write_text(SOUND + html)
    assert {fault[:2] for fault in find_faults(tmp_path)} == {("page.html", kind)}


@pytest.mark.slow
def test_the_built_site_has_no_such_fault(tmp_path):
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name, reason="pip install -e .[docs] builds the site")
    built = run_python("-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path, cwd=ROOT)
    assert built.returncode == 0, built.stderr
    assert 'class="doc-signature' in (tmp_path / "reference/tread_zoo/index.html").read_text()
    assert find_faults(tmp_path) == []


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
