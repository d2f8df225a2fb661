"""Backbones made of diffusers' transformer classes, trained from scratch like ours.

    embed        the class's own forward, up to its first block
    run_block    one of its blocks, on the tokens present
    head         its own forward again, with the final tokens as the output of its blocks

So all backbones share one routed loop, and no line of the class is copied or edited: while its
forward runs, a stand-in replaces each list of blocks. The layers before the blocks run twice. A
class that takes text gets a learned text for each label.

B batch, N image tokens, K of them present, T text tokens, D width, p patch size.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from tread_zoo.contract.backbone import Backbone, Layout, Streams
from tread_zoo.errors import unknown_name
from tread_zoo.registry import register_backbone
from tread_zoo.routing.others.arguments import PerImage, sequence, take
from tread_zoo.routing.others.calls import Call
from tread_zoo.routing.others.families import LISTS

NUM_CLASS_TOKENS = 4
HEADS = {"num_layers": 12, "num_attention_heads": 2, "attention_head_dim": 32}
IMAGES = {
    "in_channels": "in", "out_channels": "out", "patch_size": "patch", "sample_size": "side",
}  # fmt: skip
ABSENT = {  # options of classes that training here cannot support, and why
    "dropout": "a forward pass draws nothing at random",
    "guidance_embeds": "guidance is not distilled",
    "use_additional_conditions": "images have one size",
}


@dataclass(frozen=True)
class Kind:
    """How a transformer class of diffusers is built and called.

    Args:
        small: default configuration, 12 blocks of width 64. Checkpoints rely on it.
        given: the class's keywords that follow from the data, the patch size and the width, as
            {keyword: name of its value in `Diffusers._complete`}.
        text, pooled: the class's keywords for the width of text tokens and of a pooled text vector;
            None if it takes none.
        joint: whether the blocks change text tokens, too, and return (text tokens, image tokens).
        packed: whether the class takes patches [B, N, C * p * p] and positions, not images.
        rotary: whether the blocks take a table of positions.
        time_scale: factor by which t is multiplied for the class.
    """

    small: Mapping[str, Any]
    given: Mapping[str, str]
    text: str | None = None
    pooled: str | None = None
    joint: bool = False
    packed: bool = False
    rotary: bool = False
    time_scale: float = 1000.0


CLASSES = {
    "DiTTransformer2DModel": Kind(HEADS, {**IMAGES, "num_embeds_ada_norm": "classes"}),
    "PixArtTransformer2DModel": Kind(
        {**HEADS, "caption_channels": 64, "use_additional_conditions": False},
        {**IMAGES, "cross_attention_dim": "width"},
        text="caption_channels",
    ),
    "SD3Transformer2DModel": Kind(
        {**HEADS, "joint_attention_dim": 64, "pooled_projection_dim": 64},
        {**IMAGES, "caption_projection_dim": "width", "pos_embed_max_size": "places"},
        text="joint_attention_dim", pooled="pooled_projection_dim", joint=True,
    ),
    "FluxTransformer2DModel": Kind(
        {
            **HEADS, "num_layers": 4, "num_single_layers": 8, "axes_dims_rope": [8, 12, 12],
            "joint_attention_dim": 64, "pooled_projection_dim": 64,
        },
        {"in_channels": "patch_in", "out_channels": "patch_out"},
        text="joint_attention_dim", pooled="pooled_projection_dim", joint=True, packed=True,
        rotary=True, time_scale=1.0,
    ),
    "PRXTransformer2DModel": Kind(
        {
            "depth": 12, "hidden_size": 64, "num_heads": 2, "axes_dim": [16, 16],
            "context_in_dim": 64,
        },
        {"in_channels": "in", "patch_size": "patch"},
        text="context_in_dim", rotary=True, time_scale=1.0,
    ),
}  # fmt: skip


Name = Literal[
    "DiTTransformer2DModel",
    "PixArtTransformer2DModel",
    "SD3Transformer2DModel",
    "FluxTransformer2DModel",
    "PRXTransformer2DModel",
]


class Condition(NamedTuple):
    """What `embed` hands on to the blocks and the head.

    Args:
        of_lists: for each list of blocks, by its name (such as transformer_blocks), the keyword
            arguments of its blocks.
        of_network: keyword arguments for the class's own forward.
    """

    of_lists: dict[str, dict[str, Any]]
    of_network: dict[str, Any]


class _Stopped(Exception):
    """Ends a forward pass as soon as the arguments of the blocks are known."""


class _Pass:
    """A forward pass of a class of diffusers in which no block runs; `calls` collects the arguments
    that each list of blocks gets.

    Args:
        lists: names of the class's lists of blocks, in order.
        joint: see `Kind`.
        end: the tokens that the last list returns, {name of a block's argument: tokens}; None: the
            pass ends when the last list is called.
    """

    def __init__(self, lists: list[str], joint: bool, end: Mapping[str, Tensor] | None) -> None:
        self.lists, self.joint, self.end = lists, joint, end
        self.calls: dict[str, dict[str, Any]] = {}

    def run(self, index: None, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the tokens that come out of a list of blocks: `end` for the last list, otherwise
        the tokens that went in. A `Call`, the stand-in for the list, calls this with the list's
        arguments; `index` and `block` are not used.

        Raises:
            _Stopped: this is the last list, and `end` is None.
        """
        named = kwargs | ({"hidden_states": args[0]} if args else {})
        self.calls[self.lists[len(self.calls)]] = named
        if len(self.calls) == len(self.lists):
            if self.end is None:
                raise _Stopped
            named = {**named, **self.end}
        tokens = named["hidden_states"]
        return (named["encoder_hidden_states"], tokens) if self.joint else tokens


@register_backbone("diffusers", learning_rate=6e-3)
class Diffusers(Backbone):
    """A transformer class of diffusers, trained from scratch; label embeddings replace text.

    Args:
        input_size, in_channels, num_classes: see `Backbone`, also for patch_size and learn_sigma.
        cls: name of the class in diffusers.
        config: configuration of the class; the defaults make 12 blocks of width 64.
        num_class_tokens: T, the number of text tokens per label.
    """

    def __init__(
        self,
        *,
        input_size: int | tuple[int, int],
        in_channels: int,
        num_classes: int,
        cls: Name,
        config: dict[str, Any] | None = None,
        patch_size: PositiveInt = 2,
        num_class_tokens: PositiveInt = NUM_CLASS_TOKENS,
        learn_sigma: bool = False,
    ) -> None:
        kind = CLASSES[cls]
        super().__init__(
            input_size=input_size, in_channels=in_channels, num_classes=num_classes,
            patch_size=patch_size, learn_sigma=learn_sigma,
            depends_on=("order", "ids") if kind.rotary else (),
        )  # fmt: skip
        self.kind, self.cls, self.num_class_tokens = kind, cls, num_class_tokens
        self.class_config = self._complete(config or {})
        self.network: Any = _class(cls)(**self.class_config)
        # Only `self.blocks` holds the blocks. In each pass a stand-in replaces the class's lists.
        lists = [each for each in LISTS if self.network._modules.get(each)]
        self.place_of = [
            (each, i) for each in lists for i in range(len(self.network._modules[each]))
        ]
        self.blocks = nn.ModuleList(b for each in lists for b in self.network._modules.pop(each))
        if kind.text is not None:
            width = num_class_tokens * self.class_config[kind.text]
            pooled = self.class_config[kind.pooled] if kind.pooled else 0
            self.label_embed = nn.Embedding(num_classes + 1, width + pooled)
        self.num_extra_tokens = num_class_tokens if kind.joint else 0
        self._remove_idle()

    def _complete(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the class's whole configuration: `config`, our defaults, and values that follow
        from the data. Raises ValueError for options that do not fit the class or our training."""
        cls, kind, square = self.cls, self.kind, self.patch_size**2
        known = inspect.signature(_class(cls).__init__).parameters.keys() - {"self"}
        for key, value in config.items():
            if key not in known:
                raise unknown_name("backbone.config", key, known)
            if key in kind.given:
                raise ValueError(
                    f"backbone.config.{key}={value} follows from the data, backbone.patch_size and "
                    "the width: leave it out."
                )
            if value and key in ABSENT:
                raise ValueError(f"backbone.config.{key}={value}: {ABSENT[key]}; leave it out.")
        if "out" not in "".join(kind.given.values()) and self.out_channels != self.in_channels:
            raise ValueError(
                f"backbone.learn_sigma=true: {cls} returns as many channels as it takes."
            )
        if not kind.text and self.num_class_tokens != NUM_CLASS_TOKENS:
            raise ValueError(
                f"backbone.num_class_tokens={self.num_class_tokens}: {cls} takes labels, and no "
                "text: leave it out."
            )
        if not kind.text and self.grid[0] != self.grid[1]:
            raise ValueError(f"input_size={self.input_size}: {cls} takes square images only.")
        whole = {**kind.small, **config}
        sizes = {
            "in": self.in_channels, "out": self.out_channels, "patch": self.patch_size,
            "patch_in": square * self.in_channels, "patch_out": square * self.out_channels,
            "side": max(self.input_size), "places": max(self.grid), "classes": self.num_classes,
            "width": whole.get("num_attention_heads", 0) * whole.get("attention_head_dim", 0),
        }  # fmt: skip
        return whole | {key: sizes[size] for key, size in kind.given.items()}

    def _remove_idle(self) -> None:
        """Switch off the class's own label dropout, and remove weights that no output needs."""
        each: Any
        for each in self.modules():
            if hasattr(each, "dropout_prob"):  # label dropout, which our training does itself
                each.dropout_prob = 0.0
        attention: Any = getattr(self.blocks[-1], "attn", None)
        if getattr(attention, "context_pre_only", False):  # SD3 does not use the last block's text
            attention.add_q_proj, attention.norm_added_q = nn.Identity(), None

    def arguments(self, x: Tensor, t: Tensor, y: Tensor | None) -> dict[str, Any]:
        """Return the keyword arguments of the class's own forward for images x [B, C, H, W], times
        t [B] and labels y [B]; y = None means the null label for all."""
        kind, batch, device = self.kind, len(x), x.device
        labels = torch.full((batch,), self.null_label, device=device) if y is None else y
        given: dict[str, Any] = {"hidden_states": x, "timestep": kind.time_scale * t}
        if kind.text is None:
            return {**given, "class_labels": labels}
        length = self.num_class_tokens * self.class_config[kind.text]
        text, pooled = self.label_embed(labels).tensor_split([length], dim=1)
        given["encoder_hidden_states"] = text.unflatten(1, (self.num_class_tokens, -1))
        if kind.pooled:
            given["pooled_projections"] = pooled
        if kind.packed:
            h, w = self.grid
            given["hidden_states"] = F.pixel_unshuffle(x, self.patch_size).flatten(2).mT
            rows, cols = torch.arange(h, device=device), torch.arange(w, device=device)
            places = torch.cartesian_prod(torch.zeros_like(rows[:1]), rows, cols)
            given["img_ids"] = places.float()  # bfloat16 is exact only up to 256
            given["txt_ids"] = torch.zeros(self.num_class_tokens, 3, device=device)
        return given

    def _run(self, arguments: Mapping[str, Any], end: Mapping[str, Any] | None) -> Any:
        """Run the class's forward on `arguments`, without its blocks.

        Return the output that the forward computes if its blocks return the tokens in `end`, {name
        of a block's argument: tokens}. If `end` is None, return {name of a list of blocks:
        arguments of its first block}.
        """
        first = {name: self.blocks[at] for at, (name, i) in enumerate(self.place_of) if i == 0}
        run: Any = _Pass(list(first), self.kind.joint, end)
        self.network.__dict__.update({n: [Call(run, None, b)] for n, b in first.items()})
        try:
            return self.network(**arguments, return_dict=False)[0]
        except _Stopped:
            return run.calls
        finally:
            for name in first:
                del self.network.__dict__[name]

    def embed(self, x: Tensor, t: Tensor, y: Tensor | None) -> tuple[Streams, Condition]:
        if t.is_complex():
            raise ValueError(
                f"backbone.cls={self.cls} takes one time, and not r: set objective=flow, edm or "
                "ddpm, or choose another backbone."
            )
        arguments = self.arguments(x, t, y)
        of_lists = self._run(arguments, None)
        first = of_lists[self.place_of[0][0]]
        tokens = first["hidden_states"]
        if self.kind.joint:
            tokens = torch.cat([first["encoder_hidden_states"], tokens], dim=1)
        return (tokens,), Condition(of_lists, arguments)

    def _tokens(self, stream: Tensor) -> dict[str, Tensor]:
        """Return {name of the blocks' argument: tokens} for `stream`: K image tokens [B, K, D] or,
        if the blocks change text tokens, too, T text tokens and then the image's [B, T + K, D]."""
        text, tokens = stream.tensor_split([self.num_extra_tokens], dim=1)
        named = {"hidden_states": tokens}
        return {**named, "encoder_hidden_states": text} if self.kind.joint else named

    def run_block(
        self,
        index: int,
        streams: Streams,
        condition: Condition,
        layout: Layout,
        skip: Tensor | None,
    ) -> Streams:
        named = {**condition.of_lists[self.place_of[index][0]], **self._tokens(streams[0])}
        if self.kind.rotary and layout.ids is not None:
            table = named["image_rotary_emb"]
            named["image_rotary_emb"] = layout.cached("table", lambda: _rows(table, layout))
        out = self.blocks[index](**named)
        if not self.kind.joint:
            return (out,)
        text, tokens = out
        return (torch.cat([named["encoder_hidden_states"] if text is None else text, tokens], 1),)

    def head(self, streams: Streams, condition: Condition) -> Tensor:
        out: Tensor = self._run(condition.of_network, self._tokens(streams[0]))
        if self.kind.packed:
            out = F.pixel_shuffle(out.mT.unflatten(2, self.grid), self.patch_size)
        return out

    def to_diffusers(self) -> Any:
        """Return an instance of the class in diffusers with this network's weights, except the
        label embeddings. Its `save_pretrained` writes them in diffusers' format."""
        network, state = _class(self.cls)(**self.class_config), dict(self.network.state_dict())
        for (name, i), block in zip(self.place_of, self.blocks, strict=True):
            state |= {f"{name}.{i}.{key}": value for key, value in block.state_dict().items()}
        network.load_state_dict(state, strict=False)  # removed weights keep their initial values
        return network.to(next(self.parameters()))


def _rows(table: Any, layout: Layout) -> Any:
    """Return a position table, cut to the tokens that are present in `layout`. The table has rows
    for E extra tokens and the N tokens of the grid: it is a tuple of tensors [E + N, ...] that all
    images share, or one tensor [B, 1, E + N, ...]."""
    assert layout.ids is not None
    rows = sequence(layout.ids, layout.num_tokens, layout.num_extra, layout.num_extra)
    if isinstance(table, tuple):
        return tuple(PerImage(each[rows]) for each in table)
    return take(table, rows, 2)


def _class(name: str) -> Any:
    """Return the class of diffusers with this name. Raises ValueError if diffusers is not installed
    or is too old."""
    try:
        import diffusers
    except ImportError as error:
        raise ValueError(
            f"backbone=diffusers needs a package: pip install 'tread-zoo[latents]' ({error})."
        ) from error
    if not hasattr(diffusers, "PRXTransformer2DModel"):
        raise ValueError(
            f"backbone=diffusers needs diffusers 0.36; {diffusers.__version__} is here."
        )
    return getattr(diffusers, name)
