"""Optimizers: dataclasses of options whose `build` makes a `torch.optim.Optimizer` for a backbone.

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
from tread_zoo.training.sharding import full_tensor, slice_like

Momentum = Annotated[float, Field(ge=0, lt=1)]
DecayOn = Literal["all", "matrices"]
STACKED = 2**24  # numbers in the matrices that Muon steps together: 64 MiB in float32


class OptimizerPart(Protocol):
    """The interface of registered optimizers."""

    def build(self, backbone: Backbone) -> torch.optim.Optimizer:
        """Return an optimizer for all parameters of `backbone`, on their device."""


@register("optimizer", "adamw")
@dataclass(frozen=True)
class AdamW:
    """AdamW (arXiv 1711.05101) for every parameter.

    Args:
        learning_rate: the peak rate; auto is the rate registered with the backbone.
        weight_decay, beta1, beta2: as in torch.
        weight_decay_on: `all` decays every parameter. `matrices` spares norms, biases and
            embeddings. Both spare the rates, step sizes and D of scans
            (`no_weight_decay_names`).
    """

    learning_rate: Literal["auto"] | PositiveFloat = "auto"
    weight_decay: NonNegativeFloat = 0.0
    beta1: Momentum = 0.9
    beta2: Momentum = 0.99
    weight_decay_on: DecayOn = "all"

    def build(self, backbone: Backbone) -> torch.optim.Optimizer:
        """Return torch's AdamW; a step is one fused kernel on devices for which torch has one."""
        assert self.learning_rate != "auto", "make_config resolves it"
        spared = no_weight_decay_names(backbone, self.weight_decay_on)
        return torch.optim.AdamW(
            _split(dict(backbone.named_parameters()), spared, self.weight_decay),
            lr=self.learning_rate, betas=(self.beta1, self.beta2), fused=_has_fused_step(backbone),
        )  # fmt: skip


@register("optimizer", "muon")
@dataclass(frozen=True)
class Muon:
    """Muon (Jordan 2024) for the backbone's hidden matrices, AdamW for all else; see
    `hidden_matrices` and docs/training.md.

    Args:
        learning_rate: the peak of Muon's rate; auto is the rate registered with the backbone.
        momentum, nesterov, ns_steps: as in torch; `ns_steps` is the number of Newton-Schulz steps.
        weight_decay: weight decay of Muon and AdamW.
        weight_decay_on: as in `AdamW`; Muon's matrices are always decayed.
        adjust_lr_fn: factor on Muon's rate, computed from a matrix's shape [rows, columns].
            `match_rms_adamw`: 0.2 sqrt(max(rows, columns)), so that a rate for AdamW suits Muon,
            too (Moonlight, arXiv 2502.16982). `original`: sqrt(max(1, rows / columns)).
        adamw_learning_rate: the peak of AdamW's rate; auto is `learning_rate`.
        beta1, beta2: options of AdamW.
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
    weight_decay_on: DecayOn = "all"

    def build(self, backbone: Backbone) -> torch.optim.Optimizer:
        """Return one optimizer that trains the matrices with Muon and all else with AdamW.

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
            spared=no_weight_decay_names(backbone, self.weight_decay_on),
        )


def hidden_matrices(backbone: Backbone) -> dict[str, tuple[int, ...]]:
    """Return the names of the parameters that Muon trains, each with the number of rows of every
    matrix in the parameter.

    A parameter [.., rows, columns] may be several matrices, one below the other: a `qkv` of width D
    has (D, D, D), a single matrix has (rows,). Leading dimensions are stacked along the rows.

    Muon trains the linear layers of the blocks, and the parameters that a module of a block lists
    in `fused_rows`, {parameter name: numbers of rows}. Embeddings, positions and heads are left to
    AdamW.
    """
    matrices: dict[str, tuple[int, ...]] = {}
    for path, module in backbone.blocks.named_modules(prefix="blocks"):
        if isinstance(module, nn.Linear):
            matrices[f"{path}.weight"] = (module.out_features,)
    for path, module in backbone.blocks.named_modules(prefix="blocks"):
        for name, sizes in getattr(module, "fused_rows", {}).items():
            matrices[f"{path}.{name}"] = sizes
    return matrices


def no_weight_decay_names(backbone: Backbone, weight_decay_on: DecayOn) -> set[str]:
    """Return the names of the parameters without weight decay: those that have the attribute
    `_no_weight_decay`, as in fla and mamba, and, if `weight_decay_on` is "matrices", also vectors,
    biases and embeddings (parameters of `nn.Embedding` or of the backbone itself)."""
    spared = set()
    for path, module in backbone.named_modules():
        embeds = module is backbone or isinstance(module, nn.Embedding)
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            is_matrix = parameter.ndim > 1 and not embeds and not name.endswith("bias")
            marked = getattr(parameter, "_no_weight_decay", False)
            if marked or (weight_decay_on == "matrices" and not is_matrix):
                spared.add(name)
    return spared


