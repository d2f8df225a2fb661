"""A run lies on a curve or off it: by hand, and by families whose spread is known."""

import dataclasses
import json
import math

import numpy as np
import pytest

from tests.comparison.reference.runs import SCORE, SETTINGS, write_run
from tread_zoo.comparison.reference import judge, make_curve, read_trace
from tread_zoo.comparison.reference.band import band_of, judge_curve
from tread_zoo.comparison.reference.traces import HELD_OUT, TRAINING, Trace, at_steps

STEPS = range(20, 401, 20)
TREAD = {"name": "tread", "selection_rate": 0.5}


def trace(held_out, losses=None, *, seed=0, routing=None, score=None):
    """Return a run whose curves are the values at STEPS."""
    rows = dict.fromkeys(HELD_OUT, tuple(zip(STEPS, held_out, strict=False)))
    training = held_out if losses is None else losses
    rows |= dict.fromkeys(TRAINING, tuple(zip(STEPS, training, strict=False)))
    return Trace(
        folder=f"seed{seed}",
        settings={**SETTINGS, "seed": seed, "routing": routing or {"name": "none"}},
        rows=rows,
        scores=(score or SCORE)["values"],
        protocol=(score or SCORE)["protocol"],
        machine={"num_processes": 1},
        images_per_s=100.0,
        peak_memory=1.0,
    )


def curve_of(*runs):
    return make_curve("recipe", runs[0].settings, runs)


def straight(level):
    return [level] * len(STEPS)


def test_the_band_of_two_seeds_is_what_the_formula_says():
    curve = curve_of(trace(straight(1.0)), trace(straight(1.1), seed=1))
    steps, means, bands = band_of(curve, "held_out_loss")
    assert steps == list(STEPS)
    assert means == pytest.approx([1.05] * 20)
    # The deviation of 1.0 and 1.1 is 0.1 / sqrt 2; four of them, times sqrt(1 + 1/2).
    assert bands == pytest.approx([4 * math.sqrt(1.5) * 0.1 / math.sqrt(2)] * 20, rel=1e-4)


@pytest.mark.parametrize(("name", "floor"), [("held_out_loss", 0.0075), ("loss_level_2", 0.0125)])
def test_seeds_that_agree_leave_the_floor(name, floor):
    curve = curve_of(
        trace(straight(2.0)), trace(straight(2.0), seed=1), trace(straight(2.0), seed=2)
    )
    _, _, bands = band_of(curve, name)
    assert bands == pytest.approx([4 * math.sqrt(4 / 3) * 2.0 * floor] * len(bands))


def test_the_spread_of_a_loss_and_its_levels_is_pooled():
    """Two seeds that agree at one level alone do not make a band of nothing there."""
    runs = [trace(straight(1.0)), trace(straight(1.1), seed=1)]
    agreeing = tuple(zip(STEPS, straight(2.0), strict=True))
    runs = [
        dataclasses.replace(run, rows={**run.rows, "held_out_loss_level_1": agreeing})
        for run in runs
    ]
    _, means, bands = band_of(curve_of(*runs), "held_out_loss_level_1")
    assert means == [2.0] * 20
    # Four of the five curves have the relative deviation 0.1 / sqrt 2 / 1.05, one has none.
    pooled = math.sqrt(4 / 5) * 0.1 / math.sqrt(2) / 1.05
    assert bands == pytest.approx([4 * math.sqrt(1.5) * 2.0 * pooled] * 20, rel=1e-4)


def test_a_curve_that_jumps_from_point_to_point_has_a_wider_band():
    zigzag = [1.0 + 0.05 * (-1) ** index for index in range(len(STEPS))]
    curve = curve_of(trace(zigzag), trace(zigzag, seed=1))
    _, means, bands = band_of(curve, "held_out_loss")
    noise = 4 * 0.05 / (0.6745 * math.sqrt(6))  # every second difference is 4 times 0.05
    relative = [band / mean for band, mean in zip(bands, means, strict=True)]
    assert relative == pytest.approx([4 * math.sqrt(1.5) * noise] * 20, rel=0.11)


def test_training_losses_are_judged_in_tenths():
    rising = [float(index) for index in range(1, 21)]
    curve = curve_of(trace(rising), trace(rising, seed=1))
    steps, means, _ = band_of(curve, "loss")
    assert steps == list(range(40, 401, 40))
    assert means == pytest.approx([index + 0.5 for index in range(1, 20, 2)])


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (10, {20: 15.0, 40: 35.0, 60: 55.0}),
        (20, {20: 20.0, 40: 40.0, 60: 60.0}),
        (40, {}),
        (15, {}),
    ],
)
def test_windows_of_another_length_are_means_of_what_lies_within(every, expected):
    """The value of a line is its step: of steps 10 and 20 the mean is 15. What no line begins or
    ends is left out: that of step 40 would be of steps 1 to 40."""
    points = [(step, float(step)) for step in range(every, 70, every)]
    assert at_steps(points, [20, 40, 60, 80], windows=True) == expected
    at = at_steps(points, [20, 40, 60, 80], windows=False)
    assert at == {step: float(step) for step in (20, 40, 60) if step % every == 0}


