"""Backbones made of a mixer of tokens and a shell, and the registered sizes of all backbones.

A shell is all the rest: embeddings, norms, modulation, MLPs, skips and head (`backbones.shells`).
"""

from typing import Any

from torch import Tensor

from backbones.hybrid import Hybrid
from backbones.mixers.attention import Attention
from backbones.mixers.base import Mixer
from backbones.mixers.delta import BidirectionalDelta, KimiDelta
from backbones.mixers.gla import BidirectionalGLA
from backbones.mixers.linear_attention import LinearAttention
from backbones.mixers.rotary import RotaryAttention
from backbones.mixers.rwkv7 import ChannelMix, TimeMix
from backbones.mixers.selective_scan import SelectiveScan
from backbones.mixers.ssd import BidirectionalSSD
from backbones.rwkv import RWKV
from backbones.shells import AdaLNBackbone, AdaLNBlock, LightningBackbone, ScanBackbone
from backbones.uvit import UViT
from backbones.zigma import ZigMa
from tread_zoo.contract.backbone import Layout, Streams
from tread_zoo.contract.layers import self_attention
from tread_zoo.registry import register_backbone


class DiTBlock(AdaLNBlock):
    """An `AdaLNBlock` with attention. The attention's layers are attributes of the block, not of a
    `mixer` in it, so that the weights are named as in DiT's checkpoints."""

    def set_mixer(self, mixer: Mixer) -> None:
        self.qkv, self.proj = mixer.get_submodule("qkv"), mixer.get_submodule("proj")
        self.num_heads: int = mixer.num_heads  # type: ignore[assignment]
        self.fused_rows |= mixer.fused_rows  # type: ignore[arg-type]

    def prepare(self, layout: Layout) -> None:
        """Return None: this attention does not depend on where the tokens are."""

    def mix(self, x: Tensor, prepared: None, values: Streams) -> tuple[Tensor, None]:
        return self_attention(x, self.qkv, self.proj, self.num_heads), None


class DiT(AdaLNBackbone):
    """DiT: attention and MLPs, with adaLN-Zero (Peebles and Xie 2022, arXiv 2212.09748)."""

    mixer, block = Attention, DiTBlock


class LightningDiT(LightningBackbone):
    """DiT with RMSNorm, SwiGLU, rotary positions and qk-norm (arXiv 2501.01423). Fixed 2-D
    sines are added to the patches once, as in DiT."""

    mixer = RotaryAttention


class Mamba(ScanBackbone):
    """DiS (arXiv 2402.05608): selective scans in both directions, and long skips."""

    mixer = SelectiveScan


class Mamba2(ScanBackbone):
    """DiS with state-space duals in both directions (arXiv 2405.21060) as its scans."""

    mixer = BidirectionalSSD


class LinearDiT(LightningBackbone):
    """LightningDiT with linear attention without order or decay, as in SANA (arXiv 2410.10629)."""

    mixer = LinearAttention


class GLA(LightningBackbone):
    """LightningDiT with gated linear attention in both directions (arXiv 2312.06635)."""

    mixer = BidirectionalGLA


class GatedDeltaNet(LightningBackbone):
    """LightningDiT with the gated delta rule in both directions (arXiv 2412.06464)."""

    mixer = BidirectionalDelta


class KDA(LightningBackbone):
    """LightningDiT with Kimi Delta Attention in both directions (arXiv 2510.26692)."""

    mixer = KimiDelta


class RWKV7(LightningBackbone):
    """LightningDiT with RWKV-7's time mix and channel mix in its blocks (arXiv 2503.14456)."""

    mixer, mlp = TimeMix, ChannelMix


