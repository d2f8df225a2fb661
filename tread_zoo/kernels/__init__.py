"""Operations, each in several forms: implementations with the same signature.

A folder holds one operation: `naive.py` (the formula, also in float64), `torch_form.py` (fast plain
torch), `triton_form.py` (our Triton kernels), `compiled_form.py` (C for a CPU, which `compiled.py`
builds at first use), `fused.py` (adapters of optional packages, which are imported at first use).
Linear attention and the delta rules share one form in C, `recurrence.py`.

`dispatch.py` chooses the form of a call and reports why. `verify.py` compares two forms, and
`benchmarks/operations.py` times them.
"""

from tread_zoo.kernels.attention import attention
from tread_zoo.kernels.bidirectional_wkv import bidirectional_wkv
from tread_zoo.kernels.causal_conv1d import causal_conv1d
from tread_zoo.kernels.chunks import softplus
from tread_zoo.kernels.dispatch import (
    describe,
    get_forms,
    plain_forms,
    set_form,
    set_forms,
    used_ops,
)
from tread_zoo.kernels.dplr_delta_rule import dplr_delta_rule
from tread_zoo.kernels.gated_delta_rule import gated_delta_rule
from tread_zoo.kernels.gated_linear_attention import gated_linear_attention
from tread_zoo.kernels.selective_scan import selective_scan
from tread_zoo.kernels.ssd import ssd

__all__ = [
    "attention",
    "bidirectional_wkv",
    "causal_conv1d",
    "describe",
    "dplr_delta_rule",
    "gated_delta_rule",
    "gated_linear_attention",
    "get_forms",
    "plain_forms",
    "selective_scan",
    "set_form",
    "set_forms",
    "softplus",
    "ssd",
    "used_ops",
]
