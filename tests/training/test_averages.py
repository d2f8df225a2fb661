"""Power-function averages: tracked, stored, and any width made of them afterwards."""

import json

import numpy as np
import pytest
import torch

from tests.small_run import train_small
from tread_zoo.runs.checkpoint import CheckpointError, find_checkpoint, load_backbone
from tread_zoo.runs.posthoc_ema import (
    TRACKED_WIDTHS,
    posthoc_coefficients,
    width_to_exponent,
)
from tread_zoo.training.ema import power_decay

OPTIONS = (
    "lr_schedule=constant", "training.checkpoint_every=1", "training.keep_checkpoints=9",
    "training.ema_decay=0.4",
)  # fmt: skip


@pytest.mark.parametrize("width", [0.01, 0.05, 0.1, 0.2, 0.28])
def test_the_profile_is_as_wide_as_it_says(width):
    """Its standard deviation relative to the training so far, by numerical integration."""
    power, count = width_to_exponent(width), 1_000_000
    time = (np.arange(count) + 0.5) / count
    density = power * time ** (power - 1) / count
    mean = (density * time).sum()
    assert (density * (time - mean) ** 2).sum() ** 0.5 == pytest.approx(width, rel=1e-5)


@pytest.mark.parametrize(
    ("width", "words"), [(0, "0.288"), (0.3, "0.288"), (0.02, "snapshots_every")]
)
def test_a_width_that_cannot_be_had(width, words):
    """There is no such profile, or the snapshots are too far apart."""
    with pytest.raises(ValueError, match=words):
        posthoc_coefficients([500, 1000], width)


def test_a_width_made_of_snapshots_equals_the_one_tracked():
    """Of weights that walk at random for 1000 steps, with a snapshot at each fifth."""
    widths = [*TRACKED_WIDTHS.values(), 0.03, 0.07, 0.15, 0.2]
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(100, generator=generator, dtype=torch.float64)
    averages = {width: torch.full((100,), 9.0) for width in widths}
    decays, snapshots = {width: power_decay(width) for width in widths}, []
    for step in range(1, 1001):
        weights += 1e-3 * torch.randn(100, generator=generator, dtype=torch.float64)
        for width, average in averages.items():
            average.lerp_(weights.float(), 1 - decays[width](step))
        if step % 5 == 0:
            snapshots.append(torch.stack([averages[width] for width in TRACKED_WIDTHS.values()]))
    stored = torch.stack(snapshots).double()
    for width, tracked in averages.items():
        coefficients = torch.from_numpy(posthoc_coefficients(range(5, 1001, 5), width))
        made = torch.einsum("nw,nwd->d", coefficients, stored)
        assert float((made - tracked).norm() / tracked.norm()) < 1e-6, width


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """Return the folder of a run of 6 steps, all of them kept, with snapshots at 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("tracked")
    return train_small(folder, *OPTIONS, "training.ema_snapshots_every=2")


def files(folder):
    """Return the hash of each file of tensors of each checkpoint and snapshot of a run."""
    metas = sorted(folder.glob("*/step_*/checkpoint.json"))
    return {str(m.relative_to(folder)): json.loads(m.read_text())["sha256"] for m in metas}


@pytest.mark.slow
def test_a_run_s_averages_equal_the_sums_of_its_weights(tracked):
    steps = [find_checkpoint(path) for path in sorted((tracked / "checkpoints").glob("step_*"))]
    weights = [load_backbone(step, "model").patch_embed.weight.double() for step in steps]
    for width, tolerance in ((0.05, 1e-5), (0.1, 1e-5), (0.07, 5e-3)):
        power = width_to_exponent(width)
        shares = torch.arange(7, dtype=torch.float64).pow(power).diff() / 6**power
        expected = sum(share * weight for share, weight in zip(shares, weights, strict=True))
        made = load_backbone(steps[-1], f"ema:{width}").patch_embed.weight.double()
        assert (made - expected).norm() < tolerance * (expected - weights[0]).norm()


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [True, False])
def test_a_run_s_exponential_average_counts_steps_from_1(tracked, run, warmup):
    folder = tracked if warmup else run("constant", *OPTIONS, "training.ema_warmup=false")
    steps = [find_checkpoint(path) for path in sorted((folder / "checkpoints").glob("step_*"))]
    last, averages = (
        [load_backbone(step, kind).patch_embed.weight.double() for step in steps]
        for kind in ("model", "ema")
    )
    for k in range(2, 7):
        decay = min(0.4, (1 + k) / (10 + k)) if warmup else 0.4
        expected = decay * averages[k - 2] + (1 - decay) * last[k - 1]
        moved = (averages[k - 1] - averages[k - 2]).norm()
        assert (averages[k - 1] - expected).norm() < 1e-4 * moved, k


@pytest.mark.slow
def test_a_run_is_the_same_with_snapshots_and_without(tracked, run):
    plain = run("plain", *OPTIONS)
    own = files(tracked)
    for name, parts in files(plain).items():
        assert parts.items() <= own[name].items()
    with pytest.raises(CheckpointError, match=r"training\.ema_snapshots_every"):
        load_backbone(find_checkpoint(plain), "ema:0.05")
    with pytest.raises(CheckpointError, match=r"training\.ema_snapshots_every"):
        run("plain", *OPTIONS, "training.ema_snapshots_every=2", "resume=latest",
            "training.num_steps=7")  # fmt: skip


@pytest.mark.slow
def test_a_resumed_run_leaves_the_same_averages(tracked, copy_of):
    """Snapshots after the step that it goes on from, perhaps of other settings, are not kept."""
    expected, folder = files(tracked), copy_of(tracked)
    (folder / "ema_snapshots" / "step_00000004").rename(folder / "ema_snapshots" / "step_00000005")
    resume = f"resume={folder}/checkpoints/step_00000003"
    train_small(folder, *OPTIONS, "training.ema_snapshots_every=2", resume)
    assert files(folder) == expected
