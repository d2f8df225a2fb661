"""Shells: everything of a backbone except the mixer of its tokens.

A backbone is a shell and a mixer:

    @register_backbone("gla_tiny", learning_rate=1.2e-2, hidden_size=64, num_heads=2)
    class GLA(LightningBackbone):
        mixer = BidirectionalGLA

Its options are the keywords of the shell, of the mixer and of the MLP: `inspect.signature(GLA)`
lists them, and any other keyword is an error. The mixer declares the default selector, its own
initial weights, and what a block depends on besides the values of the tokens.

The shell of DiT (arXiv 2212.09748), adaLN-Zero:

    c = embed(t) + embed(y)
    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = Linear(SiLU(c))
    x = x + gate_1 * Mixer(LN(x) * (1 + scale_1) + shift_1)
    x = x + gate_2 * MLP(LN(x) * (1 + scale_2) + shift_2)

The shell of LightningDiT (arXiv 2501.01423) has RMSNorm in place of LayerNorm and SwiGLU in place
of the MLP. In both, t may be [B, N], a time per token, which gives a condition per token. Fixed 2-D
sines or learned positions are added to the patches once, before the first block.

The shell of DiS (arXiv 2402.05608):

    delta = cat(label, time, patches) + positions;  residual = 0
    [delta_i = Linear(cat(delta_i, delta_{depth-i}))]        in the second half: long skips
    residual = residual + delta
    delta    = Mixer(RMSNorm(residual))
    out      = AdaLNHead(RMSNorm(residual + delta), SiLU(time + label))

A context, T embeddings of width S [B, T, S], becomes T tokens before all others. In adaLN the mean
of these tokens is also added to c, as SD3 (arXiv 2403.03206) modulates by a pooled text, so that
the whole text reaches each token at once. With `context_as=cross_attention`, the context is not
part of the sequence: each block of the shells of DiT and LightningDiT attends to it after its
mixer, as in PixArt-α (arXiv 2310.00426),

    x = x + Linear(softmax(q kᵀ / sqrt(Dh)) v),  q = Linear(LN(x)),  k, v = Linear(context)

with heads of size Dh. The last Linear starts at 0. The mean is added to c as well. PixArt-α uses
q = Linear(x) without the norm, and adds no mean.

What goes from block to block may be several tensors, called streams. In DiS they are delta and
residual. With mixers that share values of width V (see `Mixer`), a second stream [B, L, V] has the
values; it is zero until the first of these mixers sets it. Routes keep or drop all streams of a
token together. If a route contains the mixer that sets the values, they stay zero for bypassed
tokens.

B batch, E extra tokens, K tokens present, N tokens of the full grid, L = E + K, D width.
"""

import inspect
from abc import ABCMeta
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from backbones.mixers.attention import CrossAttention
from backbones.mixers.base import Mixer, check_width, derive_signature, read_keywords
from backbones.mixers.scan import init_uniform
from backbones.mlps import GeluMLP, SwiGLU
from tread_zoo.contract.backbone import Backbone, Layout, PerToken, Streams
from tread_zoo.contract.checks import check_dependence
from tread_zoo.contract.layers import (
    AdaLNHead,
    LabelEmbedder,
    TimestepEmbedder,
    add_gated,
    join_skip,
    modulate,
    patchify,
    per_token,
    sincos_2d,
    unpatchify,
)


class CheckedInit(ABCMeta):
    """Metaclass that checks the arguments of a constructor call against the class's signature, and
    calls `initialize` and `add_registers` of the new object when all constructors have run."""

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        inspect.signature(cls).bind(*args, **keywords)
        network = super().__call__(*args, **keywords)
        network.initialize()
        network.add_registers(network.num_registers)
        return network


