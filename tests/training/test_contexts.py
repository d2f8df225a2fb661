"""Training on contexts: what a step draws, exact resume, what samples are made for, refusals."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from tread_zoo.training.parts import draw_step
from tread_zoo.training.stopping import Stopped

from tests.data.contexts import (
    SHAPE,
    grey_with_contexts,
    made_contexts,
    with_contexts,
    write_latents,
)
from tests.data.test_contexts import ragged, write_folder
from tests.processes import run_python
from tests.small_run import counting_once, parts_of, settings, train_small
from tests.training.test_resume import assert_same_end
from tread_zoo.data import build_data
from tread_zoo.diffusion import generate
from tread_zoo.evaluation.conditions import conditions_of, contexts_in
from tread_zoo.evaluation.evaluate import evaluate
from tread_zoo.evaluation.held_out import held_out_loss
from tread_zoo.seeding import make_generator
from tread_zoo.training import loop as module
from tread_zoo.training.checkpoints import CheckpointError
from tread_zoo.training.restore import restore

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


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


def drawn(parts, rank=0, num_ranks=1):
    images, contexts = next(parts.batches(0, 1, 0))
    own = slice(rank * 8 // num_ranks, (rank + 1) * 8 // num_ranks)
    return contexts, draw_step(
        parts, images[own], contexts[own], rank=rank, num_ranks=num_ranks, micro_step=3, device=CPU
    )


def test_a_step_drops_contexts_as_it_drops_labels_and_draws_nothing_else(folder):
    dropout = "training.label_dropout=0.4"
    parts = parts_of(settings(*given(folder, dropout)))
    contexts, step = drawn(parts)
    generator = make_generator("train", 0, 0, 3)
    torch.rand(8, generator=generator)  # flips
    dropped = torch.rand(8, generator=generator) < 0.4
    assert 0 < dropped.sum() < 8
    assert torch.equal(step.labels[dropped], torch.zeros(int(dropped.sum()), *SHAPE).half())
    assert torch.equal(step.labels[~dropped], contexts[~dropped])
    plain = parts_of(settings(*given(folder, dropout, "data.context=false")))
    _, other = drawn(plain)
    assert plain.backbone.num_extra_tokens == 1
    assert other.labels is None
    assert torch.equal(step.images, other.images)
    assert torch.equal(step.draw.noise, other.draw.noise)
    assert torch.equal(step.routes[0].ids, other.routes[0].ids)
    halves = [drawn(parts, rank, 2)[1] for rank in (0, 1)]  # by place in the global batch
    assert torch.equal(torch.cat([half.labels for half in halves]), step.labels)
    assert torch.equal(torch.cat([half.draw.noise for half in halves]), step.draw.noise)


@torch.no_grad()
def test_losses_importance_and_held_out_loss_see_the_contexts(folder):
    parts = parts_of(settings(*given(folder, "routing.selector=norm")))
    _, step = drawn(parts)
    losses = module.losses_of(parts.backbone, parts, step)
    backbone, x, t = parts.backbone, step.images, torch.full((8,), 0.5)
    importance = backbone.importance(x, t, step.labels, 2)
    assert not torch.equal(importance, backbone.importance(x, t, None, 2))
    assert losses.shape == (8,)
    keywords = {"seed": 0, "precision": "fp32"}
    loss = held_out_loss(backbone, parts.objective, parts.data, **keywords)[0]
    generator = make_generator("held_out", 0)
    draw = parts.objective.draw((6, 3, 4, 4), generator)
    stored = torch.stack([parts.data.held_out[i][0] for i in range(6)])
    clean = parts.data.codec.to_model(stored, device=CPU)
    level = draw.level.view(-1, 1, 1, 1)
    noisy = (1 - level) * clean + level * draw.noise
    out = backbone(noisy, draw.level, made_contexts(6, seed=1).half())
    expected = (out - (draw.noise - clean)).double().square().mean()
    assert loss == pytest.approx(float(expected), rel=1e-5)
    without = (backbone(noisy, draw.level) - (draw.noise - clean)).double().square().mean()
    assert loss != pytest.approx(float(without), rel=1e-5)


def test_a_killed_run_resumes_to_the_bit_in_the_middle_of_an_epoch(
    run, folder, monkeypatch, copy_of
):
    options = given(folder, "routing.selector=norm", "guidance=interval")
    unbroken = run("unbroken", *options)  # 3 steps an epoch
    original = module.draw_step

    def draw(parts, *batch, micro_step, **keywords):
        if micro_step == 4:
            signal.raise_signal(signal.SIGTERM)
        return original(parts, *batch, micro_step=micro_step, **keywords)

    monkeypatch.setattr(module, "draw_step", draw)
    with pytest.raises(Stopped):
        run("broken", *options)
    monkeypatch.undo()
    broken = run("broken", *options, "resume=latest")
    assert_same_end(unbroken, broken)
    scores = [json.loads((one / "score.json").read_text()) for one in (unbroken, broken)]
    assert scores[0]["values"] == scores[1]["values"]
    pictures = [(one / "samples" / "step_00000006.png").read_bytes() for one in (unbroken, broken)]
    assert pictures[0] == pictures[1]
    assert scores[0]["protocol"]["labels"] == "contexts of held-out images, evenly spaced"


def test_backbones_that_take_none_refuse_contexts_and_say_which_do(folder):
    for name, reason in (
        ("dit", "adaLN takes one vector"), ("rwkv", "adaLN takes one vector"),
        ("mamba", "tokens ahead of a scan"), ("mamba2", "tokens ahead of a scan"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"{name}_tiny takes no contexts .*: {reason}") as e:
            parts_of(settings(*given(folder, f"backbone={name}", "backbone.hidden_size=32")))
        assert "Those that do: uvit_h_2, uvit_l_2" in str(e.value)
        assert "data.context=false" in str(e.value)
    without = given(folder, "backbone=dit", "data.context=false")
    assert parts_of(settings(*without)).backbone.context_size == 0


def test_pictures_with_files_beside_them_are_trained_on_as_they_are(run, tmp_path):
    path = write_folder(tmp_path / "pictures", ragged())
    options = ["backbone=uvit", "data=image_folder", f"data.path={path}", "data.held_out=0.25"]
    options += ["data.context=context.npy", "training.batch_size=4", "training.num_steps=2"]
    folder = run("run", *options)
    score = json.loads((folder / "score.json").read_text())
    assert score["protocol"]["labels"] == "contexts of held-out images, evenly spaced"
    found = restore(folder, weights="ema", device="cpu", precision="fp32")
    assert (found.backbone.in_channels, found.backbone.context_length) == (3, 3)
    with pytest.raises(ValueError, match=r"has contexts of 5 embeddings .* trained with cont"):
        found.data({"context_length": 5})


def test_contexts_come_from_the_data_alone(folder):
    own = ["+backbone.context_length=2", "+backbone.context_size=4"]
    with pytest.raises(ValueError, match=r"context_length=2, .*the data have 3 embeddings of wid"):
        parts_of(settings(*given(folder, *own)))
    with pytest.raises(ValueError, match=r"context_length=2, .*the data have 0 embeddings"):
        parts_of(settings(*given(folder, *own, "data.context=false")))
    with pytest.raises(ValueError, match=r"num_classes=10 and context_size=4 exclude each other"):
        parts_of(settings("backbone=uvit", *own))


def test_other_contexts_than_in_training_are_refused(trained, folder, tmp_path, copy_of):
    found = restore(trained, weights="ema", device="cpu", precision="fp32")
    assert (found.backbone.context_length, found.backbone.context_size) == SHAPE
    for shape in ((4, 4), (3, 5)):
        other = write_latents(tmp_path / "{}x{}".format(*shape), with_contexts(shape=shape))
        words = f"has contexts of {shape[0]} embeddings of width {shape[1]}; the checkpoint was tr"
        with pytest.raises(ValueError, match=words):
            found.data({"path": str(other)})
        with pytest.raises(CheckpointError, match=r"data.context=\[3, 4\], not"):
            train_small(copy_of(trained), *given(other, "guidance=cfg", "resume=latest"))
        (tmp_path / "run").rename(tmp_path / "used_{}x{}".format(*shape))
    with pytest.raises(ValueError, match=r"has no contexts; the checkpoint was trained with cont"):
        found.data({"context": False})


def test_samples_are_made_for_held_out_contexts_whatever_their_number(trained, monkeypatch):
    found = restore(trained, weights="ema", device="cpu", precision="fp32")
    data = found.data({})
    held_out = made_contexts(6, seed=1).half()
    conditions = conditions_of(found.backbone, data)
    order = [0, 4, 2, 1, 5, 3]  # of 6: bits reversed
    assert torch.equal(conditions.of(range(8)), held_out[[*order, 0, 4]])
    assert torch.equal(conditions.of([7]), held_out[[4]])
    asked = []
    monkeypatch.setattr(
        "tread_zoo.evaluation.evaluate.generate",
        lambda *a, **k: asked.append(k["labels"]) or generate(*a, **k),
    )
    monkeypatch.setattr(type(data.codec), "has_pixels", True)  # its previews are pictures, too
    sampling = found.sampling({}, {"name": "sparse"})
    options = settings("evaluation.num_images=7", "evaluation.batch_size=4")["evaluation"]
    options = type(parts_of(settings()).evaluation)(**options)
    with counting_once():
        record = evaluate(found.backbone, found.objective, data, sampling, options)
    assert torch.equal(torch.cat(asked), held_out[[*order, 0]])
    assert record["protocol"]["labels"] == "contexts of held-out images, evenly spaced"
    assert "agreement" not in record["values"]
    unheld = type(data)(**{**vars(data), "held_out": None})
    assert conditions_of(found.backbone, unheld).rule.startswith("contexts of training images")


def test_contexts_of_a_file(trained, tmp_path):
    backbone = restore(trained, weights="ema", device="cpu", precision="fp32").backbone
    values = np.random.default_rng(0).standard_normal((2, 2, 4)).astype(np.float32)
    np.save(tmp_path / "two.npy", values)
    found = contexts_in(str(tmp_path / "two.npy"), backbone).of(range(3))
    expected = torch.cat([torch.from_numpy(values), torch.zeros(2, 1, 4)], dim=1)
    assert torch.equal(found, expected[[0, 1, 0]])
    np.save(tmp_path / "one.npy", values[0])
    assert torch.equal(contexts_in(str(tmp_path / "one.npy"), backbone).of([5]), expected[:1])
    np.save(tmp_path / "long.npy", np.zeros((1, 4, 4)))
    with pytest.raises(ValueError, match=r"row 0 has 4 embeddings of width 4; at most 3"):
        contexts_in(str(tmp_path / "long.npy"), backbone)
    with pytest.raises(ValueError, match=r"none.npy' cannot be read"):
        contexts_in(str(tmp_path / "none.npy"), backbone)
    digits = parts_of(settings()).backbone
    with pytest.raises(ValueError, match=r"dit_tiny was trained without contexts; leave it out"):
        contexts_in(str(tmp_path / "two.npy"), digits)


def call(script, *overrides, expect=0):
    done = run_python(ROOT / "scripts" / script, *overrides, "device=cpu")
    said = done.stdout + done.stderr
    assert done.returncode == expect, said[-3000:]
    return said


@pytest.mark.slow
def test_the_scripts_sample_and_score(trained, folder, tmp_path):
    def sample(*more):
        out = tmp_path / str(len(more))
        call("sample.py", f"checkpoint={trained}", f"out={out}", *more)
        found = np.load(out / "latents.npz")
        assert set(found.files) == {"arr_0", "numbers"}
        return found["arr_0"]

    default = sample("num_images=6")
    own = made_contexts(6, seed=1)[[0, 4, 2, 1, 5, 3]].half()
    own[5] += 1
    np.save(tmp_path / "own.npy", own.numpy())
    moved = folder.rename(tmp_path / "moved")  # a file of one's own asks for no data
    try:
        found = sample(f"contexts={tmp_path / 'own.npy'}", "first_index=4", "num_images=2")
        np.testing.assert_allclose(found[0], default[4], atol=1e-5)
        assert np.abs(found[1] - default[5]).max() > 1e-3
        said = call("sample.py", f"checkpoint={trained}", expect=1)
        assert "for others: contexts=FILE.npy" in said
        score = tmp_path / "score.json"
        call("evaluate.py", f"checkpoint={trained}", "evaluation.num_images=4", f"out={score}",
             f"+data.path={moved}")  # fmt: skip
    finally:
        moved.rename(folder)
    record = json.loads(score.read_text())
    assert record["protocol"]["labels"] == "contexts of held-out images, evenly spaced"
    said = call("sample.py", f"checkpoint={trained}", "label=3", expect=1)
    assert "label=3, but uvit_tiny was trained with contexts" in said


@pytest.mark.slow
def test_a_network_learns_what_its_contexts_say(run, tmp_path):
    """Dark and bright images, each with its own text: samples are of the text's brightness."""
    texts = made_contexts(2, seed=5)
    latents = write_latents(tmp_path / "grey", grey_with_contexts([40, 200], texts, 16))
    folder = run(
        "run", *given(latents), "training.num_steps=500", "training.learning_rate=0.01",
        "training.ema_decay=0.9", "training.label_dropout=0.4", "training.log_every=300",
        "sampler.num_steps=8", "evaluation.num_images=4",
    )  # fmt: skip
    found = restore(folder, weights="ema", device="cpu", precision="fp32")
    data = build_data("latents", path=str(latents), vae="none")
    dark, bright = (data.codec.to_model(data.train[i][0][None], device=CPU).mean() for i in (0, 1))
    assert (float(dark), float(bright)) == pytest.approx((-1.0, 1.0), abs=1e-3)
    for scale in (1.0, 1.5):
        sampling = found.sampling({}, {"name": "cfg", "scale": scale})
        means = [
            generate(
                found.backbone, found.objective, sampling, indices=range(32), seed=0,
                labels=text.expand(32, *SHAPE), batch_size=32,
            ).mean((1, 2, 3))
            for text in texts
        ]  # fmt: skip
        assert (means[0] < -0.5).all()
        assert (means[1] > 0.5).all()
    unasked = generate(
        found.backbone, found.objective, found.sampling({}, {"name": "none"}), indices=range(32),
        seed=0, labels=None, batch_size=32,
    ).mean((1, 2, 3))  # fmt: skip
    assert 4 < (unasked > 0).sum() < 28, "without a text there are both"
