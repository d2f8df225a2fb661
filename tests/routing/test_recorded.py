"""Six steps of training compute what they computed at commit 2eb6674, where routing was one
configuration of twenty options; there, on one machine, weights agreed to the bit."""

import json
from pathlib import Path

import pytest

from tread_zoo import train

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text())
CASES = [(method, row) for method, case in RECORDED.items() for row in case["rows"]]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "row"), CASES)
def test_a_method_trains_as_recorded(method, row, tmp_path):
    case = RECORDED[method]
    expected = case["rows"][row]
    train(
        backbone=row, routing=case["routing"], run_dir=str(tmp_path / "run"), device="cpu",
        training={"num_steps": 6, "batch_size": 8, "sample_every": 0, "checkpoint_every": 0,
                  "precision": "fp32"},
        sampler={"num_steps": 3}, evaluation={"num_images": 4, "metrics": []},
    )  # fmt: skip
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    values = {name: value for line in lines for name, value in json.loads(line).items()}
    for name in ("loss", "held_out_loss"):
        assert values[name] == pytest.approx(expected[name], rel=1e-5), name
    facts = json.loads((tmp_path / "run/facts.json").read_text())
    # a selector that ranks tokens did so in a pass of its own
    if method != "norm":
        assert facts["flops_routed"] == expected["flops"]
