"""The parts of a run, and its state on the devices.

build_setup(config)   makes and checks all parts on the CPU, weights from the seed; writes nothing
to_devices(setup, …)  moves them to this process's device, shards them, and loads a checkpoint
"""

import functools
import itertools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tread_zoo.config import RunConfig, TrainingConfig, differences
from tread_zoo.contract.backbone import Backbone
from tread_zoo.data import ImageData, StepBatches, make_loader
from tread_zoo.diffusion import Objective, SamplingOptions, build_sampling
from tread_zoo.evaluation.evaluate import check_evaluation
from tread_zoo.factory import add_routing, create_backbone
from tread_zoo.kernels import describe
from tread_zoo.process_group import close_process_group_at_exit, log_waiting
from tread_zoo.registry import create, split
from tread_zoo.routing import Method, Stack
from tread_zoo.runs.checkpoint import Checkpoint, data_metadata, load_weights
from tread_zoo.runs.init_from import load_source
from tread_zoo.runs.metadata import as_checkpoint_error
from tread_zoo.runs.posthoc_ema import TRACKED_WIDTHS
from tread_zoo.runs.restore import load_weak
from tread_zoo.runtime import DTYPES, resolve_precision
from tread_zoo.seeding import make_generator
from tread_zoo.training.alignment import Alignment, NoAlignment, add_parameters, token_width
from tread_zoo.training.ema import WeightAverage, exponential_decay, power_decay
from tread_zoo.training.lr_schedules import LRSchedule
from tread_zoo.training.optimizer_state import inner_optimizers, load_optimizer_state
from tread_zoo.training.optimizers import OptimizerPart
from tread_zoo.training.sharding import is_sharded, shard, sharding_requested
from tread_zoo.training.trackers import Tracker
from tread_zoo.version import describe_code

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

COMPILE_BACKEND = "inductor"


