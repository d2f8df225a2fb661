"""Where to route: how much each block of a trained network changes its tokens.

python scripts/probe_routes.py checkpoint=runs/digits_dit_tiny_none_flow_seed0
python scripts/probe_routes.py checkpoint=… probe.measure=cka probe.selection_rate=0.75

Prints the likeness of the states between blocks, draws it as placement.png, and proposes a route
with the FLOPs that it saves; placement.json has every number. The rule is at the top of
tread_zoo/evaluation/placement.py. A dense run tells most: a routed one has learnt its own route.
"""

import json
import logging

import hydra
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors, register_configs

logger = logging.getLogger(__name__)

register_configs()


@hydra.main(version_base="1.3", config_path="../configs", config_name="probe_routes")
@clear_errors
def main(config: DictConfig) -> None:
    from tread_zoo.evaluation.pictures import plot_similarity
    from tread_zoo.evaluation.placement import (
        PlacementOptions,
        describe_placement,
        probe_placement,
    )
    from tread_zoo.kernels import set_forms
    from tread_zoo.outputs import check_out_folder, write_out_file
    from tread_zoo.training.restore import restore

    settings = as_keywords(config)
    set_forms(settings["kernels"])
    options = PlacementOptions(**settings["probe"])
    run = restore(
        settings["checkpoint"],
        weights=settings["weights"],
        device=settings["device"],
        precision=settings["precision"],
    )
    out = check_out_folder("out", settings["out"] or run.run_dir / "placement")
    data = run.data(settings["data"]) if run.has_data else None
    record = probe_placement(run.backbone, run.objective, data, options, precision=run.precision)
    record |= {"weights": settings["weights"], "step": run.checkpoint.step}
    for line in describe_placement(record):
        logger.info("%s", line)
    write_out_file(out / "placement.json", json.dumps(record, indent=2))
    route = record["route"]
    plot_similarity(
        record["mean_similarity"],
        record["changes"],
        (route["start"], route["end"]),
        out / "placement.png",
        title=f"{record['backbone']}, step {record['step']}: {record['measure']} of token states",
    )
    logger.info("written to %s: placement.png, placement.json", out)


if __name__ == "__main__":
    main()
