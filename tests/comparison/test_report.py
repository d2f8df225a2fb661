"""What a report says follows from the numbers, and its page opens."""

import html
import itertools
import json
import re
import shutil
import subprocess
from contextlib import nullcontext
from html.parser import HTMLParser
from xml.etree import ElementTree

import markdown
import numpy as np
import pytest
from scipy import stats

from tests.comparison.recorded import without_figures, write_run
from tread_zoo.comparison import read_curves, read_runs, write_report
from tread_zoo.comparison.findings import comparable_metrics, group_settings, ratios_to_dense
from tread_zoo.comparison.intervals import interval

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def report(tmp_path, *, drawn=False, **options):
    runs = read_runs(str(tmp_path / "runs" / "*"))
    curves = read_curves(str(tmp_path / "runs" / "*"))
    with nullcontext() if drawn else without_figures():
        return write_report(runs, curves, tmp_path / "out", title="A title", **options)


def overview(text):
    """Return the cells of the first table by row and line, and its header."""
    lines = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    header, _, *rows = lines
    rows = rows[: next((i for i, row in enumerate(rows) if row[0] == "setting"), None)]
    return {tuple(row[:2]): dict(zip(header[2:], row[2:], strict=True)) for row in rows}


def write_pair(tmp_path, dense, routed, backbone="dit_tiny", **options):
    """Write dense and routed runs that end at these distances and losses, one for each seed."""
    for routing, finals in (("none", dense), ("tread", routed)):
        for seed, final in enumerate(finals):
            place = tmp_path / "runs" / f"{backbone}_{routing}_{seed}"
            values = {"fid": final}
            write_run(place, backbone=backbone, routing=routing, seed=seed, final=final,
                      values=values, **options)  # fmt: skip


SCORE = "Fréchet distance ↓ [95 %]"
STEPS, FLOPS, SECONDS = (
    f"routed − dense, equal {budget}" for budget in ("steps", "FLOPs", "seconds")
)


@pytest.mark.slow
def test_routing_is_ahead_where_it_is_better_at_equal_flops(tmp_path):
    write_pair(tmp_path, [0.400, 0.402], [0.401, 0.4035])
    write_pair(tmp_path, [0.300, 0.304, 0.9], [0.350, 0.352], backbone="mamba_tiny")
    write_pair(tmp_path, [0.500, 0.502], [0.500, 0.502], backbone="rwkv_tiny", seconds=20.0)
    rows = overview(report(tmp_path))
    assert rows["dit_tiny", "routed"][FLOPS].endswith(" ahead")
    assert rows["rwkv_tiny", "routed"][FLOPS].endswith(" ahead")
    assert rows["mamba_tiny", "routed"][FLOPS].endswith(" behind")
    common = interval([0.05, 0.048]).in_brackets(signed=True)  # of the seeds that both have
    assert rows["mamba_tiny", "routed"][STEPS] == f"{common} behind"
    assert rows["rwkv_tiny", "routed"][STEPS] == "+0 [+0, +0] not settled"
    page = (tmp_path / "out" / "index.html").read_text()
    assert len(re.findall(r'<svg class="ahead"', page)) == 2


@pytest.mark.slow
def test_a_table_has_each_method_over_the_dense_network_of_its_backbone(tmp_path):
    methods = {"tread": 0.9, "layer_drop": 1.2}
    spread = np.array([1.0, 1.01, 1.02])
    for backbone, level in (("dit_tiny", 2.0), ("mamba_tiny", 3.0), ("rwkv_tiny", 4.0)):
        for routing, ratio in {"none": 1.0, **methods}.items():
            for seed in range(3):
                fid = level * ratio * spread[seed - (routing == "tread")]
                kid = {"tread": 2, "none": 1}.get(routing, 3) * (1 + 0.01 * seed)
                write_run(tmp_path / "runs" / f"{backbone}_{routing}_{seed}", backbone=backbone,
                          routing=routing, seed=seed, values={"fid": fid, "kid": kid})  # fmt: skip
    text = report(tmp_path)
    head = "| Fréchet distance over dense [95 %] | dit_tiny | mamba_tiny | rwkv_tiny | all |"
    assert head in text.splitlines()
    rows = [line for line in text.splitlines() if re.match(r"\| (tread|layer_drop) \|", line)]
    logs = np.log(0.9) + np.log(spread[[2, 0, 1]]) - np.log(spread)
    low, high = np.exp(stats.t.interval(0.95, 2, logs.mean(), stats.sem(logs)))
    tread = f"{0.9:.2f} ({low:.2f} to {high:.2f}) ahead; behind in kernel distance"
    assert rows[0].startswith(f"| tread | {tread} | {tread} |")
    assert rows[0].endswith("| 0.90 (0.90 to 0.90) ahead |")
    assert rows[1].startswith("| layer_drop | 1.20 (1.20 to 1.20) behind |")
    page = (tmp_path / "out" / "index.html").read_text()
    ends = f"{0.9:.2f} ({low:.2f} to {high:.2f})"
    assert f'data-tip="{ends}, ahead; behind in kernel distance; n = 3"' in page


