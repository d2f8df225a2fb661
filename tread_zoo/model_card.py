"""The folder that tread-zoo push uploads to Hugging Face's hub, with its model card.

config.json          the checkpoint's metadata, without this machine's paths
model.safetensors    the weights, by default averaged ones
README.md            the model card: recipe, FLOPs, scores with their protocol, licence
samples.png          samples of the same step, if the run has some
samples_2.png …      samples that tread-zoo sample made in the run's folder, such as guided ones
"""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import torch

from tread_zoo.comparison.report import as_markdown
from tread_zoo.comparison.results import flops_until
from tread_zoo.config import bookkeeping_fields
from tread_zoo.contract.backbone import Backbone
from tread_zoo.data.files import printable, without_paths, write_text
from tread_zoo.evaluation.evaluate import describe_record, describe_sampling
from tread_zoo.evaluation.features import INCEPTION
from tread_zoo.evaluation.sample_folder import RECORD
from tread_zoo.registry import create
from tread_zoo.routing import Stack
from tread_zoo.runs.checkpoint import Checkpoint, find_checkpoint, load_backbone
from tread_zoo.runs.hub import write_folder
from tread_zoo.runs.metadata import FORMAT
from tread_zoo.runs.weights import check_finite

TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
SHOWN_CLASSES = 100  # config.json has all
_KEPT = ("step", "plugins", "backbone", "config", "data", "images_per_step", "imported")


def write_model_folder(
    path: str | Path,
    out: str | Path | None = None,
    *,
    weights: str = "ema",
    half: bool = False,
    license: str | None = None,
    repo: str | None = None,
) -> Path:
    """Write the folder for the hub from a checkpoint, and return it.

    Args:
        path: see `find_checkpoint`.
        out: the folder; None is <run>/hub.
        weights: see `load_backbone`.
        half: store the weights as float16.
        license: licence of the weights by its name on the hub, such as apache-2.0. None takes the
            licence of the project they were imported from. A non-commercial one cannot be changed.
        repo: user/name, the title of the card; None: `out` or, without that, the run's folder.

    Raises:
        CheckpointError: there is no checkpoint, or its weights do not fit or are not finite.
        ValueError: `out` is the folder of a run, or the licence cannot be given.
    """
    from huggingface_hub import ModelCard

    checkpoint = find_checkpoint(path)
    backbone = load_backbone(checkpoint, weights)
    run, folder = checkpoint.run_dir, Path(out or checkpoint.run_dir / "hub")
    license = _keep_license(checkpoint.meta.get("imported", {}), license)
    metadata = without_paths({k: checkpoint.meta[k] for k in _KEPT if k in checkpoint.meta})
    settings = metadata["config"].items()
    metadata["config"] = {k: v for k, v in settings if k not in bookkeeping_fields()}
    metadata |= {"format": FORMAT, "weights": weights}
    tensors = backbone.state_dict()
    if half:
        tensors = {k: x.half() if x.dtype == torch.float32 else x for k, x in tensors.items()}
        check_finite(tensors, checkpoint.path)
    write_folder(folder, tensors, metadata)
    picture = run / "samples" / f"step_{checkpoint.step:08d}.png"
    has_picture = weights == "ema" and picture.exists()  # a run samples with these
    if has_picture:
        shutil.copyfile(picture, folder / "samples.png")
    grids = _copy_grids(run, folder, step=checkpoint.step, weights=weights)
    records = _records(run, step=checkpoint.step, weights=weights)
    name = repo or without_paths(str(out or run))
    header = _header(checkpoint, backbone, records[:1], name, license)
    card = ModelCard.from_template(
        header, template_path=str(TEMPLATE), name=as_markdown(name), has_picture=has_picture,
        grids=list(map(as_markdown, grids)), license=as_markdown(license or "Not stated."),
        checkpoint=printable(shlex.quote(f"checkpoint={name}")), weights=weights,
        quoted_name=json.dumps(name, ensure_ascii=False),
        recipe={k: as_markdown(v) for k, v in _recipe(checkpoint, backbone, weights).items()},
        scores=[
            "\n".join(map(printable, describe_record(without_paths(record)))) for record in records
        ],
    )  # fmt: skip
    write_text(folder / "README.md", f"{card}\n")
    return folder


def _records(run: Path, **scored: Any) -> list[dict[str, Any]]:
    """Return the records of scores in the folder `run` whose protocols have all the values in
    `scored`."""
    files = sorted(run.glob("score*.json"))
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    records = [each for each in records if scored.items() <= each["protocol"].items()]
    for record in records[1:]:
        record.pop("contributions", None)  # equal to the first record's
    return records


def _copy_grids(run: Path, folder: Path, *, step: int, weights: str) -> list[str]:
    """Copy to `folder` the grids that `tread-zoo sample` made in the folder `run` with the weights
    `weights`, such as "ema", of training step `step`: one for each choice of sampler and guidance.
    Return these choices as texts. Grids of one class, of prompts or of contexts are left out."""
    shown, found = {"step": step, "weights": weights, "label": None, "contexts": None}, list[str]()
    for grid in sorted(run.glob("generated/*_grid.png")):
        file = grid.with_name(grid.name.removesuffix("_grid.png")) / RECORD
        record = json.loads(file.read_text(encoding="utf-8"))
        words = describe_sampling({**record, **record["settings"]})
        is_shown = shown.items() <= record["settings"].items() and words not in found
        if is_shown and "prompt" not in record["settings"]:
            found.append(words)
            shutil.copyfile(grid, folder / f"samples_{len(found) + 1}.png")
    return found


