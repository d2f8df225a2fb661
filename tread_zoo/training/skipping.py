"""Steps whose loss or gradient is not finite are skipped and counted, on the device.

    bad_k       the norm of the gradient of step k, mean of ranks and micro-steps, is not finite
    weights, moments of AdamW, averaged weights: as before where bad_k
    in_a_row <- (in_a_row + 1) bad_k

A loss that is not finite makes every gradient so (`spoil`), and through the averaging of gradients
on every rank, so all ranks decide alike without another message. The decision masks the optimizer's
kernel (its `found_inf`, made for fp16) and the average's; nothing waits for the device. The counts
are read with the log. In fp16 the scaler skips overflows, which are no fault: only losses count.
"""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tread_zoo.process_group import leave_connections

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)


def spoil(loss: Tensor) -> Tensor:
    """Return a scalar loss, itself to the bit in value and gradient if it is finite, else nan.

    A loss that overflowed can have finite gradients; those of nan are nan.
    """
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the norm of all gradients, a scalar; not finite if any number in them is not."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return whole_norm(norm)


def whole_norm(norm: Tensor) -> Tensor:
    """Return a norm as a plain tensor, where sharding left each rank a part of it."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


class StepGuard:
    """Skips the steps of an optimizer that would spoil the weights, and counts them.

    Args:
        optimizer: AdamW, not wrapped.
        accelerator: of the run.
        limit: so many skipped steps in a row end the run.
        skipped: what `state` gave when the run was saved.

    Attributes:
        applied: scalar on the device, 1 if the latest step changed the weights, else 0.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        accelerator: "Accelerator",
        limit: int,
        skipped: dict[str, int] | None = None,
    ) -> None:
        skipped = skipped or {"total": 0, "in_a_row": 0}
        self.optimizer, self.accelerator, self.limit = optimizer, accelerator, limit
        self.fused = bool(optimizer.defaults.get("fused"))
        device = accelerator.device
        self.applied = torch.ones((), device=device)
        self._loss_lost = torch.zeros((), device=device)
        self._counts = torch.tensor(  # skipped in all, in a row, most in a row
            [skipped["total"], skipped["in_a_row"], 0], device=device
        )
        self._told = self._saved = skipped["total"]

    def see(self, loss: Tensor) -> None:
        """Take in the loss of a micro-step, a scalar."""
        if self.accelerator.scaler is None:
            return  # the gradients tell
        lost = (~loss.detach().isfinite()).to(self._loss_lost.dtype)
        self._loss_lost = torch.maximum(self._loss_lost, lost)

    def decide(self, norm: Tensor) -> None:
        """Make the optimizer's next step one that changes nothing, if it has to be.

        Call it once a step with the gradient's norm, unscaled, before the optimizer steps.
        """
        self.applied = norm.isfinite().to(self.applied.dtype)
        bad = 1 - self.applied
        if self.accelerator.scaler is not None:
            bad = self.accelerator.reduce(self._loss_lost, reduction="sum").clamp(max=1)
        elif self.fused:
            self.optimizer.found_inf = bad  # type: ignore[attr-defined]
        elif not self.applied:  # waits for the device; torch's other kernels have no mask
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        total, in_a_row, most = self._counts.unbind()
        bad = bad.to(self._counts.dtype)
        in_a_row = (in_a_row + 1) * bad
        self._counts = torch.stack((total + bad, in_a_row, torch.maximum(most, in_a_row)))
        self._loss_lost = torch.zeros_like(self._loss_lost)

    def check(self, step: int) -> dict[str, int]:
        """Return `skipped_steps` so far, if any; waits for the device.

        Raises:
            FloatingPointError: too many in a row; on every rank, for all have seen the same.
        """
        total, _, most = self._counts.tolist()
        if most >= self.limit:
            leave_connections()
            raise FloatingPointError(
                f"the loss or its gradient is not finite: {most} steps in a row were skipped, seen "
                f"at step {step} (training.max_skipped_in_a_row={self.limit}). Training diverged. "
                "Checkpoints from before are kept: lower training.learning_rate or "
                "training.max_grad_norm, and resume=latest."
            )
        if total > self._told and self.accelerator.is_main_process:
            logger.warning(
                "up to step %d, %d steps were skipped: the loss or its gradient was not finite",
                step, total,
            )  # fmt: skip
        self._told = total
        return {"skipped_steps": total} if total else {}

    def state(self) -> dict[str, int]:
        """Return what a checkpoint remembers; `since_last` counts from the one before."""
        total, in_a_row, _ = self._counts.tolist()
        since, self._saved = total - self._saved, total
        return {"total": total, "in_a_row": in_a_row, "since_last": since}
