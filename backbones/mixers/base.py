"""What a mixer is, and how a row's options are read off the constructors of its parts.

B batch, K tokens present, D width, V width of a first value.
"""

import inspect
from inspect import Parameter
from typing import Any, ClassVar, get_type_hints

from torch import nn

from tread_zoo.contract.backbone import Layout

# What a shell gives to a part that names it, with a value that any part takes.
GIVEN: dict[str, Any] = {"hidden_size": 1, "grid": (1, 1), "index": 0}


class Mixer(nn.Module):
    """Mixes tokens [B, K, D] -> [B, K, D], which stand in raster order before and after.

        forward(x, layout) -> mixed tokens

    A shell gives the constructor those of `hidden_size`, `grid` (h, w of the full image) and
    `index` of the block that it names. Its other keywords are options of every row that has the
    mixer, with their annotations and defaults.

    A mixer with a `value_size` V shares the values of one block, the first value [B, K, V], with
    all later ones: forward(x, layout, first_value) -> (mixed tokens, the first value if this mixer
    sets it, else None).

    Attributes:
        default_selector: of its rows, see `Backbone`.
        depends_on: see `Backbone`; the constructor sets it where it depends on an option.
        value_size: V; 0: none.
    """

    default_selector: ClassVar[str] = "random"
    depends_on: tuple[str, ...] = ()
    value_size: int = 0

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        signature = inspect.Signature(list(read_keywords(cls).values()))
        cls.__signature__ = signature  # type: ignore[attr-defined]

    def prepare(self, layout: Layout) -> Any:
        """Return what `forward` gets in place of the layout. It runs ahead of each block, outside
        of compiled code, so that what it finds once for a layout it can keep in `layout.cache`."""
        return layout

    def initialize(self, num_blocks: int) -> None:
        """Set what differs from the shell, which has set its linear layers and left norms at 1."""

    @classmethod
    def options_for_heads(cls, hidden_size: int, num_heads: int) -> dict[str, Any]:
        """Return the options that give it `num_heads` heads, in a network of several mixers."""
        return {"num_heads": num_heads} if "num_heads" in read_keywords(cls) else {}


def read_keywords(part: type, last: type | None = None) -> dict[str, Parameter]:
    """Return the keywords of a class's constructor by name, with their types.

    A constructor that takes **options hands them on: those of the next class in line are keywords
    too, up to that of `last`. If the last one takes any, **options is a keyword of that kind.
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
        except NameError:  # types that are imported for a type checker alone
            hints = {}
        _, *given = inspect.signature(vars(base)["__init__"]).parameters.values()
        others = [p for p in given if p.kind is Parameter.VAR_KEYWORD]
        named = {
            p.name: p.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints.get(p.name, Any))
            for p in given
            if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        }
        keywords = {**named, **keywords}  # what a class says of a keyword goes before its base
        if base is last or not others:
            break
    return {**keywords, **{p.name: p for p in others}}


def derive_signature(shell: type, last: type, *parts: type | None) -> inspect.Signature:
    """Return the signature of a shell's constructor: its own keywords, and in place of the
    **options that it takes those of its parts."""
    parameters = read_keywords(shell, last)
    keywords = {name: p for name, p in parameters.items() if p.kind is Parameter.KEYWORD_ONLY}
    for part in parts if len(keywords) < len(parameters) else ():
        for name, parameter in read_keywords(part).items() if part else ():
            if name not in GIVEN:
                keywords.setdefault(name, parameter)
    return inspect.Signature(sorted(keywords.values(), key=lambda p: p.kind))
