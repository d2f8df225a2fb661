"""Alignment: its loss in float64, its gradients beside routes, resuming, features of a table."""

import math

import pytest
import torch

from tests.data.tables import Stub, place_features, write_features
from tests.small_run import parts_of, settings
from tests.training.test_resume import assert_same_end
from tread_zoo import create, create_backbone
from tread_zoo.data.latents import latents
from tread_zoo.runs.checkpoint import find_checkpoint
from tread_zoo.training.step import draw_step, step_loss
from tread_zoo.training.trackers import read_metrics

CPU = torch.device("cpu")
ALIGNED = ("data=table", "alignment=repa", "alignment.hidden_size=16")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table of images with features [2, 5, 3, 4] of them and of the mirrored ones."""
    return write_features(tmp_path_factory.mktemp("table"))


def parts(table, *overrides):
    return parts_of(settings(*ALIGNED, f"data.path={table}", *overrides))


# The loss -------------------------------------------------------------------------------------


def loss_by_hand(state, tokens, ids, features, projection, mean_share):
    """The loss of each image, place by place, in float64; the grids are the same, 3x2."""
    weights = {name: value.double() for name, value in state.items()}
    losses = []
    for kept, places, maps in zip(tokens.double(), ids.tolist(), features.double(), strict=True):
        at = dict(zip(places, kept, strict=True))
        similarities = []
        for place, token in at.items():
            if projection == "mlp":
                out = token
                for layer in (0, 2, 4):
                    out = weights[f"layers.{layer}.weight"] @ out + weights[f"layers.{layer}.bias"]
                    out = out / (1 + (-out).exp()) if layer < 4 else out
            else:
                row, col = divmod(place, 2)
                out = weights["layers.bias"].clone()
                for i, j in ((i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)):
                    inside = 0 <= row + i < 3 and 0 <= col + j < 2
                    neighbour = at.get((row + i) * 2 + col + j) if inside else None
                    if neighbour is not None:
                        out += weights["layers.weight"][:, :, i + 1, j + 1] @ neighbour
            target = maps.flatten(1)[:, place]
            if mean_share is not None:
                every = maps.flatten(1)
                std = (every - every.mean(1, keepdim=True)).square().mean(1).sqrt()
                target = (target - mean_share * every.mean(1)) / std
            similarities.append(float(out @ target / (out.norm() * target.norm())))
        losses.append(-sum(similarities) / len(similarities))
    return torch.tensor(losses)


@pytest.mark.parametrize("projection", ["mlp", "conv"])
@pytest.mark.parametrize("mean_share", [None, 1.0, 0.6])
def test_the_loss_is_that_of_the_kept_tokens_at_their_places(projection, mean_share):
    torch.manual_seed(0)
    backbone = create_backbone(
        "dit", input_size=(6, 4), in_channels=1, num_classes=0, depth=8, hidden_size=16
    )
    options = {"projection": projection, "hidden_size": 7}
    if mean_share is not None:
        options |= {"normalize": "spatial", "mean_share": mean_share}
    projector = create("alignment", "repa", **options).build(backbone, 4)
    assert projector.block == 2  # a quarter of the depth
    features = 1 + torch.randn(2, 4, 3, 2)
    tokens = torch.randn(2, 6, 16)
    for ids in (torch.tensor([[0, 2, 3], [1, 4, 5]]), torch.arange(6).expand(2, -1)):
        kept = tokens.gather(1, ids[..., None].expand(-1, -1, 16))
        expected = loss_by_hand(projector.state_dict(), kept, ids, features, projection, mean_share)
        torch.testing.assert_close(projector(kept, ids, features), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(projector(tokens, None, features), expected, atol=1e-5, rtol=0)


def test_features_of_another_grid_are_resized():
    """A linear course over the image stays one between the outer places."""
    backbone = create_backbone("dit", input_size=16, in_channels=1, num_classes=0, depth=4)
    projector = create("alignment", "repa", projection="conv").build(backbone, 2)  # 8x8
    place = (torch.arange(8) + 0.5) / 8
    ramp = torch.stack([torch.ones(8, 8), place.expand(8, 8)])
    torch.nn.init.zeros_(projector.layers.weight)
    inside = torch.arange(64).view(8, 8)[2:6, 2:6].reshape(1, -1)
    tokens = torch.zeros(1, 16, backbone.config["hidden_size"])
    with torch.no_grad():
        projector.layers.bias.copy_(torch.tensor([1.0, 0.5]))
    angles = torch.atan2(ramp[1], ramp[0]).view(-1)[inside] - math.atan(0.5)
    for side in (4, 16):  # coarser and finer
        own = (torch.arange(side) + 0.5) / side
        features = torch.stack([torch.ones(side, side), own.expand(side, side)])[None]
        loss = projector(tokens, inside, features)
        torch.testing.assert_close(loss, -angles.cos().mean(1), atol=1e-5, rtol=0)


def test_the_term_is_added_by_its_weight(table):
    setup = parts(table, "routing.start=1", "routing.end=3", "alignment.weight=0.25")
    batch = next(setup.batches())
    result, plain = (step_loss(setup, draw_step(setup, b, 0, 0, CPU)) for b in (batch, batch[:2]))
    assert result.values["alignment_loss"].shape == (8,)
    torch.testing.assert_close(result.losses, plain.losses + 0.25 * result.values["alignment_loss"])


# Runs -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_stops_aligning_and_resumes_to_the_bit(run, table):
    given = [*ALIGNED, f"data.path={table}", "alignment.stop=0.6", "alignment.projection=conv"]
    given += ["optimizer=muon", "optimizer.learning_rate=1e-3", "lr_schedule=constant"]
    given += ["training.horizontal_flip=true", "training.gradient_accumulation_steps=2"]
    unbroken = run("unbroken", *given)  # aligned in steps 1 … 4 of 6
    rows = [row for row in read_metrics(unbroken) if "loss" in row]
    assert [row["step"] for row in rows if "alignment_loss" in row] == [2, 4]
    run("parts", *given, "training.checkpoint_every=3")
    checkpoint = find_checkpoint(unbroken.parent / "parts" / "checkpoints" / "step_00000003")
    resumed = run("parts", *given, f"resume={checkpoint.path}")
    assert_same_end(unbroken, resumed)
    assert not any("layers" in name for name in checkpoint.tensors("ema"))
    start = parts(table, *given[1:]).projector.state_dict()
    end = checkpoint.tensors("alignment")
    assert start.keys() == end.keys()
    assert not any(torch.equal(start[name], end[name]) for name in start)


SELF = ("alignment=self_flow", "alignment.hidden_size=16", "routing.start=1", "routing.end=3")


@pytest.mark.parametrize("second_level_fraction", [0, 0.5])
def test_the_averaged_network_is_the_encoder(second_level_fraction):
    """Kept tokens of a block are compared, by their ids, with a later block's tokens at the
    cleaner time."""
    setup = parts_of(settings(*SELF, f"objective.second_level_fraction={second_level_fraction}"))
    teacher = parts_of(settings("seed=1")).backbone
    with torch.no_grad():
        for parameter in (*teacher.parameters(), *setup.backbone.parameters()):
            parameter += 0.05 * torch.randn(parameter.shape)
    batch = next(setup.batches())
    x, y, draw, routes, _ = drawn = draw_step(setup, batch, 0, 0, CPU)
    term = step_loss(setup, drawn, teacher=teacher).values["alignment_loss"]

    times = draw.level[:, None].expand(-1, 16) if draw.token_levels is None else draw.token_levels
    clean = times.min(dim=1).values.view(-1, 1, 1, 1)
    x_t = (1 - clean) * x + clean * draw.noise
    _, seen = teacher(x_t, clean.view(-1), y, features=[2])
    each = times.view(-1, 4, 4).repeat_interleave(2, 1).repeat_interleave(2, 2)[:, None]
    _, own = setup.backbone(
        (1 - each) * x + each * draw.noise, times, y, routes=routes, features=[1]
    )
    projected = setup.projector.layers(own[1].tokens)
    target = torch.stack(
        [tokens[ids] for tokens, ids in zip(seen[2].tokens, own[1].ids, strict=True)]
    )
    similarity = torch.nn.functional.cosine_similarity(projected, target, dim=-1)
    torch.testing.assert_close(term, -similarity.mean(dim=1), rtol=1e-4, atol=1e-5)
    term.mean().backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_the_averaged_network_may_choose_its_own_tokens(monkeypatch):
    """After a block that most tokens bypass, the features are those that the next block sees."""
    learned = ("routing=mixture_of_depths", "routing.start=1", "routing.end=3")
    setup = parts_of(settings(*SELF[:2], *learned, "alignment.teacher_block=1"))
    teacher = parts_of(settings("seed=1", *learned)).backbone
    drawn = draw_step(setup, next(setup.batches()), 0, 0, CPU)
    assert step_loss(setup, drawn, teacher=teacher).values["alignment_loss"].isfinite().all()

    x, t, y = drawn.x, drawn.draw.level, drawn.y
    tokens, seen = teacher.tokens_after(x, t, y, 1), {}
    run_block = teacher.run_block

    def watched(index, streams, *given):
        seen[index] = streams[0]
        return run_block(index, streams, *given)

    monkeypatch.setattr(teacher, "run_block", watched)
    teacher(x, t, y)
    assert seen[1].shape[1] < seen[2].shape[1]
    torch.testing.assert_close(tokens, seen[2][:, teacher.num_extra_tokens :])


def test_the_data_go_on_where_they_were_after_the_alignment_has_stopped(table):
    setup = parts(table, "alignment.stop=0.5", "training.gradient_accumulation_steps=2")
    unbroken = list(setup.batches())
    for step in (1, 3, 4):
        rest = list(setup.batches(step=step))
        assert len(rest) == len(unbroken) - 2 * step
        for one, other in zip(rest, unbroken[2 * step :], strict=True):
            assert len(one) == len(other)
            assert all(map(torch.equal, one, other))


@pytest.mark.slow
def test_the_teacher_is_the_average_of_the_weights(run):
    """An average that follows the weights at once teaches other features than an average that
    lags."""
    given = (*SELF, "training.log_every=1", "training.num_steps=3", "evaluation.metrics=[]")
    terms = [
        [row["alignment_loss"] for row in read_metrics(run(name, *given, decay)) if "loss" in row]
        for name, decay in (("lags", "training.ema_decay=0.99"), ("same", "training.ema_decay=0"))
    ]
    assert terms[0][0] == terms[1][0]  # before the first step both are the weights
    assert all(abs(one - other) > 1e-6 for one, other in list(zip(*terms, strict=True))[1:])


@pytest.mark.slow
def test_a_run_taught_by_its_average_resumes_to_the_bit(run):
    given = [*SELF, "objective.second_level_fraction=0.25", "alignment.stop=0.6"]
    unbroken = run("unbroken", *given)
    rows = [row for row in read_metrics(unbroken) if "loss" in row]
    assert [row["step"] for row in rows if "alignment_loss" in row] == [2, 4]
    run("parts", *given, "training.checkpoint_every=3")
    checkpoint = find_checkpoint(unbroken.parent / "parts" / "checkpoints" / "step_00000003")
    assert_same_end(unbroken, run("parts", *given, f"resume={checkpoint.path}"))
    changed = ["alignment=none", "training.num_steps=7", "resume=latest", "resume_changed=true"]
    assert find_checkpoint(run("parts", *given[2:5], *changed)).step == 7
    changed = ["training.num_steps=8", "resume=latest", "resume_changed=true"]
    again = run("parts", *SELF, *changed)
    assert find_checkpoint(again).step == 8
    assert "alignment" in find_checkpoint(again).path.joinpath("checkpoint.json").read_text()


def test_features_are_those_of_the_images_mirrored_or_not(table):
    setup = parts(table, "training.horizontal_flip=true")
    batch = next(setup.batches())
    x, _, _, _, features = draw_step(setup, batch, 3, 0, CPU)
    seen = ((x + 1) * 127.5).round().to(torch.uint8)
    torch.testing.assert_close(features.float(), place_features(seen), atol=1e-3, rtol=0)
    assert not torch.equal(seen, batch[0])


def test_latents_have_features_too_and_without_alignment_none_are_read(tmp_path, monkeypatch):
    place = "tread_zoo.data.latents.load_vae"
    monkeypatch.setattr(place, lambda name: Stub())
    data = latents(str(write_features(tmp_path, Stub(), part_size=16)))
    assert data.features == (2, 5, 3, 4)
    latent, label, features = data.train.with_features()[17]
    assert (latent.shape, label) == ((2, 6, 4, 4), 1)
    assert features.shape == data.features
    assert len(data.train[17]) == 2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data=digits"], "encode features="),
        (["data=table", "alignment.block=4"], "alignment.block=4"),
        (["data=table", "alignment.stop=0"], "alignment.stop=0"),
        (["data=table", "training.horizontal_flip=true"], "flips=true"),
    ],
)
def test_what_cannot_be_aligned_is_refused(tmp_path, overrides, words):
    if "data=table" in overrides:
        overrides = [*overrides, f"data.path={write_features(tmp_path, flips=False)}"]
    with pytest.raises(ValueError, match=words):
        parts_of(settings("alignment=repa", *overrides))