class Shell(Backbone, metaclass=CheckedInit):
    """Base of shells: a shell is a backbone without its mixer, the layer that mixes tokens.

    A shell's subclass that sets `mixer`, and perhaps `mlp`, is a whole backbone. The constructor of
    a subclass takes its own keywords and passes **options on.

    Args:
        input_size, in_channels, num_classes: see `Backbone`, also for patch_size and learn_sigma.
        hidden_size: width D of the tokens.
        time_scale: factor on t before its sinusoidal embedding; 1000 suits noise labels of order 1.
        num_registers: number of learned extra tokens, which routes never drop (arXiv 2309.16588).
        options: options of the mixer and of the MLP.

    Class attributes:
        mixer: the class that mixes tokens.
        mlp: the class that mixes channels, called as mlp(x [B, K, D], mixer.prepare(layout)).
        takes_contexts: see `Backbone`.

    Attributes that subclasses set:
        positions, label_embed: embeddings of positions and, if there are any, of labels.
        final: the last layers, called as final(tokens, condition) -> patches.
    """

    mixer: ClassVar[type[Mixer] | None] = None
    mlp: ClassVar[type[nn.Module] | None] = None
    takes_contexts: ClassVar[bool] = True

    positions: Tensor | nn.Parameter
    label_embed: LabelEmbedder | None
    final: Any  # a module with `zero()`, (tokens, condition) -> patches

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.__signature__ = derive_signature(cls, Shell, cls.mixer, cls.mlp)  # type: ignore[attr-defined]
        declared = vars(cls)
        if "mixer" in declared and cls.mixer is not None and "default_selector" not in declared:
            cls.default_selector = cls.mixer.default_selector

    def __init__(
        self,
        *,
        input_size: int | tuple[int, int],
        in_channels: int,
        num_classes: int,
        patch_size: PositiveInt = 2,
        hidden_size: PositiveInt = 384,
        learn_sigma: bool = False,
        time_scale: PositiveFloat = 1000.0,
        num_registers: NonNegativeInt = 0,
        **options: Any,
    ) -> None:
        super().__init__(
            input_size=input_size,
            in_channels=in_channels,
            num_classes=num_classes,
            patch_size=patch_size,
            depends_on=(),
            learn_sigma=learn_sigma,
        )
        self.hidden_size, self.time_scale, self.options = hidden_size, time_scale, options
        self.value_size, self.num_registers = 0, num_registers
        self.patch_embed = nn.Linear(in_channels * patch_size**2, hidden_size)

    def make_part(self, part: type[Any], index: int, **options: Any) -> Any:
        """Return an instance of `part`, the class of a mixer or MLP, for block `index`. Its
        constructor gets what it takes of hidden_size, grid, index and the backbone's options;
        `options` add to the backbone's options or replace them."""
        names = read_keywords(part)
        given = {**self.options, **options, "hidden_size": self.hidden_size}
        given = {"index": index, **given, "grid": self.grid}
        made = part(**{name: value for name, value in given.items() if name in names})
        if isinstance(made, Mixer):
            self.depends_on = check_dependence((*self.depends_on, *made.depends_on))
            self.value_size = max(self.value_size, made.value_size)
        return made

    def make_mixer(self, index: int) -> Mixer:
        """Return the mixer of block `index`."""
        if self.mixer is None:
            raise TypeError(f"{type(self).__name__} has no mixer: set one in the class.")
        return self.make_part(self.mixer, index)

    def initialize(self) -> None:
        """Set every weight. This is called once, after all constructors have run.

        | parameter | value |
        |---|---|
        | linear layers | as `init_linears` says; biases 0 |
        | label table, learned positions | normal, std 0.02 |
        | mixers, and MLPs with an `initialize` | as that method says |
        | the head's modulation and last layer | 0 |
        """
        self.init_linears()
        if isinstance(self.positions, nn.Parameter):
            nn.init.normal_(self.positions, std=0.02)
        if self.label_embed is not None:
            nn.init.normal_(self.label_embed.table.weight, std=0.02)
        for module in self.blocks.modules():
            initialize = getattr(module, "initialize", None)
            if initialize is not None:
                initialize(self.num_blocks)
        self.final.zero()

    def init_linears(self) -> None:
        """Draw the linear layers uniformly within ±1 / sqrt(fan in); biases are 0."""
        draw_linears(self, lambda weight: init_uniform(weight, weight.shape[1]))


