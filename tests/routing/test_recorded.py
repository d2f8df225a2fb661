"""Six steps of training compute what they computed at commit 2eb6674, where routing was one
configuration of twenty options; there, on one machine, weights agreed to the bit. The losses of
`norm` are those of the commit before tread lost its option of one choice for the whole batch."""

import json
from pathlib import Path

import pytest
import torch

from tread_zoo.config import make_config
from tread_zoo.evaluation.flops import mean_flops
from tread_zoo.training.loop import optimize
from tread_zoo.training.meters import Window
from tread_zoo.training.setup import build_setup, make_accelerator, to_devices
from tread_zoo.training.step import step_flops

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text())
CASES = [
    pytest.param(method, row, marks=pytest.mark.slow if row == "dit" else pytest.mark.nightly)
    for method, case in RECORDED.items()
    for row in case["rows"]
]


@pytest.mark.parametrize(("method", "row"), CASES)
def test_a_method_trains_as_recorded(method, row):
    case = RECORDED[method]
    expected = case["rows"][row]
    training = {"num_steps": 6, "batch_size": 8, "precision": "fp32"}
    config = make_config(backbone=row, routing=case["routing"], training=training, device="cpu")
    setup = build_setup(config)
    state = to_devices(setup, make_accelerator(setup, torch.device("cpu"), "fp32"), None)
    batches, window = setup.batches(), Window(state)
    for state.step in range(6):
        optimize(state, batches, window)
    loss = float(window.step_losses().mean())
    assert loss == pytest.approx(expected["loss"], rel=1e-5)
    if method != "norm":  # which ranked tokens in a pass of its own
        assert mean_flops(step_flops(setup, setup.backbone)) == expected["flops"]
