"""Hybrids: blocks of several kinds in a repeated pattern, as linear attention with some softmax
attention between (Kimi Linear, arXiv 2510.26692; Qwen3-Next; Dimba, 2406.01159).

    pattern="gated_deltanet:3,attention:1"    three blocks of delta rules, one of attention, again

`lightning_shell` has the shell, and the mixers are those of their own rows, with the options that
these have by default; every block has SwiGLU. With attention alone it is `lightning_dit`.

What a route's gaps are to it is for each block what they are to its mixer. The first value of
RWKV-7 is that of its first block here; where that lies within a route, the tokens that bypassed it
have zeros for it.

D width, H heads.
"""

from collections.abc import Callable
from itertools import cycle, islice
from typing import Annotated, ClassVar, NamedTuple

from pydantic import AfterValidator, PositiveFloat, PositiveInt
from torch import Tensor

from backbones.gated_deltanet import BidirectionalDelta
from backbones.gla import BidirectionalGLA
from backbones.lightning_dit import RotaryAttention
from backbones.lightning_shell import LightningBackbone, Mixer
from backbones.mamba2 import BidirectionalSSD
from backbones.rwkv7 import TimeMix
from tread_zoo.backbone import DEPENDS_ON, Layout
from tread_zoo.errors import unknown_name
from tread_zoo.registry import register_backbone


class StateSpaceDual(Mixer):
    """The mixer of Mamba-2, with an inner width of D and H heads in each direction."""

    def __init__(self, hidden_size: int, num_heads: int, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.ssd = BidirectionalSSD(
            hidden_size, expand=1, state_size=64, head_size=hidden_size // num_heads, conv_width=4
        )

    def forward(
        self, x: Tensor, layout: Layout, first_value: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self.ssd(x, layout), None

    def initialize(self) -> None:
        self.ssd.initialize(self.depth)


class Kind(NamedTuple):
    """A mixer by name.

    Args:
        make: (D, H, depth, index among the blocks of its kind) -> the mixer.
        depends_on: as of `Backbone`.
    """

    make: Callable[[int, int, int, int], Mixer]
    depends_on: tuple[str, ...]


MIXERS = {
    "attention": Kind(lambda d, h, depth, index: RotaryAttention(d, h), ("order", "ids")),
    "gated_deltanet": Kind(lambda d, h, depth, index: BidirectionalDelta(d, h), ("order",)),
    "gla": Kind(lambda d, h, depth, index: BidirectionalGLA(d, h), ("order",)),
    "mamba2": Kind(lambda d, h, depth, index: StateSpaceDual(d, h, depth), ("order",)),
    "rwkv7": Kind(
        lambda d, h, depth, index: TimeMix(d, d // h, low_rank=d // 12, index=index),
        ("order", "ids"),
    ),
}


def read_pattern(pattern: str) -> list[str]:
    """Return the names of the mixers of one period, as of "gla:3,attention" four.

    Raises:
        ValueError: an unknown name, or a count that is none.
    """
    names: list[str] = []
    for part in pattern.split(","):
        name, _, count = (piece.strip() for piece in part.partition(":"))
        if name not in MIXERS:
            raise unknown_name("pattern", name, MIXERS)
        if count and not (count.isdecimal() and int(count)):
            raise ValueError(f"pattern={pattern!r}: {count!r} must be a number of blocks.")
        names += [name] * int(count or 1)
    return names


def _check_pattern(pattern: str) -> str:
    read_pattern(pattern)
    return pattern


class Hybrid(LightningBackbone):
    """A stack of `LightningBlock`s whose mixers follow a pattern.

    Args:
        input_size, in_channels, num_classes, patch_size, learn_sigma: see `Backbone`.
        pattern: mixers and numbers of blocks, repeated to the depth; names are those of `MIXERS`.
        hidden_size: D, divisible by 4 H.
        depth: number of blocks.
        num_heads: H, of every mixer.
        mlp_ratio: of `SwiGLU`.
        time_scale: factor on t before its sinusoids; 1000 suits noise labels of order 1.

    Raises:
        ValueError: sizes that do not fit each other, or a pattern that cannot be read.
    """

    default_selector: ClassVar[str] = "rows"

    def __init__(
        self,
        *,
        input_size: int | tuple[int, int],
        in_channels: int,
        num_classes: int,
        pattern: Annotated[str, AfterValidator(_check_pattern)] = "gated_deltanet:3,attention:1",
        patch_size: PositiveInt = 2,
        hidden_size: PositiveInt = 384,
        depth: PositiveInt = 12,
        num_heads: PositiveInt = 6,
        mlp_ratio: PositiveFloat = 4.0,
        learn_sigma: bool = False,
        time_scale: PositiveFloat = 1000.0,
    ) -> None:
        if hidden_size % (4 * num_heads):
            raise ValueError(
                f"hidden_size={hidden_size} must be divisible by 4 num_heads={4 * num_heads}."
            )
        names = list(islice(cycle(read_pattern(pattern)), depth))
        depends_on = {each for name in names for each in MIXERS[name].depends_on}

        def make_mixer(index: int) -> Mixer:
            before = names[:index].count(names[index])
            return MIXERS[names[index]].make(hidden_size, num_heads, depth, before)

        super().__init__(
            input_size=input_size,
            in_channels=in_channels,
            num_classes=num_classes,
            patch_size=patch_size,
            depends_on=[each for each in DEPENDS_ON if each in depends_on],
            hidden_size=hidden_size,
            depth=depth,
            make_mixer=make_mixer,
            mlp_ratio=mlp_ratio,
            learn_sigma=learn_sigma,
            time_scale=time_scale,
        )
        self.initialize()


# Sizes for comparisons; nobody has published diffusion networks of this kind.
register_backbone(
    "hybrid_tiny", learning_rate=1.2e-2, patch_size=2, hidden_size=64, depth=12, num_heads=2
)(Hybrid)
register_backbone(
    "hybrid_matched_s", learning_rate=3e-4, patch_size=2, hidden_size=384, depth=12, num_heads=6
)(Hybrid)
register_backbone("hybrid_matched_b", patch_size=2, hidden_size=768, depth=12, num_heads=12)(Hybrid)
