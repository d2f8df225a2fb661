"""A depthwise causal convolution by its formula, tap by tap.

    y_t = bias + Σ_k w_k x_{t-W+1+k}

Dimensions: B batch, L length, D channels, W taps.
"""

import torch
from torch import Tensor


def causal_conv1d_naive(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, segment_ids: Tensor | None = None
) -> Tensor:
    """Return the convolution by its formula; see `tread_zoo.kernels.causal_conv1d`."""
    steps, taps = x.unbind(1), weight.unbind(1)  # indices would make backward quadratic
    outputs = []
    for t in range(len(steps)):
        y = torch.zeros_like(steps[0]) if bias is None else bias.expand_as(steps[0])
        for back in range(min(len(taps), t + 1)):
            tap = taps[-1 - back] * steps[t - back]
            if segment_ids is not None:
                tap = tap * (segment_ids[:, t] == segment_ids[:, t - back]).unsqueeze(-1)
            y = y + tap
        outputs.append(y)
    return torch.stack(outputs, dim=1).to(x.dtype)
