"""The base of mixers, and how a backbone gets its options from the constructors of its parts.

B batch, K tokens present, D width, V width of a first value.
"""

import inspect
from inspect import Parameter
from typing import Any, ClassVar, get_type_hints

from torch import nn

from tread_zoo.contract.backbone import Layout

# Keywords that a shell fills in if a constructor has them, with values that each of them accepts.
GIVEN: dict[str, Any] = {"hidden_size": 1, "grid": (1, 1), "index": 0}


class Mixer(nn.Module):
    """Base of mixers of tokens [B, K, D] -> [B, K, D], in raster order before and after.

        forward(x, layout) -> mixed tokens

    If the constructor has `hidden_size`, `grid` (h, w of the full image) or `index` (of the block),
    the shell fills it in. Every other keyword becomes an option of the backbones with this mixer.

    A mixer with a `value_size` V shares a first value [B, K, V] with all later blocks:
    forward(x, layout, first_value) -> (mixed tokens, first value if this mixer sets it, else None).

    Attributes:
        default_selector: default selector of backbones with this mixer, see `Backbone`.
        depends_on: see `Backbone`; the constructor sets it if it depends on an option.
        value_size: V; 0: no first value.
    """

    default_selector: ClassVar[str] = "random"
    depends_on: tuple[str, ...] = ()
    value_size: int = 0

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        signature = inspect.Signature(list(read_keywords(cls).values()))
        cls.__signature__ = signature  # type: ignore[attr-defined]

    def prepare(self, layout: Layout) -> Any:
        """Return what `forward` gets instead of the layout. This runs before each block, outside of
        compiled code; see `Layout.cached`."""
        return layout

    def initialize(self, num_blocks: int) -> None:
        """Override this to change initial weights, after the shell has drawn all linear layers."""

    @classmethod
    def options_for_heads(cls, hidden_size: int, num_heads: int) -> dict[str, Any]:
        """Return the options that set `num_heads` heads, for networks with several mixers."""
        return {"num_heads": num_heads} if "num_heads" in read_keywords(cls) else {}


def check_width(hidden_size: int, multiple: int, what: str) -> None:
    """Raise `ValueError` unless D is divisible by `multiple`; the error says `what` that is."""
    if hidden_size % multiple:
        raise ValueError(f"hidden_size={hidden_size} must be divisible by {multiple}, {what}.")


def read_keywords(part: type, last: type | None = None) -> dict[str, Parameter]:
    """Return the keywords of the constructor of `part` by name, with their types. If it has
    **options, those of its base class follow, and so on up to `last`, whose **options remain."""
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
    """Return the constructor's signature of a `shell`, with the keywords of `parts` instead of
    **options; `last` is the last base class whose keywords count."""
    parameters = read_keywords(shell, last)
    keywords = {name: p for name, p in parameters.items() if p.kind is Parameter.KEYWORD_ONLY}
    for part in parts if len(keywords) < len(parameters) else ():
        for name, parameter in read_keywords(part).items() if part else ():
            if name not in GIVEN:
                keywords.setdefault(name, parameter)
    return inspect.Signature(sorted(keywords.values(), key=lambda p: p.kind))
