"""Print every registered backbone: parameters, FLOPs of a forward pass, tokens, default routing.

python scripts/list_backbones.py
python scripts/list_backbones.py pattern='*_tiny' input_size=8 in_channels=1 num_classes=10

Nothing is computed: the networks are built and traced without data.
"""

import hydra
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors


@hydra.main(version_base="1.3", config_path="../configs", config_name="list_backbones")
@clear_errors
def main(config: DictConfig) -> None:
    import torch

    from tread_zoo import create_backbone, list_backbones
    from tread_zoo.evaluation.flops import count_flops
    from tread_zoo.routing import build_routing
    from tread_zoo.seeding import make_generator

    settings = as_keywords(config)
    names = list_backbones(settings["pattern"])
    if not names:
        raise ValueError(f"pattern={settings['pattern']!r} matches no backbone; try pattern='*'.")
    columns = ("M params", "GFLOPs", "routed", "ratio", "tokens", "extra", "blocks", "route")
    print(f"{'backbone':16s}" + "".join(f"{c:>9s}" for c in columns) + "  selector")
    for name in names:
        with torch.device("meta"):
            network = create_backbone(
                name,
                input_size=settings["input_size"],
                in_channels=settings["in_channels"],
                num_classes=settings["num_classes"],
            )
        routing = build_routing(
            "tread",
            num_blocks=network.num_blocks,
            default_selector=network.default_selector,
            default_range=network.default_range,
            selection_rate=settings["selection_rate"],
        )
        routes = routing.draw(1, network.grid, make_generator("list", 0))
        dense, routed = count_flops(network), count_flops(network, routes=routes)
        millions = sum(p.numel() for p in network.parameters()) / 1e6
        (plan,) = routing.plans
        print(
            f"{name:16s}{millions:9.2f}{dense / 1e9:9.3f}{routed / 1e9:9.3f}{routed / dense:9.3f}"
            f"{network.num_tokens:9d}{network.num_extra_tokens:9d}{network.num_blocks:9d}"
            f"{f'{plan.start}:{plan.end}':>9s}  {network.default_selector}"
        )


if __name__ == "__main__":
    main()