@pytest.mark.slow
def test_the_value_at_equal_flops_is_read_off_the_curve(tmp_path):
    write_pair(tmp_path, [0.4, 0.4], [0.4, 0.4])
    # the dense run at 70 of its 100 steps, between those that were scored at 60 and 80
    at_70 = 0.4 * (1 + 20 * ((1 / 60 + 1 / 80) / 2 - 1 / 100))
    apart = overview(report(tmp_path))["dit_tiny", "routed"][FLOPS]
    assert apart.startswith(f"{0.4 - at_70:+.3g} ")


def test_the_best_comes_first_and_a_distance_decides(tmp_path):
    write_pair(tmp_path, [0.50, 0.51], [0.52, 0.53], backbone="mamba_tiny")
    write_pair(tmp_path, [0.40, 0.42], [0.415, 0.41])
    text = report(tmp_path)
    assert [name for name, _ in overview(text)] == 2 * ["dit_tiny"] + 2 * ["mamba_tiny"]
    assert overview(text)["dit_tiny", "dense"][SCORE] == "0.41 [0.2829, 0.5371]"
    page = (tmp_path / "out" / "index.html").read_text()
    assert "Ranked by <b>Fréchet distance</b> (lower is better)" in page
    (best,) = re.findall(r'<tbody class="best">(.*?)</tbody>', page, re.S)
    assert best.index('<tr class="best">') < best.index("dense") < best.index("<tr>")


@pytest.mark.slow
@pytest.mark.parametrize(
    "chance",
    [
        {"values": {"fid": 0.2, "label_accuracy": 0.12}},
        {"values": {"fid": 4.2}, "real": {"fid": 0.4}},
    ],
)
def test_samples_at_chance_are_not_ranked(tmp_path, chance):
    protocol = {"num_generated": 500}
    write_run(tmp_path / "runs" / "noise", backbone="mamba_tiny", protocol=protocol, **chance)
    write_run(tmp_path / "runs" / "far", backbone="uvit_tiny", protocol=protocol,
              values={"fid": 5.9, "label_accuracy": 0.5}, real={"fid": 0.4})  # fmt: skip
    rows = overview(report(tmp_path))
    assert [name for name, _ in rows] == ["uvit_tiny dense", "mamba_tiny dense"]
    assert "at chance" in rows["mamba_tiny dense", "dense"][SCORE]
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count('<tr class="chance"') == 1


@pytest.mark.slow
def test_seconds_of_two_machines_are_not_compared(tmp_path):
    write_pair(tmp_path, [0.4, 0.4], [0.3, 0.3])
    for routing, device in (("none", "a CPU"), ("tread", "a GPU")):
        place = tmp_path / "runs" / f"other_{routing}"
        write_run(place, backbone="uvit_tiny", routing=routing, device=device, values={"fid": 1.0})
    rows = overview(report(tmp_path))
    assert rows["uvit_tiny", "routed"][STEPS] == "+0 not settled"
    assert rows["uvit_tiny", "routed"][SECONDS] == ""
    assert rows["dit_tiny", "routed"][SECONDS].endswith(" ahead")


TREAD = {"name": "tread"}
OTHERS = ["layer_drop", "token_merging", "maskdit"]