def draw_linears(network: nn.Module, draw: Callable[[Tensor], object]) -> None:
    """Draw the weights of all linear layers of a network with `draw`, and set their biases to 0."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            draw(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


# DiT and LightningDiT -----------------------------------------------------------------------------


class AdaLNBlock(nn.Module):
    """A mixer, then an MLP, both modulated and gated by the condition (adaLN-Zero).

    A block gets and returns a tuple of streams: the tokens [B, L, D] and, if the mixers of a
    network share values of width V (see `Mixer`), these values [B, L, V].
    """

    def __init__(self, hidden_size: int, mixer: Mixer, mlp: nn.Module) -> None:
        super().__init__()
        self.fused_rows: dict[str, tuple[int, ...]] = {"modulation.weight": 6 * (hidden_size,)}
        self.norm1 = self.make_norm(hidden_size)
        self.set_mixer(mixer)
        self.norm2 = self.make_norm(hidden_size)
        self.mlp = mlp
        self.cross: CrossAttention | None = None
        self.modulation: nn.Module = nn.Linear(hidden_size, 6 * hidden_size)

    def make_norm(self, hidden_size: int) -> nn.Module:
        return nn.LayerNorm(hidden_size, eps=1e-6, elementwise_affine=False)

    def set_mixer(self, mixer: Mixer) -> None:
        """Store `mixer`, which `prepare` and `mix` use."""
        self.mixer = mixer

    def prepare(self, layout: Layout) -> Any:
        """Return what the mixer computes from `layout`. This is called outside of compiled code."""
        return self.mixer.prepare(layout)

    def mix(self, x: Tensor, prepared: Any, values: Streams) -> tuple[Tensor, Tensor | None]:
        """Return the mixed tokens [B, L, D], and the shared values if this mixer sets them, else
        None.

        Args:
            x: tokens [B, L, D], normalised and modulated.
            prepared: the result of `prepare`.
            values: a tuple of one tensor, the values [B, L, V] of width V that the network's mixers
                share; an empty tuple if they share none.
        """
        if not self.mixer.value_size:
            return self.mixer(x, prepared), None
        return self.mixer(x, prepared, *values)

    def forward(
        self, streams: Streams, condition: Tensor, prepared: Any, context: Tensor | None = None
    ) -> Streams:
        x, *values = streams
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=-1)
        mixed, value = self.mix(modulate(self.norm1(x), shift1, scale1), prepared, tuple(values))
        x = add_gated(x, gate1, mixed)
        if self.cross is not None and context is not None:
            x = x + self.cross(x, context)
        x = add_gated(x, gate2, self.mlp(modulate(self.norm2(x), shift2, scale2), prepared))
        return (x, *values) if value is None else (x, value.to(values[0].dtype))


class LightningBlock(AdaLNBlock):
    """An `AdaLNBlock` with RMSNorm in place of LayerNorm."""

    def make_norm(self, hidden_size: int) -> nn.Module:
        return nn.RMSNorm(hidden_size, eps=1e-6)


class AdaLNBackbone(Shell):
    """The shell of DiT: blocks that the condition scales, shifts and gates (adaLN-Zero).

    Args:
        depth: number of blocks.
        reversed_time: embed 1 - t, for networks whose time is 1 at the data.
        context_as: `tokens`: a context joins the sequence. `cross_attention`: blocks attend to it.
            Only for networks with contexts.
        options: options of the mixer, the MLP and `Shell`; fixed positions need a hidden_size D
            divisible by 4.

    Class attributes:
        block: the class of a block, called as block(D, mixer, MLP).
        learned_positions: True: position embeddings are learned. False: they are 2-D sines.
        mlp, per_token_time: see `Shell` and `Backbone`.
    """

    mlp: ClassVar[type[nn.Module] | None] = GeluMLP
    block: ClassVar[type[AdaLNBlock]] = AdaLNBlock
    learned_positions: ClassVar[bool] = False
    per_token_time: bool = True

    def __init__(
        self,
        *,
        depth: PositiveInt = 12,
        reversed_time: bool = False,
        context_as: Literal["tokens", "cross_attention"] = "tokens",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        width = self.hidden_size
        if context_as != "tokens" and self.num_classes:
            raise ValueError(
                f"context_as={context_as} needs contexts, and this network has labels: leave it "
                "out, or train on data with contexts."
            )
        self.reversed_time, self.context_as = reversed_time, context_as
        if self.learned_positions:
            self.positions = nn.Parameter(torch.empty(self.num_tokens, width))
        else:
            self.register_buffer("positions", sincos_2d(width, self.grid), persistent=False)
        self.time_embed = TimestepEmbedder(
            width, frequency_size=256, mlp_size=width, time_scale=self.time_scale
        )
        self.label_embed = LabelEmbedder(self.num_classes, width) if self.num_classes else None
        self.blocks = nn.ModuleList(self.make_block(index, depth) for index in range(depth))
        self.final = AdaLNHead(width, self.patch_size, self.out_channels)

    def make_block(self, index: int, depth: int) -> nn.Module:
        """Return block `index` of the `depth` blocks."""
        mlp = nn.Identity() if self.mlp is None else self.make_part(self.mlp, index)
        return self.block(self.hidden_size, self.make_mixer(index), mlp)

    def init_linears(self) -> None:
        """Draw linear layers Xavier-uniformly, and those of the time MLP normally with std 0.02.
        Biases and each block's modulation are 0."""
        draw_linears(self, nn.init.xavier_uniform_)
        draw_linears(self.time_embed, partial(nn.init.normal_, std=0.02))
        for block in self.blocks:
            nn.init.zeros_(block.get_parameter("modulation.weight"))

    def embed(self, x: Tensor, t: Tensor, y: Tensor | None) -> tuple[Streams, Any]:
        tokens = self.patch_embed(patchify(x, self.patch_size)) + self.positions
        condition = self.time_embed(1 - t if self.reversed_time else t)
        context = self.embed_context(y, len(x))
        if context is not None:
            condition = condition + context.mean(dim=1)
        attends = self.context_as == "cross_attention"
        tokens = self.prepend(tokens, None if attends else context)
        if self.label_embed is not None:
            label = self.label_embed(y, len(x))
            condition = condition + (label if t.ndim == 1 else per_token(label))
        condition = F.silu(condition)
        streams: Streams = (tokens,)
        if self.value_size:
            values = tokens.new_zeros(*tokens.shape[:2], self.value_size)
            if tokens.requires_grad:  # torch.func refuses the call, also with False
                values.requires_grad_()
            streams = tokens, values
        if attends and context is not None:
            return streams, (condition, context)
        return streams, condition if t.ndim == 1 else PerToken(condition)

    def add_contexts(self, context_length: int, context_size: int) -> None:
        super().add_contexts(context_length, context_size)
        if not context_size or self.context_as == "tokens":
            return
        if not all(isinstance(block, AdaLNBlock) for block in self.blocks):
            raise ValueError(
                f"{type(self).__name__} has blocks without cross-attention: set "
                "backbone.context_as=tokens."
            )
        self.num_extra_tokens -= context_length
        self.num_context_tokens -= context_length
        for block in self.blocks:
            block.cross = CrossAttention(self.hidden_size).to(self.context_positions)

    def run_block(
        self, index: int, streams: Streams, condition: Any, layout: Layout, skip: Tensor | None
    ) -> Streams:
        block: Any = self.blocks[index]
        given, *context = condition if isinstance(condition, tuple) else (condition,)
        return block(streams, given, block.prepare(layout), *context)

    def head(self, streams: Streams, condition: Any) -> Tensor:
        condition = condition[0] if isinstance(condition, tuple) else condition
        tokens = self.final(streams[0][:, self.num_extra_tokens :], condition)
        return unpatchify(tokens, self.patch_size, self.grid)


