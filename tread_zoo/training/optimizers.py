"""Optimizers: dataclasses of options whose `build` makes a `torch.optim.Optimizer` of a backbone.

The loop multiplies the learning rate that each parameter group starts with by the schedule's
factor; it knows nothing else of an optimizer.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn

from tread_zoo.contract.backbone import Backbone
from tread_zoo.registry import register
from tread_zoo.training.sharding import slice_like, whole

Momentum = Annotated[float, Field(ge=0, lt=1)]
Decayed = Literal["all", "matrices"]


class OptimizerPart(Protocol):
    """What is registered as an optimizer."""

    def build(self, backbone: Backbone) -> torch.optim.Optimizer:
        """Return the optimizer of all parameters of `backbone`, on their device."""


@register("optimizer", "adamw")
@dataclass(frozen=True)
class AdamW:
    """AdamW (arXiv 1711.05101) of every parameter.

    Args:
        learning_rate: its peak; auto is what the backbone's preset is trained with.
        weight_decay, beta1, beta2: as of torch.
        decayed: what the weight decay is of: all, or matrices: no norms, biases and embeddings.
            Rates, steps and D of scans have none; see `spared_from_decay`.
    """

    learning_rate: Literal["auto"] | PositiveFloat = "auto"
    weight_decay: NonNegativeFloat = 0.0
    beta1: Momentum = 0.9
    beta2: Momentum = 0.99
    decayed: Decayed = "all"

    def build(self, backbone: Backbone) -> torch.optim.Optimizer:
        """Return torch's AdamW; the step is one kernel where torch has one."""
        assert self.learning_rate != "auto", "make_config resolves it"
        spared = spared_from_decay(backbone, self.decayed)
        return torch.optim.AdamW(
            _split(dict(backbone.named_parameters()), spared, self.weight_decay),
            lr=self.learning_rate, betas=(self.beta1, self.beta2), fused=_has_fused_step(backbone),
        )  # fmt: skip


@register("optimizer", "muon")
@dataclass(frozen=True)
class Muon:
    """Muon (Jordan 2024) of the backbone's hidden matrices, AdamW of all else; see
    `hidden_matrices` and docs/training.md.

    Args:
        learning_rate: the peak of Muon's; auto is what the backbone's preset is trained with.
        momentum, nesterov, ns_steps: as of torch; `ns_steps` is the number of Newton-Schulz steps.
        weight_decay: of both.
        decayed: as of `AdamW`; what Muon trains is decayed.
        adjust_lr_fn: factor on Muon's rate by the shape [rows, columns] of a matrix;
            match_rms_adamw: 0.2 sqrt(max(rows, columns)), so that rates of AdamW fit (Moonlight,
            arXiv 2502.16982); original: sqrt(max(1, rows / columns)).
        adamw_learning_rate: the peak of AdamW's; auto is `learning_rate`.
        beta1, beta2: of AdamW.
    """

    learning_rate: Literal["auto"] | PositiveFloat = "auto"
    momentum: Momentum = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    weight_decay: NonNegativeFloat = 0.0
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    adamw_learning_rate: Literal["auto"] | PositiveFloat = "auto"
    beta1: Momentum = 0.9
    beta2: Momentum = 0.99
    decayed: Decayed = "all"

    def build(self, backbone: Backbone) -> torch.optim.Optimizer:
        """Return one optimizer of both kinds of parameters.

        Raises:
            ValueError: the backbone has no hidden matrices.
        """
        assert self.learning_rate != "auto", "make_config resolves it"
        matrices, auto = hidden_matrices(backbone), self.adamw_learning_rate == "auto"
        if not matrices:
            raise ValueError(
                f"optimizer=muon has nothing to train in {type(backbone).__name__}: its "
                "blocks have no hidden matrices. Use optimizer=adamw."
            )
        muon_options = ("weight_decay", "momentum", "nesterov", "ns_steps", "adjust_lr_fn")
        return MuonWithAdamW(
            dict(backbone.named_parameters()),
            matrices,
            muon={"lr": self.learning_rate, **{k: getattr(self, k) for k in muon_options}},
            adamw={
                "lr": self.learning_rate if auto else self.adamw_learning_rate,
                "weight_decay": self.weight_decay,
                "betas": (self.beta1, self.beta2),
                "fused": _has_fused_step(backbone),
            },
            spared=spared_from_decay(backbone, self.decayed),
        )


