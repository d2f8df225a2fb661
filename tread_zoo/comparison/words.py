"""What a comparison says, in sentences that follow from its numbers and claim nothing more."""

import math
from collections.abc import Sequence
from operator import eq, gt, lt

from tread_zoo.comparison.curves import HELD_OUT, CurveOf, drawn_curves, value_at_flops
from tread_zoo.comparison.groups import Group, spread
from tread_zoo.comparison.machines import Machines
from tread_zoo.comparison.markdown import LOWER_IS_BETTER, QUALITY
from tread_zoo.comparison.results import RunResult
from tread_zoo.comparison.table import pairs_with_dense

SHARE_THAT_BINDS = 0.25  # of the wall-clock, beside the largest
CHEAPER = 0.98  # of the dense run's FLOPs; runs at equal FLOPs differ by a step's


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
    if share < CHEAPER:
        text += _at_equal_flops(pairs)
    return text


def _at_equal_flops(pairs: Sequence[tuple[RunResult, RunResult]]) -> str:
    """Compare the ends of routed runs with the dense ones when they had spent as much; "" where
    nothing was measured on the way."""
    clauses = []
    for name, curve in _compared_curves(pairs).items():
        ends = [curve(r)[-1][1] for _, r in pairs if curve(r)]
        dense = [value_at_flops(d, curve(d), r.flops * r.images) for d, r in pairs]
        if len(ends) < len(pairs) or not all(map(math.isfinite, dense)):
            continue
        title, factor, form = QUALITY[name]
        means = [format(factor * sum(values) / len(values), form) for values in (dense, ends)]
        single = all(curve(run) is run.curve for pair in pairs for run in pair)
        what = f"its {'loss' if name == HELD_OUT else title} was {means[0]}, against {means[1]}"
        by = " by the same single draw" if single else ""
        verdict = _verdict([mine - other for mine, other in zip(ends, dense, strict=True)])
        clauses.append(f"{what}{by}, {verdict}")
    if not clauses:
        return ""
    return (
        f" When the dense run had spent as many FLOPs, {'; '.join(clauses)}; its learning rate had "
        "not come to its end there, which favours the routed run."
    )


def _compared_curves(pairs: Sequence[tuple[RunResult, RunResult]]) -> dict[str, CurveOf]:
    """Return the held-out loss, and the first distance that was scored on the way."""
    found = drawn_curves([run for pair in pairs for run in pair])
    distance = next((name for name in LOWER_IS_BETTER if name in found and name != HELD_OUT), None)
    return {name: found[name] for name in (HELD_OUT, distance) if name in found}


def _verdict(differences: Sequence[float]) -> str:
    seeds = "every seed" if len(differences) > 1 else "the only seed"
    for word, holds in (("higher", gt), ("lower", lt), ("the same", eq)):
        if all(holds(d, 0) for d in differences):
            return f"{word} with {seeds}"
    return "which the seeds do not settle"


def _what_bound(groups: Sequence[Group]) -> list[str]:
    """Say what the wall-clock of the runs went into, where they measured all of it."""
    machines = Machines([run for group in groups for run in group.results])
    lines = []
    for group in groups:
        measured = [run for run in group.ended.values() if run.phases]
        partly = [str(run.phases_since) for run in measured if run.phases_since]
        whole = [run for run in measured if not run.phases_since]
        for mark, runs in machines.split(whole).items():
            on = f" on {mark}" if mark else ""
            lines.append(f"{group.label}{on}: bound by {_bound(runs)}.")
        if partly:
            lines.append(
                f"{group.label}: of {len(partly)} run(s) it is not known what bound them: they "
                f"were resumed, and their seconds are of the steps after {', '.join(partly)} alone."
            )
    return lines


def _bound(runs: Sequence[RunResult]) -> str:
    """Return what most of the seconds of runs went into, and the shares of all."""
    seconds = {
        name: sum(run.phases.get(name, 0.0) for run in runs)
        for name in dict.fromkeys(name for run in runs for name in run.phases)
    }
    whole = sum(seconds.values())
    parts = ", ".join(f"{name} {100 * s / whole:.0f} %" for name, s in seconds.items())
    largest = max(seconds, key=lambda name: seconds[name])
    binds = [largest, *(name for name, s in seconds.items()
                        if name != largest and s > SHARE_THAT_BINDS * whole)]  # fmt: skip
    bound = ", then by ".join("the network's own steps" if b == "training" else b for b in binds)
    return f"{bound} ({parts} of {whole / len(runs):.0f} s)"
