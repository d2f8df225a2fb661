"""Score a checkpoint's samples, or existing images: distances to real ones, label accuracy.

tread-zoo evaluate checkpoint=runs/digits_dit_tiny_tread_flow_seed0
tread-zoo evaluate checkpoint=… guidance=sparse guidance.weak_rate=0.8 sampler=dpmpp_2m
tread-zoo evaluate checkpoint=… weights=ema:0.07        # another average of the weights
tread-zoo evaluate checkpoint=… evaluation.reference=VIRTUAL_imagenet256_labeled.npz
tread-zoo evaluate samples=kept data=digits            # against digits' training part
tread-zoo evaluate samples=theirs.npz evaluation.reference=photos evaluation.metrics=[kid]
accelerate launch --multi_gpu -m tread_zoo evaluate checkpoint=… evaluation.num_images=50000

The record has the values and their protocol; scores by another protocol go to another file.
See docs/evaluation.md.
"""

import json
import logging
from pathlib import Path
from typing import Any

from tread_zoo.checkpoint_config import EvaluateConfig
from tread_zoo.cli import command
from tread_zoo.config import EvaluationConfig
from tread_zoo.fields import check
from tread_zoo.registry import create

logger = logging.getLogger(__name__)


@command("evaluate", EvaluateConfig)
def main(settings: dict[str, Any]) -> None:
    config = check(EvaluateConfig, settings)  # before torch is imported, which takes seconds
    from tread_zoo.evaluation.evaluate import describe_record
    from tread_zoo.evaluation.protocol import Protocol
    from tread_zoo.evaluation.score import distributed
    from tread_zoo.kernels import set_forms
    from tread_zoo.runtime import resolve_device

    set_forms(config.kernels)
    if config.out is not None:
        Path(config.out).expanduser().parent.mkdir(parents=True, exist_ok=True)
    with distributed(resolve_device(config.device)) as is_main:
        record, name = _score_run(config) if config.samples is None else _score_images(config)
    if not is_main:
        return
    for line in describe_record(record):
        logger.info(line)
    digest = Protocol.of(record).digest
    out = Path(config.out or name.format(digest=digest)).expanduser()
    out.parent.mkdir(parents=True, exist_ok=True)  # a shipped network has no folder
    out.write_text(json.dumps(record, indent=2), encoding="utf-8")
    logger.info("written to %s", out)


def _score_run(config: EvaluateConfig) -> tuple[dict[str, Any], str]:
    """Return a record with the scores of a checkpoint's samples, and the path of the file for it,
    in which {digest} stands for the digest of the record's protocol."""
    from tread_zoo.evaluation.evaluate import check_kept_images, evaluate
    from tread_zoo.runs.restore import restore

    assert config.checkpoint is not None
    run = restore(
        config.checkpoint, weights=config.weights, device=config.device, precision=config.precision
    )
    sampling = run.sampling(config.sampler, config.guidance)
    weak = run.weak(sampling)
    moved = {} if config.vae is None else {"vae": config.vae}
    data = run.data({**config.data, **moved})
    data.codec.prepare(next(run.backbone.parameters()).device)
    own = {**run.config.get("evaluation", {}), "keep_images": None}  # an imported run has none
    evaluation = check(EvaluationConfig, {**own, **config.evaluation}, "evaluation")
    check_kept_images(evaluation)
    record = evaluate(
        run.backbone, run.objective, data, sampling, evaluation, precision=run.precision,
        routing=run.routing, weak=None if weak is None else weak.backbone, weights=config.weights,
        step=run.checkpoint.step,
    )  # fmt: skip
    return record, str(run.run_dir / f"score_{run.checkpoint.step:08d}_{{digest}}.json")


def _score_images(config: EvaluateConfig) -> tuple[dict[str, Any], str]:
    """Return a record with the scores of existing images, and the path of the file for it."""
    from tread_zoo.evaluation.evaluate import evaluate_images
    from tread_zoo.runtime import resolve_device

    assert config.samples is not None
    device = resolve_device(config.device)
    data = create("data", config.data) if config.data else None
    if data is not None:
        data.codec.prepare(device)
    evaluation = check(EvaluationConfig, config.evaluation, "evaluation")
    record = evaluate_images(config.samples, data, evaluation, device)
    place = Path(config.samples).expanduser().resolve()
    return record, str(place.with_name(f"{place.name}_score_{{digest}}.json"))


if __name__ == "__main__":
    main()
