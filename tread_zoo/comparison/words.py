"""What a comparison says, in sentences that follow from its numbers and claim nothing more."""

import math
from collections.abc import Sequence
from itertools import pairwise

from tread_zoo.comparison.groups import Group, spread
from tread_zoo.comparison.results import RunResult
from tread_zoo.comparison.table import pairs_with_dense

SHARE_THAT_BINDS = 0.25  # of the wall-clock, beside training itself


def read_out(groups: Sequence[Group]) -> list[str]:
    """Return sentences: routed against dense at equal steps and at equal FLOPs, and what bound the
    runs."""
    lines = []
    for group in groups:
        pairs = pairs_with_dense(group, groups)
        if pairs:
            lines.append(_against_dense(group, pairs))
    return [*lines, *_what_bound(groups)]


def _against_dense(group: Group, pairs: Sequence[tuple[RunResult, RunResult]]) -> str:
    """Compare held-out losses, lower is better, and say how far all seeds agree."""
    dense, routed = zip(*pairs, strict=True)
    differences = [r.values["held_out_loss"] - d.values["held_out_loss"] for d, r in pairs]
    share = sum(r.flops * r.images for r in routed) / sum(d.flops * d.images for d in dense)
    loss = spread(routed, lambda run: run.values["held_out_loss"])
    other = spread(dense, lambda run: run.values["held_out_loss"])
    text = (
        f"{group.label}: held-out loss {loss} against {other} dense, {_verdict(differences)}, for "
        f"{share:.2f} of its training FLOPs."
    )
    at_equal = [loss_at_flops(d, r.flops * r.images) for d, r in pairs]
    if all(map(math.isfinite, at_equal)) and all(run.curve for run in routed) and share < 1:
        curves = [r.curve[-1][1] for r in routed]
        gains = [mine - dense_loss for mine, dense_loss in zip(curves, at_equal, strict=True)]
        mean = sum(at_equal) / len(at_equal)
        text += (
            f" When the dense run had spent as many FLOPs, its loss was {mean:.4f}, against "
            f"{sum(curves) / len(curves):.4f} by the same single draw, {_verdict(gains)}; its "
            "learning rate had not come to its end there, which favours the routed run."
        )
    return text


def _verdict(differences: Sequence[float]) -> str:
    if len(differences) < 2:
        return f"{'higher' if differences[0] > 0 else 'lower'} with the only seed"
    if all(d > 0 for d in differences):
        return "higher with every seed"
    if all(d < 0 for d in differences):
        return "lower with every seed"
    return "which the seeds do not settle"


def loss_at_flops(run: RunResult, flops: float) -> float:
    """Return the held-out loss of the run when it had spent `flops`, straight between the logged
    steps; NaN outside of them."""
    step = flops / (run.flops * run.images / run.num_steps) if run.num_steps else math.nan
    for (before, first), (after, second) in pairwise(run.curve):
        if before <= step <= after:
            return first + (second - first) * (step - before) / (after - before)
    return math.nan


def _what_bound(groups: Sequence[Group]) -> list[str]:
    """Say what the wall-clock of the runs went into, where they measured it."""
    lines = []
    for group in groups:
        runs = [run for run in group.ended.values() if run.phases]
        if not runs:
            continue
        seconds = {
            name: sum(run.phases.get(name, 0.0) for run in runs)
            for name in dict.fromkeys(name for run in runs for name in run.phases)
        }
        whole = sum(seconds.values())
        parts = ", ".join(f"{name} {100 * s / whole:.0f} %" for name, s in seconds.items())
        others = {name: s for name, s in seconds.items() if name != "training"}
        largest = max(others, key=lambda name: others[name], default="")
        binds = largest and others[largest] > SHARE_THAT_BINDS * whole
        bound = largest if binds else "the network's own steps"
        lines.append(f"{group.label}: bound by {bound} ({parts} of {whole / len(runs):.0f} s).")
    return lines
