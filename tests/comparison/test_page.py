"""The page shows all that was measured, needs nothing beside itself, and claims what follows."""

import base64
import dataclasses
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.comparison.test_table import cell, with_values
from tread_zoo.comparison import group_runs, write_page
from tread_zoo.comparison.curves import value_at_flops
from tread_zoo.comparison.markdown import QUALITY
from tread_zoo.comparison.words import read_out
from tread_zoo.evaluation.pictures import save_grid

STEPS = 10


def run(loss, *, flops=4, curve=(), phases=None, picture=""):
    return dataclasses.replace(
        with_values((loss, loss), held_out_loss=loss),
        flops=flops, flops_dense=4, num_steps=STEPS, images=100, curve=curve,
        phases=phases or {}, picture=picture,
    )  # fmt: skip


CURVE = ((2, 0.8), (6, 0.6), (10, 0.4))
RUNS = {
    ("none", 0): run(0.40, curve=CURVE, phases={"training": 9.0, "data": 1.0}),
    ("none", 1): run(0.42, curve=CURVE),
    ("tread", 0): run(0.43, flops=3, curve=((5, 0.7), (10, 0.5)), phases={"training": 1.0,
                                                                         "data": 1.0}),
    ("tread", 1): run(0.44, flops=3, curve=((5, 0.7), (10, 0.52))),
    ("own", 0): run(0.39, flops=3),
    ("own", 1): run(0.43, flops=3),
}  # fmt: skip


def groups_of(runs):
    return group_runs([cell(*key) for key in runs], list(runs.values()))


def test_sentences_follow_from_the_numbers():
    tread, own, *bound = read_out(groups_of(RUNS))
    assert tread.startswith(
        "tread: held-out loss 0.4350 (0.4300 … 0.4400) against 0.4100 (0.4000 … 0.4200) dense, "
        "higher with every seed, for 0.75 of its training FLOPs."
    )
    # 100 * 3 FLOPs are 7.5 steps of the dense run: 0.6 - 0.2 * 1.5 / 4
    assert "its loss was 0.5250, against 0.5100 by the same single draw, lower with every seed" in (
        tread
    )
    assert "which the seeds do not settle, for 0.75" in own
    assert "as many FLOPs" not in own, "it logged nothing on its way"
    assert bound == [
        "none: bound by the network's own steps (training 90 %, data 10 % of 10 s).",
        "tread: bound by the network's own steps, then by data (training 50 %, data 50 % of 2 s).",
    ]


def test_runs_at_equal_flops_differ_by_rounding_and_a_tie_is_one():
    runs = {("none", 0): run(0.4, curve=CURVE), ("tread", 0): run(0.4, flops=3.9993, curve=CURVE)}
    (line,) = read_out(groups_of(runs))
    assert "the same with the only seed" in line
    assert "had not come to its end" not in line


def test_what_bound_a_run_is_not_told_by_a_part_of_it():
    whole = run(0.4, phases={"training": 9.0, "data": 1.0})
    part = dataclasses.replace(run(0.4, phases={"data": 5.0}), phases_since=8)
    found = read_out(groups_of({("none", 0): whole, ("none", 1): part}))
    assert found[0] == "none: bound by the network's own steps (training 90 %, data 10 % of 10 s)."
    assert found[1].startswith("none: of 1 run(s) it is not known")
    assert "after 8 alone" in found[1]
    assert len(found) == 2


def test_the_loss_at_a_cost_is_read_between_the_logged_steps():
    dense = run(0.4, curve=CURVE)
    warm = dataclasses.replace(dense, stages=((5, 6), (10, 2)))  # 10 images a step
    assert [warm.flops_by(step) for step in (0, 4, 5, 6, 10)] == [0, 240, 300, 320, 400]
    # From step 2 to 6, 120 to 320 FLOPs.
    assert value_at_flops(warm, CURVE, 220) == pytest.approx(0.7)
    assert value_at_flops(dense, CURVE, 400 * 0.4) == pytest.approx(0.7)
    assert math.isnan(value_at_flops(dense, CURVE, 400 * 0.1)), "before the first"
    assert math.isnan(value_at_flops(dense, CURVE, 400 * 1.1)), "after the last"


