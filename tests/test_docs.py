"""The Python of the pages and the notebooks runs, a study's tables are of its records, and the
built site has nothing that a reader stumbles over."""

import itertools
import json
import os
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
from tread_zoo import __version__

ROOT = Path(__file__).parents[1]


def test_the_block_loop_of_the_concepts_page_gives_what_the_backbone_gives():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/concepts.md").read_text(), re.S)
    exec(code, names := {})  # it ends with an assertion
    assert names["out"].std() > 0


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


@pytest.fixture
def page(load):
    return load("where_routing_pays")


def record(fid, *, seed=1, features="features", sampling=None, **protocol):
    scores = {"fid": fid, "kid": fid / 4, "precision": 0.8, "recall": 0.8, "label_accuracy": 0.9}
    sampling = {"selection_rate": 0, "guidance": "none", "guidance_scale": 1, **(sampling or {})}
    own = {"reference": "held_out", "step": 2000, "num_generated": 2000, "num_reference": 5000}
    own |= {"extractor": f"{features}@0a1b2c3d", "seed": seed, "sampling": sampling, **protocol}
    contributions = {"blocks": [0.1] * 12, "ranges": [[2, 8, 0.3]]}
    return {"values": scores, "real": {}, "protocol": own, "contributions": contributions}


def planted_study(folder):
    """Runs of three seeds. Their luck is common to the arms; routing is ahead of 9 blocks by 0.3
    in one kind of features, in the other by chance, and guidance by 2 gains it 0.2 less."""
    generator = np.random.default_rng(0)
    for seed, (name, routing, depth) in itertools.product(range(3), PLANTED):
        run = folder / "runs" / f"{name}_seed-{seed}"
        run.mkdir(parents=True)
        config = {"seed": seed, "backbone": {"depth": depth}, "routing": {"name": routing}}
        fid = {"dense": 4.0, "routed": 4.0, "six": 4.5, "nine": 4.3}[name] + 0.5 * seed
        noise = generator.normal(0, 0.01, 4)
        records = [
            record(1 + generator.normal(0, 0.3), features="cifar10_resnet56"),
            record(0, reference="train") | {"real": {"fid": 0.1, "label_accuracy": 0.835}},
        ]
        for draw in (1, 2) if depth == 12 else ():
            gain = 0.1 if routing == "tread" else 0.3
            sampling = {"guidance": "cfg", "guidance_scale": 2}
            own = {"seed": draw, "num_generated": 1000}
            records.append(record(fid + 0.1 + noise[draw], **own))
            records.append(record(fid + 0.1 - gain + noise[draw], sampling=sampling, **own))
        facts = {"images_per_step": 128, "flops_routed": 1e6 * depth}
        (run / "config.json").write_text(json.dumps(config))
        (run / "facts.json").write_text(json.dumps(facts))
        (run / "score.json").write_text(json.dumps(record(fid + noise[0])))
        for number, each in enumerate(records):
            (run / f"score_00002000_{number:06x}.json").write_text(json.dumps(each))


PLANTED = (("dense", "none", 12), ("routed", "tread", 12), ("six", "none", 6), ("nine", "none", 9))


@pytest.fixture
def study(page, tmp_path):
    planted_study(tmp_path)
    scores, real = page["collect_seeds"](tmp_path)
    return pd.DataFrame(scores), pd.DataFrame(real)


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_a_planted_effect_is_settled_over_seeds_and_a_planted_null_is_not(page, study):
    rows = [cells(line) for line in page["over_seeds"](study[0]).splitlines()]
    arms, apart = rows[2:6], rows[9:]
    assert [row[:3] for row in arms] == [
        ["256K", arm, "3"] for arm in ("dense", "routed", "dense, 9 blocks", "dense, 6 blocks")
    ]
    assert arms[1][-1] == "30.0 ± 0.0 %", "the routed blocks"
    assert arms[3][-1] == ""
    of_dense, of_nine, of_six = (row[4] for row in apart)
    assert "**" not in of_dense
    assert of_nine.endswith("** ahead")
    assert of_six.endswith("** ahead")


def test_an_answer_that_is_not_settled_says_how_small_an_effect_it_excludes(page, study):
    plain = page["unguided"](study[0])
    text = page["answer"](*(page["scored"](plain, arm, 256_000) for arm in ("routed", "dense")))
    mean, half, gain, loss = map(float, re.findall(r"[+-]?\d+\.\d\d", text))
    assert (gain, loss) == (pytest.approx(half - mean, 0.02), pytest.approx(half + mean, 0.02))
    assert "not settled** (n = 3)" in text


def test_a_planted_front_is_found(page, study, tmp_path):
    table = page["fronts"](study[0])
    (line,) = [line for line in table.splitlines() if line.startswith("| cfg | 2 |")]
    seeds, dense, routed, apart, more = cells(line)[2:]
    assert (seeds, apart.split()[-1]) == ("3", "behind")
    assert float(routed) > float(dense)
    assert more.endswith("behind")
    assert float(more.strip("*").split()[0]) == pytest.approx(-0.2, abs=0.03)
    panels = page["draw_plane"], page["draw_distances"]
    page["draw_panels"](tmp_path / "fronts.png", page["fronts_of"](study[0]), *panels)
    assert (tmp_path / "fronts.png").stat().st_size > 10_000


def test_two_kinds_of_features_may_judge_otherwise(page, study):
    rows = [cells(line) for line in page["spaces"](study[0]).splitlines()]
    (of_nine,) = [row for row in rows if row[1] == "dense, 9 blocks"]
    assert of_nine[2] == "3"
    assert of_nine[3].endswith("ahead")
    assert "**" not in of_nine[4]
    assert cells(page["real_images"](study[1]).splitlines()[2])[1:] == [
        "5,000", "0.100", "", "", "0.835",
    ]  # fmt: skip


def test_an_answer_is_by_trainings_not_by_draws(page):
    """One pair settles nothing, however alike its draws are."""
    index = pd.MultiIndex.from_product([[0], [1, 2, 3, 4]])
    one = pd.Series([1.0, 1.01, 1.0, 1.01], index)
    assert "not settled" in page["answer"](one - 1, one)
    several = pd.MultiIndex.from_product([[0, 1, 2], [1, 2]])
    apart = pd.Series([-1, -1.01, -1.02, -1, -1.01, -1.0], several)
    assert "ahead** (n = 3)" in page["answer"](apart, 0 * apart)


@pytest.mark.parametrize("name", ["route_train_look", "compare_and_read"])
def test_a_notebook_opens_in_colab_with_this_version(name):
    hook = runpy.run_path(str(ROOT / "docs/source_links.py"))["on_page_markdown"]
    page = SimpleNamespace(file=SimpleNamespace(src_path="index.md"))
    config = {"docs_dir": str(ROOT / "docs"), "repo_url": "https://github.com/someone/zoo"}
    path = f"examples/notebooks/{name}.ipynb"
    html = hook((ROOT / "docs/index.md").read_text(), page, config)
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