def _header(
    checkpoint: Checkpoint,
    backbone: Backbone,
    records: list[dict[str, Any]],
    name: str,
    license: str | None,
) -> Any:
    """Return the card's metadata for the hub, a `huggingface_hub.ModelCardData`, with the scores in
    `records` as results, and the last part of `name` as the model's name."""
    from huggingface_hub import EvalResult, ModelCardData

    data = without_paths(checkpoint.data).get("name", "unknown")
    source = checkpoint.meta["config"].get("data", {})
    on_hub = source.get("name") == "hf" and not Path(source["path"]).expanduser().exists()
    task = _task(checkpoint, backbone)
    return ModelCardData(
        license=license, library_name="tread-zoo", tags=["diffusion", "token-routing", task],
        datasets=[source["path"]] if on_hub and not Path(source["path"]).is_absolute() else None,
        model_name=name.rpartition("/")[2],
        eval_results=[
            EvalResult(task, data, data, _metric_type(metric, record), float(f"{value:.3g}"))
            for record in records for metric, value in record["values"].items()
        ] or None,
    )  # fmt: skip


def _task(checkpoint: Checkpoint, backbone: Backbone) -> str:
    """Return the hub's name of the network's task, such as text-to-image."""
    if "text_encoder" in checkpoint.data:
        return "text-to-image"
    kind = "class-conditional" if backbone.num_classes else "conditional"
    return f"{kind if backbone.is_conditional else 'unconditional'}-image-generation"


def _metric_type(metric: str, record: dict[str, Any]) -> str:
    """Return a metric's name for the hub, where fid and kid mean distances between Inception's
    features. If the scores in `record` are from another extractor, fid and kid are renamed."""
    if (record["protocol"].get("extractor") or INCEPTION).startswith(INCEPTION):
        return metric
    others = {"fid": "frechet-distance", "kid": "kernel-distance", "kid_std": "kernel-distance-std"}
    return others.get(metric, metric)


def _keep_license(imported: dict[str, str], license: str | None) -> str | None:
    """Return the licence of the weights: `license` or, if None, that of the project that they were
    imported from, in the record `imported`. Raises ValueError if `license` would replace a
    non-commercial one."""
    origin = imported.get("license")
    if origin and "-nc" in origin and license not in (None, origin):
        raise ValueError(
            f"license={license}, but {imported['project']} published these weights under {origin}, "
            "which forbids commercial use: leave license out."
        )
    return license or origin


def _recipe(checkpoint: Checkpoint, backbone: Backbone, weights: str) -> dict[str, str]:
    """Return texts that describe the network and its training, by topic, such as "optimizer"."""
    meta, config = checkpoint.meta, without_paths(checkpoint.meta["config"])
    file = checkpoint.run_dir / "facts.json"
    count = sum(parameter.numel() for parameter in backbone.parameters())
    size = "x".join(map(str, [backbone.in_channels, *backbone.input_size]))
    rows = {"backbone": f"{backbone.name}, {count / 1e6:.2f} M parameters, input {size}"}
    for kind in ("objective", "optimizer", "sampler", "guidance"):
        options = dict(config.get(kind, {}))
        words = [options.pop("name", ""), *(f"{key} {value}" for key, value in options.items())]
        rows |= {kind: ", ".join(words)} if kind in config else {}
    if "imported" in meta:
        rows["imported"] = "{file}, format {format}".format(**meta["imported"])
        if "project" in meta["imported"]:
            rows["data"] = "as {project} says; the file does not name it".format(**meta["imported"])
    if config.get("init_from"):
        rows["starts from"] = Path(config["init_from"]).name
    if "routing" in config:
        rows["routing"] = create("routing", config["routing"]).describe(Stack.of(backbone))
        source = [f"{key} {value}" for key, value in config["data"].items() if value is not None]
        rows["data"] = "{name}, {num_images} images, {num_classes} classes".format(**meta["data"])
        rows["source of the data"] = ", ".join(source).removeprefix("name ")
        if names := meta["data"].get("class_names"):
            words = [f"{number} {name}" for number, name in enumerate(names[:SHOWN_CLASSES])]
            rows["classes"] = ", ".join([*words, "…"] if len(names) > SHOWN_CLASSES else words)
        rows["training"] = f"{checkpoint.step} steps of {meta['images_per_step']} images"
    if file.exists():
        flops = json.loads(file.read_text(encoding="utf-8"))
        rows["FLOPs"] = (
            f"{flops['flops_routed'] / 1e6:.1f} M per image, forward and backward, of "
            f"{flops['flops_dense'] / 1e6:.1f} M without routing; in total "
            f"{flops_until(checkpoint.step, flops):.3g}"
        )
    return rows | {"weights": weights}
