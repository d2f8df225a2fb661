"""Score a checkpoint: distances to real images and, for digits, agreement with the asked label.

python scripts/evaluate.py checkpoint=runs/digits_dit_tiny_tread_flow_seed0
python scripts/evaluate.py checkpoint=… guidance=sparse guidance.weak_rate=0.8 sampler=dpmpp_2m
python scripts/evaluate.py checkpoint=… evaluation.reference=VIRTUAL_imagenet256_labeled.npz
accelerate launch --multi_gpu scripts/evaluate.py checkpoint=… evaluation.num_images=50000

The record of settings that are not the run's own has a name of its own: none overwrites another.
Several processes share the samples, and the numbers are those of one. See docs/evaluation.md.
"""

import json
import logging
from typing import TYPE_CHECKING, Any, TypedDict

import hydra
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors, register_configs

if TYPE_CHECKING:
    from tread_zoo.diffusion import SamplingOptions
    from tread_zoo.training.restore import Restored

logger = logging.getLogger(__name__)

register_configs()


class Settings(TypedDict):
    """The kinds of configs/evaluate.yaml's own fields."""

    checkpoint: str
    out: str | None
    data: dict[str, Any]
    vae: str | None
    weights: str
    device: str
    precision: str


@hydra.main(version_base="1.3", config_path="../configs", config_name="evaluate")
@clear_errors
def main(config: DictConfig) -> None:
    from tread_zoo.evaluation.evaluate import EvaluationOptions, describe_record, evaluate
    from tread_zoo.evaluation.sharing import end_share, start_share
    from tread_zoo.kernels import set_forms
    from tread_zoo.kinds import check_typed
    from tread_zoo.outputs import check_out_file, write_out_file
    from tread_zoo.runtime import resolve_device
    from tread_zoo.training.restore import restore

    settings = as_keywords(config)
    check_typed(settings, Settings)
    set_forms(settings["kernels"])
    options = EvaluationOptions(**settings["evaluation"])
    share = start_share(resolve_device(settings["device"]))
    run = restore(
        settings["checkpoint"],
        weights=settings["weights"],
        device=settings["device"],
        precision=settings["precision"],
    )
    sampling = run.sampling(settings["sampler"], settings["guidance"])
    out = settings["out"] or run.run_dir / _file_name(run, settings, sampling)
    if share.is_main:
        out = check_out_file("out", out)
    moved = {} if settings["vae"] is None else {"vae": settings["vae"]}
    data = run.data({**settings["data"], **moved})
    data.codec.prepare(next(run.backbone.parameters()).device)
    record = evaluate(
        run.backbone,
        run.objective,
        data,
        sampling,
        options,
        precision=run.precision,
        weak=run.weak(sampling),
        share=share,
    )
    end_share(share)
    if not share.is_main:
        return
    record["protocol"] |= {"weights": settings["weights"], "step": run.checkpoint.step}
    for line in describe_record(record):
        logger.info(line)
    write_out_file(out, json.dumps(record, indent=2))
    logger.info("written to %s", out)


def _file_name(run: "Restored", settings: dict[str, Any], sampling: "SamplingOptions") -> str:
    """Return the name of the record where nobody says: of its own for settings of its own."""
    from tread_zoo.evaluation.naming import score_file, settings_of_score

    changed = {f"data.{k}": v for k, v in settings["data"].items() if k != "path"}
    asked = settings_of_score(
        sampling.as_dict(),
        settings["evaluation"],
        weights=settings["weights"],
        precision=settings["precision"],
        **changed,
    )
    meta = run.checkpoint.meta
    options = meta.get("data_options", {})
    own = settings_of_score(
        run.sampling({}, {}).as_dict(),
        meta.get("evaluation", {}),
        weights="ema",
        precision="auto",
        **{name: options.get(name.removeprefix("data.")) for name in changed},
    )
    return score_file(run.checkpoint.step, asked, own)


if __name__ == "__main__":
    main()
