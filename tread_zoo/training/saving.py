"""Saving a run's state, gathered from all ranks; every rank must call these functions."""

import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from tread_zoo.factory import describe_backbone
from tread_zoo.runs.checkpoint import SNAPSHOTS, save_checkpoint
from tread_zoo.runs.posthoc_ema import TRACKED_WIDTHS
from tread_zoo.training.ema import WeightAverage
from tread_zoo.training.meters import timed
from tread_zoo.training.optimizer_state import optimizer_state
from tread_zoo.training.setup import TrainState

logger = logging.getLogger(__name__)


def save_state(state: TrainState, folder: Path) -> None:
    """Save a checkpoint to the run's `folder`: weights, averages, the state of the optimizer, and
    the settings of the run."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    setup, scaler = state.setup, state.accelerator.scaler
    with timed(state, "saving"):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: Any = get_model_state_dict(setup.backbone, options=options)
        averages = _gather(state, state.averages)
        tensors, plain = optimizer_state(state.optimizer, state.parameters)
        parts = {"model": weights, **averages, "optimizer": tensors}
        if setup.projector is not None:
            parts["alignment"] = get_model_state_dict(setup.projector, options=options)
        if state.accelerator.is_main_process:
            meta = {
                "step": state.step,
                "config": setup.config.as_dict(),
                "plugins": list(setup.config.plugins),
                "backbone": describe_backbone(setup.backbone),
                "data": setup.data_metadata,
                "images_per_step": state.images_per_step,
                "seconds": state.seconds,
                "optimizer": plain,
                "scaler": scaler.state_dict() if scaler else None,
            }
            keep = setup.training.keep_checkpoints
            logger.info("saved     %s", save_checkpoint(folder, parts, meta, keep))
        state.accelerator.wait_for_everyone()


def save_snapshot(state: TrainState, folder: Path) -> None:
    """Save the averages of the widths in `TRACKED_WIDTHS` to the run's `folder`. Averages of other
    widths can be computed from them."""
    with timed(state, "saving"):
        parts = _gather(state, {k: v for k, v in state.averages.items() if k in TRACKED_WIDTHS})
        if state.accelerator.is_main_process:
            save_checkpoint(folder, parts, {"step": state.step}, 0, SNAPSHOTS)


def _gather(state: TrainState, averages: dict[str, WeightAverage]) -> dict[str, dict[str, Tensor]]:
    """Return {name of an average: {name of a weight: weight}}, with whole weights on the CPU. On
    ranks other than 0, the inner mappings are empty. One average is gathered at a time. Every rank
    must call this."""
    parts, accelerator = {}, state.accelerator
    for part, average in averages.items():
        whole = average.full_network(accelerator.device).state_dict()
        parts[part] = {k: v.cpu() for k, v in whole.items() if accelerator.is_main_process}
        average.release()
    return parts
