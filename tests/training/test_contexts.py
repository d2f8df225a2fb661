"""Training on contexts: what a step draws, exact resume, what samples are made for, refusals."""

import json
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from backbones import DiT
from tests.data.tables import (
    SHAPE,
    filled,
    made_contexts,
    with_contexts,
    write_latents,
)
from tests.data.test_contexts import write_folder
from tests.data.text_encoders import save_t5
from tests.small_run import parts_of, settings, train_small
from tests.training.test_resume import assert_same_end
from tread_zoo.diffusion import generate
from tread_zoo.diffusion.conditions import conditions_of, contexts_in, contexts_of
from tread_zoo.evaluation.held_out import held_out_loss
from tread_zoo.runs.restore import restore
from tread_zoo.seeding import make_generator, make_image_generator
from tread_zoo.training.step import draw_step

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """24 + 6 latents [3,4,4] with contexts."""
    return write_latents(tmp_path_factory.mktemp("latents"))


def given(folder, *more):
    return ["backbone=uvit", "data=latents", f"data.path={folder}", "data.vae=none", *more]


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """A small run on them."""
    run = tmp_path_factory.mktemp("run") / "run"
    return train_small(run, *given(folder, "guidance=cfg", "sampler.num_steps=2"))


def drawn(setup, rank=0, num_ranks=1):
    images, contexts = next(setup.batches())
    own = slice(rank * 8 // num_ranks, (rank + 1) * 8 // num_ranks)
    return contexts, draw_step(setup, (images[own], contexts[own]), 3, rank, CPU)


def test_a_step_drops_contexts_as_it_drops_labels_and_draws_nothing_else(folder):
    dropout = "training.label_dropout=0.4"
    setup = parts_of(settings(*given(folder, dropout)))
    contexts, (x, y, draw, routes, _) = drawn(setup)
    dropped = make_image_generator("label", 0, 3, images=range(8)).rand() < 0.4
    assert 0 < dropped.sum() < 8
    assert not y[dropped].any()
    assert torch.equal(y[~dropped], contexts[~dropped])
    plain = parts_of(settings(*given(folder, dropout, "data.context=false")))
    _, (other, none, same, ids, _) = drawn(plain)
    assert none is None
    assert torch.equal(x, other)
    assert torch.equal(draw.noise, same.noise)
    assert torch.equal(routes[0].ids, ids[0].ids)
    halves = [drawn(setup, rank, 2)[1] for rank in (0, 1)]  # by place in the global batch
    assert torch.equal(torch.cat([half[1] for half in halves]), y)
    assert torch.equal(torch.cat([half[2].noise for half in halves]), draw.noise)


@torch.no_grad()
def test_ranked_tokens_and_held_out_loss_see_the_contexts(folder):
    setup = parts_of(settings(*given(folder, "routing.selector=norm")))
    _, (x, y, _, routes, *_) = drawn(setup)
    backbone, t = setup.backbone, torch.full((8,), 0.5)
    assert not torch.equal(*(backbone(x, t, c, routes=routes) for c in (y, None)))
    loss = held_out_loss(backbone, setup.objective, setup.data, seed=0, precision="fp32")[0]
    draw = setup.objective.draw(
        (6, 3, 4, 4), make_image_generator("held_out", 0, 0, images=range(6))
    )
    stored = torch.stack([setup.data.held_out[i][0] for i in range(6)])
    clean = setup.data.codec.to_model(stored, device=CPU)
    level = draw.level.view(-1, 1, 1, 1)
    noisy = (1 - level) * clean + level * draw.noise
    contexts = torch.stack([filled(one) for one in made_contexts(6, seed=1)]).half()
    expected, without = (
        (backbone(noisy, draw.level, y) - (draw.noise - clean)).double().square().mean()
        for y in (contexts, None)
    )
    assert loss == pytest.approx(float(expected), rel=1e-5)
    assert loss != pytest.approx(float(without), rel=1e-5)


@pytest.mark.slow
def test_a_run_resumes_to_the_bit_in_the_middle_of_an_epoch(run, folder):
    options = given(folder, "routing.selector=norm", "guidance=interval", "lr_schedule=constant")
    run("parts", *options, "training.num_steps=4")  # 3 steps an epoch
    ends = [run("unbroken", *options), run("parts", *options, "resume=latest")]
    assert_same_end(*ends)
    scores = [json.loads((end / "score.json").read_text())["values"] for end in ends]
    assert scores[0] == scores[1]


def test_a_backbone_that_takes_none_refuses_contexts_and_says_what_to_do(folder, monkeypatch):
    monkeypatch.setattr(DiT, "takes_contexts", False)
    with pytest.raises(ValueError, match=r"takes no contexts .*data.context=false"):
        parts_of(settings(*given(folder, "backbone=dit")))
    without = given(folder, "backbone=dit", "data.context=false")
    assert parts_of(settings(*without)).backbone.context_size == 0


@pytest.mark.slow
def test_pictures_with_files_beside_them_are_trained_on_as_they_are(run, tmp_path):
    path = write_folder(tmp_path / "pictures", made_contexts(8))
    options = ["backbone=uvit", "data=image_folder", f"data.path={path}", "data.held_out=0.25"]
    options += ["data.context=context.npy", "training.batch_size=4", "training.num_steps=2"]
    folder = run("run", *options)
    score = json.loads((folder / "score.json").read_text())
    assert "contexts of held-out images, evenly spaced" in json.dumps(score)
    restored = restore(folder, weights="ema", device="cpu", precision="fp32")
    assert (restored.backbone.in_channels, restored.backbone.context_length) == (3, 3)
    with pytest.raises(ValueError, match="context"):
        restored.data({"context_length": 5})


@pytest.mark.slow
def test_captions_are_trained_on_with_an_encoder_named_in_the_data(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TREAD_ZOO_CACHE", str(tmp_path / "cache"))
    for number, caption in enumerate(CAPTIONS):
        file = tmp_path / "drawn" / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        pixels = (255 * pictures_of(*caption)[0]).byte().permute(1, 2, 0).contiguous()
        Image.fromarray(pixels.numpy()).save(file)
        file.with_suffix(".txt").write_text(" ".join(caption))
    encoder = save_t5(tmp_path / "t5")
    options = ["data=image_folder", f"data.path={tmp_path / 'drawn'}", "training.batch_size=4"]
    folder = run("run", *options, f"data.text_encoder={encoder}", "training.num_steps=2")
    restored = restore(folder, weights="ema", device="cpu", precision="fp32")
    prompt = contexts_of(("red cross",), restored.text_encoder(), restored.backbone).of([0])
    assert prompt.shape[1:] == restored.data({}).context
    moved = (tmp_path / "t5").rename(tmp_path / "moved")
    (tmp_path / "cache").rename(tmp_path / "lost")  # other hardware gives other last bits
    change = mock.patch("tread_zoo.data.text.as_half", lambda values: (values * 1.001).half())
    with change:
        run("run", *options, f"data.text_encoder={moved}", "training.num_steps=3", "resume=latest")
    other = save_t5(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="text_encoder"):
        run("run", *options, f"data.text_encoder={other}", "training.num_steps=4", "resume=latest")


@pytest.mark.slow
def test_other_contexts_than_in_training_are_refused(trained, folder, tmp_path, copy_of):
    restored = restore(trained, weights="ema", device="cpu", precision="fp32")
    assert (restored.backbone.context_length, restored.backbone.context_size) == SHAPE
    data = with_contexts()
    longer = [[(x, torch.cat([c, c])) for x, c in part] for part in (data.train, data.held_out)]
    data = replace(data, train=longer[0], held_out=longer[1], context=(6, 4))
    other = write_latents(tmp_path / "other", data)
    for changes in ({"path": str(other)}, {"context": False}):
        with pytest.raises(ValueError, match="context"):
            restored.data(changes)
    with pytest.raises(ValueError, match="context"):
        train_small(copy_of(trained), *given(other, "guidance=cfg", "resume=latest"))


def test_samples_are_made_for_held_out_contexts_or_those_of_a_file(trained, tmp_path):
    restored = restore(trained, weights="ema", device="cpu", precision="fp32")
    held_out = torch.stack([filled(one) for one in made_contexts(6, seed=1)]).half()
    conditions = conditions_of(restored.backbone, restored.data({}))
    order = [0, 4, 2, 1, 5, 3]  # of 6: bits reversed
    assert torch.equal(conditions.of(range(8)), held_out[[*order, 0, 4]])
    assert torch.equal(conditions.of([7]), held_out[[4]])
    backbone = restored.backbone
    values = np.random.default_rng(0).standard_normal((2, 2, 4)).astype(np.float32)
    np.save(tmp_path / "two.npy", values)
    contexts = contexts_in(str(tmp_path / "two.npy"), backbone).of(range(3))
    expected = torch.cat([torch.from_numpy(values), torch.zeros(2, 1, 4)], dim=1)
    assert torch.equal(contexts, expected[[0, 1, 0]])
    np.save(tmp_path / "one.npy", values[0])
    assert torch.equal(contexts_in(str(tmp_path / "one.npy"), backbone).of([5]), expected[:1])
    np.save(tmp_path / "long.npy", np.zeros((1, 4, 4)))
    for name in ("long", "none"):
        with pytest.raises(ValueError, match=name):
            contexts_in(str(tmp_path / f"{name}.npy"), backbone)


FAR = (torch.arange(8) - 3.5).abs()
ROWS, COLS = torch.meshgrid(FAR, FAR, indexing="ij")
DRAWN = {
    "cross": (ROWS < 1) | (COLS < 1),
    "frame": torch.maximum(ROWS, COLS) > 2,
    "stripes": ROWS % 2 < 1,
}
PAINTED = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1)}
CAPTIONS = [(colour, shape) for colour in PAINTED for shape in DRAWN]
MOVES = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]


