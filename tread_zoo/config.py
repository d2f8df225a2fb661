"""The configuration of a run: one tree of settings, checked only here.

    config = make_config(backbone="dit_tiny", routing={"selection_rate": 0.75}, seed=1)

Types, ranges and unknown names are checked when a configuration is made. Parts (`backbone`,
`objective`, …) are given as a name or as a mapping with `name` and options. They are kept as
mappings with all options, so configurations compare with `==`. Checkpoints store the result of
`as_dict`.

Fields marked `BOOKKEEPING` do not change what a run computes, such as where it writes and how often
it reports.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, TypedDict, Unpack

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from pydantic.dataclasses import dataclass

from tread_zoo.credentials import without_credentials
from tread_zoo.errors import unknown_field
from tread_zoo.fields import (
    BOOKKEEPING,
    OPTIONS,
    RARE,
    Auto,
    Device,
    Fraction,
    check,
    default_fields,
    walk,
)
from tread_zoo.registry import KINDS, complete, get_entry, plugins_of, split

LONGEST_NAME = 150  # bytes of a file name; file systems take 255


def part_type(name: str) -> Any:
    """Return the type of a field that chooses a registered part, such as a sampler: the part's
    name, or a mapping of its options with its name under "name". A mapping without "name" means the
    part called by the argument `name`."""

    def with_name(part: Any) -> Any:
        part = {"name": part} if isinstance(part, str) else part
        return {"name": name, **part} if isinstance(part, Mapping) else part

    return Annotated[dict[str, Any], BeforeValidator(with_name)]


def _weights(text: str) -> str:
    if text in ("ema", "model"):
        return text
    name, _, width = text.partition(":")
    with suppress(ValueError):
        if name == "ema":
            return f"ema:{float(width):g}"  # one spelling, because scores record it
    raise ValueError(
        f"weights={text!r} must be ema, model, or ema: and a relative width, as in ema:0.05."
    )


Weights = Annotated[str, AfterValidator(_weights)]


def _metrics(parts: Any) -> Any:
    if parts == "auto":
        return parts
    if not isinstance(parts, list | tuple):
        raise ValueError(f"evaluation.metrics={parts!r} must be auto, or a list, as in [fid].")
    return tuple(complete("metric", part, "evaluation.metrics") for part in parts)


STEPS_TO_COUNT = 10**6  # mean FLOPs are taken over so many steps, longer than any warm-up


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class TrainingConfig:
    """How to train.

    Args:
        num_steps: optimizer steps of the whole run; auto: as the recipe of the data says; data
            without a recipe need a number.
        num_flops: FLOPs of the whole run, which set `num_steps`, for comparisons at equal cost.
            Forward and backward passes of all processes count; a multiply-add is 2 FLOPs.
        batch_size: images per process and micro-step.
        gradient_accumulation_steps: micro-steps per optimizer step.
        max_grad_norm: gradients are clipped to this norm, 1e-6 or more; 0 switches clipping off.
        ema_decay: decay of the averaged weights, which are used for samples and scores.
        ema_warmup: let the decay grow to `ema_decay` as (1 + k) / (10 + k) at step k; false: it is
            constant.
        ema_snapshots_every: optimizer steps between two snapshots of averages, from which weights
            of any width, as in `weights=ema:0.07`, are computed after training; 0: never.
        label_dropout: fraction of labels (or contexts) left out, for classifier-free guidance.
        horizontal_flip: mirror each image with probability one half.
        precision: precision of the computation; weights stay float32.
        activation_checkpointing: recompute blocks in the backward pass to save memory: true for
            every block, n for every n-th.
        compile: compile each block with torch.compile.
        num_workers: loader processes, for data that is not in memory.
        max_corrupt_share: fraction of the images that may be unreadable, rounded up; each is
            replaced by another and listed in corrupt.txt. With more, the run ends.
        log_every: optimizer steps between two lines of metrics.
        sample_every: optimizer steps between two grids of samples; 0: at the end only.
        score_every: optimizer steps between two scores; 0: at the end only.
        checkpoint_every: optimizer steps between two checkpoints; 0: at the end only.
        keep_checkpoints: number of newest checkpoints to keep.
        timeout_s: seconds after which a process that waits for another gives up.
        max_time_s: seconds after which the run saves and ends with exit status 75, to stay within
            a cluster's time limit, counted from the first step; null: never.
    """

    num_steps: Auto | PositiveInt = "auto"
    num_flops: PositiveFloat | None = None
    batch_size: PositiveInt = 64
    gradient_accumulation_steps: PositiveInt = 1
    max_grad_norm: Annotated[float, Field(ge=1e-6)] | Annotated[float, Field(ge=0, le=0)] = 1.0
    ema_decay: Fraction = 0.995
    ema_warmup: Annotated[bool, RARE] = True
    ema_snapshots_every: Annotated[NonNegativeInt, BOOKKEEPING, RARE] = 0
    label_dropout: Annotated[float, Field(ge=0, le=0.9)] = 0.1
    horizontal_flip: bool = False
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    activation_checkpointing: Annotated[bool | NonNegativeInt, BOOKKEEPING] = False
    compile: Annotated[bool, BOOKKEEPING] = False
    num_workers: Annotated[NonNegativeInt, Field(le=1024), BOOKKEEPING] = 0
    max_corrupt_share: Annotated[Fraction, BOOKKEEPING, RARE] = 0.01
    log_every: Annotated[PositiveInt, BOOKKEEPING] = 20
    sample_every: Annotated[NonNegativeInt, BOOKKEEPING] = 200
    score_every: Annotated[NonNegativeInt, BOOKKEEPING] = 0
    checkpoint_every: Annotated[NonNegativeInt, BOOKKEEPING] = 250
    keep_checkpoints: Annotated[PositiveInt, BOOKKEEPING, RARE] = 2
    timeout_s: Annotated[PositiveInt, Field(le=31_536_000), BOOKKEEPING, RARE] = 1800  # a year
    max_time_s: Annotated[PositiveFloat | None, Field(le=31_536_000), BOOKKEEPING, RARE] = None


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class EvaluationConfig:
    """How to score a run or a checkpoint.

    Args:
        num_images: number of samples to score.
        labels: labels of samples: `even`: image i has the label i mod num_classes; `random`: labels
            are drawn from the seed.
        extractor: `digits-cnn-64`, `fashion-cnn-128`, `inception-v3-compat`, `dinov2-vit-l-14` (or
            s, b, g in place of l), a file of tread-zoo make-features, or a .pt2 file of
            torch.export; `auto` is the first for digits, the second for Fashion-MNIST at 32x32,
            else `inception-v3-compat`.
        metrics: names of registered metrics; `auto` is fid, kid, precision and recall, as far as
            extractor, reference and number of images allow; `[]` makes and scores no samples.
            label_accuracy is added if the extractor knows the classes.
        reference: images to compare with: `train` or `held_out`, those of the data; a folder of
            pictures; or an .npz in ADM's format, with images or with statistics from tread-zoo
            make-reference.
        num_reference: number of images of `train` or `held_out`, evenly spaced; null: all.
        seed: seed of the samples.
        block_ranges: ranges of blocks, as in [[2, 8]], whose contributions are measured; empty: the
            routed ranges, or else the default route.
        batch_size: images per batch.
        inception_weights, dinov2_weights: files of weights; null looks in torch's hub folder.
        keep_images: a new or empty folder where samples are kept as PNG files; null: none.
    """

    num_images: PositiveInt = 500
    labels: Annotated[Literal["even", "random"], RARE] = "even"
    extractor: str = "auto"
    metrics: Annotated[Auto | tuple[dict[str, Any], ...], BeforeValidator(_metrics)] = "auto"
    reference: str = "train"
    num_reference: Annotated[PositiveInt | None, RARE] = None
    seed: Annotated[int, RARE] = 1
    block_ranges: Annotated[tuple[tuple[int, int], ...], BOOKKEEPING, RARE] = ()
    batch_size: Annotated[PositiveInt, BOOKKEEPING, RARE] = 250
    inception_weights: Annotated[str | None, BOOKKEEPING, RARE] = None
    dinov2_weights: Annotated[str | None, BOOKKEEPING, RARE] = None
    keep_images: Annotated[str | None, BOOKKEEPING, RARE] = None


def _sampled(part: Any) -> Any:
    return part if part == "auto" else complete("routing", part, "sampler.routing")


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class SamplingGrid:
    """Options that every sampler has: its steps from noise to data.

    Args:
        num_steps: number of steps; auto: the sampler's default.
        grid: spacing of the steps: for flow `uniform`, `quadratic` or `logit_normal`; for edm `rho`
            or `log`; for ddpm `uniform`. `auto` is the first of these for the objective.
        shift: for flow, replaces each time t by shift t / (1 + (shift - 1) t); above 1, more steps
            are spent on noisier images.
        rho: for edm, how strongly noise levels concentrate near 0; auto: the objective's rho.
        selection_rate: fraction of tokens that bypass blocks in sampling; 0: none.
        routing: the routing method in sampling, such as token_merging; auto: as in training.
    """

    num_steps: Auto | PositiveInt = "auto"
    grid: Literal["auto", "uniform", "quadratic", "logit_normal", "rho", "log"] = "auto"
    shift: Annotated[float, Field(gt=0)] = 1.0
    rho: Auto | Annotated[float, Field(gt=0)] = "auto"
    selection_rate: Fraction = 0.0
    routing: Annotated[Auto | dict[str, Any], BeforeValidator(_sampled)] = "auto"


GRID_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingGrid))


def default_part(kind: str, name: str) -> dict[str, Any]:
    """Return the name and default options of a registered part: `{"name": …, option: default, …}`.
    A required option has "???"."""
    entry = get_entry(kind, name)
    grid = default_fields(SamplingGrid) if kind == "sampler" else {}
    return {"name": entry.name, **grid, **entry.options()}


def complete_sampler(part: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a sampler's name and all its options, checked: `{"name": …, "num_steps": …, "grid": …,
    "shift": …, "rho": …, option: …}`. `part` is its name, or a mapping with `name` and options."""
    name, options = split("sampler", part)
    entry = get_entry("sampler", name)
    if taken := entry.parameters().keys() & set(GRID_FIELDS):
        raise ValueError(
            f"sampler={name} has a field {', '.join(sorted(taken))}, which is a setting of every "
            "sampler: rename it; its default of sampler.num_steps is the class's default_num_steps."
        )
    names = (*GRID_FIELDS, *entry.parameters())
    for option in options:
        if option not in names:
            raise unknown_field("sampler", option, names)
    grid = check(SamplingGrid, {k: options.pop(k) for k in GRID_FIELDS if k in options}, "sampler")
    if grid.num_steps == "auto":
        grid = dataclasses.replace(grid, num_steps=getattr(entry.target, "default_num_steps", 25))
    return {"name": entry.name, **dataclasses.asdict(grid), **entry.complete(options)}


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class RunConfig:
    """All settings of a run.

    Args:
        plugins: modules that register parts of other projects; see docs/extending.md.
        backbone: the network, such as dit, mamba, rwkv, uvit or hybrid; a bare name is size tiny.
        routing: which tokens run through which blocks in training: tread, sprint, none, …
        objective: what the network learns to predict: flow, edm, mean_flow or ddpm.
        data: the images, such as digits, cifar10, image_folder or latents.
        optimizer: the optimizer of the weights, such as adamw or muon.
        lr_schedule: the learning rate over training, as a fraction of the peak.
        sampler: the sampler, in training and afterwards.
        guidance: the guidance of samples, such as cfg, sparse or interval.
        alignment: a second loss on features of a block, such as repa.
        tracker: a service that also gets the metrics, such as wandb or tensorboard.
        seed: seed of weights, data order and all other random numbers.
        device: where to compute: auto, cpu, cuda, cuda:1, mps.
        run_dir: the run's folder; auto is runs/ and a name made of data, backbone, routing,
            objective, alignment, settings that are not defaults, and the seed.
        init_from: a checkpoint, a run's folder or a name on the hub: a new run starts from its
            weights, and backbone options left at their defaults come from it.
        resume: `null` starts a new run; `latest` continues from the newest checkpoint in `run_dir`;
            `auto` does so if there is one, and else starts a new run; a folder of a run or
            checkpoint continues from that. Settings that are not given come from that run.
        resume_changed: continue although backbone, routing, objective, data, alignment or seed
            differ.
        overwrite: move an earlier run in `run_dir` aside.
        kernels: which implementation (form) of an operation to use, as in {selective_scan: torch};
            tread-zoo doctor lists them. Operations that are not named choose by themselves.
    """

    plugins: Annotated[tuple[str, ...], BOOKKEEPING] = ()
    backbone: part_type("dit_tiny") = "dit_tiny"  # type: ignore[valid-type]
    routing: part_type("tread") = "tread"  # type: ignore[valid-type]
    objective: part_type("flow") = "flow"  # type: ignore[valid-type]
    data: part_type("digits") = "digits"  # type: ignore[valid-type]
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    optimizer: part_type("adamw") = "adamw"  # type: ignore[valid-type]
    lr_schedule: part_type("cosine") = "cosine"  # type: ignore[valid-type]
    sampler: part_type("euler") = "euler"  # type: ignore[valid-type]
    guidance: part_type("none") = "none"  # type: ignore[valid-type]
    alignment: part_type("none") = "none"  # type: ignore[valid-type]
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    tracker: Annotated[part_type("local"), BOOKKEEPING] = "local"  # type: ignore[valid-type]
    seed: int = 0
    device: Annotated[Device, BOOKKEEPING] = "auto"
    run_dir: Annotated[str, BOOKKEEPING] = "auto"
    init_from: str | None = None
    resume: Annotated[str | None, BOOKKEEPING] = None
    resume_changed: Annotated[bool, BOOKKEEPING, RARE] = False
    overwrite: Annotated[bool, BOOKKEEPING] = False
    kernels: Annotated[dict[str, str], BOOKKEEPING, RARE] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return every field as plain values, without credentials, for checkpoints to store."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return without_credentials(plain)

    def differences(self, other: "RunConfig") -> dict[str, tuple[Any, Any]]:
        """Return the settings that change what a run computes and differ between this configuration
        and `other`: {dotted name: (value here, value in `other`)}."""
        pairs, bookkeeping = differences(self.as_dict(), other.as_dict()), bookkeeping_fields()
        return {f: pair for f, pair in pairs.items() if not {f, f.partition(".")[0]} & bookkeeping}


