"""List the backbones, the routing methods, and the trained networks that come with the package.

tread-zoo list
tread-zoo list pattern='mamba*' plugins=[my_plugin]
"""

import re
from collections import defaultdict
from typing import Any

from pydantic.dataclasses import dataclass

from tread_zoo import available, list_backbones
from tread_zoo.cli import command
from tread_zoo.fields import OPTIONS, check
from tread_zoo.registry import get_entry

SIZE = re.compile(r"_(tiny|matched_[a-z]+|[a-z]+_\d+)$")  # of a name, as in dit_b_2


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class ListConfig:
    """What tread-zoo list shows.

    Args:
        plugins: modules that register parts.
        pattern: of the names, as mamba*.
    """

    plugins: tuple[str, ...] = ()
    pattern: str = "*"


@command("list", ListConfig)
def main(settings: dict[str, Any]) -> None:
    config = check(ListConfig, settings)
    print("Backbones, backbone=NAME or NAME_SIZE")
    sizes = defaultdict[str, list[str]](list)
    for name in list_backbones(config.pattern):
        sizes[SIZE.sub("", name)].append(name)
    for name, variants in sizes.items():
        print(f"  {name:17s} {_summary('backbone', variants[-1])}")
        print(f"  {'':17s}   {', '.join(one.removeprefix(f'{name}_') for one in variants)}")
    print("\nRouting methods, routing=NAME")
    for name in available("routing", config.pattern):
        print(f"  {name:17s} {_summary('routing', name)}")
    shipped = ", ".join(list_backbones(config.pattern, pretrained=True))
    print(f"\nTrained networks, checkpoint=NAME or load_pretrained(NAME)\n  {shipped or 'none'}")


def _summary(kind: str, name: str) -> str:
    """Return the first line of a part's documentation."""
    return (get_entry(kind, name).target.__doc__ or "").strip().partition("\n")[0]


if __name__ == "__main__":
    main()
