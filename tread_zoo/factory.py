"""Backbones by name, and by what a file says of one.

backbone = create_backbone("mamba_tiny", input_size=32, in_channels=3, num_classes=10)
build_backbone(describe_backbone(backbone))         # its architecture, anew
"""

from collections.abc import Mapping
from typing import Any

from tread_zoo.contract.backbone import Backbone
from tread_zoo.registry import get_entry


def create_backbone(
    name: str,
    *,
    input_size: int | tuple[int, int],
    in_channels: int,
    num_classes: int,
    context_length: int = 0,
    context_size: int = 0,
    **options: Any,
) -> Backbone:
    """Return the backbone `name` with fresh weights from torch's global generator.

    Args:
        input_size: height and width of its input, one integer or two.
        in_channels: channels of its input.
        num_classes: number of labels; 0 makes it unconditional.
        context_length, context_size: of contexts, see `Backbone.add_contexts`; 0 and 0 without.
        options: any other keyword of its constructor, in place of the preset's value.

    Raises:
        ValueError: an unknown name or keyword (the nearest is suggested), contexts for one that
            takes none or beside classes, or a value that it refuses.
    """
    entry = get_entry("backbone", name)
    sizes = {"input_size": input_size, "in_channels": in_channels, "num_classes": num_classes}
    config: dict[str, Any] = {**sizes, **entry.complete(options)}
    backbone: Backbone = entry.target(**config)
    if context_length or context_size:
        backbone.add_contexts(context_length, context_size)
        config |= {"context_length": context_length, "context_size": context_size}
    backbone.name, backbone.config = entry.name, config
    return backbone


def describe_backbone(backbone: Backbone) -> dict[str, Any]:
    """Return what `build_backbone` takes: `name`, `config`, and what was added to it, if any."""
    described: dict[str, Any] = {"name": backbone.name, "config": backbone.config}
    for key, ranges in (("fusions", backbone.fused_ranges), ("masks", backbone.masked_ranges)):
        if ranges:
            described[key] = [list(pair) for pair in ranges]
    if backbone.bypassed != "dense":
        described["bypassed"] = backbone.bypassed
    return described


def build_backbone(described: Mapping[str, Any]) -> Backbone:
    """Return the backbone that `describe_backbone` described, with fresh weights."""
    backbone = create_backbone(described["name"], **described["config"])
    backbone.add_fusions(described.get("fusions", ()), described.get("bypassed", "dense"))
    backbone.add_mask_tokens(described.get("masks", ()))
    return backbone
