"""A training step that no GPU waits for, traced without one.

The device `meta` stands in for the GPU. Its tensors have no values, so reading a number, a truth
value or a length from them raises an error. Copies from the host are refused by these tests.
"""

from dataclasses import dataclass

import pytest
import torch
from accelerate.state import PartialState
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.data.tables import write_features
from tests.small_run import parts_of, settings
from tread_zoo import create_backbone
from tread_zoo.registry import available, create, register
from tread_zoo.runtime import set_float32_products
from tread_zoo.training.ema import WeightAverage, exponential_decay
from tread_zoo.training.loop import optimize
from tread_zoo.training.meters import Window
from tread_zoo.training.setup import make_accelerator, to_devices

pytestmark = pytest.mark.slow

META = torch.device("meta")
SIZES = {
    "mamba2_tiny": ["backbone.head_size=16"],
    "rwkv7_tiny": ["backbone.head_size=16"],
    "rwkv_tiny": ["backbone.depth=5"],
}


# It has no rule for tensors without values, for it returns nothing.
library = torch.library.Library("aten", "IMPL")
library.impl("_fused_sgd_", lambda *args, **kwargs: None, "Meta")


class NoTensors(TorchFunctionMode):
    """Refuses to make tensors on the device of the host's numbers."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and out.is_meta:
            raise AssertionError("numbers of the host are copied to the device")
        return out


class NoCopies(TorchDispatchMode):
    """Refuses copies of host tensors to the device. A single number may accompany an operation."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        on_host = [x for x in given if x.device.type == "cpu"]
        copied = on_host and any(x.is_meta for x in [*given, *made])
        name = func.overloadpacket.__name__
        if copied and (name in ("_to_copy", "copy_") or any(x.ndim for x in on_host)):
            raise AssertionError(f"{func} copies {[list(x.shape) for x in on_host]} to the device")
        return out


class Skipping(torch.optim.Optimizer):
    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter -= 0.1 * torch.where(self.found_inf > 0, 0, parameter.grad)


@register("optimizer", "sgd_that_skips_for_tests")
@dataclass(frozen=True)
class SGDThatSkips:
    """Stands in for fused optimizers, which `meta` does not have; these are traced below."""

    def build(self, backbone):
        return Skipping(backbone.parameters(), {"lr": 0.1})


def trace(monkeypatch, *overrides):
    """Do one optimizer step, which may copy tables that later steps share, and a second step,
    which may copy nothing."""
    setup = parts_of(settings("optimizer=sgd_that_skips_for_tests", *overrides))
    accelerator = make_accelerator(setup, torch.device("cpu"), "fp32")
    for shared in (accelerator.state, PartialState()):
        monkeypatch.setattr(shared, "device", META)
    state = to_devices(setup, accelerator, None)
    batches = (tuple(tensor.to(META) for tensor in batch) for batch in [*setup.batches()][:4])
    batches, window = iter(list(batches)), Window(state)

    def step():
        skipped = optimize(state, batches, window)
        state.step += 1
        for average in state.averages.values():
            average.update(setup.backbone, state.step, skipped)

    step()
    with NoTensors(), NoCopies():
        step()
    assert next(setup.backbone.parameters()).is_meta


FEW = ("dit_tiny", "mamba_tiny", "rwkv7_tiny")  # whose dense steps stand for those of the others


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backbone", "routing"),
    [
        pytest.param(b, r, marks=() if r == "tread" or b in FEW else pytest.mark.nightly)
        for b in available("backbone", "*_tiny")
        for r in ("none", "tread")
    ],
)
def test_a_step_neither_reads_from_the_device_nor_copies_to_it(monkeypatch, backbone, routing):
    sizes = [f"backbone={backbone}", *SIZES.get(backbone, [])]
    trace(monkeypatch, *sizes, f"routing={routing}", "training.horizontal_flip=true")


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["routing=sprint", "routing.selector=norm", "routing.path_drop=0.5"],
        ["routing=maskdit", "objective=edm"],
        ["routing.selector=blocks", "objective=ddpm"],
        ["backbone=zigma", "routing.selector=segments", "backbone.gaps=decay"],
        ["routing=microdit"],
        ["training.activation_checkpointing=true"],
        ["data=table", "alignment=repa", "alignment.hidden_size=16"],
    ],
    ids=["norm", "mask", "blocks", "gaps", "split", "recomputed", "aligned"],
)
def test_nor_does_one_of_any_kind(monkeypatch, tmp_path, overrides):
    more = ["training.gradient_accumulation_steps=2", "training.ema_snapshots_every=2"]
    if "data=table" in overrides:
        more += [f"data.path={write_features(tmp_path / 'table')}", "training.horizontal_flip=true"]
    trace(monkeypatch, *more, *overrides)


@pytest.mark.parametrize(
    "copy_or_read",
    [
        float,
        torch.Tensor.tolist,
        lambda x: torch.ones(2).to(META),
        lambda x: torch.tensor([1.0, 2.0], device=META),
        lambda x: x.copy_(torch.ones(())),
        lambda x: x.view(1)[torch.tensor([0, 0])],
    ],
)
def test_a_read_or_a_copy_is_noticed(copy_or_read):
    with (
        NoTensors(),
        NoCopies(),
        pytest.raises((AssertionError, RuntimeError, NotImplementedError)),
    ):
        copy_or_read(torch.ones((), device=META))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_optimizer_learns_on_the_device_whether_to_step(name):
    sizes = {"input_size": 4, "in_channels": 1, "num_classes": 3, "depth": 3}
    average = WeightAverage(create_backbone("dit_tiny", **sizes), exponential_decay(0.9))
    with FakeTensorMode(), torch.device("cuda"):  # there need not be one
        network, average.network = (create_backbone("dit_tiny", **sizes) for _ in range(2))
        optimizer = create("optimizer", name, learning_rate=1e-3).build(network)
        assert optimizer._step_supports_amp_scaling
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for step in (1, 2):
            norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.found_inf = norm.isfinite().logical_not().float()
            optimizer.step()
            average.update(network, step, optimizer.found_inf)


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [("cuda", "bf16", "high"), ("cuda", "fp32", "highest"), ("cpu", "bf16", "medium")],
)
def test_products_of_float32_in_half_precision_runs_are_tf32(device, precision, expected):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        set_float32_products(torch.device(device), precision)
        assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.set_float32_matmul_precision(before)
