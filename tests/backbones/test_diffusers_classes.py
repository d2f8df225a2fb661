"""Classes of diffusers as backbones: the contract, equal outputs, training, saving and errors."""

import json
import sys
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

from backbones.diffusers import CLASSES
from tests.small_run import SMALL as RUN
from tests.small_run import full_settings
from tread_zoo import create, create_backbone
from tread_zoo.diffusion import build_sampling, generate
from tread_zoo.evaluation.flops import training_flops
from tread_zoo.registry import available
from tread_zoo.runs.checkpoint import find_checkpoint, load_backbone
from tread_zoo.testing import CHECKS, Probe
from tread_zoo.testing.method_checks import CHECKS as METHOD_CHECKS
from tread_zoo.testing.method_checks import MethodProbe
from tread_zoo.training.loop import train

pytest.importorskip("diffusers", reason="diffusers is not installed")

HEADS = {"num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 8}
CONFIGS = {
    "DiTTransformer2DModel": HEADS,
    "PixArtTransformer2DModel": {**HEADS, "caption_channels": 12},
    "SD3Transformer2DModel": {**HEADS, "qk_norm": "rms_norm", "dual_attention_layers": [1]},
    "FluxTransformer2DModel": {
        **HEADS, "num_layers": 2, "num_single_layers": 2, "axes_dims_rope": [4, 2, 2],
    },
    "PRXTransformer2DModel": {"depth": 4, "hidden_size": 16, "axes_dim": [4, 4]},
}  # fmt: skip
EVERY_CLASS = pytest.mark.parametrize("cls", CONFIGS)
FEW = [pytest.param(c, marks=() if c.startswith("SD3") else pytest.mark.nightly) for c in CONFIGS]


def probe_of(cls):
    """Return a probe of a class. DiT's images are square, because its code joins patches to a
    square."""
    size = (8, 8) if cls.startswith("DiT") else (8, 12)
    return Probe("diffusers", size, overrides={"cls": cls, "config": CONFIGS[cls]})


def build(cls, **options):
    sizes = {"input_size": 8, "in_channels": 1, "num_classes": 10}
    config = {**CONFIGS.get(cls, {}), **options.pop("config", {})}
    return create_backbone("diffusers", **{**sizes, "cls": cls, "config": config, **options})


def run(folder, cls, *overrides):
    given = [each for each in RUN if not each.startswith("backbone.")]
    part = {"name": "diffusers", "cls": cls, "config": CONFIGS[cls]}
    return train(**{**full_settings(*given, *overrides), "backbone": part, "run_dir": str(folder)})


def test_every_class_is_tested():
    assert CONFIGS.keys() == CLASSES.keys()


NIGHTLY = {"compiles": pytest.mark.nightly}


@pytest.mark.filterwarnings("error::tread_zoo.testing.probe.Advice")
@pytest.mark.parametrize("check", [pytest.param(n, marks=NIGHTLY.get(n, ())) for n in CHECKS])
@pytest.mark.parametrize("cls", FEW)
def test_contract(cls, check):
    CHECKS[check](probe_of(cls))


@EVERY_CLASS
def test_the_output_is_that_of_the_class_to_the_bit(cls):
    backbone = probe_of(cls).build()
    x, t, y = probe_of(cls).inputs()
    whole = backbone.to_diffusers().eval()  # in train() a DiT drops labels
    expected = whole(**backbone.arguments(x, t, y), return_dict=False)[0]
    if backbone.kind.packed:
        expected = F.pixel_shuffle(expected.mT.unflatten(2, backbone.grid), backbone.patch_size)
    assert torch.equal(backbone(x, t, y), expected)


@EVERY_CLASS
def test_routed_steps_change_every_parameter_of_a_fresh_network(cls):
    torch.manual_seed(0)
    backbone = build(cls)
    before = deepcopy(backbone)
    optimizer = torch.optim.AdamW(backbone.parameters(), weight_decay=0)
    route = probe_of(cls).route(backbone, rate=0.5, batch=11)
    x, t, y = torch.randn(11, 1, 8, 8), torch.rand(11), torch.arange(11)  # with the null label
    for _ in range(2):  # PRX starts with gates of 0, which cut the gradients of the first step
        (backbone(x, t, y, routes=[route]) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, new), old in zip(backbone.named_parameters(), before.parameters(), strict=True):
        assert torch.isfinite(new).all()
        if not name.endswith("to_k.bias"):  # softmax takes no notice of the same added to all keys
            assert not torch.equal(new, old), name
    assert torch.equal(deepcopy(backbone)(x, t, y), backbone(x, t, y))


@pytest.mark.slow
@pytest.mark.parametrize("check", ["gradients_flow", "sampling"])
@pytest.mark.parametrize("method", available("routing"))
@pytest.mark.parametrize("cls", FEW)
def test_every_method(cls, method, check):
    probe = probe_of(cls)
    depth = "depth" if cls.startswith("PRX") else "num_layers"
    probe.overrides["config"] = {**CONFIGS[cls], depth: 6}
    METHOD_CHECKS[check](MethodProbe(method, probe))


@pytest.mark.slow
@pytest.mark.parametrize("cls", FEW)
def test_routes_save_flops(cls):
    backbone = build(cls)
    dense, routed = (
        training_flops(backbone, create("routing", {"name": name, **options}), 10)
        for name, options in (("none", {}), ("tread", {"start": 1, "end": -1}))
    )
    assert 0.5 * dense < routed < 0.9 * dense


@EVERY_CLASS
def test_guided_sampling(cls):
    backbone = probe_of(cls).build()
    options = build_sampling({"name": "euler", "num_steps": 2}, {"name": "cfg", "scale": 2.0})
    samples = generate(
        backbone, create("objective", "flow"), options, indices=[0, 1], labels=torch.arange(2),
        seed=0, batch_size=2,
    )  # fmt: skip
    assert samples.shape == (2, 2, *backbone.input_size)
    assert torch.isfinite(samples).all()


@pytest.mark.slow
@pytest.mark.parametrize("cls", FEW)
def test_a_run_is_saved_loaded_and_resumed_to_the_bit(cls, tmp_path):
    given = ["lr_schedule=constant", "routing.start=1", "routing.end=-1"]
    unbroken = run(tmp_path / "unbroken", cls, *given)
    run(tmp_path / "broken", cls, *given, "training.num_steps=3")
    broken = run(tmp_path / "broken", cls, *given, "resume=latest")
    one, other = find_checkpoint(unbroken), find_checkpoint(broken)
    assert one.step == other.step == 6
    for part in ("model", "ema"):
        weights, again = one.tensors(part), other.tensors(part)
        assert weights.keys() == again.keys()
        assert all(torch.equal(again[key], tensor) for key, tensor in weights.items())
        loaded = load_backbone(one, part).state_dict()
        assert all(torch.equal(loaded[key], tensor) for key, tensor in weights.items())
    blocks = json.loads((unbroken / "score.json").read_text())["contributions"]["blocks"]
    assert len(blocks) == load_backbone(one).num_blocks
    assert min(blocks) > 0


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        ("SD3Transformer2DModel", {"config": {"num_layer": 3}}, "num_layers"),
        ("SD3Transformer2DModel", {"config": {"patch_size": 1}}, "backbone.patch_size"),
        ("PixArtTransformer2DModel", {"config": {"dropout": 0.1}}, "dropout"),
        ("FluxTransformer2DModel", {"config": {"guidance_embeds": True}}, "guidance_embeds"),
        ("PRXTransformer2DModel", {"learn_sigma": True}, "learn_sigma"),
        ("DiTTransformer2DModel", {"input_size": (8, 12)}, "square"),
        ("DiTTransformer2DModel", {"num_class_tokens": 2}, "num_class_tokens"),
        ("SD3Transformer2DModel", {"num_registers": 2}, "num_registers"),
        ("SD3Transformer2DModel", {"num_classes": 0, "context_length": 2, "context_size": 3},
         "context"),
        ("UNet2DModel", {}, "cls"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_named(cls, options, message):
    with pytest.raises(ValueError, match=message):
        build(cls, **options)


def test_a_second_time_is_refused():
    backbone = build("SD3Transformer2DModel")
    with pytest.raises(ValueError, match="objective"):
        backbone(torch.zeros(1, 1, 8, 8), torch.ones(1), r=torch.zeros(1))


def test_the_absence_of_diffusers_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ValueError, match=r"pip install 'tread-zoo\[latents\]'"):
        build("SD3Transformer2DModel")


@pytest.mark.nightly
@EVERY_CLASS
def test_it_learns_digits(cls, tmp_path):
    given = ["data=digits", "training.num_steps=200", "training.batch_size=64"]
    folder = run(tmp_path, cls, *given, "optimizer.learning_rate=auto")
    values = json.loads((folder / "score.json").read_text())["values"]
    assert values["held_out_loss"] < 0.75  # about 1.5 after 20 steps