@pytest.mark.parametrize(
    ("routings", "labels"),
    [
        (["none", *({**TREAD, "selection_rate": r} for r in (0.25, 0.5))],
         ["dense", "tread, selection_rate 0.25", "tread, selection_rate 0.5"]),
        (["none", TREAD, {**TREAD, "end": 9}, {**TREAD, "probability": 0.5}],
         ["dense", "tread", "tread, end 9", "tread, probability 0.5"]),
        ([{**TREAD, "warm_start": 0.25}, {**TREAD, "selection_rate": 0.25}, TREAD],
         ["tread, warm_start 0.25", "tread, selection_rate 0.25", "tread"]),
        ([TREAD, {**TREAD, "start": 3}, {**TREAD, "end": 9},
          *({"name": name} for name in OTHERS)],
         ["tread", "tread, start 3", "tread, end 9", *OTHERS]),
        ([{**TREAD, "start": start, "end": 8, "probability": 0.5} for start in (4, 5, 6)]
         + [{**TREAD, "start": 4, "end": 8}], None),
    ],
)  # fmt: skip
def test_labels_are_unique_and_leave_out_what_most_settings_share(tmp_path, routings, labels):
    for number, routing in enumerate(routings):
        write_run(tmp_path / "runs" / str(number), routing=routing)
    settings = group_settings(read_runs(str(tmp_path / "runs" / "*")))
    found = [setting.label for setting in settings]
    assert len(set(found)) == len(routings)
    assert labels is None or found == [f"dit_tiny {label}" for label in labels]


def test_an_option_that_one_run_sets_is_all_that_its_label_says(tmp_path):
    name = "lightning_dit_tiny"
    for number, option in enumerate(({}, {"window": 4}, {"qk_norm": False})):
        write_run(tmp_path / "runs" / str(number), backbone={"name": name, **option})
    settings = group_settings(read_runs(str(tmp_path / "runs" / "*")))
    expected = [f"{name} dense{option}" for option in ("", ", window 4", ", qk_norm False")]
    assert [setting.label for setting in settings] == expected


def settings_of(tmp_path):
    return group_settings(read_runs(str(tmp_path / "runs" / "*")))


def test_what_differs_between_routed_and_dense_runs_is_in_their_labels(tmp_path):
    for seed in range(2):
        for routing, rate in (("none", 1e-3), ("tread", 6e-3)):
            optimizer = {"name": "adamw", "learning_rate": rate}
            place = tmp_path / "runs" / f"{routing}{seed}"
            write_run(place, routing=routing, seed=seed, optimizer=optimizer)
    dense, routed = settings_of(tmp_path)
    assert dense.label == "dit_tiny dense, learning_rate 0.001"
    assert routed.label == "dit_tiny tread, learning_rate 0.006"
    assert routed.dense_of([dense, routed]) == dense


def test_an_option_that_only_other_parts_have_does_not_part_a_pair(tmp_path):
    chosen = ["adamw", *({"name": "muon", "momentum": m} for m in (0.9, 0.95))]
    for number, optimizer in enumerate(chosen):
        for routing in ("none", "tread"):
            place = tmp_path / "runs" / f"{routing}{number}"
            write_run(place, routing=routing, optimizer=optimizer)
    settings = settings_of(tmp_path)
    assert all(s.is_dense or s.dense_of(settings) is not None for s in settings)


@pytest.mark.parametrize(("steps", "flops", "is_compared"), [(100, 700, True), (50, 700, False),
                                                             (50, 2000, True)])  # fmt: skip
def test_a_ratio_is_of_equal_steps_or_equal_flops(tmp_path, steps, flops, is_compared):
    for backbone in ("dit_tiny", "mamba_tiny"):
        write_run(tmp_path / "runs" / backbone, backbone=backbone)
        write_run(tmp_path / "runs" / f"routed_{backbone}", backbone=backbone, routing="tread",
                  steps=steps, flops=flops, every=10)  # fmt: skip
    assert bool(ratios_to_dense(settings_of(tmp_path), ["held_out_loss"])[0]) == is_compared