class LightningBackbone(AdaLNBackbone):
    """The shell of LightningDiT: an `AdaLNBackbone` with `LightningBlock`s, SwiGLU and RMSNorm."""

    mlp: ClassVar[type[nn.Module] | None] = SwiGLU
    block: ClassVar[type[AdaLNBlock]] = LightningBlock

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.final.norm = nn.RMSNorm(self.hidden_size, eps=1e-6)


# DiS ----------------------------------------------------------------------------------------------


class ScanBlock(nn.Module):
    """A block of DiS: (delta, residual) -> next (delta, residual), all [B, L, D].

    The next residual is residual + delta, where delta is first joined with a long skip, if there is
    one. The next delta is the mixer's output for the normalised next residual.
    """

    def __init__(self, hidden_size: int, mixer: Mixer, has_skip: bool) -> None:
        super().__init__()
        self.skip_proj = nn.Linear(2 * hidden_size, hidden_size) if has_skip else None
        self.norm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.mixer = mixer

    def prepare(self, layout: Layout) -> Any:
        return self.mixer.prepare(layout)

    def forward(self, streams: Streams, prepared: Any, skip: Tensor | None) -> Streams:
        delta, residual = streams
        residual = residual + join_skip(delta, skip, self.skip_proj)
        return self.mixer(self.norm(residual), prepared), residual