PART_FIELDS = tuple(field for field in default_fields(RunConfig) if field in KINDS)


Part = str | Mapping[str, Any]


class RunFields(TypedDict, total=False):
    """The types in which `RunConfig`'s fields may be given, for editors and type checkers."""

    plugins: list[str] | tuple[str, ...]
    backbone: Part
    routing: Part
    objective: Part
    data: Part
    training: Mapping[str, Any] | TrainingConfig
    optimizer: Part
    lr_schedule: Part
    sampler: Part
    guidance: Part
    alignment: Part
    evaluation: Mapping[str, Any] | EvaluationConfig
    tracker: Part
    seed: int
    device: str
    run_dir: str
    init_from: str | None
    resume: str | None
    resume_changed: bool
    overwrite: bool
    kernels: Mapping[str, str]


def make_config(**fields: Unpack[RunFields]) -> RunConfig:
    """Return the configuration of a run, with defaults for what is not given.

    For the learning rate, the steps and the warm-up steps, `auto` is replaced by a number here.

    Raises:
        ValueError: a field is unknown, a value has the wrong type or range, or values exclude each
            other. One line names the field, the value and what would work.
    """
    config: RunConfig = check(RunConfig, fields)  # parts as given
    parts = {kind: getattr(config, kind) for kind in PART_FIELDS}
    sampler = complete_sampler(parts.pop("sampler"))
    parts = {kind: complete(kind, part) for kind, part in parts.items()}
    config = dataclasses.replace(config, **parts, sampler=sampler)
    training, optimizer = config.training, dict(config.optimizer)
    if training.num_flops and training.num_steps != "auto":
        raise ValueError(
            f"training.num_flops={training.num_flops:g} sets the number of steps, and training."
            f"num_steps={training.num_steps} is another: leave one of them out, or, with an "
            "experiment, set training.num_steps=auto."
        )
    if training.num_flops:  # `train` sets the steps: that needs the network
        training = dataclasses.replace(training, num_steps=STEPS_TO_COUNT)
    elif training.num_steps == "auto":
        steps = get_entry("data", config.data["name"]).metadata.get("num_steps")
        if steps is None:
            raise ValueError(
                f"training.num_steps=auto, but data={config.data['name']} has no recipe that says "
                "how long to train: set training.num_steps=…, or take a recipe, experiment=…"
            )
        training = dataclasses.replace(training, num_steps=steps)
    if optimizer.get("learning_rate") == "auto":
        name = config.backbone["name"]
        optimizer["learning_rate"] = get_entry("backbone", name).metadata.get("learning_rate", 1e-4)
    lr_schedule = dict(config.lr_schedule)
    if lr_schedule.get("warmup_steps") == "auto":
        lr_schedule["warmup_steps"] = auto_warmup_steps(int(training.num_steps))
    if lr_schedule.get("warmup_steps", 0) >= int(training.num_steps):
        raise ValueError(
            f"lr_schedule.warmup_steps={lr_schedule['warmup_steps']} is all of training.num_steps="
            f"{training.num_steps}: the learning rate would never be reached. Set lr_schedule."
            "warmup_steps=0, or to a few percent of the steps."
        )
    config = dataclasses.replace(
        config, training=training, optimizer=optimizer, lr_schedule=lr_schedule
    )
    run_dir = _auto_run_dir(config) if config.run_dir == "auto" else config.run_dir
    used = [(kind, getattr(config, kind)) for kind in PART_FIELDS]
    metrics = config.evaluation.metrics
    used += [] if isinstance(metrics, str) else [("metric", metric) for metric in metrics]
    plugins = tuple(dict.fromkeys((*config.plugins, *plugins_of(used))))
    return dataclasses.replace(config, run_dir=run_dir, plugins=plugins)