@pytest.mark.slow
def test_scores_of_two_protocols_are_not_ranked(tmp_path):
    write_run(tmp_path / "runs" / "a", values={"fid": 4.0})
    write_run(tmp_path / "runs" / "b", seed=1, values={"fid": 5.0}, protocol={
        "step": 50, "nfe": 3, "torch": "1", "sampling": {"sampler": "heun"},
        "notes": ["few images"]})  # fmt: skip
    runs = read_runs(str(tmp_path / "runs" / "*"))
    assert comparable_metrics(runs) == (["fid", "held_out_loss"], ["few images"])
    runs.attrs["metrics"].append("mean_gap")
    assert any("mean_gap is not compared" in note for note in comparable_metrics(runs)[1])
    write_run(tmp_path / "runs" / "c", routing="tread", values={"fid": 4.0}, held_out={"draws": 1})
    assert "Held-out losses are not compared: the runs differ in held_out.draws" in report(tmp_path)
    runs = read_runs(str(tmp_path / "runs" / "*"))
    curves = read_curves(runs.folder).query("metric != 'fid'")
    text = write_report(runs, curves, tmp_path / "no_fid_on_the_way", title="t")
    assert "equal FLOPs" not in text, "the held-out loss must not stand in"
    write_run(tmp_path / "runs" / "d", seed=2, values={"fid": 4.0}, protocol={"reference": "other"})
    with pytest.raises(ValueError, match="reference"):
        report(tmp_path)


def test_failed_unfinished_and_repeated_runs_are_noted(tmp_path):
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b", routing="tread", ended=False)
    write_run(tmp_path / "runs" / "twin")
    text = report(tmp_path, failed={"c": "exit status 1"})
    assert "1 setting of 1 backbone, 1 run, on digits" in text
    assert "twin has the settings and seed of another run" in text
    assert "c failed: exit status 1" in text
    assert "b is at step 100, not scored" in text
    with pytest.raises(ValueError, match="No run has been scored"):
        write_report(read_runs(tmp_path / "runs" / "b"), read_curves(tmp_path / "runs" / "b"),
                     tmp_path, title="t")  # fmt: skip


@pytest.mark.slow
def test_pages_hold_no_paths_of_the_machine(tmp_path):
    for name, path in (("a", "one/photos"), ("b", "two/photos"), ("twin", "one/photos")):
        data = {"name": "npz", "path": f"{tmp_path}/{path}.npz"}
        protocol = {"reference": f"{tmp_path}/reference.npz", "data": "photos"}
        write_run(tmp_path / "runs" / name, data=data, protocol=protocol)
    write_run(tmp_path / "runs" / "c", ended=False, data=data)
    failed = {"d": f"[Errno 2] No such file or directory: '{tmp_path}/My Photos/x.npz'"}
    command = (
        f"tread-zoo compare 'compare.runs=[{tmp_path}/runs/a,{tmp_path}/runs/b]' https://x.org/y"
    )
    text = report(tmp_path, failed=failed, command=command)
    page = (tmp_path / "out" / "index.html").read_text()
    for written in (text, page):
        assert str(tmp_path) not in written
        assert str(tmp_path.parent) not in written
        assert "compare.runs=[a,b]" in written
        assert "https://x.org/y" in written
        assert "twin has the settings" in written
    assert "reference.npz" in page
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| dit_tiny")]
    assert len(rows) == len(set(rows)) == 2, rows
    assert all("photos.npz" in row for row in rows)


@pytest.mark.slow
def test_names_are_text_in_markdown_too(tmp_path):
    names = ["a|b", "<img src=x>", "`code`", "*bold*", "__init__", "a[b](c)", "two\nlines", "&lt;"]
    for name in names:
        write_run(tmp_path / "runs" / name.replace("/", ""), data={"name": "npz", "path": name})
    failed = {name: name for name in names}
    text = report(tmp_path, failed=failed, command='x="```\n# title"')
    rows = [line for line in text.splitlines() if line.startswith("| dit_tiny")]
    assert len(rows) == len(names)
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    shown = markdown.markdown(text, extensions=["tables", "fenced_code"])
    for name in names:
        assert html.escape(name.replace("\n", "\\n"), quote=False) in shown, name
    for tag in ("<img src=x", "<em>", "<strong>", "<a ", "<h1>title"):
        assert tag not in shown
    assert shown.count("<code") == 1


