"""The checkpoints that other projects publish: what their tensors are called, and what they mean.

    their tensors -> `recognize`: whose are they? -> `Format.keywords`: sizes from shapes
                  -> `Format.rules`: names and layouts -> tensors of our backbone

A format is a table. Each `Rule` makes one of our tensors from one or more of theirs; what no rule
asks for is unknown, and what a rule asks for in vain is missing. Three layouts recur:

- a convolution that cuts patches, [D, C, p, p], is our linear layer [D, C p p];
- a head's rows are ordered row, column, channel (p, p, C_out) in all of these projects, as ours;
- blocks that they keep as `in_blocks`, `mid_block`, `out_blocks` are one list here.

Their times differ; ours is of order 1 with noise at 1, and `time_scale` is the factor between. What
a factor cannot turn is folded into weights, see `dit`.

rules.py    rules, layouts, sizes read off shapes
dit.py      DiT, SiT, TREAD
uvit.py     U-ViT
dis.py      DiS
drwkv.py    Diffusion-RWKV
"""

from collections.abc import Collection

from tread_zoo.errors import unknown_name
from tread_zoo.training.published.dis import DIS
from tread_zoo.training.published.dit import DIT, SIT, TREAD
from tread_zoo.training.published.drwkv import DRWKV
from tread_zoo.training.published.rules import Choices, Format, Rule, Tensors, add_null_row
from tread_zoo.training.published.uvit import UVIT

__all__ = [
    "FORMATS",
    "Choices",
    "Format",
    "Rule",
    "Tensors",
    "add_null_row",
    "get_format",
    "recognize",
]

FORMATS: dict[str, Format] = {
    "dit": DIT,
    "sit": SIT,
    "tread": TREAD,
    "uvit": UVIT,
    "dis": DIS,
    "drwkv": DRWKV,
}


def get_format(name: str) -> Format:
    """Return the format of that name.

    Raises:
        ValueError: an unknown name; the nearest is suggested.
    """
    if name not in FORMATS:
        raise unknown_name("format", name, FORMATS)
    return FORMATS[name]


def recognize(keys: Collection[str]) -> list[str]:
    """Return the formats whose marks are all there; DiT, SiT and TREAD share theirs."""
    return [name for name, form in FORMATS.items() if set(form.marks) <= set(keys)]
