"""Parameter counts against the published ones, in millions, at 4x32x32 with 1000 classes."""

import pytest
import torch

from tread_zoo import create_backbone, list_backbones
from tread_zoo.registry import get_entry

PUBLISHED = {
    "dit_s_2": 32.96,
    "dit_b_2": 130.5,
    "dit_l_2": 458.1,
    "dit_xl_2": 675.1,
    "sit_s_2": 32.96,
    "sit_xl_2": 675.1,
    "mamba_s_2": 29.1,
    "mamba_b_2": 121.2,
    "mamba_m_2": 231.4,
    "mamba_l_2": 407.2,
    "mamba_h_2": 907.0,
    "rwkv_s_2": 39.3,
    "rwkv_b_2": 74.8,
    "rwkv_m_2": 132.6,
    "rwkv_l_2": 439.3,
    "rwkv_h_2": 780.3,
}

# U-ViT predicts the noise alone, ZigMa the velocity. The published U-ViT-S is the unconditional one
# of CIFAR-10 and CelebA: with 1000 labels and their token it has 44.77.
PUBLISHED_WITHOUT_SIGMA = {
    "uvit_s_2": (44.3, {"num_classes": 0}),
    "uvit_m_2": (130.9, {}),
    "uvit_l_2": (286.8, {}),
    "uvit_h_2": (500.8, {}),
    "zigma_b_1": (134.6, {"num_classes": 0}),
}

# LightningDiT was trained on latents of 32 channels; the published L has patches of 2.
LATENTS = {"input_size": 16, "in_channels": 32, "learn_sigma": False}
PUBLISHED_LIGHTNING_DIT = {
    "lightning_dit_b_1": (130.6, LATENTS),
    "lightning_dit_l_2": (458.1, {}),
    "lightning_dit_xl_1": (675.3, LATENTS),
}


def build(name, **overrides):
    sizes = {"input_size": 32, "in_channels": 4, "num_classes": 1000, "learn_sigma": True}
    with torch.device("meta"):
        return create_backbone(name, **{**sizes, **overrides})


@pytest.mark.parametrize(
    ("name", "millions", "overrides"),
    [
        *((name, millions, {}) for name, millions in PUBLISHED.items()),
        *((name, *facts) for name, facts in PUBLISHED_LIGHTNING_DIT.items()),
    ],
)
def test_parameter_count(name, millions, overrides):
    backbone = build(name, **overrides)
    tensors = [*backbone.parameters(), *backbone.buffers()]  # DiT counts its fixed positions
    assert sum(t.numel() for t in tensors) / 1e6 == pytest.approx(millions, rel=0.002)


@pytest.mark.parametrize("name", PUBLISHED_WITHOUT_SIGMA)
def test_parameter_count_without_sigma(name):
    millions, overrides = PUBLISHED_WITHOUT_SIGMA[name]
    backbone = build(name, learn_sigma=False, **overrides)
    counted = sum(p.numel() for p in backbone.parameters()) / 1e6
    assert counted == pytest.approx(millions, rel=0.002)


@pytest.mark.parametrize(
    ("size", "image"),
    [
        ("tiny", {"input_size": 8, "in_channels": 1, "num_classes": 10}),
        ("matched_s", {}),
        ("matched_b", {}),
    ],
)
def test_sizes_for_comparisons_lie_within_a_tenth_of_each_other(size, image):
    names = [name for name in list_backbones(f"*_{size}") if is_ours(name)]
    sized, architectures = (
        {get_entry("backbone", name).target for name in some if is_ours(name)}
        for some in (names, list_backbones())
    )
    assert sized == architectures
    counts = [
        sum(p.numel() for p in build(name, learn_sigma=False, **image).parameters())
        for name in names
    ]
    assert max(counts) <= 1.1 * min(counts), dict(zip(names, counts, strict=True))


def is_ours(name):
    return get_entry("backbone", name).target.__module__.startswith("backbones.")


@pytest.mark.parametrize("name", list_backbones())
def test_every_preset_builds_and_declares_its_routing(name):
    backbone = build(name)
    assert backbone.out_channels == 8
    assert backbone.default_selector in ("random", "rows", "blocks", "segments")