def pictures_of(colour, shape):
    """Return the shape at nine places, [9, 3, 8, 8] in 0 … 1."""
    ink = torch.stack([DRAWN[shape].roll(move, dims=(0, 1)) for move in MOVES])
    return ink.unsqueeze(1) * torch.tensor(PAINTED[colour]).view(3, 1, 1).float()


def embeddings_of(captions):
    """Return contexts [n, 2, 8]: one embedding for each word."""
    words = [*PAINTED, *DRAWN]
    table = torch.randn(len(words), 8, generator=make_generator("words"))
    return torch.stack([table[[words.index(word) for word in one]] for one in captions])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["dit", "rwkv"])
def test_a_network_draws_what_its_captions_say(run, tmp_path, name):
    """Three shapes in three colours: the picture nearest to a sample is one of its caption."""
    (tmp_path / "drawn" / "all").mkdir(parents=True)
    pictures, contexts = [pictures_of(*one) for one in CAPTIONS], embeddings_of(CAPTIONS)
    for i, (images, context) in enumerate(zip(pictures, contexts, strict=True)):
        for move, image in enumerate(images):
            file = tmp_path / "drawn" / "all" / f"{i}_{move}.png"
            pixels = (255 * image).byte().permute(1, 2, 0)
            Image.fromarray(pixels.contiguous().numpy()).save(file)
            np.save(file.with_suffix(".context.npy"), context.numpy())
    folder = run(
        "run", f"backbone={name}", "backbone.hidden_size=48", "backbone.depth=5",
        "data=image_folder", f"data.path={tmp_path / 'drawn'}", "data.context=context.npy",
        "data.held_out=0.1", "training.num_steps=250", "training.batch_size=32",
        "training.log_every=100", "training.ema_decay=0.97", "optimizer.learning_rate=0.004",
    )  # fmt: skip
    restored = restore(folder, weights="ema", device="cpu", precision="fp32")
    sampling = restored.sampling({"num_steps": 10}, {"name": "cfg", "scale": 1.5})
    samples = generate(
        restored.backbone, restored.objective, sampling, indices=range(72), seed=0,
        labels=contexts.repeat_interleave(8, 0), batch_size=72,
    )  # fmt: skip
    far = torch.cdist(samples.flatten(1), 2 * torch.cat(pictures).flatten(1) - 1)
    agrees = far.argmin(1) // len(MOVES) == torch.arange(72) // 8
    assert agrees.float().mean() > 0.5, f"{agrees.float().mean():.2f}; chance is 0.11"
