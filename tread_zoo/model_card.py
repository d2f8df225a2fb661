"""What scripts/push.py makes of a run: a folder for Hugging Face's hub, and its model card.

config.json          what a checkpoint says of the run, without this machine's paths
model.safetensors    its averaged weights
README.md            the model card: recipe, scores with their protocol, FLOPs, licence
samples.png          samples of the same step, where the run has left some
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tread_zoo.backbone import Backbone
from tread_zoo.evaluation.evaluate import describe_record
from tread_zoo.pretrained import WEIGHTS_NAME, build_backbone, write_config
from tread_zoo.routing import build_routing
from tread_zoo.training.checkpoints import FORMAT, Checkpoint, find_checkpoint

TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
_KEPT = ("step", "plugins", "backbone", "config", "data", "images_per_step", "imported")
_OF_THE_MACHINE = ("run_dir", "resume", "overwrite", "tracker", "device")


def write_model_folder(
    path: str | Path,
    out: str | Path | None = None,
    *,
    weights: str = "ema",
    license: str | None = None,
    repo: str | None = None,
) -> Path:
    """Write the folder of a run's newest checkpoint, or of one checkpoint, and return it.

    Args:
        path: as of `find_checkpoint`.
        out: the folder; None is <run>/hub.
        weights: `ema` or `model`.
        license: of the weights, as the hub names it, such as apache-2.0.
        repo: user/name, for the card; None: the folder.

    Raises:
        CheckpointError: there is no checkpoint.
        ValueError: `out` is the folder of a run.
    """
    checkpoint = find_checkpoint(path)
    facts = {key: checkpoint.meta[key] for key in _KEPT if key in checkpoint.meta}
    facts["config"] = {k: v for k, v in facts["config"].items() if k not in _OF_THE_MACHINE}
    file = checkpoint.file(weights)
    digest = checkpoint.meta["sha256"][file.name]
    described = {"format": FORMAT, **_without_paths(facts), "sha256": {WEIGHTS_NAME: digest}}
    folder = write_config(Path(out or checkpoint.run_dir / "hub"), described)
    shutil.copyfile(file, folder / WEIGHTS_NAME)
    picture = checkpoint.run_dir / "samples" / f"step_{checkpoint.step:08d}.png"
    if picture.exists():
        shutil.copyfile(picture, folder / "samples.png")
    records = [
        record
        for record in map(_read, sorted(checkpoint.run_dir.glob("score*.json")))
        if record["protocol"].get("step") == checkpoint.step
        and record["protocol"].get("weights") == weights
    ]
    card = _card(checkpoint, records, picture.exists(), repo or str(folder), license)
    (folder / "README.md").write_text(card + "\n", encoding="utf-8")
    return folder


def _card(
    checkpoint: Checkpoint,
    records: list[dict[str, Any]],
    has_picture: bool,
    name: str,
    license: str | None,
) -> str:
    """Return the model card: the hub's header, and TEMPLATE filled in."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    data = checkpoint.meta.get("data", {}).get("name", "unknown")
    values = records[0]["values"] if records else {}
    results = [
        EvalResult(
            task_type="unconditional-image-generation",
            dataset_type=data,
            dataset_name=data,
            metric_type=metric,
            metric_value=value,
        )
        for metric, value in values.items()
    ]
    header = ModelCardData(
        license=license,
        library_name="tread-zoo",
        tags=["diffusion", "token-routing"],
        model_name=name.rpartition("/")[2],
        eval_results=results or None,
    )
    card = ModelCard.from_template(
        header,
        template_path=str(TEMPLATE),
        name=name,
        has_picture=has_picture,
        recipe=_recipe(checkpoint),
        scores=["\n".join(describe_record(record)) for record in records],
        license=license,
    )
    return str(card)


def _recipe(checkpoint: Checkpoint) -> dict[str, str]:
    """Return what the network is and how it was trained, by topic, in words."""
    meta, facts = checkpoint.meta, _read(checkpoint.run_dir / "facts.json")
    config = meta["config"]
    with torch.device("meta"):
        backbone = build_backbone(meta["backbone"])
    count = sum(parameter.numel() for parameter in backbone.parameters())
    size = "x".join(map(str, [backbone.in_channels, *backbone.input_size]))
    rows = {
        "backbone": f"{backbone.name}, {count / 1e6:.2f} M parameters, input {size}",
        "objective": _words(config["objective"]),
        "sampling": f"{_words(config['sampler'])}; guidance {_words(config['guidance'])}",
    }
    if "imported" in meta:
        rows["imported"] = "from {file}, format {format}".format(**meta["imported"])
    if "training" not in config:
        return rows
    training, data = config["training"], meta["data"]
    rows |= {
        "data": f"{data['name']}, {data['num_images']} images, {data['num_classes']} classes",
        "routing": _routing(config["routing"], backbone),
        "training": f"{checkpoint.step} steps of {meta['images_per_step']} images, averaged "
        f"weights' decay {training['ema_decay']}, label dropout {training['label_dropout']}",
        "optimizer": _words(config["optimizer"]),
    }
    if facts:
        rows["FLOPs"] = (
            f"{facts['flops_routed'] / 1e6:.1f} M per image, forward and backward, of "
            f"{facts['flops_dense'] / 1e6:.1f} M without routing; in all "
            f"{facts['flops_routed'] * meta['images_per_step'] * checkpoint.step:.3g}"
        )
    return rows


def _routing(options: Mapping[str, Any], backbone: Backbone) -> str:
    routing = build_routing(
        **options,
        num_blocks=backbone.num_blocks,
        default_selector=backbone.default_selector,
        default_range=backbone.default_range,
    )
    return routing.describe(backbone.grid)


def _words(part: Mapping[str, Any]) -> str:
    """Return a part as its name and its options."""
    options = [f"{key} {value}" for key, value in part.items() if key != "name"]
    return ", ".join([part["name"], *options])


def _without_paths(value: Any) -> Any:
    """Return plain values with absolute paths cut to their last part: they are of this machine."""
    if isinstance(value, Mapping):
        return {key: _without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_paths(inner) for inner in value]
    if isinstance(value, str) and (os.path.isabs(value) or value.startswith("~")):
        return Path(value).name
    return value


def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return content
