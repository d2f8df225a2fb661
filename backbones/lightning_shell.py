"""The shell of LightningDiT (arXiv 2501.01423): all of a backbone but what mixes its tokens.

    c = embed(t) + embed(y)
    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = Linear(SiLU(c))
    x = x + gate_1 * Mixer(RMSNorm(x) * (1 + scale_1) + shift_1)
    x = x + gate_2 * SwiGLU(RMSNorm(x) * (1 + scale_2) + shift_2)

It is the shell of DiT with RMSNorm for LayerNorm and SwiGLU for the MLP. Patches get fixed 2-D
sines once, which routed tokens carry with them. A row of this kind brings its mixer and its sizes:

    class MyMixer(Mixer):
        def forward(self, x, layout, first_value): …         # -> [B, K, D], None

    class MyNet(LightningBackbone):
        def __init__(self, *, …):
            super().__init__(…, depends_on=…, make_mixer=lambda index: MyMixer(hidden_size))
            self.initialize()

Where mixers have values of their first block in common, these are a stream of their own, [B, K, V],
zeros until some mixer sets it: a route takes it along, so that a token always meets its own. Where
the mixer that sets it lies within a route, the tokens that bypassed it keep zeros.

B batch, K tokens present, N tokens of the full grid, D width, V width of a first value.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.adaln_shell import AdaLNBackbone
from tread_zoo.backbone import Layout, Streams
from tread_zoo.layers import add_gated, modulate


class Mixer(nn.Module, ABC):
    """What mixes tokens [B, K, D] -> [B, K, D], which stand in raster order before and after.

    Attributes:
        value_size: V, width of the first value that it sets or reads; 0: none.
    """

    value_size: int = 0

    @abstractmethod
    def forward(
        self, x: Tensor, layout: Layout, first_value: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mixed tokens, and the first value [B, K, V] if this mixer sets it, else None.

        Args:
            x: [B, K, D].
            layout: which tokens these are.
            first_value: [B, K, V] of these tokens; None where no mixer of the network has one.
        """

    def initialize(self) -> None:
        """Set what differs from the shell: linear layers are Xavier uniform with zero biases before
        the call, norms 1."""


class SwiGLU(nn.Module):
    """Linear(SiLU(Linear(x)) * Linear(x)), [B, K, D] -> [B, K, D] (arXiv 2002.05202).

    Args:
        hidden_size: D.
        mlp_ratio: of an MLP with as many parameters: the inner width is 2/3 of its, rounded down.
    """

    def __init__(self, hidden_size: int, mlp_ratio: float) -> None:
        super().__init__()
        inner = int(2 / 3 * int(hidden_size * mlp_ratio))
        self.fc1 = nn.Linear(hidden_size, 2 * inner)
        self.fc2 = nn.Linear(inner, hidden_size)
        self.fused_rows = {"fc1.weight": (inner, inner)}

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        gate, value = self.fc1(x).chunk(2, dim=-1)
        out: Tensor = self.fc2(F.silu(gate) * value)
        return out


class LightningBlock(nn.Module):
    """A mixer and an MLP, modulated and gated by the condition: streams -> streams.

    Args:
        hidden_size: D.
        mixer: of tokens.
        mlp: of channels, called as mlp(x [B, K, D], layout); most ignore the layout.
    """

    def __init__(self, hidden_size: int, mixer: Mixer, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(hidden_size, eps=1e-6)
        self.mixer = mixer
        self.norm2 = nn.RMSNorm(hidden_size, eps=1e-6)
        self.mlp = mlp
        self.modulation: nn.Module = nn.Linear(hidden_size, 6 * hidden_size)
        self.fused_rows: dict[str, tuple[int, ...]] = {"modulation.weight": 6 * (hidden_size,)}

    def forward(self, streams: Streams, condition: Tensor, layout: Layout) -> Streams:
        x, first_value = streams[0], streams[1] if len(streams) == 2 else None
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=-1)
        mixed, value = self.mixer(modulate(self.norm1(x), shift1, scale1), layout, first_value)
        x = add_gated(x, gate1, mixed)
        x = add_gated(x, gate2, self.mlp(modulate(self.norm2(x), shift2, scale2), layout))
        if first_value is None:
            return (x,)
        return x, first_value if value is None else value.to(first_value.dtype)


class LightningBackbone(AdaLNBackbone):
    """A stack of `LightningBlock`s, as `AdaLNBackbone` is one of DiT's.

    Args:
        input_size, in_channels, num_classes, patch_size, depends_on, learn_sigma: see `Backbone`.
        hidden_size: D, divisible by 4.
        depth: number of blocks.
        make_mixer: (index of the block) -> its mixer; those with a first value share one width.
        mlp_ratio: of `SwiGLU`.
        make_mlp: (index of the block) -> what takes its place, called as `LightningBlock` says.
        time_scale: factor on t before its sinusoids; 1000 suits noise labels of order 1.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    def __init__(
        self,
        *,
        input_size: int | tuple[int, int],
        in_channels: int,
        num_classes: int,
        patch_size: int,
        depends_on: Sequence[str],
        hidden_size: int,
        depth: int,
        make_mixer: Callable[[int], Mixer],
        mlp_ratio: float = 4.0,
        make_mlp: Callable[[int], nn.Module] | None = None,
        learn_sigma: bool = False,
        time_scale: float = 1000.0,
    ) -> None:
        def make_block(index: int) -> LightningBlock:
            mlp = make_mlp(index) if make_mlp else SwiGLU(hidden_size, mlp_ratio)
            return LightningBlock(hidden_size, make_mixer(index), mlp)

        super().__init__(
            input_size=input_size,
            in_channels=in_channels,
            num_classes=num_classes,
            patch_size=patch_size,
            depends_on=depends_on,
            hidden_size=hidden_size,
            depth=depth,
            make_block=make_block,
            learn_sigma=learn_sigma,
            time_scale=time_scale,
        )
        self.final.norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.value_size = max(m.value_size for m in self.modules() if isinstance(m, Mixer))

    def initialize(self) -> None:
        """Set every weight: as `AdaLNBackbone`, then what each mixer, and each MLP that has an
        `initialize`, says of its own; a subclass calls it once, last."""
        super().initialize()
        for block in self.blocks:
            assert isinstance(block, LightningBlock)
            block.mixer.initialize()
            own: Callable[[], None] | None = getattr(block.mlp, "initialize", None)
            if own is not None:
                own()

    def embed(self, x: Tensor, t: Tensor, y: Tensor | None) -> tuple[Streams, Any]:
        (tokens,), condition = super().embed(x, t, y)
        if not self.value_size:
            return (tokens,), condition
        return (tokens, tokens.new_zeros(*tokens.shape[:2], self.value_size)), condition

    def run_block(
        self, index: int, streams: Streams, condition: Tensor, layout: Layout, skip: Tensor | None
    ) -> Streams:
        after: Streams = self.blocks[index](streams, condition, layout)
        return after
