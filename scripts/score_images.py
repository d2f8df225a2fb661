"""Score images that lie there: a folder of pictures or an .npz of ADM's, ours or anyone's.

python scripts/score_images.py samples=kept data=digits            # against data's training part
python scripts/score_images.py samples=a.npz evaluation.reference=VIRTUAL_imagenet256_labeled.npz
python scripts/score_images.py samples=theirs evaluation.reference=photos evaluation.metrics=[kid]
accelerate launch --multi_gpu scripts/score_images.py samples=… evaluation.reference=…

The numbers are those that scripts/evaluate.py gives for the same images. See docs/evaluation.md.
"""

import json
import logging

import hydra
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors

logger = logging.getLogger(__name__)


@hydra.main(version_base="1.3", config_path="../configs", config_name="score_images")
@clear_errors
def main(config: DictConfig) -> None:
    from tread_zoo.data import build_data
    from tread_zoo.evaluation.evaluate import EvaluationOptions, describe_record
    from tread_zoo.evaluation.score_images import open_samples, record_path, score_images
    from tread_zoo.evaluation.sharing import end_share, start_share
    from tread_zoo.outputs import check_out_file, write_out_file
    from tread_zoo.runtime import resolve_device

    settings = as_keywords(config)
    device, asked = resolve_device(settings["device"]), settings["evaluation"]
    share = start_share(device)
    data = build_data(**settings["data"]) if "data" in settings else None
    if data is not None:
        data.codec.prepare(device)
    samples = open_samples(settings["samples"], data)
    if asked["num_images"] is None:
        asked["num_images"] = len(samples.source)
    options = EvaluationOptions(**asked)
    out = settings["out"] or record_path(settings["samples"])
    if share.is_main:
        out = check_out_file("out", out)
    record = score_images(samples, options, data, device=device, share=share)
    end_share(share)
    if not share.is_main:
        return
    for line in describe_record(record):
        logger.info(line)
    write_out_file(out, json.dumps(record, indent=2))
    logger.info("written to %s", out)


if __name__ == "__main__":
    main()