class Images(HTMLParser):
    """Collects the pictures, and what a page would load from elsewhere."""

    def __init__(self):
        super().__init__()
        self.pictures, self.outside = {}, []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        source = given.get("src") or (given.get("href") if tag == "link" else None)
        if source and not source.startswith("data:"):
            self.outside.append(source)
        if tag == "img":
            self.pictures[given["alt"]] = base64.b64decode(source.partition(",")[2])


def make_page(folder):
    import torch

    picture = folder / "samples.png"
    save_grid(torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8), picture)
    shown = dataclasses.replace(RUNS[("none", 0)], picture=str(picture))
    runs = {**RUNS, ("none", 0): shown}
    keys = [cell(*key) for key in runs]
    return write_page(keys, list(runs.values()), folder, title="A <b>", command="do it")


def test_the_page_has_every_plot_and_stands_alone(tmp_path):
    parser = Images()
    text = make_page(tmp_path).read_text()
    parser.feed(text)
    assert not parser.outside
    titles = {
        "Held-out loss against steps, FLOPs and seconds", "Agreement, %", "Fréchet distance",
        "Held-out loss", "none",
    }  # fmt: skip
    assert set(parser.pictures) == titles
    assert all(data.startswith(b"\x89PNG") for data in parser.pictures.values())
    assert len(list((tmp_path / "plots").glob("*.png"))) == len(titles) - 1
    assert "A &lt;b&gt;" in text
    assert "<td>0.4350 (0.4300 … 0.4400)</td>" in text
    assert "-0.0100, +0.0100" in text, "own against dense, by seed"


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
with_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="needs chromium, to open the page as a reader would"
)
PROBE = """<script>
  window.addEventListener("load", () => {
    document.querySelector("th").click();
    const shown = [...document.images].filter(i => i.complete && i.naturalWidth > 0);
    const first = document.querySelector("tbody tr td").textContent;
    const plots = shown.filter(i => i.closest(".plots")).length;
    document.title = JSON.stringify(
      {shown: shown.length, all: document.images.length, plots, first});
  });
</script></body>"""


def open_in_browser(text, folder):
    """Return what a browser shows of a page, and what it says of it."""
    page = folder / "opened.html"
    page.write_text(text.replace("</body>", PROBE))
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return json.loads(re.search(r"<title>(.*?)</title>", done.stdout).group(1)), done.stderr


@pytest.mark.slow
@with_browser
def test_a_browser_shows_every_plot_without_an_error(tmp_path):
    found, said = open_in_browser(make_page(tmp_path).read_text(), tmp_path)
    assert found == {"shown": 5, "all": 5, "plots": 4, "first": "held-out real images"}
    assert "CONSOLE" not in said


COMMITTED = Path(__file__).parents[2] / "docs" / "comparison"
PAGES = sorted(COMMITTED.glob("**/index.html"))


@with_browser
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_browser_shows_every_plot_of_a_committed_page(page, tmp_path):
    """Those of all scores that its runs have, and of what they measured on their way."""
    runs = json.loads((page.parent / "results.json").read_text())
    ended = {name for run in runs if not run["failed"] for name in run["values"]}
    on_the_way = {name for run in runs for name, curve in run["scores"].items() if len(curve) > 1}
    found, said = open_in_browser(page.read_text(), tmp_path)
    assert found["plots"] == len(ended & QUALITY.keys()) + len(on_the_way & QUALITY.keys())
    assert found["shown"] == found["all"] > found["plots"] > 0
    assert "CONSOLE" not in said


def test_the_committed_pages_are_small():
    assert PAGES, "there is one"
    files = [path for path in COMMITTED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3e6