NASTY = ["a$b$_{ a$_{$", '"><img src=x onerror=alert(1)>', "$\x01"]


@pytest.mark.slow
def test_any_name_can_be_drawn_and_shown(tmp_path):
    """Names with mathtext, HTML, or characters that XML forbids are shown as they are."""
    for number, name in enumerate(NASTY):
        for routing in ("none", "tread"):
            write_run(
                tmp_path / "runs" / f"{routing}{number}", routing=routing, values={"fid": 0.1},
                data={"name": "npz", "path": name},
            )  # fmt: skip
    failed = {name: name for name in NASTY}
    report(tmp_path, drawn=True, failed=failed, command=" ".join(NASTY))
    for file in (tmp_path / "out" / "figures").iterdir():
        texts = "".join(ElementTree.parse(file).getroot().itertext())
        if file.stem == "quality":
            assert all(name.replace("\x01", "\\x01") in texts for name in NASTY)
    page = _Tags((tmp_path / "out" / "index.html").read_text(encoding="utf-8"))
    assert "onerror" not in page.attributes
    assert page.texts.count('"><img src=x onerror=alert(1)>') > 5


class _Tags(HTMLParser):
    """What a browser makes of a page: the names of all attributes, and the text."""

    def __init__(self, text):
        super().__init__()
        self.attributes, self.texts = set(), ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, text):
        self.texts += text


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    write_pair(folder, [0.400, 0.402], [0.401, 0.4035])
    write_pair(folder, [0.300, 0.302], [0.350, 0.352], backbone="mamba_tiny")
    shutil.copy(
        folder / "runs/dit_tiny_none_0/samples/step_00000100.png",
        folder / "runs/dit_tiny_none_0/samples/real.png",
    )
    report(folder, drawn=True, command="python scripts/compare.py 'a<b'")
    return folder / "out" / "index.html"


@pytest.mark.slow
def test_the_page_needs_no_other_file_and_begins_with_the_answer(page):
    text = page.read_text()
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", text)
    assert "python scripts/compare.py &#39;a&lt;b&#39;" in text
    places = [text.index(mark) for mark in ("<table", "over training</h2>", "One class a column")]
    assert places == sorted(places)
    assert "currentColor" in text
    names = {path.name for path in page.parent.iterdir()}
    assert names == {
        "index.html", "report.md", "quality.png", "results.csv", "curves.csv", "figures",
    }  # fmt: skip


@pytest.mark.slow
def test_settings_of_one_cost_are_ranked_in_a_figure(tmp_path):
    for backbone, level in (("dit_tiny", 2.0), ("mamba_tiny", 1.0), ("rwkv_tiny", 3.0)):
        for seed in range(2):
            write_run(tmp_path / "runs" / f"{backbone}_{seed}", backbone=backbone, seed=seed,
                      values={"fid": level + 0.1 * seed})  # fmt: skip
    report(tmp_path, drawn=True)
    root = ElementTree.parse(tmp_path / "out" / "figures" / "ranking.svg").getroot()
    names = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    ranked = ["mamba_tiny dense", "dit_tiny dense", "rwkv_tiny dense"]
    assert [name for name in reversed(names) if name in ranked] == ranked, "from the bottom up"


def test_figures_are_files_too_and_their_parts_can_be_hidden(page):
    text, files = page.read_text(), page.parent / "figures"
    names = {path.stem for path in files.iterdir()}
    assert names >= {"quality", "curve_fid", "difference_dit_tiny", "difference_mamba_tiny"}
    for file in files.iterdir():
        assert ElementTree.parse(file).getroot().tag.endswith("svg")
    for number in re.findall(r'data-hide="(s\d)"', text):
        assert f'<g class="{number}">' in text
    assert "dit_tiny dense: Fréchet distance 0.401 [" in text, "the numbers of what is pointed at"


