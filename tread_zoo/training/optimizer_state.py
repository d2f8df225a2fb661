"""The state of any optimizer, keyed by parameter names, for checkpoints: tensors and JSON values.

torch.distributed.checkpoint.state_dict is not used: it takes an optimizer step to create the state
that it loads into, which changes some optimizers.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tread_zoo.training.sharding import full_tensor, slice_like


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that hold the state. For an optimizer that wraps others in its
    attributes, or in lists there, these are the wrapped ones; for any other, it is `optimizer`
    itself."""
    inner = []
    for value in vars(optimizer).values():
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, torch.optim.Optimizer):
                inner += inner_optimizers(each)
    return inner or [optimizer]


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[Any]]:
    """Return the state of an optimizer: its tensors, and a list of all other values. Every rank
    must call this.

    The tensors are unsharded and on the CPU; their keys are `<parameter>|<name>`, as in
    `head.weight|exp_avg`. For each of `inner_optimizers`, the list has a dictionary. Its "state"
    has the other values, with keys of the same form; its "groups" has the options of each group.

    Args:
        optimizer: the optimizer.
        parameters: all trained parameters, by name.
    """
    tensors: dict[str, Tensor] = {}
    plain: list[Any] = []
    for inner in inner_optimizers(optimizer):
        values, content = {}, inner.state_dict()
        for number, parameter in enumerate(_names(inner, parameters)):
            for name, value in content["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{parameter}|{name}"] = full_tensor(value).detach().cpu()
                else:
                    values[f"{parameter}|{name}"] = value
        groups = [
            {k: v for k, v in group.items() if k != "params" and not isinstance(v, Tensor)}
            for group in content["param_groups"]
        ]
        plain.append({"state": values, "groups": groups})
    return tensors, plain


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    plain: list[Any],
    *,
    with_groups: bool,
) -> None:
    """Load `tensors` and `plain`, the result of `optimizer_state`; each rank loads its slices. If
    `with_groups` is set, the parameter groups get their saved options; otherwise they keep the
    options with which the optimizer was built. `parameters` has all trained parameters by name."""
    for inner, saved in zip(inner_optimizers(optimizer), plain, strict=True):
        numbers = {name: number for number, name in enumerate(_names(inner, parameters))}
        content, state = inner.state_dict(), defaultdict[int, dict[str, Any]](dict)
        for key, value in {**tensors, **saved["state"]}.items():
            parameter, _, name = key.partition("|")
            if parameter in numbers:
                if isinstance(value, Tensor):
                    value = slice_like(value, parameters[parameter])
                state[numbers[parameter]][name] = value
        content["state"] = dict(state)
        if with_groups:
            # The last group may be missing: it belongs to an alignment, which may have stopped.
            for group, options in zip(content["param_groups"], saved["groups"], strict=False):
                group |= {k: v for k, v in options.items() if k != "fused"}  # of the machine
        inner.load_state_dict(content)


def _names(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> list[str]:
    """Return the names of an optimizer's parameters in the order in which its state numbers them.
    `parameters` has all trained parameters by name."""
    names = {parameter: name for name, parameter in parameters.items()}
    return [names[p] for group in optimizer.param_groups for p in group["params"]]
