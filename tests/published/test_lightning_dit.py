"""LightningDiT from its own tensors, written out anew."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.published.tensors import theirs
from tests.published.test_conversion import embedded, imported, network
from tread_zoo.published import export_checkpoint
from tread_zoo.runs.checkpoint import CheckpointError


def by_formula(w, x, t, y):
    """t is what its sinusoids are fed; patches of 2."""
    width, head = len(w["x_embedder.proj.bias"]), w["feat_rope.freqs_cos"].shape[1]

    def linear(name, v):
        return F.linear(v, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(name, v):
        weight = w.get(f"{name}.weight", 1.0)
        return v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def modulated(name, v, shift, scale):
        return norm(name, v) * (1 + scale[:, None]) + shift[:, None]

    def turned(v):
        swapped = torch.stack([-v[..., 1::2], v[..., 0::2]], -1).flatten(-2)
        return v * w["feat_rope.freqs_cos"] + swapped * w["feat_rope.freqs_sin"]

    tokens, c = embedded(w, x, t, y)
    c = F.silu(c)
    for name in ("blocks.0", "blocks.1"):
        s1, g1, a1, s2, g2, a2 = linear(f"{name}.adaLN_modulation.1", c).split(width, 1)
        qkv = linear(f"{name}.attn.qkv", modulated(f"{name}.norm1", tokens, s1, g1))
        mixed = []
        for q, k, v in zip(*(z.split(head, 2) for z in qkv.split(width, 2)), strict=True):
            if f"{name}.attn.q_norm.weight" in w:
                q, k = norm(f"{name}.attn.q_norm", q), norm(f"{name}.attn.k_norm", k)
            mixed.append((turned(q) @ turned(k).mT / math.sqrt(head)).softmax(-1) @ v)
        tokens = tokens + a1[:, None] * linear(f"{name}.attn.proj", torch.cat(mixed, 2))
        both = linear(f"{name}.mlp.w12", modulated(f"{name}.norm2", tokens, s2, g2))
        gate, value = both.chunk(2, 2)
        tokens = tokens + a2[:, None] * linear(f"{name}.mlp.w3", F.silu(gate) * value)
    shift, scale = linear("final_layer.adaLN_modulation.1", c).chunk(2, 1)
    values = linear("final_layer.linear", modulated("final_layer.norm_final", tokens, shift, scale))
    return values.view(len(x), 4, 4, 2, 2, 4).permute(0, 5, 1, 3, 2, 4).reshape(len(x), 4, 8, 8)


@pytest.mark.parametrize("norms", [True, False])
def test_it_equals_its_formula(tmp_path, norms):
    content = theirs("lightning_dit", norms=norms)
    backbone = network(tmp_path, "lightning_dit", content)
    x, t, y = torch.randn(3, 4, 8, 8), torch.tensor([0.0, 0.3, 1.0]), torch.tensor([0, 7, 3])
    expected = by_formula(content, x, 1 - t, y)  # time and velocity are turned
    assert expected.std() > 0.1
    torch.testing.assert_close(backbone(x, t, y), -expected, atol=1e-4, rtol=0)


def test_heads_follow_from_the_table_of_rotations_which_must_be_ours(tmp_path):
    content = theirs("lightning_dit", heads=2)
    assert imported(tmp_path, "lightning_dit", content).config["num_heads"] == 2
    content["feat_rope.freqs_cos"] = content["feat_rope.freqs_cos"].roll(1, 0)
    with pytest.raises(CheckpointError, match=r"freqs_cos .* trained otherwise"):
        imported(tmp_path / "other", "lightning_dit", content)


def test_it_goes_back_with_its_tables(tmp_path):
    """To the bit: heads of 64, as its published networks have; in smaller ones nothing rounds."""
    content = theirs("lightning_dit", width=256)
    frequency = 1 / 10000 ** (torch.arange(0, 32, 2).float() / 32)
    place = torch.arange(16)
    angles = [axis[:, None] * frequency for axis in (place // 4, place % 4)]
    angles = torch.cat(angles, 1).repeat_interleave(2, 1)
    content |= {"feat_rope.freqs_cos": angles.cos(), "feat_rope.freqs_sin": angles.sin()}
    done = imported(tmp_path, "lightning_dit", content)
    back = torch.load(export_checkpoint(done.path, tmp_path / "back.pt", format="lightning_dit"))
    torch.testing.assert_close(back, content, atol=0, rtol=0)