def test_the_settings_of_any_two_runs_can_be_compared(page):
    (embedded,) = re.findall(r'id="configs">(.*?)</script>', page.read_text())
    configs = json.loads(embedded)
    assert {"seed", "backbone.name", "routing.name"} <= configs["values"].keys()
    assert "objective.name" not in configs["values"], "all have the same"
    dense, routed = map(configs["runs"].index, ("dit_tiny_none_0", "dit_tiny_tread_0"))
    assert configs["values"]["seed"][dense] == configs["values"]["seed"][routed]
    assert configs["values"]["routing.name"][routed] == '"tread"'


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_a_browser(page, tmp_path, width):
    probe = """<script>addEventListener("load", () => {
      const box = element => element.getBoundingClientRect();
      document.title = [innerWidth, document.documentElement.scrollWidth,
        Math.round(box(document.querySelector(".overview tbody")).bottom),
        [...document.querySelectorAll("svg, img, li")].filter(
          element => box(element).right > innerWidth).length,
        [...document.images].filter(image => !image.naturalWidth).length].join(" ");
    })</script>"""
    # a frame of this width: a window of a browser has a least width of its own
    (tmp_path / "page.html").write_text(page.read_text() + probe)
    frame = (
        f'<iframe src="page.html" style="width:{width}px;height:800px;border:0"></iframe><script>'
        'addEventListener("load", () => document.title ='
        "document.querySelector('iframe').contentDocument.title)</script>"
    )
    (tmp_path / "frame.html").write_text(frame)
    done = subprocess.run(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom",
         "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}",
         (tmp_path / "frame.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    title = re.search("<title>(.*?)</title>", done.stdout)
    assert title, html.unescape(done.stdout)[:500]
    inner, scroll, first_row_ends, too_wide, broken = map(int, title.group(1).split())
    assert inner == width
    assert scroll <= width, "it scrolls sideways"
    assert first_row_ends <= 800, "the answer is not on the first screen"
    assert (too_wide, broken) == (0, 0)


def test_what_blocks_are_worth_has_a_strip_for_each_setting(tmp_path):
    for routing in ("none", "tread"):
        for seed, first in enumerate((0.7, 0.8)):
            place = tmp_path / "runs" / f"{routing}_{seed}"
            write_run(place, routing=routing, seed=seed, worth=[first, 0.01, 0.02, 0.4])
    text = report(tmp_path)
    assert "| dit_tiny dense | [1, 3) 0.4 | 0.75 0.01 0.02 0.40 |" in text
    assert "| dit_tiny tread | [1, 3) 0.4 | 0.75 (0.01) (0.02) 0.40 |" in text
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count('class="routed"') == 2
    curves = read_curves(str(tmp_path / "runs" / "*"))
    assert {"contribution_0", "contribution_1_3"} <= set(curves.metric)
    assert len(curves[curves.metric == "contribution_0"]) == 4 * 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budgets", "steps", "equal"), [(1, (100, 100, 100), STEPS), (2, (140, 200, 280), FLOPS)]
)
def test_a_routed_setting_is_compared_with_the_blocks_outside_its_route_alone(
    tmp_path, budgets, steps, equal
):
    """At equal FLOPs, too, where numbers of steps and of warm-up steps differ."""
    for (name, routing, depth, final, flops), n in zip(
        (("dense", "none", 12, 0.40, 1000), ("routed", "tread", 12, 0.44, 700),
         ("shallow", "none", 6, 0.43, 500)), steps, strict=True,
    ):  # fmt: skip
        for seed, budget in itertools.product(range(3), range(1, budgets + 1)):
            write_run(
                tmp_path / "runs" / f"{name}_{seed}_{budget}", routing=routing, seed=seed,
                final=final / budget + seed / 1000, backbone={"name": "dit_tiny", "depth": depth},
                steps=n * budget, flops=flops,
            )  # fmt: skip
    rows = overview(report(tmp_path))
    name = "dit_tiny" if budgets == 1 else "tread, num_flops 8.96e+06"
    assert rows[name, "routed"][equal] == "+0.04 [+0.04, +0.04] behind"
    assert rows[name, "routed − depth 6"][equal] == "+0.01 [+0.01, +0.01] behind"
    assert (name, "depth 6") in rows
