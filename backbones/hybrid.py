"""Hybrids: blocks of several kinds in a repeated pattern, as linear attention with some softmax
attention between (Kimi Linear, arXiv 2510.26692; Qwen3-Next; Dimba, 2406.01159).

    pattern="gated_deltanet:3,attention:1"    three blocks of delta rules, one of attention, again
    pattern=[{"name": "gated_deltanet", "repeat": 3, "per_channel": True}, {"name": "attention"}]

A name is that of a backbone with a mixer, of this package or of a plug-in; `attention` is that of
`lightning_dit`. The shell is that of LightningDiT, and every block has SwiGLU. A mixer has H heads,
the options that a list gives it, and else its own defaults. With attention alone it is
`lightning_dit`.

What a route's gaps are to it is for each block what they are to its mixer. The first value of
RWKV-7 is that of its first block here; where that lies within a route, the tokens that bypassed it
have zeros for it.

D width, H heads.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, PositiveInt

from backbones.mixers.base import GIVEN, Mixer, read_keywords
from backbones.shells import LightningBackbone
from tread_zoo.errors import unknown_name
from tread_zoo.registry import Entry, available, get_entry

Pattern = str | list[dict[str, Any]]


def find_mixer(name: str) -> type[Mixer]:
    """Return the mixer of a registered backbone.

    Raises:
        ValueError: there is no such backbone, or it has no mixer.
    """
    name = "lightning_dit" if name == "attention" else name
    if not {name, f"{name}_tiny"}.isdisjoint(available("backbone")):
        mixer = getattr(get_entry("backbone", name).target, "mixer", None)
        if mixer is not None:
            found: type[Mixer] = mixer
            return found
    names = [each for each in available("backbone", "*_tiny") if _has_mixer(each)]
    raise unknown_name("pattern", name, ["attention", *(n.removesuffix("_tiny") for n in names)])


def _has_mixer(name: str) -> bool:
    return getattr(get_entry("backbone", name).target, "mixer", None) is not None


def read_pattern(pattern: Pattern) -> list[tuple[type[Mixer], dict[str, Any]]]:
    """Return mixers and their options, block by block, of one period.

    Raises:
        ValueError: an unknown name or option, a value that does not fit, or a count that is none.
    """
    blocks: list[tuple[type[Mixer], dict[str, Any]]] = []
    for part in pattern.split(",") if isinstance(pattern, str) else pattern:
        if isinstance(part, str):
            name, _, repeat = (piece.strip() for piece in part.partition(":"))
            options: dict[str, Any] = {}
        else:
            options = dict(part)
            name, repeat = str(options.pop("name", "")), str(options.pop("repeat", ""))
        mixer = find_mixer(name)
        if repeat and not (repeat.isdecimal() and int(repeat)):
            raise ValueError(f"pattern={pattern!r}: {repeat!r} must be a number of blocks.")
        given = {key: value for key, value in GIVEN.items() if key in read_keywords(mixer)}
        checked = Entry("backbone", name, mixer).complete({**given, **options}, f"pattern.{name}")
        blocks += [(mixer, {key: checked[key] for key in options})] * int(repeat or 1)
    if not blocks:
        raise ValueError(f"pattern={pattern!r} must have a mixer.")
    return blocks


def _check_pattern(pattern: Pattern) -> Pattern:
    read_pattern(pattern)
    return pattern


CheckedPattern = Annotated[Pattern, AfterValidator(_check_pattern)]


class Hybrid(LightningBackbone):
    """A stack of `LightningBlock`s whose mixers follow a pattern.

    Args:
        pattern: mixers, their options and numbers of blocks, repeated to the depth; see the module.
        num_heads: H, of every mixer; hidden_size D is divisible by 4 H.

    Raises:
        ValueError: sizes that do not fit each other, or a pattern that cannot be read.
    """

    default_selector: ClassVar[str] = "rows"

    def __init__(
        self,
        *,
        pattern: CheckedPattern = "gated_deltanet:3,attention:1",
        num_heads: PositiveInt = 6,
        hidden_size: PositiveInt = 384,
        **options: Any,
    ) -> None:
        if hidden_size % (4 * num_heads):
            raise ValueError(
                f"hidden_size={hidden_size} must be divisible by 4 num_heads={4 * num_heads}."
            )
        self._period, self._num_heads = read_pattern(pattern), num_heads
        super().__init__(hidden_size=hidden_size, **options)

    def make_mixer(self, index: int) -> Mixer:
        mixer, options = self._period[index % len(self._period)]
        kinds = [self._period[i % len(self._period)][0] for i in range(index)]
        heads = mixer.options_for_heads(self.hidden_size, self._num_heads)
        made: Mixer = self.make_part(mixer, kinds.count(mixer), **{**heads, **options})
        return made

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **keywords: Any) -> Any:
        """Load weights, also those of older checkpoints, where Mamba-2's mixer lay deeper."""
        renamed = {
            key.replace(".mixer.ssd.", ".mixer."): value for key, value in state_dict.items()
        }
        return super().load_state_dict(renamed, *args, **keywords)
