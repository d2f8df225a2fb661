"""Backbones from registered names, and from their descriptions in files.

backbone = create_backbone("mamba_tiny", input_size=32, in_channels=3, num_classes=10)
build_backbone(describe_backbone(backbone))         # the same with fresh weights
"""

import json
from collections.abc import Mapping
from typing import Any

import torch

from tread_zoo.contract.backbone import Backbone
from tread_zoo.registry import create, describe_part, get_entry
from tread_zoo.routing import Method, Stack


def create_backbone(
    name: str,
    *,
    input_size: int | tuple[int, int] = 32,
    in_channels: int = 4,
    num_classes: int = 1000,
    context_length: int = 0,
    context_size: int = 0,
    **options: Any,
) -> Backbone:
    """Return the backbone `name` with fresh weights from torch's global generator; by default for
    latents of ImageNet at 256 pixels.

    Args:
        input_size: height and width of its input, one integer or two.
        in_channels: channels of its input.
        num_classes: number of labels; 0 makes it unconditional.
        context_length, context_size: number and width of the embeddings in a context, see
            `Backbone.add_contexts`; 0: no contexts.
        options: any other keyword of its constructor, which replaces the preset's value.

    Raises:
        ValueError: a name or keyword is unknown (the nearest is suggested), a value is wrong, or
            contexts are given to a backbone that takes none or that has classes.
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


def add_routing(backbone: Backbone, method: Method) -> None:
    """Add the weights of a routing method, if it has any, to a network as `backbone.routing`. They
    are drawn from torch's global generator.

    Raises:
        ValueError: the method does not fit the network, or the network already has such weights.
    """
    if backbone.routing is not None:
        raise ValueError(f"this network has weights of routing={backbone.routing_config['name']}.")
    module = method.build(Stack.of(backbone))
    if module is not None:
        backbone.routing = module.to(next(backbone.parameters()))
        backbone.routing_config = json.loads(json.dumps(describe_part("routing", method)))


def describe_backbone(backbone: Backbone) -> dict[str, Any]:
    """Return a description for `build_backbone`: `name`, `config`, and `routing` if a method added
    weights to the backbone."""
    described: dict[str, Any] = {"name": backbone.name, "config": backbone.config}
    return described | ({"routing": backbone.routing_config} if backbone.routing_config else {})


def build_backbone(described: Mapping[str, Any]) -> Backbone:
    """Return the backbone that `describe_backbone` described, with fresh weights."""
    backbone = create_backbone(described["name"], **described["config"])
    if "routing" in described:
        add_routing(backbone, create("routing", described["routing"]))
    return backbone


def at_size(backbone: Backbone, height: int, width: int) -> Backbone:
    """Return a network with the same weights for inputs of `height` x `width`, or `backbone` itself
    if it has this size.

    Nothing is interpolated: only networks that compute positions from the grid have other sizes.

    Raises:
        ValueError: weights belong to single positions, such as learned ones; or the size is not
            divisible by the patches.
    """
    if (height, width) == backbone.input_size:
        return backbone
    described, weights = describe_backbone(backbone), backbone.state_dict()
    with torch.device("meta"):  # twice the size: another grid may have as many positions
        larger = build_backbone(_with_size(described, *(2 * side for side in backbone.input_size)))
    shapes = {name: tensor.shape for name, tensor in larger.state_dict().items()}
    fixed = [name for name, tensor in weights.items() if tensor.shape != shapes[name]]
    if fixed:
        raise ValueError(
            f"{backbone.name} has weights for each position of its {backbone.input_size[0]}x"
            f"{backbone.input_size[1]} input ({', '.join(fixed)}), so it has no other size. dit, "
            "sit, lightning_dit, linear_dit, gla, gated_deltanet, kda, rwkv7 and hybrid have any."
        )
    other = build_backbone(_with_size(described, height, width)).to(next(backbone.parameters()))
    other.load_state_dict(weights)
    return other.train(backbone.training)


def _with_size(described: Mapping[str, Any], height: int, width: int) -> dict[str, Any]:
    return {**described, "config": {**described["config"], "input_size": [height, width]}}
