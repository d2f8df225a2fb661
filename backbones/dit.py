"""DiT: a transformer conditioned by adaLN-Zero (Peebles and Xie 2022, arXiv 2212.09748).

`adaln_shell` has the shell, this file the attention. Positions are fixed 2-D sines added once, so a
routed token carries its position with it, and blocks do not depend on which tokens they see.

B batch, K tokens present, D width, H heads.
"""

from typing import Any

from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from backbones.adaln_shell import AdaLNBackbone, AdaLNBlock
from tread_zoo.backbone import Layout
from tread_zoo.layers import self_attention
from tread_zoo.registry import register_backbone


class DiTBlock(AdaLNBlock):
    """Attention and MLP, modulated and gated by the condition: [B, K, D] -> [B, K, D]."""

    qkv: nn.Linear
    proj: nn.Linear

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float) -> None:
        super().__init__(
            hidden_size,
            mlp_ratio,
            qkv=nn.Linear(hidden_size, 3 * hidden_size),
            proj=nn.Linear(hidden_size, hidden_size),
        )
        self.num_heads = num_heads
        self.fused_rows["qkv.weight"] = 3 * (hidden_size,)

    def mix(self, x: Tensor, layout: Layout) -> Tensor:
        return self_attention(x, self.qkv, self.proj, self.num_heads)


class DiT(AdaLNBackbone):
    """A stack of `DiTBlock`s.

    Args:
        input_size, in_channels, num_classes, patch_size, learn_sigma: see `Backbone`.
        hidden_size: D, divisible by `num_heads` and by 4.
        depth: number of blocks.
        num_heads: H.
        mlp_ratio: width of the MLP over D.
        time_scale: factor on t before its sinusoids; 1000 suits noise labels of order 1.
        reversed_time: embed 1 - t, the time of networks that have data at 1, as SiT's.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    def __init__(
        self,
        *,
        input_size: int | tuple[int, int],
        in_channels: int,
        num_classes: int,
        patch_size: PositiveInt = 2,
        hidden_size: PositiveInt = 384,
        depth: PositiveInt = 12,
        num_heads: PositiveInt = 6,
        mlp_ratio: PositiveFloat = 4.0,
        learn_sigma: bool = False,
        time_scale: PositiveFloat = 1000.0,
        reversed_time: bool = False,
    ) -> None:
        if hidden_size % num_heads:
            raise ValueError(
                f"hidden_size={hidden_size} is not divisible by num_heads={num_heads}."
            )
        super().__init__(
            input_size=input_size,
            in_channels=in_channels,
            num_classes=num_classes,
            patch_size=patch_size,
            depends_on=(),
            hidden_size=hidden_size,
            depth=depth,
            make_block=lambda index: DiTBlock(hidden_size, num_heads, mlp_ratio),
            learn_sigma=learn_sigma,
            time_scale=time_scale,
            reversed_time=reversed_time,
        )
        self.initialize()


_SIZES = {
    "s": {"depth": 12, "hidden_size": 384, "num_heads": 6},
    "b": {"depth": 12, "hidden_size": 768, "num_heads": 12},
    "l": {"depth": 24, "hidden_size": 1024, "num_heads": 16},
    "xl": {"depth": 28, "hidden_size": 1152, "num_heads": 16},
}

for _size, _keywords in _SIZES.items():
    for _patch in (2, 4, 8):
        _rate = 3e-4 if _size == "s" else None
        register_backbone(
            f"dit_{_size}_{_patch}", learning_rate=_rate, patch_size=_patch, **_keywords
        )(DiT)
# Sizes for comparisons: every architecture has them, of nearly the same number of parameters.
register_backbone(
    "dit_tiny", learning_rate=1.2e-2, patch_size=2, hidden_size=64, depth=12, num_heads=2
)(DiT)
register_backbone("dit_matched_s", learning_rate=3e-4, patch_size=2, **_SIZES["s"])(DiT)
register_backbone("dit_matched_b", patch_size=2, **_SIZES["b"])(DiT)

# SiT (arXiv 2401.08740) is this class under its names, with time as it counts it: data at 1, not
# scaled. What sets it apart is its objective, `flow`.
_SIT: dict[str, Any] = {"patch_size": 2, "time_scale": 1.0, "reversed_time": True}
for _size, _keywords in _SIZES.items():
    _rate = 3e-4 if _size == "s" else None
    register_backbone(f"sit_{_size}_2", learning_rate=_rate, **_SIT, **_keywords)(DiT)
register_backbone("sit_tiny", learning_rate=1.2e-2, hidden_size=64, depth=12, num_heads=2, **_SIT)(
    DiT
)