@dataclass(frozen=True)
class Setup:
    """What a run is made of: its configuration, data, networks and registered parts.

    `projector` is the network that an alignment trains with the backbone, `weak` the network that
    guidance loads from its `weak_checkpoint`. Two texts may be empty: `not_scored` says which
    metrics are left out and why, `initial` which weights a new run starts from.
    """

    config: RunConfig
    data: ImageData
    backbone: Backbone
    routing: Method
    objective: Objective
    sampling: SamplingOptions
    optimizer: OptimizerPart
    lr_schedule: LRSchedule
    tracker: Tracker
    alignment: Alignment
    projector: nn.Module | None
    weak: Backbone | None = None
    not_scored: str = ""
    initial: str = ""

    @property
    def training(self) -> TrainingConfig:
        """The training settings."""
        return self.config.training

    @functools.cached_property
    def data_metadata(self) -> dict[str, Any]:
        """Metadata of the data, for checkpoints and `facts.json`."""
        return data_metadata(self.data)

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of the whole run."""
        return int(self.training.num_steps)  # make_config resolves auto

    @property
    def is_self_taught(self) -> bool:
        """Whether the alignment's features come from the averaged network."""
        return getattr(self.alignment, "self_taught", False)

    @property
    def aligned_steps(self) -> int:
        """Number of optimizer steps, from the start, whose loss has the alignment's term."""
        return 0 if self.projector is None else math.ceil(self.alignment.stop * self.num_steps)

    def batches(
        self, rank: int = 0, num_ranks: int = 1, step: int = 0
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield (images as stored, labels [B] or contexts [B,T,S]) for each micro-step of a rank,
        starting at optimizer step `step`. If the alignment uses an encoder's stored features, these
        are a third element until the alignment stops: [B,K,F,h,w] with F channels. K is 2 if there
        are also features of mirrored images, else 1.

        Raises:
            ValueError: there are too few images for one batch on each rank.
        """
        micro_steps, seed = self.training.gradient_accumulation_steps, self.config.seed
        train: Any = self.data.train

        def load(items: Any, start: int, end: int) -> Iterator[tuple[Tensor, ...]]:
            plan = StepBatches(
                items, self.training.batch_size, seed=seed, rank=rank, num_ranks=num_ranks,
                start_step=start * micro_steps, num_steps=max(start, end) * micro_steps,
            )  # fmt: skip
            return make_loader(items, plan, self.training.num_workers, seed=seed)

        if self.projector is None or self.is_self_taught:
            return load(train, step, self.num_steps)
        stop = self.aligned_steps
        aligned = load(train.with_features(), step, stop)
        return itertools.chain(aligned, load(train, max(step, stop), self.num_steps))


def build_setup(config: RunConfig, source: Checkpoint | None = None) -> Setup:
    """Return the `Setup` of a run, with random weights from the seed or weights from `source`.

    Raises:
        CheckpointError: the weights of `source` do not fit.
        ValueError: the parts do not fit together.
    """
    objective = create("objective", config.objective)
    sampling = build_sampling(config.sampler, config.guidance)
    sampling.levels(objective)
    data = create("data", config.data)
    data.codec.check(flip=config.training.horizontal_flip)
    not_scored = check_evaluation(config.evaluation, data).not_scored
    backbone = _build_backbone(config, data)
    routing = _add_routing(config, backbone)
    for start, end in config.evaluation.block_ranges:
        if not 0 <= start < end <= backbone.num_blocks:
            raise ValueError(
                f"evaluation.block_ranges has [{start}, {end}], which is no range of the network's "
                f"{backbone.num_blocks} blocks: give 0 <= start < end <= {backbone.num_blocks}."
            )
    initial = "" if source is None else load_source(source, config, backbone)
    sampling = replace(sampling, trained=routing)
    sampling.check(backbone, objective)
    sampling.check_training(backbone, config.training.label_dropout)
    if hasattr(objective, "check_training"):
        objective.check_training(backbone, config.training.label_dropout, routing)
    alignment = create("alignment", config.alignment)
    other = load_weak(sampling, backbone, objective, data_metadata(data))
    weak = None if other is None else other.backbone
    sampling.try_guidance(backbone, objective, weak)
    kinds = ("optimizer", "lr_schedule", "tracker")
    created = {kind: create(kind, getattr(config, kind)) for kind in kinds}
    return Setup(
        config=config, data=data, backbone=backbone, routing=routing, objective=objective,
        sampling=sampling, alignment=alignment, weak=weak, not_scored=not_scored, initial=initial,
        projector=_build_projector(config, alignment, data, backbone), **created,
    )  # fmt: skip


def _build_backbone(config: RunConfig, data: ImageData) -> Backbone:
    name, options = split("backbone", config.backbone)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(make_generator("weights", config.seed).initial_seed())
        backbone = create_backbone(
            name, input_size=data.image_size, in_channels=data.channels,
            num_classes=data.num_classes, **data.context_keywords, **options,
        )  # fmt: skip
    backbone.checkpoint_blocks = int(config.training.activation_checkpointing)
    return backbone


def _add_routing(config: RunConfig, backbone: Backbone) -> Method:
    """Return the routing method, after adding its weights, if any, to the backbone."""
    routing: Method = create("routing", config.routing)
    num_steps = int(config.training.num_steps)
    if not routing.routed_steps(num_steps):
        raise ValueError(
            f"routing.warm_start={routing.warm_start:g} and routing.dense_tail="
            f"{routing.dense_tail:g} leave none of training.num_steps={num_steps} to route; make "
            "them smaller, or set routing=none."
        )
    routing.check(Stack.of(backbone))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(make_generator("routing", config.seed).initial_seed())
        add_routing(backbone, routing)
    return routing


def _build_projector(
    config: RunConfig, alignment: Alignment, data: ImageData, backbone: Backbone
) -> nn.Module | None:
    if isinstance(alignment, NoAlignment):
        return None
    if getattr(alignment, "self_taught", False):
        width = token_width(backbone)
    elif data.features is None:
        raise ValueError(
            f"alignment={config.alignment['name']}, but {data.name} has no features of an encoder: "
            "tread-zoo encode features=… writes a table that has them (docs/training.md)."
        )
    elif config.training.horizontal_flip and data.features[0] < 2:
        raise ValueError(
            f"training.horizontal_flip=true, but {data.name} has no features of mirrored images. "
            "Encode with flips=true, or set training.horizontal_flip=false."
        )
    else:
        width = data.features[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(make_generator("alignment", config.seed).initial_seed())
        return alignment.build(backbone, width)


# On the devices ------------------------------------------------------------------------------


@dataclass
class TrainState:
    """The state of a run on its devices: what an optimizer step changes or needs.

    Args:
        setup, accelerator: the parts of the run, and accelerate's `Accelerator`.
        model: the backbone, wrapped for several processes.
        projector: the alignment's projection, wrapped in the same way, if there is one.
        whole: an unsharded copy of the network, for counting and describing.
        optimizer, stepper: the optimizer, and accelerate's wrapper of it.
        averages: averages of the weights, by file name in a checkpoint.
        rates: peak learning rate of each parameter group, in the order of `groups`.
        step: number of optimizer steps done.
        seconds: seconds spent so far, by purpose, such as "training"; see `timed`.
    """

    setup: Setup
    accelerator: "Accelerator"
    model: nn.Module
    projector: nn.Module | None
    whole: Backbone
    optimizer: torch.optim.Optimizer
    stepper: Any
    averages: dict[str, WeightAverage]
    rates: list[float] = field(default_factory=list)
    step: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def average(self) -> WeightAverage:
        """The averaged weights, used for samples and scores."""
        return self.averages["ema"]

    @property
    def images_per_step(self) -> int:
        """Number of images per optimizer step, over all ranks."""
        training = self.setup.training
        num_ranks = int(self.accelerator.num_processes)
        return num_ranks * training.batch_size * training.gradient_accumulation_steps

    @property
    def parameters(self) -> dict[str, Tensor]:
        """All trained parameters, by name."""
        projector = self.setup.projector
        extra = {} if projector is None else dict(projector.named_parameters(prefix="alignment"))
        return {**dict(self.setup.backbone.named_parameters()), **extra}

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer or of its inner optimizers."""
        inner = inner_optimizers(self.optimizer)
        return [group for each in inner for group in each.param_groups]


def make_accelerator(setup: Setup, device: torch.device, precision: str) -> "Accelerator":
    """Return the accelerator that connects a launcher's processes. The training loop applies
    autocast itself; accelerate only scales the loss in fp16. If a step may leave weights unused,
    DDP does not wait for their gradients."""
    from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs

    ddp = DistributedDataParallelKwargs(
        broadcast_buffers=False, gradient_as_bucket_view=True,
        find_unused_parameters=setup.routing.idle_weights,
    )  # fmt: skip
    group = InitProcessGroupKwargs(timeout=timedelta(seconds=setup.training.timeout_s))
    log_waiting(setup.training.timeout_s)
    return Accelerator(
        cpu=device.type == "cpu", mixed_precision="fp16" if precision == "fp16" else "no",
        gradient_accumulation_steps=setup.training.gradient_accumulation_steps,
        kwargs_handlers=[ddp, group],
    )  # fmt: skip


def check_ranks_agree(
    accelerator: "Accelerator", checkpoint: Checkpoint | None, setup: Setup
) -> None:
    """Raise a `ValueError` on every rank if ranks start different runs, for example because folders
    are not shared or a file system lags. Nothing else would notice."""
    if accelerator.num_processes == 1:
        return
    from accelerate.utils import gather_object

    settings: dict[str, Any] = {k: v for k, v in setup.config.as_dict().items() if k != "device"}
    settings["data"] = setup.data_metadata  # paths may differ between machines
    settings["code"] = describe_code()
    settings["checkpoint"] = checkpoint and {"step": checkpoint.step, **checkpoint.meta["sha256"]}
    first, *others = gather_object([settings])
    for rank, other in enumerate(others, 1):
        pairs = differences(first, other).items()
        if wrong := [f"{field}={one!r} and {another!r}" for field, (one, another) in pairs]:
            close_process_group_at_exit()
            raise ValueError(
                f"ranks 0 and {rank} of this run differ: {'; '.join(wrong)}. Nothing was trained. "
                "Give all of them the same command and code, and a run_dir that all machines share."
            )


def to_devices(
    setup: Setup, accelerator: "Accelerator", checkpoint: Checkpoint | None
) -> TrainState:
    """Return the state of a run at its start or, if there is one, from a `checkpoint`. Every rank
    must call this."""
    network, projector, training = setup.backbone, setup.projector, setup.training
    decays = {"ema": exponential_decay(training.ema_decay, warmup=training.ema_warmup)}
    if training.ema_snapshots_every:
        decays |= {part: power_decay(width) for part, width in TRACKED_WIDTHS.items()}
    averages = {part: WeightAverage(network, decay) for part, decay in decays.items()}
    if checkpoint is not None:
        load_weights(network, checkpoint, "model")
        for part, average in averages.items():
            load_weights(average.network, checkpoint, part)
        if projector is not None and "alignment.safetensors" in checkpoint.meta["sha256"]:
            load_weights(projector, checkpoint, "alignment")  # absent if only now switched on
    dtype = DTYPES[resolve_precision(setup.training.precision, accelerator.device)]
    if setup.training.compile:
        describe(accelerator.device, dtype=dtype)  # compiled code cannot check kernels
        compile_blocks(network)
    modules = [network] if projector is None else [network, projector]
    if sharding_requested() and torch.distributed.is_initialized():
        shard(modules, accelerator.device, dtype)
    else:
        for module in modules:
            module.to(accelerator.device)
    for average in averages.values():
        average.to(accelerator.device, network)
    sharded = is_sharded(next(network.parameters()))
    if sharded and setup.is_self_taught:
        name = setup.config.alignment["name"]
        raise ValueError(f"alignment={name} needs whole averaged weights: train it without FSDP2.")
    optimizer = setup.optimizer.build(network)
    if projector is not None:
        add_parameters(inner_optimizers(optimizer)[-1], list(projector.parameters()))
    # Wrap the modules separately: once the alignment stops, the projector is not called.
    wrapped = modules if sharded else [accelerator.prepare_model(module) for module in modules]
    state = TrainState(
        setup=setup, accelerator=accelerator, model=wrapped[0],
        projector=None if projector is None else wrapped[1], whole=averages["ema"].network,
        optimizer=optimizer, averages=averages,
        stepper=accelerator.prepare_optimizer(optimizer, device_placement=False),
    )  # fmt: skip
    state.rates = [group["lr"] for group in state.groups]
    if checkpoint is not None:
        _continue(state, checkpoint)
    if setup.weak is not None:
        setup.weak.to(accelerator.device)
    setup.data.codec.prepare(accelerator.device)
    return state


def _continue(state: TrainState, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's step, seconds spent, optimizer state and state of fp16's loss scaler. If
    the checkpoint is from an optimizer of another kind, the optimizer starts without a state."""
    meta, config, accelerator = checkpoint.meta, state.setup.config, state.accelerator
    before, now = meta["config"]["optimizer"], config.as_dict()["optimizer"]
    if before["name"] == now["name"]:  # another optimizer starts fresh
        tensors = checkpoint.tensors("optimizer")
        with as_checkpoint_error(checkpoint.path, "has an optimizer's state that does not fit"):
            load_optimizer_state(
                state.optimizer, state.parameters, tensors, meta["optimizer"],
                with_groups=before == now,
            )  # fmt: skip
    if accelerator.scaler is not None and meta["scaler"]:
        accelerator.scaler.load_state_dict(meta["scaler"])
    state.step, state.seconds = checkpoint.step, dict(meta["seconds"])
    if accelerator.is_main_process and state.images_per_step != meta["images_per_step"]:
        logger.warning(
            "resumed with %d images per step (ranks x batch_size x accumulated), and %s had %d: "
            "from here it is another run",
            state.images_per_step, checkpoint.path, meta["images_per_step"],
        )  # fmt: skip


def compile_blocks(network: Backbone) -> None:
    """Compile each block in place, at its first call; blocks of one kind share their graphs. The
    batch size is dynamic from the start, the number of tokens from its second value on. So blocks
    are not compiled anew for every batch size, or for every rate of a routing schedule."""
    config = torch._dynamo.config
    # Blocks of all kinds (with or without a skip, routed or dense) share one cache.
    config.recompile_limit = max(config.recompile_limit, 8 * network.num_blocks)
    # Do not let DDP cut graphs at its buckets; it can send gradients early between blocks.
    config.optimize_ddp = False
    for block in network.blocks:
        block.compile(backend=COMPILE_BACKEND)
        block._compiled_call_impl = _mark_sizes(block._compiled_call_impl)
    logger.info("compile: the first steps build the blocks, which may take minutes")


def _mark_sizes(call: Any) -> Any:
    """Return a function that marks the varying sizes of its arguments as dynamic, then returns the
    result of `call`. The batch size varies, and every size of indices of tokens (int64)."""

    def mark(value: Any) -> None:
        if isinstance(value, Tensor):
            sizes = value.ndim if value.dtype == torch.int64 else min(value.ndim, 1)
            torch._dynamo.maybe_mark_dynamic(value, list(range(sizes)))
        elif isinstance(value, tuple):
            for each in value:
                mark(each)
        elif is_dataclass(value):  # the result of a mixer's `prepare`
            mark(tuple(vars(value).values()))

    def marked(*args: Any) -> Any:
        mark(args)
        return call(*args)

    return marked