def _split(
    parameters: Mapping[str, Tensor], spared: Collection[str], weight_decay: float
) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups: first the parameters named in `spared`, without weight
    decay, then all others with it. If there are none to spare, or `weight_decay` is 0, all
    parameters are in one group."""
    first = [p for name, p in parameters.items() if weight_decay and name in spared]
    rest = [p for name, p in parameters.items() if not weight_decay or name not in spared]
    groups = [{"params": first, "weight_decay": 0.0}] if first else []
    return [*groups, {"params": rest, "weight_decay": weight_decay}]


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for matrices, AdamW for the rest. If a parameter consists of several matrices, as `qkv`
    does, each of them is orthogonalised by itself.

    Muon's results are those of `torch.optim.Muon`, but matrices of one shape are stepped together:
    a network has hundreds of matrices and a few shapes. Momentum is sharded like its parameter
    (FSDP2). Sharded matrices are gathered, up to `STACKED` numbers at a time, and every rank
    computes with the whole. A step changes nothing if the attribute `found_inf` is 1.0, as with
    torch's fused optimizers.

    Args:
        parameters: all trained parameters, by name.
        matrices: for the name of each of Muon's parameters, the number of rows of every matrix in
            it; see `hidden_matrices`.
        muon, adamw: options of torch's optimizers. Muon's parameter groups come first; parameters
            with equal numbers of rows, the group's `row_sizes`, are in one group.
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
        """Step every parameter that has a gradient, and return the closure's value."""
        loss, skipped = None, getattr(self, "found_inf", None)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if "row_sizes" not in group:
                adamw = torch.optim.AdamW([dict(group)])  # a copy, to which torch adds defaults
                adamw.state, adamw.found_inf = self.state, skipped  # type: ignore[attr-defined]
                adamw.step()
                continue
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, same in by_shape.items():
                count = max(1, STACKED // shape.numel())
                for first in range(0, len(same), count):
                    self._step_matrices(same[first : first + count], group, skipped)
        return loss

    def _step_matrices(
        self, parameters: list[Tensor], group: Mapping[str, Any], skipped: Tensor | None
    ) -> None:
        """Step parameters of one shape with the options of `group`, unless `skipped` is 1.0."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        averages = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        weights, rate, momentum = [p.detach() for p in parameters], group["lr"], group["momentum"]
        if skipped is not None:  # if skipped, momentum stays and the rate is 0
            pairs = zip(averages, gradients, strict=True)
            gradients = [torch.where(skipped > 0, average, given) for average, given in pairs]
            rate = rate * (skipped == 0)
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        if group["nesterov"]:
            gradients = [g.lerp(a, momentum) for g, a in zip(gradients, averages, strict=True)]
        else:
            gradients = averages
        columns, sizes = weights[0].shape[-1], group["row_sizes"]
        moves = torch.stack([full_tensor(each).view(-1, columns) for each in gradients])
        parts = moves.split(sizes, dim=1)  # views [len(parameters), size, columns]
        for size in set(sizes):
            same = [part for part in parts if part.shape[1] == size]
            directions = orthogonalized(torch.cat(same), group["ns_steps"]).float()
            directions *= _factor(size, columns, group["adjust_lr_fn"])
            torch._foreach_copy_(same, directions.chunk(len(same)))
        moves = (moves * rate).view(len(weights), *weights[0].shape)
        torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
        torch._foreach_sub_(
            weights, [slice_like(*pair) for pair in zip(moves, weights, strict=True)]
        )


def orthogonalized(matrices: Tensor, num_steps: int) -> Tensor:
    """Return M matrices U S V^T [M, rows, columns], orthogonalised: U f(S) V^T in bfloat16, with
    singular values f(S) of about 1. f is `num_steps` steps of the Newton-Schulz iteration
    X <- a X + (b G + c G^2) X, where G = X X^T, and a, b, c are Muon's numbers (Jordan 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    x = x.mT if is_tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _factor(rows: int, columns: int, adjust_lr_fn: str) -> float:
    """Return the factor on a matrix's learning rate; see `Muon`."""
    if adjust_lr_fn == "original":
        return max(1.0, rows / columns) ** 0.5
    return 0.2 * max(rows, columns) ** 0.5


def _has_fused_step(backbone: Backbone) -> bool:
    return next(backbone.parameters()).device.type in ("cpu", "cuda")