class ScanBackbone(Shell):
    """The shell of DiS: blocks with long skips from the first half to the second.

    Args:
        depth: an even number. There are depth + 1 blocks: depth / 2 that give long skips, one in
            the middle, and depth / 2 that take them.
        options: options of the mixer and of `Shell`; hidden_size D must be even.
    """

    default_range = (3, -3)  # contains both blocks of a skip, or neither

    def __init__(self, *, depth: PositiveInt = 24, **options: Any) -> None:
        super().__init__(**options)
        width = self.hidden_size
        if depth % 2:
            raise ValueError(f"depth={depth} must be even: skips join the halves.")
        check_width(width, 2, "as half the sinusoids are cosines")
        self.num_extra_tokens = 2 if self.num_classes else 1
        self.skips = {depth - i: i for i in range(depth // 2)}
        self.positions = nn.Parameter(torch.empty(self.num_extra_tokens + self.num_tokens, width))
        self.time_embed = TimestepEmbedder(
            width, frequency_size=width, mlp_size=4 * width, time_scale=self.time_scale
        )
        self.label_embed = LabelEmbedder(self.num_classes, width) if self.num_classes else None
        self.blocks = nn.ModuleList(
            ScanBlock(width, self.make_mixer(index), has_skip=index in self.skips)
            for index in range(depth + 1)
        )
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.final = AdaLNHead(width, self.patch_size, self.out_channels)

    def embed(self, x: Tensor, t: Tensor, y: Tensor | None) -> tuple[Streams, Tensor]:
        time = self.time_embed(t)
        condition, extra = time, [time.unsqueeze(1)]
        if self.label_embed is not None:
            label = self.label_embed(y, len(x))
            condition, extra = time + label, [label.unsqueeze(1), *extra]
        tokens = self.patch_embed(patchify(x, self.patch_size))
        delta = torch.cat([*extra, tokens], dim=1) + self.positions
        delta = self.prepend_context(delta, y)
        residual = torch.zeros_like(delta)
        if delta.requires_grad:  # torch.func refuses the call, also with False
            residual.requires_grad_()
        return (delta, residual), F.silu(condition)

    def run_block(
        self, index: int, streams: Streams, condition: Tensor, layout: Layout, skip: Tensor | None
    ) -> Streams:
        block: Any = self.blocks[index]
        return block(streams, block.prepare(layout), skip)

    def head(self, streams: Streams, condition: Tensor) -> Tensor:
        delta, residual = (stream[:, self.num_extra_tokens :] for stream in streams)
        tokens = self.final(self.norm(residual + delta), condition)
        return unpatchify(tokens, self.patch_size, self.grid)

    def hidden_state(self, streams: Streams) -> Tensor:
        delta, residual = streams
        return residual + delta
