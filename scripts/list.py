"""List the backbones, the routing methods, and the trained networks that come with the package.

tread-zoo list
tread-zoo list pattern='mamba*' plugins=[my_plugin]
"""

from typing import Any

from pydantic.dataclasses import dataclass

from tread_zoo.cli import command
from tread_zoo.fields import OPTIONS, check
from tread_zoo.help import group
from tread_zoo.registry import list_backbones


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class ListConfig:
    """What tread-zoo list shows.

    Args:
        plugins: modules that register more backbones and methods.
        pattern: which names to list, such as mamba*; * is all.
    """

    plugins: tuple[str, ...] = ()
    pattern: str = "*"


@command("list", ListConfig)
def main(settings: dict[str, Any]) -> None:
    pattern = check(ListConfig, settings).pattern
    print(f"{group('backbone', pattern)}\n\n{group('routing', pattern)}")
    shipped = ", ".join(list_backbones(pattern, pretrained=True))
    print(f"\nTrained networks, checkpoint=NAME or load_pretrained(NAME)\n  {shipped or 'none'}")


if __name__ == "__main__":
    main()
