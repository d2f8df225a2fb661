"""Parameter counts against the published ones, in millions, at 4x32x32 with 1000 classes."""

import pytest
import torch

from tests.backbones.test_weights import NAMES
from tread_zoo import create_backbone
from tread_zoo.registry import get_entry

MILLIONS = {
    "dit_s_2": 32.96, "dit_b_2": 130.5, "dit_l_2": 458.1, "dit_xl_2": 675.1, "sit_s_2": 32.96,
    "sit_xl_2": 675.1, "mamba_s_2": 29.1, "mamba_b_2": 121.2, "mamba_m_2": 231.4,
    "mamba_l_2": 407.2, "mamba_h_2": 907.0, "rwkv_s_2": 39.3, "rwkv_b_2": 74.8, "rwkv_m_2": 132.6,
    "rwkv_l_2": 439.3, "rwkv_h_2": 780.3, "lightning_dit_l_2": 458.1,
}  # fmt: skip
ONE_OUTPUT, NO_LABELS = {"learn_sigma": False}, {"learn_sigma": False, "num_classes": 0}
LATENTS = {"input_size": 16, "in_channels": 32, **ONE_OUTPUT}  # LightningDiT's, but for L's
PUBLISHED = [
    *((name, millions, {}) for name, millions in MILLIONS.items()),
    ("lightning_dit_b_1", 130.6, LATENTS),
    ("lightning_dit_xl_1", 675.3, LATENTS),
    # U-ViT predicts the noise alone, ZigMa the velocity. The published U-ViT-S is the unconditional
    # one for CIFAR-10 and CelebA: with 1000 labels and their token it has 44.77.
    ("uvit_s_2", 44.3, NO_LABELS),
    ("uvit_s_2", 44.7, {**NO_LABELS, "context_length": 77, "context_size": 768}),  # MS-COCO: 45
    ("uvit_m_2", 130.9, ONE_OUTPUT),
    ("uvit_l_2", 286.8, ONE_OUTPUT),
    ("uvit_h_2", 500.8, ONE_OUTPUT),
    ("zigma_b_1", 134.6, NO_LABELS),
]


def build(name, **overrides):
    sizes = {"input_size": 32, "in_channels": 4, "num_classes": 1000, "learn_sigma": True}
    with torch.device("meta"):
        return create_backbone(name, **{**sizes, **overrides})


@pytest.mark.parametrize(("name", "millions", "overrides"), PUBLISHED)
def test_parameter_count(name, millions, overrides):
    backbone = build(name, **overrides)
    tensors = [*backbone.parameters(), *backbone.buffers()]  # DiT counts its fixed positions
    assert sum(t.numel() for t in tensors) / 1e6 == pytest.approx(millions, rel=0.002)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "image"),
    [
        ("tiny", {"input_size": 8, "in_channels": 1, "num_classes": 10}),
        ("matched_s", {}),
        ("matched_b", {}),
    ],
)
def test_sizes_for_comparisons_lie_within_a_tenth_of_each_other(size, image):
    names = [name for name in NAMES if name.endswith(f"_{size}")]
    sized, architectures = (
        {get_entry("backbone", name).target for name in some} for some in (names, NAMES)
    )
    assert sized == architectures
    counts = [
        sum(p.numel() for p in build(name, learn_sigma=False, **image).parameters())
        for name in names
    ]
    assert max(counts) <= 1.1 * min(counts), dict(zip(names, counts, strict=True))