# SiT (arXiv 2401.08740) is DiT with objective=flow and an unscaled time that is 1 at the data.
SIT: dict[str, Any] = {"time_scale": 1.0, "reversed_time": True}
DIT: dict[str, dict[str, Any]] = {
    "s": {"depth": 12, "hidden_size": 384, "num_heads": 6},
    "b": {"depth": 12, "hidden_size": 768, "num_heads": 12},
    "l": {"depth": 24, "hidden_size": 1024, "num_heads": 16},
    "xl": {"depth": 28, "hidden_size": 1152, "num_heads": 16},
}
# Published sizes: (name, class, keywords).
PUBLISHED: list[tuple[str, type[Any], dict[str, Any]]] = [
    *((f"dit_{s}_{p}", DiT, {**DIT[s], "patch_size": p}) for s in DIT for p in (2, 4, 8)),
    *((f"sit_{s}_2", DiT, {**DIT[s], **SIT}) for s in DIT),
    *(
        (f"lightning_dit_{s}_{p}", LightningDiT, {**DIT[s], "patch_size": p})
        for s in ("b", "l", "xl")
        for p in (1, 2)
    ),
    ("mamba_s_2", Mamba, {"depth": 24, "hidden_size": 368}),
    ("mamba_b_2", Mamba, {"depth": 24, "hidden_size": 768}),
    ("mamba_m_2", Mamba, {"depth": 48, "hidden_size": 768}),
    ("mamba_l_2", Mamba, {"depth": 48, "hidden_size": 1024}),
    ("mamba_h_2", Mamba, {"depth": 48, "hidden_size": 1536}),
    ("rwkv_s_2", RWKV, {"depth": 13, "hidden_size": 384}),
    ("rwkv_b_2", RWKV, {"depth": 25, "hidden_size": 384}),
    ("rwkv_m_2", RWKV, {"depth": 25, "hidden_size": 512}),
    ("rwkv_l_2", RWKV, {"depth": 37, "hidden_size": 768}),
    ("rwkv_h_2", RWKV, {"depth": 37, "hidden_size": 1024}),
    ("uvit_s_2", UViT, {"depth": 12, "hidden_size": 512, "num_heads": 8}),
    ("uvit_m_2", UViT, {"depth": 16, "hidden_size": 768, "num_heads": 12}),
    ("uvit_l_2", UViT, {"depth": 20, "hidden_size": 1024, "num_heads": 16}),
    ("uvit_h_2", UViT, {"depth": 28, "hidden_size": 1152, "num_heads": 16, "final_conv": False}),
    ("zigma_b_1", ZigMa, {"depth": 24, "hidden_size": 768, "patch_size": 1}),
    ("zigma_b_2", ZigMa, {"depth": 24, "hidden_size": 768}),
]
# Sizes for a laptop, with nearly equal parameter counts: (name, class, learning rate, keywords).
TINY: list[tuple[str, type[Any], float, dict[str, Any]]] = [
    ("dit", DiT, 1.2e-2, {"hidden_size": 64, "num_heads": 2}),
    ("sit", DiT, 1.2e-2, {"hidden_size": 64, "num_heads": 2, **SIT}),
    ("lightning_dit", LightningDiT, 1.2e-2, {"hidden_size": 64, "num_heads": 2}),
    ("uvit", UViT, 6e-3, {"hidden_size": 74, "num_heads": 2, "init_std": 0.1}),
    ("mamba", Mamba, 1.2e-2, {"hidden_size": 88, "depth": 12, "state_size": 4}),
    (
        "mamba2",
        Mamba2,
        6e-3,
        {"hidden_size": 120, "depth": 12, "expand": 1, "state_size": 16, "head_size": 40},
    ),
    ("zigma", ZigMa, 1.2e-2, {"hidden_size": 88, "depth": 12, "state_size": 4}),
    ("rwkv", RWKV, 1.2e-2, {"hidden_size": 60}),
    ("rwkv7", RWKV7, 1.2e-2, {"hidden_size": 64, "head_size": 32, "low_rank": 8}),
    ("linear_dit", LinearDiT, 1.2e-2, {"hidden_size": 64, "num_heads": 2}),
    ("gla", GLA, 1.2e-2, {"hidden_size": 64, "num_heads": 2}),
    ("gated_deltanet", GatedDeltaNet, 1.2e-2, {"hidden_size": 64, "num_heads": 2}),
    ("kda", KDA, 1.2e-2, {"hidden_size": 64, "num_heads": 2, "mlp_ratio": 3.25}),
    ("hybrid", Hybrid, 1.2e-2, {"hidden_size": 64, "num_heads": 2}),
]
# Sizes with nearly as many parameters as DiT-S/2 and as DiT-B/2.
MATCHED: list[tuple[str, type[Any], dict[str, Any], dict[str, Any]]] = [
    ("dit", DiT, DIT["s"], DIT["b"]),
    ("lightning_dit", LightningDiT, DIT["s"], DIT["b"]),
    (
        "uvit",
        UViT,
        {"hidden_size": 448, "num_heads": 7},
        {"depth": 16, "hidden_size": 768, "num_heads": 12},
    ),
    ("mamba", Mamba, {"hidden_size": 392}, {"hidden_size": 800}),
    ("mamba2", Mamba2, {"depth": 28}, {"depth": 28, "hidden_size": 768}),
    ("zigma", ZigMa, {}, {"hidden_size": 768}),
    ("rwkv", RWKV, {"hidden_size": 352}, {"depth": 25, "hidden_size": 512}),
    ("rwkv7", RWKV7, {}, {"hidden_size": 768, "low_rank": 64}),
    ("linear_dit", LinearDiT, {}, {"hidden_size": 768, "num_heads": 12}),
    ("gla", GLA, {}, {"hidden_size": 768, "num_heads": 12}),
    ("gated_deltanet", GatedDeltaNet, {}, {"hidden_size": 768, "num_heads": 12}),
    ("kda", KDA, {}, {"hidden_size": 768, "num_heads": 12}),
    ("hybrid", Hybrid, {}, {"hidden_size": 768, "num_heads": 12}),
]

for _name, _network, _sizes in PUBLISHED:
    _rate = 3e-4 if "_s_" in _name else None
    register_backbone(_name, learning_rate=_rate, **_sizes)(_network)
for _name, _network, _rate, _sizes in TINY:
    register_backbone(f"{_name}_tiny", learning_rate=_rate, **_sizes)(_network)
for _name, _network, _small, _base in MATCHED:
    register_backbone(f"{_name}_matched_s", learning_rate=3e-4, **_small)(_network)
    register_backbone(f"{_name}_matched_b", **_base)(_network)
