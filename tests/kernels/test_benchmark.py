"""The benchmark measures what it says; the loops it compares with are right themselves."""

import math

import pytest
import torch

from tests.scripts.test_command_line import call
from tread_zoo.kernels import benchmark, dispatch, get_forms
from tread_zoo.kernels.benchmark import LOOP, Row, list_runs, make_case, measure, slopes
from tread_zoo.kernels.verify import cast, compare

CPU = torch.device("cpu")


@pytest.mark.parametrize("rate", [0.0, 0.25])
@pytest.mark.parametrize("op", get_forms())
def test_the_baseline_equals_the_formula(op, rate):
    case = make_case(op, 20, batch=2, width=64, rate=rate)
    args = cast(case.args, torch.float64)
    baseline = next(iter(list_runs(op, None).values()))
    assert max(compare(baseline, dispatch.get_form(op, "naive").run, args)) < 1e-12
    assert case.tokens == (15 if rate else 20)


@pytest.mark.parametrize("op", get_forms())
def test_every_form_is_measured_or_says_why_not(op):
    rows = measure(make_case(op, 12, batch=2, width=64, rate=0.5), device=CPU, rounds=1)
    assert [row.form for row in rows] == list(list_runs(op, None))
    assert rows[0].speedup == 1.0
    for row in rows:
        if row.skipped:
            assert row.skipped == "no CUDA device"
            continue
        assert 0 < row.forward_ms < row.total_ms
        assert row.saved_mib > 0
        assert row.error < 2e-5
        assert row.gradient_error < 1e-5
    assert {"torch", "naive"} <= {row.form for row in rows if not row.skipped}


def test_a_wrong_form_shows_its_error(monkeypatch):
    right = dispatch.get_form("attention", "torch").run
    forms = (dispatch.Form("torch", lambda *a: right(*a) + 0.5), *dispatch._FORMS["attention"][2:])
    monkeypatch.setitem(dispatch._FORMS, "attention", forms)
    case = make_case("attention", 8, batch=2, width=64)
    (row,) = [r for r in measure(case, device=CPU, rounds=1) if r.form == "torch"]
    assert row.error == pytest.approx(0.5)


def test_what_would_hold_all_pairs_is_left_out(monkeypatch):
    monkeypatch.setattr(benchmark, "LARGEST_PAIRS", 2 * 3 * 9**2 * 4)
    for length, words in ((9, ""), (10, "holds all pairs of tokens: too large")):
        case = make_case("attention", length, batch=2, width=192)
        rows = measure(case, device=CPU, forms=["naive"], rounds=1)
        assert [row.skipped for row in rows] == [words]


def test_the_slope_of_linear_time_is_one():
    lengths = (64, 256, 1024)
    rows = [Row("op", "form", n, n, 1, "float32", 0.0, 0.01 * n) for n in lengths]
    rows.append(Row("op", "form", 64, 32, 1, "float32", 0.0, 99.0))
    rows.append(Row("op", "other", 64, 64, 1, "float32", 0.0, 1.0))
    assert slopes(rows) == {("op", "form", 1): pytest.approx(1.0)}
    assert math.isnan(rows[0].speedup)


def test_unknown_forms_are_told():
    with pytest.raises(ValueError, match=f"forms=loop is unknown.*{LOOP}"):
        list_runs("selective_scan", ["loop"])


@pytest.mark.slow
def test_the_script_writes_table_plot_and_numbers(tmp_path):
    small = ("lengths=[8,16]", "width=64", "batch=1", "rounds=1", "ops=[selective_scan]", "out=b")
    said = call("benchmark_kernels.py", *small, cwd=tmp_path)
    assert {path.name for path in (tmp_path / "b").iterdir()} == {
        "report.md", "results.csv", "time.png",
    }  # fmt: skip
    text = (tmp_path / "b" / "report.md").read_text()
    assert "| `selective_scan` | torch | 8 of 16 |" in text
    assert "python scripts/benchmark_kernels.py" in text
    assert "selective_scan`, torch, " in said
    said = call("benchmark_kernels.py", "ops=[selectiv_scan]", cwd=tmp_path, expect=1)
    assert "selective_scan" in said
