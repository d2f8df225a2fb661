"""Whether a run lies on a curve: the spread of the reference seeds, widened by what is known.

At point p of a curve, S seeds have the values y_sp with the mean m_p. Relative to that mean,

    spread_p = sqrt(1/(S-1) sum_s (y_sp - m_p)^2) / |m_p|        of the seeds, at p
    between_p = max(rms of spread over a curve and its levels, rms over the five points around p)
    noise    = median |y_p-1 - 2 y_p + y_p+1| / |m_p| / (0.6745 sqrt 6)      from point to point
    scale_p  = |m_p| max(between_p, noise, floor)
    band_p   = Z sqrt(1 + 1/S) scale_p                           around m_p

A new run is off a mean of S runs by its own deviation and by the mean's: sqrt(1 + 1/S). Two seeds
that happen to agree would make a band of nothing. So the spread is pooled over all points of a loss
and its four levels; it is never less than the noise that the second differences show (they see no
slow change), and never less than a floor: what the seeds of the runs in docs/comparison deviate
from each other, 38 pairs. Training losses are judged in tenths of the run, for a line of the log is
mostly noise.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tread_zoo.comparison.markdown import SAME_PROTOCOL, settings_of
from tread_zoo.comparison.reference.curve import Curve
from tread_zoo.comparison.reference.settings import differences
from tread_zoo.comparison.reference.traces import HELD_OUT, TRAINING, Trace, at_steps
from tread_zoo.evaluation.metrics import KID_SUBSET_SIZE

Z = 4.0  # standard deviations: many points and curves are looked at, so one alone must be far off
WINDOW = 2  # points to either side
TENTHS = 10
FLOOR, FLOOR_OF_A_LEVEL = 0.0075, 0.0125  # relative, of losses
FLOORS = {"fid": 0.1, "sfid": 0.1, "fd_dinov2": 0.1, "isc": 0.05, "kid": 0.25}  # relative
SHARES = ("agreement", "precision", "recall")  # of samples: their floor is binomial
LOSS_PROTOCOL = ("held_out_draws", "held_out_objective", "held_out_images", "held_out_seed")
OUTSIDE_SCORES = ("kid_std",)
HIGHER = "routed: higher than a dense run's, as it must be; compared with a routed reference"


@dataclass(frozen=True)
class Verdict:
    """What became of one curve or score.

    Args:
        name: of the curve or the score.
        points: that were compared.
        step: where the run lies farthest outside, in bands.
        value, mean: the run's there, and the reference's.
        band: half of its width there.
        note: why it was not compared, or what else is to be known.
    """

    name: str
    points: int = 0
    step: int = 0
    value: float = math.nan
    mean: float = math.nan
    band: float = math.nan
    note: str = ""

    @property
    def bands(self) -> float:
        """How far the run is from the mean, in half bands; its sign says above or below."""
        return (self.value - self.mean) / self.band if self.points else 0.0

    @property
    def is_finite(self) -> bool:
        """Whether the run has a number there."""
        return math.isfinite(self.value)

    @property
    def is_off(self) -> bool:
        """Whether it lies outside; what is not finite does."""
        return self.points > 0 and not abs(self.bands) <= 1

    @property
    def word(self) -> str:
        """on, above, below, not finite, or that it was not compared."""
        if not self.points:
            return "not compared"
        if not self.is_finite:
            return "not finite"
        return ("above" if self.bands > 0 else "below") if self.is_off else "on"


def judge(run: Trace, curve: Curve) -> list[Verdict]:
    """Return a verdict for each curve, as far as the run got, and for each score once it ended."""
    return [
        *(judge_curve(run, curve, name) for name in (*HELD_OUT, *TRAINING) if name in curve.names),
        *_judge_scores(run, curve),
    ]


def judge_curve(run: Trace, curve: Curve, name: str) -> Verdict:
    """Return the verdict of one curve; routed training losses compare with the same routing."""
    note = ""
    routing, reference = ({"routing": s["routing"]} for s in (run.settings, curve.settings))
    if name in TRAINING and routing["routing"]["name"] != "none":
        note = HIGHER
    if name in TRAINING and differences(routing, reference):
        return Verdict(name, note="another routing: its training loss compares with no dense one's")
    steps, means, bands = band_of(curve, name)
    values = at_steps(run.rows.get(name, ()), steps, windows=name in TRAINING)
    if not values:
        last = max((step for step, _ in run.rows.get(name, ())), default=0)
        note = "logged at other steps" if last >= steps[0] else "not logged so far"
        return Verdict(name, note=f"{note}; the reference has {_listed(steps)}")
    found = [
        Verdict(name, len(values), step, values[step], mean, band, note)
        for step, mean, band in zip(steps, means, bands, strict=True)
        if step in values
    ]
    return max(found, key=lambda verdict: abs(verdict.bands) if verdict.is_finite else math.inf)


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:3])) + (" …" if len(steps) > 3 else "")


def band_of(curve: Curve, name: str) -> tuple[list[int], list[float], list[float]]:
    """Return the steps at which a curve is judged, the mean there and half of the band's width."""
    group = TRAINING if name in TRAINING else HELD_OUT
    steps, rows = _judged(curve, name)
    means, spreads = _means_and_spreads(rows)
    related = [_means_and_spreads(_judged(curve, n)[1])[1] for n in group if n in curve.names]
    pooled = _rms([spread for found in related for spread in found])
    floor = max(_noise(rows, means), FLOOR_OF_A_LEVEL if "level" in name else FLOOR, pooled)
    widen = Z * math.sqrt(1 + 1 / len(rows))
    around = [_rms(spreads[max(0, p - WINDOW) : p + WINDOW + 1]) for p in range(len(spreads))]
    bands = [widen * abs(m) * max(floor, near) for m, near in zip(means, around, strict=True)]
    return steps, means, bands


