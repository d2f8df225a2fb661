"""Every benchmark runs at a tiny size; what the forms of the kernels give is right."""

import pytest

from benchmarks.launches import PARTS, count_step
from tests.processes import ROOT, run_script
from tread_zoo.kernels import get_forms
from tread_zoo.kernels.dispatch import list_forms

SMALL = ("hidden_size=32", "num_heads=2", "depth=4", "--batch-size=2", "--rounds=1", "--device=cpu")


def run(script, *arguments, cwd):
    done = run_script(ROOT / "benchmarks" / script, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_time_and_memory_grow_with_the_tokens(tmp_path):
    small = ("--in-channels=1", "--num-classes=10", "--tokens", "16", "64")
    routing = ("--batch-size=8", "--routing", "start=1", "end=3")
    printed = run("routing.py", "dit", *SMALL, *small, *routing, cwd=tmp_path).splitlines()[-2:]
    rows = [line.strip("| ").split(" | ") for line in printed]
    assert [row[:2] for row in rows] == [["dit", "16"], ["dit", "64"]]
    kept = []
    for row in rows:
        dense_ms, routed_ms, time_ratio, flops_ratio, over, dense, routed = map(float, row[2:])
        assert min(dense_ms, routed_ms) > 0
        assert flops_ratio < 1
        assert over == pytest.approx(time_ratio / flops_ratio, rel=0.03)
        assert routed <= dense
        kept.append(dense)
    assert kept[1] > 2 * kept[0]


@pytest.mark.slow
def test_options_are_timed_beside_the_base(tmp_path):
    base = "backbone.depth=4 backbone.hidden_size=32 backbone.num_heads=2 training.batch_size=2"
    options = ("routing=none", "routing.start=1 routing.end=3 routing.selection_rate=0.75")
    printed = run("methods.py", "--base", base, "--rounds=1", *options, cwd=tmp_path)
    lines = printed.splitlines()[-3:]
    assert [line.split("  ")[0] for line in lines] == ["base", *options]
    of_base, dense, routed = (float(line.split()[-3]) for line in lines)
    assert routed < of_base < dense


@pytest.mark.slow
def test_guidances_are_timed_beside_each_other(tmp_path):
    base = "backbone.depth=4 backbone.hidden_size=32 backbone.num_heads=2 training.batch_size=2"
    options = ("guidance=cfg", "guidance={name:sparse,routing:{name:tread,start:1,end:3}}")
    base = ("--base", f"{base} sampler.num_steps=2", "--sampling", "--rounds=1")
    lines = run("methods.py", *base, *options, cwd=tmp_path).splitlines()[-3:]
    plain, guided, sparse = (float(line.split()[-3]) for line in lines)
    assert plain < sparse < guided


def test_the_loader_is_timed_beside_training(tmp_path):
    printed = run("loader.py", "dit", *SMALL, "--num-batches=2", "--workers=0", cwd=tmp_path)
    workers, speed, cpu_us, ratio = map(float, printed.splitlines()[-1].split())
    assert (workers, speed > 0, cpu_us > 0, ratio > 0) == (0, True, True, True)


@pytest.mark.nightly
def test_every_form_is_measured_and_right_or_says_why_not(tmp_path):
    small = ("--lengths", "12", "--width=64", "--batch=2", "--rounds=1", "--device=cpu")
    printed = run("operations.py", *small, cwd=tmp_path)
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line[:3] == "| `"]
    for op in get_forms():
        mine = [row for row in rows if row[0] == f"`{op}`"]
        assert [row[1:3] for row in mine if row[1] == "torch"] == [
            ["torch", "12"],
            ["torch", "6 of 12"],
        ]
        assert {row[1] for row in mine} == set(list_forms(op))
    for _, form, _, _, *cells in rows:
        if cells[0].startswith("not run"):
            assert form not in ("torch", "naive")
            continue
        forward, both, *_, error, gradient_error = cells
        assert 0 < float(forward) < float(both)
        assert float(error) < 2e-5
        assert float(gradient_error) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backbone", "optimizer", "budget"),
    [
        ("dit_tiny", "adamw", 470),
        ("dit_tiny", "muon", 700),
        ("mamba_tiny", "adamw", 770),
        ("rwkv7_tiny", "adamw", 2080),
    ],
)
def test_a_step_keeps_to_its_launches(backbone, optimizer, budget):
    """What takes more needs a reason, and a new budget here."""
    overrides = ["training.precision=fp32", "backbone.depth=4", f"optimizer={optimizer}"]
    launches = count_step([f"backbone={backbone}", *overrides]).by_part()
    assert all(launches[part] > 0 for part in PARTS)
    assert budget / 2 < launches["all"] <= budget, launches


def test_saving_is_timed_both_ways(tmp_path):
    (line,) = run("saving.py", "dit", *SMALL, cwd=tmp_path).splitlines()[-1:]
    ours, copied, written = (float(line.split(word)[1].split()[0]) for word in
                             ("ours ", "copied ", "written "))  # fmt: skip
    assert ours > 0
    assert copied <= written
    assert not [*tmp_path.iterdir()]
