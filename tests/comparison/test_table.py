"""The table shows means and ranges of what the runs wrote, and refuses to mix protocols."""

import csv
import dataclasses
import json
import math
from pathlib import Path

import pytest

from tread_zoo.comparison import Cell, RunResult, write_report
from tread_zoo.comparison.markdown import describe_notes

RESULT = RunResult(
    values={"agreement": 0.9, "fid": 1.0, "held_out_loss": 0.4},
    real={"agreement": 0.986, "fid": 0.39},
    parameters=1_000_000,
    flops=3_000_000,
    flops_dense=4_000_000,
    seconds=100.0,
    images_per_s=500.0,
    protocol={"data": "digits", "extractor": "e", "num_generated": 500, "num_reference": 9,
              "reference": "train", "sampling": {"sampler": "euler"}, "weights": "ema", "step": 8},
    machine={"device": "CPU, 1 thread"},
)  # fmt: skip


def cell(routing, seed):
    return Cell({"routing": routing, "seed": str(seed)}, (), Path(f"{routing}{seed}"))


def report(tmp_path, **values):
    """Write the report of results by (routing, seed) and return it."""
    cells = [cell(*key) for key in values["results"]]
    results = list(values["results"].values())
    return write_report(cells, results, tmp_path, title="Title", command="do it")


def with_values(by_level=(), **values):
    return dataclasses.replace(RESULT, values={**RESULT.values, **values}, by_level=by_level)


def test_mean_and_range_over_seeds(tmp_path):
    text = report(
        tmp_path,
        results={
            ("none", 0): with_values(held_out_loss=0.40, by_level=(0.1, 0.7)),
            ("none", 1): with_values(held_out_loss=0.42, by_level=(0.1, 0.7)),
            ("tread", 0): with_values((0.2, 0.6), agreement=0.8, held_out_loss=0.43),
            ("tread", 1): with_values((0.4, 0.4), agreement=1.0, held_out_loss=0.41),
        },
    )
    rows = {line.split(" | ")[0].strip("| `"): line for line in text.splitlines() if "|" in line}
    assert "0.4100 (0.4000 … 0.4200)" in text
    assert "90.0 (80.0 … 100.0)" in text
    assert rows["held-out real images"].startswith("| held-out real images | 98.6 | 0.39 |")
    assert "`tread` | +0.0300, -0.0100 | +0.2000, -0.2000 |" in text
    assert "| 0.75 |" in text
    assert "do it" in text
    assert "CPU, 1 thread" in text


def test_cells_of_several_grids_share_a_table_and_their_dense_runs(tmp_path):
    choices = [
        {"backbone": "dit", "routing": "none", "seed": "0"},
        {"backbone": "rwkv", "routing": "none", "seed": "0"},
        {"backbone": "rwkv", "routing.selector": "rows", "seed": "0"},
        {"backbone": "rwkv", "routing.selector": "rows", "seed": "1"},
    ]
    losses = (0.1, 0.2, 0.25, 0.9)
    text = write_report(
        [Cell(choice, (), Path(str(index))) for index, choice in enumerate(choices)],
        [with_values((loss,), held_out_loss=loss) for loss in losses],
        tmp_path, title="Title", command="do it",
    )  # fmt: skip
    assert "| backbone | routing | routing.selector | runs | agreement" in text
    assert "| `rwkv` | `none` |  | 1 | 90.0 |" in text
    assert "| `rwkv` |  | `rows` | +0.0500 | +0.0500 |" in text, "seed 1 has no dense run"


def test_all_numbers_are_written_for_other_programs(tmp_path):
    report(tmp_path, results={("none", 0): RESULT})
    with (tmp_path / "results.csv").open() as stream:
        (row,) = csv.DictReader(stream)
    assert (row["routing"], float(row["fid"]), int(row["flops"])) == ("none", 1.0, 3_000_000)
    (record,) = json.loads((tmp_path / "results.json").read_text())
    assert record["protocol"] == RESULT.protocol


