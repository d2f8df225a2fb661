"""The base class of mixers, and the options that a backbone gets from its shell, mixer and MLP.

B batch, K tokens present, D width.
"""

import inspect
from inspect import Parameter
from typing import Any, ClassVar, get_type_hints

from torch import nn

from tread_zoo.contract.backbone import Layout

# Keywords that the shell fills in if a mixer or MLP has them, each with a value that any accepts.
GIVEN: dict[str, Any] = {"hidden_size": 1, "grid": (1, 1), "index": 0}


class Mixer(nn.Module):
    """Base of layers that mix tokens, [B, K, D] -> [B, K, D], in raster order before and after.

        forward(x, prepared) -> mixed tokens

    `prepared` is the `Layout` of the tokens, or what `prepare` makes of it.

    If the constructor has `hidden_size`, `grid` (h, w of the full image) or `index` (of the block),
    the shell fills it in. Every other keyword becomes an option of the backbones with this mixer.

    Mixers with a `value_size` V share values [B, K, V]. The first of them in the network returns
    its values; the others get these as `first_value` and return None:

        forward(x, prepared, first_value) -> (mixed tokens, values or None)

    Attributes:
        default_selector: selector that backbones with this mixer use by default, see `Backbone`.
        depends_on: see `Backbone`; set by the constructor if an option changes it.
        value_size: V; 0: no shared values.
    """

    default_selector: ClassVar[str] = "random"
    depends_on: tuple[str, ...] = ()
    value_size: int = 0

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        signature = inspect.Signature(list(read_keywords(cls).values()))
        cls.__signature__ = signature  # type: ignore[attr-defined]

    def prepare(self, layout: Layout) -> Any:
        """Return the argument `prepared` of `forward`, computed from `layout`, which says which
        tokens are present. This runs before each block, outside of compiled code; `Layout.cached`
        keeps results that several blocks need."""
        return layout

    def initialize(self, num_blocks: int) -> None:
        """Override this to set the mixer's initial weights; `num_blocks` is the number of blocks in
        the network, whose linear layers have all been drawn before."""

    @classmethod
    def options_for_heads(cls, hidden_size: int, num_heads: int) -> dict[str, Any]:
        """Return the options that give this mixer `num_heads` heads at a width of `hidden_size`,
        for networks with several mixers."""
        return {"num_heads": num_heads} if "num_heads" in read_keywords(cls) else {}


def check_width(hidden_size: int, multiple: int, what: str) -> None:
    """Raise `ValueError` unless `hidden_size` is divisible by `multiple`. The error explains the
    multiple by `what`, such as "num_heads"."""
    if hidden_size % multiple:
        raise ValueError(f"hidden_size={hidden_size} must be divisible by {multiple}, {what}.")


def read_keywords(part: type, last: type | None = None) -> dict[str, Parameter]:
    """Return the keywords that the constructor of `part` takes: name -> parameter, with its type.

    If the constructor has **options, the keywords of its base class are added, and so on, up to and
    including the class `last`; None: the last class before `nn.Module`. If the last constructor
    that was read has **options, the result has an entry for them.
    """
    keywords: dict[str, Parameter] = {}
    others: list[Parameter] = []
    for base in part.__mro__:
        if base is nn.Module:
            break
        if "__init__" not in vars(base):
            continue
        try:
            hints = get_type_hints(vars(base)["__init__"], include_extras=True)
        except NameError:  # types imported only for type checkers
            hints = {}
        _, *given = inspect.signature(vars(base)["__init__"]).parameters.values()
        others = [p for p in given if p.kind is Parameter.VAR_KEYWORD]
        named = {
            p.name: p.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints.get(p.name, Any))
            for p in given
            if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        }
        keywords = {**named, **keywords}  # a class overrides its base
        if base is last or not others:
            break
    return {**keywords, **{p.name: p for p in others}}


def derive_signature(shell: type, last: type, *parts: type | None) -> inspect.Signature:
    """Return the signature of a backbone's constructor.

    It has the keywords of the class `shell` and of its base classes up to and including `last`. In
    place of **options it has the keywords of `parts`, the classes of mixer and MLP (None: there is
    none), without those in `GIVEN`, which the shell fills in.
    """
    parameters = read_keywords(shell, last)
    keywords = {name: p for name, p in parameters.items() if p.kind is Parameter.KEYWORD_ONLY}
    for part in parts if len(keywords) < len(parameters) else ():
        for name, parameter in read_keywords(part).items() if part else ():
            if name not in GIVEN:
                keywords.setdefault(name, parameter)
    return inspect.Signature(sorted(keywords.values(), key=lambda p: p.kind))