def hidden_matrices(backbone: Backbone) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the parts of each matrix that Muon trains, by parameter name.

    A parameter [.., rows, columns] is split along its rows: `qkv` has three parts, a single matrix
    has one, (rows,). Leading dimensions are stacked along the rows.

    These are the linear layers of the blocks, and what a module in them lists in `fused_rows`,
    {parameter name: sizes}. Embeddings, positions and heads are left to AdamW.
    """
    matrices: dict[str, tuple[int, ...]] = {}
    for path, module in backbone.blocks.named_modules(prefix="blocks"):
        if isinstance(module, nn.Linear):
            matrices[f"{path}.weight"] = (module.out_features,)
    for path, module in backbone.blocks.named_modules(prefix="blocks"):
        for name, sizes in getattr(module, "fused_rows", {}).items():
            matrices[f"{path}.{name}"] = sizes
    return matrices


def spared_from_decay(backbone: Backbone, decayed: Decayed) -> set[str]:
    """Return the names of the parameters without weight decay: those that are marked
    `_no_weight_decay`, as those of fla and mamba; if only matrices are decayed also biases, other
    vectors, and embeddings, which are the parameters of the backbone itself and of `nn.Embedding`.
    """
    spared = set()
    for path, module in backbone.named_modules():
        embeds = module is backbone or isinstance(module, nn.Embedding)
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            is_matrix = parameter.ndim > 1 and not embeds and not name.endswith("bias")
            marked = getattr(parameter, "_no_weight_decay", False)
            if marked or (decayed == "matrices" and not is_matrix):
                spared.add(name)
    return spared


def _split(
    parameters: Mapping[str, Tensor], spared: Collection[str], weight_decay: float
) -> list[dict[str, Any]]:
    """Return parameter groups: of what is spared from weight decay, if there is any, and last of
    what is not, which further parameters join."""
    first = [p for name, p in parameters.items() if weight_decay and name in spared]
    rest = [p for name, p in parameters.items() if not weight_decay or name not in spared]
    groups = [{"params": first, "weight_decay": 0.0}] if first else []
    return [*groups, {"params": rest, "weight_decay": weight_decay}]


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` of matrices, each part of a fused one as a parameter of its own; AdamW of
    the rest.

    Momentum is sharded as its parameter (FSDP2). Sharded matrices are gathered one at a time, and
    every rank computes with the whole. With `found_inf` of 1.0 set, as on torch's fused optimizers,
    a step changes nothing.

    Args:
        parameters: all, by name.
        matrices: sizes of the parts along the rows, by name; see `hidden_matrices`.
        muon, adamw: options of torch's optimizers. The parameter groups are those of `muon`, one
            for each way to split, which is its `row_sizes`; then those of `adamw`.
        spared: names of parameters that AdamW does not decay.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        matrices: Mapping[str, tuple[int, ...]],
        *,
        muon: Mapping[str, Any],
        adamw: Mapping[str, Any],
        spared: Collection[str] = (),
    ) -> None:
        by_sizes: dict[tuple[int, ...], list[Tensor]] = {}
        for name, row_sizes in matrices.items():
            by_sizes.setdefault(tuple(row_sizes), []).append(parameters[name])
        rest = {name: parameter for name, parameter in parameters.items() if name not in matrices}
        groups = [{"params": part, "row_sizes": k, **muon} for k, part in by_sizes.items()]
        by_decay = _split(rest, spared, adamw.get("weight_decay", 0.0))
        super().__init__([*groups, *({**adamw, **group} for group in by_decay)], defaults={})
        self._step_supports_amp_scaling = bool(adamw.get("fused"))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Return the closure's value, and move every parameter that has a gradient."""
        loss, skipped = None, getattr(self, "found_inf", None)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if "row_sizes" not in group:
                adamw = torch.optim.AdamW([dict(group)])  # a copy: it would add its defaults
                adamw.state, adamw.found_inf = self.state, skipped  # type: ignore[attr-defined]
                adamw.step()
                continue
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_matrix(parameter, parameter.grad, group, skipped)
        return loss

    def _step_matrix(
        self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], skipped: Tensor | None
    ) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum, average = group["momentum"], state["momentum_buffer"]
        if skipped is not None:  # then the average stays
            gradient = torch.where(skipped > 0, average, gradient)
        average.lerp_(gradient, 1 - momentum)
        update = gradient.lerp(average, momentum) if group["nesterov"] else average
        weights = parameter.detach()
        matrix = whole(weights).clone()
        _orthogonal_step(matrix, whole(update), group)
        moved = slice_like(matrix, weights)
        weights.copy_(moved if skipped is None else torch.where(skipped > 0, weights, moved))


def _orthogonal_step(matrix: Tensor, update: Tensor, group: Mapping[str, Any]) -> None:
    """Move each part of a whole matrix [.., rows, columns], in place, by Muon without momentum."""
    columns, row_sizes = matrix.shape[-1], list(group["row_sizes"])
    parts, updates = (torch.split(x.view(-1, columns), row_sizes) for x in (matrix, update))
    for part, gradient in zip(parts, updates, strict=True):
        part.grad = gradient
    options = {**group, "params": parts, "momentum": 0.0, "nesterov": False}
    torch.optim.Muon([options]).step()


def _has_fused_step(backbone: Backbone) -> bool:
    return next(backbone.parameters()).device.type in ("cpu", "cuda")