@pytest.mark.parametrize("key", ["extractor", "step", "reference"])
def test_numbers_of_different_protocols_do_not_share_a_table(tmp_path, key):
    other = dataclasses.replace(RESULT, protocol={**RESULT.protocol, key: "other"})
    with pytest.raises(ValueError, match=f"scored with {key}=other"):
        report(tmp_path, results={("none", 0): RESULT, ("none", 1): other})
    assert not list(tmp_path.iterdir())


def test_another_reference_is_another_protocol_but_older_records_are_believed(tmp_path):
    def told(**fields):
        return dataclasses.replace(RESULT, protocol={**RESULT.protocol, **fields})

    new = told(reference_sha256="a", resize="none", uint8="nearest")
    report(tmp_path, results={("none", 0): RESULT, ("none", 1): RESULT})
    report(tmp_path, results={("none", 0): RESULT, ("none", 1): new})
    for changed in ({"reference_sha256": "b"}, {"resize": "bicubic"}, {"uint8": "floor"}):
        other = told(**{"reference_sha256": "a", "resize": "none", "uint8": "nearest", **changed})
        with pytest.raises(ValueError, match=f"scored with {next(iter(changed))}="):
            report(tmp_path, results={("none", 0): new, ("none", 1): other})
    with pytest.raises(ValueError, match="scored with num_generated=100"):
        report(tmp_path, results={("none", 0): RESULT, ("none", 1): told(num_generated=100)})


def test_notes_of_records_in_words():
    """A distance of fewer images than features is marked where guidances are compared, too."""
    doubt = "fid: the samples' covariance, of 2048 features, is singular."
    assert describe_notes([{}, {"notes": [doubt]}]) == f" Note: {doubt} (1 of 2 runs)"
    assert describe_notes([{"notes": [doubt, doubt]}] * 2) == f" Note: {doubt}"
    assert describe_notes([{}]) == ""


def sampled(**sampling):
    sampling = {"sampler": "euler", "num_steps": 25, "guidance": "cfg", "guidance_scale": 2.0,
                "nfe": 50, "flops_per_image": 7e6, **sampling}  # fmt: skip
    return dataclasses.replace(RESULT, protocol={**RESULT.protocol, "sampling": sampling})


def test_networks_of_different_cost_share_a_table_with_a_column_for_it(tmp_path):
    grid = {"grid": "auto", "shift": 3.0, "rho": "auto"}
    results = {("none", 0): sampled(**grid), ("tread", 0): sampled(**grid, flops_per_image=9e6)}
    text = report(tmp_path, results=results)
    assert "euler 25 steps, shift 3.0, cfg guidance 2" in text
    header, *rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    place = header.index("MFLOPs a sample")
    assert [row[place] for row in rows[1:3]] == ["7", "9"]


@pytest.mark.parametrize("changed", [{"guidance_scale": 3.0}, {"guidance": "sparse"}, {"nfe": 49}])
def test_another_guidance_is_another_protocol(tmp_path, changed):
    results = {("none", 0): sampled(), ("tread", 0): sampled(**changed)}
    with pytest.raises(ValueError, match="scored with sampling="):
        report(tmp_path, results=results)


def test_a_failed_run_is_shown_and_left_out_of_the_mean(tmp_path):
    failed = dataclasses.replace(RESULT, values={}, protocol={}, failed="loss is nan")
    text = report(tmp_path, results={("none", 0): RESULT, ("none", 1): failed})
    assert "none: seed 1 failed: loss is nan" in text
    assert "| `none` | 90.0 |" in text


def test_settings_of_fewer_runs_than_others_say_so(tmp_path):
    results = {("none", 0): RESULT, ("none", 1): RESULT, ("tread", 0): RESULT}
    text = report(tmp_path, results=results)
    assert "| routing | runs | agreement, % |" in text
    assert "| `none` | 2 | 90.0 |" in text
    assert "| `tread` | 1 | 90.0 |" in text
    assert "| held-out real images |  | 98.6 |" in text