def test_lines_of_a_window_count_by_their_steps():
    """A run of 70 steps with a line every 30: the last is of 10 steps."""
    points = [(30, 1.0), (60, 2.0), (70, 4.0)]
    assert at_steps(points, [70], windows=True)[70] == pytest.approx((30 + 60 + 40) / 70)


def logged(every, *, seed=0, num_steps=800):
    """A run whose training loss falls steeply at first, logged as a run does: means since the line
    before, and a line at the end."""
    loss = [0.3 + 2.0 * math.exp(-step / 60) for step in range(1, num_steps + 1)]
    ends = [*range(every, num_steps, every), num_steps]
    lines = [(b, float(np.mean(loss[a:b]))) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    whole = trace(straight(1.0), seed=seed)
    return dataclasses.replace(whole, rows={**whole.rows, **dict.fromkeys(TRAINING, tuple(lines))})


@pytest.mark.parametrize("every", [7, 16, 20, 30, 40, 50, 80, 100, 160, 250, 800])
def test_how_often_was_logged_does_not_move_a_run_off_its_curve(every):
    """The very losses of the reference, at another training.log_every."""
    curve = curve_of(logged(20), logged(20, seed=1))
    verdict = judge_curve(logged(every, seed=2), curve, "loss")
    assert abs(verdict.bands) < 0.01
    if verdict.points == 0:
        assert verdict.note.startswith("logged at other steps")
    else:
        assert 800 % every == 0 or every in (30, 50)


@pytest.mark.parametrize("lines", [51, 53, 61, 97])
def test_a_curve_of_thinned_lines_is_on_its_own_runs(lines):
    """More lines than points, and not a multiple: the first point is of fewer lines."""
    runs = [logged(10, seed=seed, num_steps=10 * lines) for seed in (0, 1)]
    verdict = judge_curve(runs[0], curve_of(*runs), "loss")
    assert verdict.points >= 8
    assert abs(verdict.bands) < 0.01


def family(rng, *, shift=1.0, spread=0.008, noise=0.02):
    """Return a run of a family: a fall to a level that differs from seed to seed by `spread`, and a
    training loss with noise on it."""
    clean = (0.4 + 0.6 * np.exp(-np.array(STEPS) / 80)) * (1 + spread * rng.standard_normal())
    return clean * shift, clean * shift * (1 + noise * rng.standard_normal(len(clean)))


def runs_off(shift, *, count=20, num_seeds=2):
    """Return how many of `count` runs of a shifted family are off curves of the family."""
    off = 0
    for number in range(count):
        rng = np.random.default_rng(number)
        seeds = [trace(*family(rng), seed=seed) for seed in range(num_seeds)]
        run = trace(*family(rng, shift=shift), seed=9)
        off += any(verdict.is_off for verdict in judge(run, curve_of(*seeds)))
    return off


@pytest.mark.parametrize("num_seeds", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_seed_of_the_same_family_is_on_the_curve(num_seeds):
    assert runs_off(1.0, num_seeds=num_seeds) <= 1


@pytest.mark.parametrize("shift", [1.12, pytest.param(0.88, marks=pytest.mark.slow)])
def test_another_family_is_off_it(shift):
    assert runs_off(shift) >= 19


def test_a_run_that_leaves_the_curve_midway_is_found_and_where():
    curve = curve_of(trace(straight(1.0)), trace(straight(1.01), seed=1))
    values = straight(1.0)
    values[7] = 1.2
    verdict = judge_curve(trace(values, seed=2), curve, "held_out_loss")
    assert (verdict.word, verdict.step, verdict.value) == ("above", 160, 1.2)
    values[7] = math.nan
    verdict = judge_curve(trace(values, seed=2), curve, "held_out_loss")
    assert verdict.is_off
    assert (verdict.word, verdict.step) == ("not finite", 160)


def test_a_run_whose_loss_is_not_finite_is_off_as_the_run_writes_it(tmp_path):
    """A number that is not finite is in no line of the log; the line is there."""
    curve = curve_of(trace(straight(1.0)), trace(straight(1.01), seed=1))
    values = dict.fromkeys(STEPS, 1.0)
    folder = write_run(tmp_path / "run", losses=values, held_out=values, score=None)
    assert not any(verdict.is_off for verdict in judge(read_trace(folder), curve))
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if "images_per_s" in line:
            line |= {"learning_rate": 0.1, "grad_norm": 1.0}
        if line["step"] == 140:
            for name in (*TRAINING, *HELD_OUT[:2]):
                line.pop(name, None)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, step in (("loss", 160), ("held_out_loss", 140)):
        verdict = judge_curve(read_trace(folder), curve, name)
        assert (verdict.word, verdict.step, verdict.is_off) == ("not finite", step, True)
    with pytest.raises(ValueError, match="run has a loss that is not finite, at step 140"):
        curve_of(
            trace(straight(1.0)),
            dataclasses.replace(
                read_trace(folder), protocol={"step": 1}, machine={"num_processes": 1}
            ),
        )


def test_a_run_that_still_trains_is_judged_as_far_as_it_got(tmp_path):
    curve = curve_of(trace(straight(1.0)), trace(straight(1.01), seed=1))
    values = dict.fromkeys(list(STEPS)[:6], 1.0)
    folder = write_run(tmp_path / "run", losses=values, held_out=values, score=None)
    verdicts = {verdict.name: verdict for verdict in judge(read_trace(folder), curve)}
    assert verdicts["held_out_loss"].points == 6
    assert verdicts["loss"].points == 3
    assert verdicts["scores"].note == "the run has not ended"
    assert not any(verdict.is_off for verdict in verdicts.values())


def test_a_routed_training_loss_is_compared_with_the_same_routing_only():
    dense = curve_of(trace(straight(1.0)), trace(straight(1.01), seed=1))
    run = trace(straight(1.0), straight(1.3), seed=2, routing=TREAD)
    verdicts = {verdict.name: verdict for verdict in judge(run, dense)}
    assert verdicts["loss"].word == "not compared"
    assert verdicts["held_out_loss"].word == "on"
    routed = curve_of(*(trace(straight(1.0), straight(1.3), seed=s, routing=TREAD) for s in (0, 1)))
    verdict = judge_curve(run, routed, "loss")
    assert verdict.word == "on"
    newer = {**TREAD, "a_newer_option": 0}
    run = trace(straight(1.0), straight(1.3), seed=2, routing=newer)
    assert judge_curve(run, routed, "loss").word == "on", "an older curve does not say"
    other = trace(straight(1.0), straight(1.3), seed=2, routing={**TREAD, "selection_rate": 0.25})
    assert judge_curve(other, routed, "loss").word == "not compared"
    assert "higher than a dense run's" in verdict.note


def with_score(**values):
    return {**SCORE, "values": {**SCORE["values"], **values}}


def test_scores_have_floors_of_their_own():
    """500 samples: the deviation of a share of 0.9 is sqrt(0.9 0.1 / 500) = 0.0134; times 4 and
    sqrt(3/2), 0.0657."""
    curve = curve_of(trace(straight(1.0)), trace(straight(1.0), seed=1))
    for agreement, word in ((0.9 - 0.065, "on"), (0.9 - 0.067, "below"), (0.96, "on")):
        run = trace(straight(1.0), seed=2, score=with_score(agreement=agreement))
        verdicts = {verdict.name: verdict for verdict in judge(run, curve)}
        assert verdicts["score: agreement"].word == word
        assert "score: kid_std" not in verdicts


def test_a_kernel_distance_near_0_has_a_floor_by_its_own_deviation():
    """Of subsets of 1000 among 4000 samples, half of kid_std; times 4 and sqrt(3/2)."""
    protocol = {**SCORE["protocol"], "num_generated": 4000, "kid_subset_size": 1000}
    given = {"kid": 0.0001, "kid_std": 0.002}
    near = {**with_score(**given), "protocol": protocol}
    curve = curve_of(*(trace(straight(1.0), seed=seed, score=near) for seed in (0, 1)))
    width = 4 * math.sqrt(1.5) * 0.002 / 2
    for off, word in ((0.99, "on"), (-0.99, "on"), (1.01, "above")):
        score = {**near, "values": {**near["values"], "kid": 0.0001 + off * width}}
        verdicts = {v.name: v for v in judge(trace(straight(1.0), seed=2, score=score), curve)}
        assert verdicts["score: kid"].word == word


def test_a_score_that_the_run_lacks_is_said():
    curve = curve_of(trace(straight(1.0)), trace(straight(1.0), seed=1))
    values = {name: v for name, v in SCORE["values"].items() if name != "kid"}
    run = trace(straight(1.0), seed=2, score={**SCORE, "values": values})
    verdicts = {verdict.name: verdict for verdict in judge(run, curve)}
    assert verdicts["score: kid"].note == "not scored"
    assert not verdicts["score: kid"].is_off


def test_scores_of_another_protocol_are_not_compared_but_the_loss_is():
    curve = curve_of(trace(straight(1.0)), trace(straight(1.0), seed=1))
    protocol = {**SCORE["protocol"], "extractor": "cnn@2", "data": "digits.npz"}
    run = dataclasses.replace(trace(straight(1.0), seed=2), protocol=protocol)
    verdicts = {verdict.name: verdict for verdict in judge(run, curve)}
    assert verdicts["score: kid"].note == "another protocol: extractor is cnn@2, not cnn@1"
    assert verdicts["score: held_out_loss"].word == "on"
