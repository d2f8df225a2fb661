"""Compiled blocks compute what they did, and are compiled once for all steps of a run."""

from copy import deepcopy

import pytest
import torch
from torch._dynamo.utils import counters

from tests.small_run import parts_of, settings
from tests.training.test_distributed import EVERY_ARCHITECTURE
from tread_zoo.training import compiling, train
from tread_zoo.training.compiling import compile_blocks
from tread_zoo.training.loop import losses_of
from tread_zoo.training.parts import draw_step

RATES = [0.5, 0.0, 0.25, 0.6]  # of 16 tokens 8, 16, 12 and 7 stay


@pytest.fixture
def capture(monkeypatch):
    """Return a function that sets the backend; what was compiled before is forgotten."""

    def choose(backend):
        monkeypatch.setattr(compiling, "BACKEND", backend)
        torch.compiler.reset()
        counters.clear()

    yield choose
    torch.compiler.reset()


def step(parts, other=None):
    """Return loss and gradients of the first step; with the routes of another run's parts."""
    images, labels = next(parts.batches(0, 1, 0))
    drawn = draw_step(
        other or parts, images, labels, rank=0, micro_step=0, device=torch.device("cpu")
    )
    parts.backbone.zero_grad()
    loss = losses_of(parts.backbone, parts, drawn).mean()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in parts.backbone.parameters()]


def lively(*options):
    """Return the parts of a run in which every parameter has a gradient."""
    parts = parts_of(settings(*options))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in parts.backbone.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return parts


def assert_equals_eager(options):
    parts = lively(*options)
    names = list(parts.backbone.state_dict())
    loss, gradients = step(parts)
    compile_blocks(parts.backbone)
    again, others = step(parts)
    assert counters["stats"]["unique_graphs"] > 0
    assert sum(counters["graph_break"].values()) == 0
    torch.testing.assert_close(again, loss, atol=1e-4, rtol=0)
    torch.testing.assert_close(others, gradients, atol=1e-4, rtol=1e-4)
    assert list(parts.backbone.state_dict()) == names
    assert all(block._compiled_call_impl is None for block in deepcopy(parts.backbone).blocks)


def assert_compiles_once(options):
    """Dense steps and any number of kept tokens share what the first few steps compiled."""
    parts = lively(*options)
    others = [parts_of(settings(*options, f"routing.selection_rate={rate}")) for rate in RATES]
    compile_blocks(parts.backbone)
    graphs = []
    for other in others + others[:2]:
        step(parts, other)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[1:] == [graphs[1]] * (len(graphs) - 1), "a step compiled anew"
    assert graphs[-1] <= parts.backbone.num_blocks * len(RATES)


@pytest.mark.parametrize("recompute", ["false", "2"])
def test_compiled_blocks_equal_eager_ones(capture, recompute):
    capture("aot_eager")
    assert_equals_eager(["backbone=dit", f"training.activation_checkpointing={recompute}"])


def test_no_step_compiles_anew(capture):
    capture("eager")
    assert_compiles_once(["backbone=dit"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["uvit", "mamba", "rwkv"])
def test_every_architecture_compiles_once(capture, name):
    options = [option for option in EVERY_ARCHITECTURE[name] if option.startswith("backbone")]
    capture("eager")
    assert_compiles_once(options)


@pytest.mark.slow
def test_generated_code_equals_eager(capture):
    capture("inductor")
    assert_equals_eager(["backbone.depth=2", "routing=none"])


def test_a_missing_compiler_is_told_before_any_work(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"training.compile=true needs a C\+\+ compiler"):
        train(**settings("training.compile=true", f"run_dir={tmp_path / 'run'}"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("every", "twice"), [("false", set()), ("true", {0, 1, 2, 3}), ("3", {0, 3})]
)
def test_every_nth_block_is_computed_again(every, twice):
    parts = lively(f"training.activation_checkpointing={every}")
    ran, run_block = [], parts.backbone.run_block

    def counted(index, *rest):
        ran.append(index)
        return run_block(index, *rest)

    parts.backbone.run_block = counted
    step(parts)
    assert {index for index in ran if ran.count(index) == 2} == twice
    assert set(ran) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "wrong", ["compile=inductor", "activation_checkpointing=-1", "activation_checkpointing=half"]
)
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=rf"training.{wrong.partition('=')[0]}="):
        parts_of(settings(f"training.{wrong}"))