def ran_on(speed=500.0, peak=3e9, **machine):
    machine = {"device": "CPU, 1 thread", "num_processes": 1, "precision": "fp32", "torch": "2",
               "matmul_flops_per_s": peak, **machine}  # fmt: skip
    return dataclasses.replace(RESULT, images_per_s=speed, machine=machine)


def column_of(text, title):
    header, _, *rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [row[header.index(title)] for row in rows if len(row) == len(header)]


def test_the_peak_is_the_largest_of_the_page_and_of_one_process(tmp_path):
    """3 MFLOPs * 500 images/s are 1.5 GFLOPs/s: half of 3, a quarter by each of two processes."""
    results = {
        ("none", 0): ran_on(),
        ("tread", 0): ran_on(peak=1.5e9),  # timed beside a busy neighbour
        ("own", 0): ran_on(num_processes=2),
        ("other", 0): ran_on(device="GPU", peak=6e9),
    }
    text = report(tmp_path, results=results)
    assert column_of(text, "of peak FLOPs, %")[:4] == ["50 [1]", "50 [1]", "25 [2]", "25 [3]"]
    assert "the largest matrix product that these runs timed on the same device" in text
    with (tmp_path / "results.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [float(row["of_peak_flops"]) for row in rows] == [0.5, 0.5, 0.25, 0.25]


def test_seconds_of_different_machines_are_apart(tmp_path):
    results = {
        ("none", 0): ran_on(500),
        ("none", 1): ran_on(600),
        ("none", 2): ran_on(90, torch="1"),
        ("tread", 0): ran_on(80, torch="1"),
    }
    text = report(tmp_path, results=results)
    assert column_of(text, "images/s")[:2] == ["550 (500 … 600) [1]; 90 [2]", "80 [2]"]
    assert "machines [1] 1 process(es) on CPU, 1 thread, fp32, torch 2, [2] 1 process(es)" in text
    assert "apart" in text
    del results["none", 2], results["tread", 0]
    text = report(tmp_path, results=results)
    assert column_of(text, "images/s")[0] == "550 (500 … 600)"
    assert "apart" not in text


def test_only_seeds_still_have_a_column_of_names(tmp_path):
    cells = [Cell({"seed": str(seed)}, (), Path(str(seed))) for seed in range(2)]
    text = write_report(cells, [RESULT, RESULT], tmp_path, title="Title", command="do it")
    rows = [line.count("|") for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 4
    assert len(set(rows)) == 1
    assert "| setting | agreement, % |" in text


def test_the_exports_have_all_that_was_measured_and_are_json(tmp_path):
    run = dataclasses.replace(
        ran_on(peak_memory_bytes=7), phases={"data": 1.5}, images_per_s=math.nan,
        values={"precision": 0.25},
    )  # fmt: skip
    report(tmp_path, results={("none", 0): run})
    with (tmp_path / "results.csv").open() as stream:
        (row,) = csv.DictReader(stream)
    assert (row["peak_memory_bytes"], row["seconds_data"]) == ("7", "1.5")
    assert (row["device"], row["images_per_s"]) == ("CPU, 1 thread", "")
    assert (row["precision"], row["machine_precision"]) == ("0.25", "fp32")

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    (record,) = json.loads((tmp_path / "results.json").read_text(), parse_constant=refuse)
    assert record["images_per_s"] is None


def test_that_no_run_ended_is_said(tmp_path):
    failed = dataclasses.replace(RESULT, values={}, protocol={}, machine={}, failed="loss is nan")
    text = report(tmp_path, results={("none", 0): failed})
    assert "No run ended" in text
    assert "None" not in text


def test_each_note_of_a_score_is_shown_once_with_its_runs(tmp_path):
    few = dataclasses.replace(RESULT, protocol={**RESULT.protocol, "notes": ["fid: few images."]})
    text = report(tmp_path, results={("none", 0): few, ("none", 1): RESULT, ("tread", 0): few})
    assert text.count("few images") == 1
    assert "Note: fid: few images. (In none: seed 0; tread: seed 0.)" in text