def auto_warmup_steps(num_steps: int) -> int:
    """Return the number of warm-up steps for `auto`: 50, or a fifth of `num_steps` if that is
    less."""
    return min(50, num_steps // 5)


def _auto_run_dir(config: RunConfig) -> str:
    """Return `runs/<names>_<settings>_seed<n>`. <names> are those of data, backbone, routing,
    objective and alignment; <settings> are other settings that change what a run computes and
    differ from their defaults."""
    names = [config.data["name"], config.backbone["name"], config.routing["name"]]
    names += [config.objective["name"], config.alignment["name"]]
    names = names[:-1] if names[-1] == "none" else names
    usual_names, choices, parts = default_fields(RunConfig), dict[str, Any](), dict[str, Any]()
    for kind in [kind for kind in PART_FIELDS if kind != "tracker"]:
        part = getattr(config, kind)
        entry = get_entry(kind, part["name"])
        required = {k: part[k] for k in {*entry.parameters()} - {*entry.defaults()} if k in part}
        try:
            complete(kind, {"name": part["name"], **required})
        except ValueError:  # as guidance=custom, which needs one of its options
            required = {k: part[k] for k in entry.parameters() if k in part}
        parts[kind] = {"name": part["name"], **required}
        if part["name"] != usual_names[kind] and part["name"] not in names:
            choices[kind] = part["name"]
        choices |= {f"{kind}.{k}": required[k] for k in sorted(required)}
    steps = config.training.num_steps
    usual_steps = get_entry("data", config.data["name"]).metadata.get("num_steps")
    if steps != usual_steps and not config.training.num_flops:
        choices["training.num_steps"] = steps
    usual = make_config(
        **parts, training={"num_steps": steps}, seed=config.seed, run_dir=".",
    )  # fmt: skip
    choices |= {field: own for field, (_, own) in usual.differences(config).items()}
    texts = {
        field: v if isinstance(v, str) else "-".join(re.findall(r"[\w.+-]+", json.dumps(v)))
        for field, v in choices.items()
    }
    return f"runs/{'_'.join([*names, *([file_name(texts)] if texts else [])])}_seed{config.seed}"


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the differences of nested mappings: {dotted key: (value in one, value in other)}."""
    pairs: dict[str, tuple[Any, Any]] = {}
    for key in {**one, **other}:
        a, b = one.get(key), other.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            pairs |= {f"{key}.{inner}": pair for inner, pair in differences(a, b).items()}
        elif a != b:
            pairs[key] = (a, b)
    return pairs


def bookkeeping_fields() -> set[str]:
    """Return the dotted names of the settings that do not change what a run computes."""
    return {setting.name for setting in walk(RunConfig) if BOOKKEEPING in setting.marks}


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as a flat one with dotted keys, which all begin with `prefix`."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        inside = isinstance(value, Mapping)
        flat |= flatten(value, f"{prefix}{key}.") if inside else {prefix + key: value}
    return flat


def file_name(choices: Mapping[str, str]) -> str:
    """Return `choices`, values by field, as a file name such as `backbone-dit_tiny_seed-0`. If the
    name must be cut, or characters in it replaced, a digest is added."""
    text = "_".join(f"{field}-{value}" for field, value in choices.items()) or "run"
    name = re.sub(r"[^\w.-]+", "_", text)
    if name == text and len(name.encode()) <= LONGEST_NAME:
        return name
    short = name.encode()[: LONGEST_NAME - 9].decode(errors="ignore")
    return f"{short}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