def _judged(curve: Curve, name: str) -> tuple[list[int], list[list[float]]]:
    """Return the steps at which a curve is judged, and the values of each seed there."""
    steps, windows = list(curve.steps_of(name)), name in TRAINING
    if windows:
        steps = steps[:: -math.ceil(len(steps) / TENTHS)][::-1]
    points = [curve.points_of(name, run) for run in curve.runs]
    return steps, [list(at_steps(found, steps, windows=windows).values()) for found in points]


def _means_and_spreads(rows: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Return mean and relative deviation over the seeds, at each point."""
    columns = list(zip(*rows, strict=True))
    means = [statistics.fmean(values) for values in columns]
    return means, [statistics.stdev(v) / abs(m) for v, m in zip(columns, means, strict=True)]


def _noise(rows: Sequence[Sequence[float]], means: Sequence[float]) -> float:
    """Return the relative deviation from point to point, by second differences."""
    jumps = [
        abs(row[p - 1] - 2 * row[p] + row[p + 1]) / abs(means[p])
        for row in rows
        for p in range(1, len(row) - 1)
    ]
    return statistics.median(jumps) / (0.6745 * math.sqrt(6)) if jumps else 0.0


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(value * value for value in values))


def _judge_scores(run: Trace, curve: Curve) -> list[Verdict]:
    wanted = [n for n in curve.runs[0].scores if n not in OUTSIDE_SCORES]
    if not run.has_ended:
        return [Verdict("scores", note="the run has not ended")] if wanted else []
    verdicts = []
    for name in wanted:
        values, title = curve.scores_of(name), f"score: {name}"
        if name not in run.scores or len(values) < 2:
            missing = "not scored" if name not in run.scores else "one reference seed alone has it"
            verdicts.append(Verdict(title, note=missing))
            continue
        other = _other_protocol(run.protocol, curve.protocol, loss=name in HELD_OUT)
        if other:
            verdicts.append(Verdict(title, note=f"another protocol: {other}"))
            continue
        mean = statistics.fmean(values)
        scale = max(statistics.stdev(values), _floor_of(name, mean, run.protocol))
        if name == "kid":
            scale = max(scale, _noise_of_kid(curve, run.protocol))
        band = Z * math.sqrt(1 + 1 / len(values)) * scale
        step = int(run.protocol.get("step", run.last_step))
        verdicts.append(Verdict(title, 1, step, run.scores[name], mean, band))
    return verdicts


def _floor_of(name: str, mean: float, protocol: Mapping[str, object]) -> float:
    if name in SHARES:
        count = protocol.get("num_generated", 500)
        assert isinstance(count, int)
        share = min(max(mean, 1 / count), 1 - 1 / count)  # one sample more or less is no news
        return math.sqrt(share * (1 - share) / count)
    relative = FLOOR_OF_A_LEVEL if "level" in name else FLOORS.get(name, FLOOR)
    return abs(mean) * relative


def _noise_of_kid(curve: Curve, protocol: Mapping[str, Any]) -> float:
    """Return how far the kernel distance of another draw of N samples is off: near 0, a share of
    the mean is no floor.

    kid_std is the deviation of one subset of m samples. The mean over 100 subsets deviates by less,
    but they share their samples: by kid_std sqrt(m / N), as if N / m of them were of their own.
    """
    deviations = curve.scores_of("kid_std")
    count = protocol.get("num_generated") or KID_SUBSET_SIZE
    size = protocol.get("kid_subset_size") or KID_SUBSET_SIZE
    share = min(1.0, size / count)
    return statistics.fmean(deviations) * math.sqrt(share) if deviations else 0.0


def _other_protocol(
    given: Mapping[str, object], wanted: Mapping[str, object], *, loss: bool
) -> str:
    """Return the first key that makes two scores incomparable, with both values; "" if none does.
    What only one of them says is passed over, and what the data are called.

    Loss: of all the protocol it depends on these alone. Which files the images were read from, as
    held_out_sha256 tells, is a matter of the data, as their name is.
    """
    keys = ("weights", "step", *LOSS_PROTOCOL) if loss else SAME_PROTOCOL
    for key in keys:
        ours, theirs = (settings_of(protocol, key) for protocol in (given, wanted))
        if key != "data" and None not in (ours, theirs) and ours != theirs:
            return f"{key} is {ours}, not {theirs}"
    return ""
