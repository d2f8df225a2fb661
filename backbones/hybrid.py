"""Hybrids: blocks of several kinds in a repeated pattern, such as linear attention with softmax
attention in some blocks (Kimi Linear, arXiv 2510.26692; Qwen3-Next; Dimba, 2406.01159).

    pattern="gated_deltanet:3,attention:1"    three blocks of delta rules, then one of attention
    pattern=[{"name": "gated_deltanet", "repeat": 3, "per_channel": True}, {"name": "attention"}]

The pattern is repeated up to the depth. A name is any registered backbone with a mixer, also from a
plug-in; `attention` is the mixer of `lightning_dit`. All else is LightningDiT's, and every block
has SwiGLU. A mixer that has heads gets H of them; `Mixer.options_for_heads` also sets widths that
go with these. Options in the list replace all this, and the others have the mixer's defaults. With
attention only, this is `lightning_dit`.

All RWKV-7 blocks share v_1, the values of the first of them. If a route contains that first block,
v_1 is zero for tokens that bypass the route.

D width, H heads.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, PositiveInt

from backbones.mixers.base import GIVEN, Mixer, check_width, read_keywords
from backbones.shells import LightningBackbone
from tread_zoo.errors import unknown_name
from tread_zoo.registry import Entry, available, get_entry

Pattern = str | list[dict[str, Any]]


def find_mixer(name: str) -> type[Mixer]:
    """Return the mixer class of the backbone that is registered as `name` or `name`_tiny;
    `attention` means that of `lightning_dit_tiny`.

    Raises:
        ValueError: there is no such backbone, or it has no mixer.
    """
    targets = {each: get_entry("backbone", each).target for each in available("backbone")}
    mixers = {each: target.mixer for each, target in targets.items() if hasattr(target, "mixer")}
    mixers["attention"] = mixers["lightning_dit_tiny"]
    mixer: type[Mixer] | None = mixers.get(name) or mixers.get(f"{name}_tiny")
    if mixer is None:
        names = [n.removesuffix("_tiny") for n, m in mixers.items() if m and "_tiny" in n]
        raise unknown_name("pattern", name, ["attention", *names])
    return mixer


def read_pattern(pattern: Pattern) -> list[tuple[type[Mixer], dict[str, Any]]]:
    """Return (class of the mixer, its options by name) for each block of `pattern`, which the
    network repeats up to its depth; `Hybrid` explains patterns.

    Raises:
        ValueError: a name or option is unknown, or a value or number of blocks is wrong.
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
    """LightningDiT with different mixers in its blocks, such as delta rules and some attention.

    Args:
        pattern: mixers and their numbers of blocks, as in gated_deltanet:3,attention:1, or a list
            that also has the mixers' options; repeated up to the depth.
        num_heads: number of heads of mixers that have heads, H; hidden_size D must be divisible
            by 4 H.
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
        check_width(hidden_size, 4 * num_heads, "4 * num_heads")
        self._period, self._num_heads = read_pattern(pattern), num_heads
        super().__init__(hidden_size=hidden_size, **options)

    @classmethod
    def used_parts(cls, options: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return ("backbone", name) for each name in the `pattern` of this backbone's `options`,
        except `attention`."""
        pattern = options.get("pattern", "")
        parts = pattern.split(",") if isinstance(pattern, str) else [p["name"] for p in pattern]
        names = [part.partition(":")[0].strip() for part in parts]
        return [("backbone", name) for name in names if name not in ("", "attention")]

    def make_mixer(self, index: int) -> Mixer:
        mixer, options = self._period[index % len(self._period)]
        kinds = [self._period[i % len(self._period)][0] for i in range(index)]
        heads = mixer.options_for_heads(self.hidden_size, self._num_heads)
        return self.make_part(mixer, kinds.count(mixer), **{**heads, **options})
