"""Training on latents: exact resume, the order of draws, decoding, and what is refused later."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tread_zoo.training.parts import draw_step
from tread_zoo.training.stopping import Stopped

from tests.data.vaes import save_vaes
from tests.small_run import parts_of, settings
from tests.training.test_resume import assert_same_end
from tread_zoo.data import build_data, to_uint8
from tread_zoo.data.codec import PIXELS
from tread_zoo.data.latents import load_vae
from tread_zoo.data.latents.encode import EncodingOptions, encode_latents
from tread_zoo.evaluation.evaluate import evaluate
from tread_zoo.evaluation.extraction import Collector
from tread_zoo.evaluation.features import ClassifierFeatures, save_features
from tread_zoo.evaluation.held_out import held_out_loss
from tread_zoo.seeding import make_generator
from tread_zoo.training import loop as module
from tread_zoo.training.restore import restore

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def moments(tmp_path):
    """An .npz of 40 moments of 2 channels, with mirrored copies."""
    values = np.random.default_rng(0).standard_normal((2, 40, 4, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "set.npz", moments=values[0], latents_flip=values[1],
             labels=np.arange(40) % 4)  # fmt: skip
    return values


def options(tmp_path, *more):
    return ["data=latents", f"data.path={tmp_path / 'set.npz'}", "data.held_out=0.2", *more]


def drawn(parts, micro_step=3):
    images, labels = next(parts.batches(0, 1, 0))
    return (images, labels), draw_step(
        parts, images, labels, rank=0, micro_step=micro_step, device=CPU
    )


def test_noise_of_moments_is_drawn_last_and_flips_choose_the_copy(tmp_path, moments):
    """Levels, noise, labels and kept ids are those of data that draw nothing themselves."""
    flip = "training.horizontal_flip=true"
    (stored, _), step = drawn(parts_of(settings(*options(tmp_path, flip))))
    plain = options(tmp_path, flip, "data.content=samples")
    _, other = drawn(parts_of(settings(*plain)))
    assert other.images.shape == (8, 4, 8, 8)
    parts = parts_of(settings(*options(tmp_path, flip)))
    generator = make_generator("train", 0, 0, 3)
    flipped = torch.rand(8, generator=generator) < 0.5
    dropped = torch.rand(8, generator=generator) < 0.1
    draw = parts.objective.draw((8, 2, 8, 8), generator)
    routes = parts.routing.at(3, 6, 0).draw(8, parts.backbone.grid, generator)
    noise = torch.randn(8, 2, 8, 8, generator=generator)
    assert torch.equal(step.draw.noise, draw.noise)
    assert torch.equal(step.draw.level, draw.level)
    assert torch.equal(step.routes[0].ids, routes[0].ids)
    assert torch.equal(step.labels == 4, dropped)
    assert 0 < flipped.sum() < 8
    copy = stored[torch.arange(8), flipped.long()]
    z = copy[:, :2] + (copy[:, 2:] / 2).exp() * noise
    codec = parts.data.codec
    shift, scale = (torch.tensor(v).view(-1, 1, 1) for v in (codec.shift, codec.scale))
    torch.testing.assert_close(step.images, (z - shift) * scale)


def test_the_order_of_draws_of_pixels_is_what_it_was():
    """Counted by hand: what the first release drew for digits."""
    parts = parts_of(settings("training.horizontal_flip=true"))
    assert parts.data.codec is PIXELS
    assert "codec" not in parts.settings["data"]
    (images, _), step = drawn(parts)
    generator = make_generator("train", 0, 0, 3)
    flipped = torch.rand(8, generator=generator) < 0.5
    torch.rand(8, generator=generator)
    assert torch.equal(step.draw.noise, parts.objective.draw(images.shape, generator).noise)
    mirrored = torch.where(flipped.view(-1, 1, 1, 1), images.flip(-1), images)
    assert torch.equal(step.images, mirrored.float() / 127.5 - 1)


def test_a_killed_run_on_moments_resumes_to_the_bit_in_the_middle_of_an_epoch(
    run, tmp_path, moments, monkeypatch
):
    given = options(tmp_path, "training.horizontal_flip=true", "training.num_workers=1")
    unbroken = run("unbroken", *given)  # 4 steps an epoch
    original = module.draw_step

    def draw(parts, *batch, micro_step, **keywords):
        if micro_step == 1:
            signal.raise_signal(signal.SIGTERM)
        return original(parts, *batch, micro_step=micro_step, **keywords)

    monkeypatch.setattr(module, "draw_step", draw)
    with pytest.raises(Stopped):
        run("broken", *given)
    monkeypatch.undo()
    broken = run("broken", *given, "resume=latest")
    assert_same_end(unbroken, broken)
    scores = [json.loads((folder / "score.json").read_text()) for folder in (unbroken, broken)]
    assert scores[0]["values"] == scores[1]["values"]
    assert list(scores[0]["values"]) == ["held_out_loss"]
    assert "name their autoencoder with data.vae" in scores[0]["not_scored"]
    assert list((unbroken / "samples").glob("*.png"))


def test_another_normalization_is_refused_at_resume_and_at_evaluation(run, tmp_path, moments):
    folder = run("run", *options(tmp_path, "training.num_steps=2"))
    other = np.load(tmp_path / "set.npz")
    np.savez(tmp_path / "set.npz", **{**other, "moments": 2 * moments[0]})
    with pytest.raises(ValueError, match=r"data.codec.scale=\["):
        run("run", *options(tmp_path, "resume=latest"))
    restored = restore(folder, weights="ema", device="cpu", precision="fp32")
    with pytest.raises(ValueError, match=r"trained on data with scale=\[.*means nothing for oth"):
        restored.data({})


def test_the_held_out_loss_draws_moments_with_fixed_noise(tmp_path, moments):
    parts = parts_of(settings(*options(tmp_path)))
    arguments = (parts.backbone, parts.objective, parts.data)
    one, again = (held_out_loss(*arguments, seed=0, precision="fp32") for _ in range(2))
    assert one == again
    # a fresh network gives 0: the loss is the mean square of noise - x
    generator = make_generator("held_out", 0)
    draw = parts.objective.draw((8, 2, 8, 8), generator)
    stored = torch.stack([parts.data.held_out[i][0] for i in range(8)])
    noise = parts.data.codec.draw(stored.shape, generator)
    x = parts.data.codec.to_model(stored, device=CPU, noise=noise)
    assert one[0] == pytest.approx(float((draw.noise - x).double().square().mean()), rel=1e-5)


class Doubling:
    """An autoencoder that shows a latent's two channels, each pixel four times, and their sum."""

    kind, sha256, latent_channels = "AutoencoderKL", "7" * 64, 2

    @property
    def facts(self):
        factors = {"scaling_factor": 1.0, "shift_factor": 0.0}
        return {"class": self.kind, "name": "d/d", "sha256": self.sha256, "latent_channels": 2,
                **factors}  # fmt: skip

    def to(self, device):
        return self

    def decode(self, z):
        z = torch.cat([z, z.sum(1, keepdim=True)], 1)
        return z.repeat_interleave(2, -1).repeat_interleave(2, -2)


def test_samples_and_references_are_decoded_and_the_protocol_says_so(
    tmp_path, moments, monkeypatch
):
    for place in ("codec", "source"):
        monkeypatch.setattr(f"tread_zoo.data.latents.{place}.load_vae", lambda name: Doubling())
    monkeypatch.setattr("tread_zoo.data.latents.codec.check_vae", lambda name: None)
    parts = parts_of(settings(*options(tmp_path, "data.vae=d/d")))
    assert parts.settings["data_options"]["vae"] == "d/d"
    torch.manual_seed(0)
    features = ClassifierFeatures(image_size=(16, 16), channels=3, num_classes=4, num_features=8)
    save_features(features, tmp_path / "features.safetensors", "nothing")
    original, seen = Collector.add, []

    def add(self, images, digests=None):
        seen.append(images)
        return original(self, images, digests)

    monkeypatch.setattr(Collector, "add", add)
    given = settings(
        "evaluation.num_reference=5", "evaluation.metrics=[fid]", "evaluation.allow_few_images=true"
    )["evaluation"]
    own = {"extractor": str(tmp_path / "features.safetensors")}
    evaluation = type(parts.evaluation)(**{**given, **own})
    record = evaluate(parts.backbone, parts.objective, parts.data, parts.sampling, evaluation)
    assert record["protocol"]["reference"] == "train, decoded latents"
    assert record["protocol"]["num_reference"] == 5
    assert record["values"].keys() == {"fid", "agreement"}
    generated, reference, unseen = seen
    assert (generated.shape, reference.shape) == ((20, 3, 16, 16), (5, 3, 16, 16))
    assert len(unseen) == 5  # of 8 held out
    train = parts.data.train
    for number, index in enumerate((0, 6, 12, 19, 25)):  # of 32, evenly spaced
        mean = train[index][0][0, :2]
        expected = ((mean.clamp(-1, 1) + 1) * 127.5).round()
        gap = reference[number, :2, ::2, ::2].float() - expected
        assert gap.abs().max() <= 1


def call(script, *overrides, expect=0):
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / script, *overrides, "device=cpu"],
        capture_output=True, text=True, check=False, timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == expect, said[-3000:]
    return said


@pytest.mark.slow
def test_from_encoded_digits_to_decoded_samples(run, tmp_path):
    vaes = save_vaes(tmp_path)
    source = {"name": "digits"}
    vae = load_vae(vaes["AutoencoderKL"])
    given = EncodingOptions(batch_size=200, flips=True)
    encode_latents(build_data("digits"), vae, tmp_path / "latents", given, source=source)
    folder = run(
        "run", "backbone=mamba", "data=latents", f"data.path={tmp_path / 'latents'}",
        "training.horizontal_flip=true", "evaluation.num_reference=20",
    )  # fmt: skip
    picture = np.asarray(Image.open(folder / "samples" / "step_00000006.png"))
    assert picture.shape[-1] == 3  # decoded: grey digits came back in colour
    score = json.loads((folder / "score.json").read_text())
    assert score["protocol"]["reference"] == "train, decoded latents"
    moved = (tmp_path / "AutoencoderKL").rename(tmp_path / "moved")
    said = call("sample.py", f"checkpoint={folder}", "num_images=3", expect=1)
    assert "AutoencoderKL' does not exist. Where it has moved" in said
    other = f"vae={vaes['AutoencoderTiny']}"
    said = call("sample.py", f"checkpoint={folder}", "num_images=3", other, expect=1)
    assert "is another autoencoder" in said
    said = call("sample.py", f"checkpoint={folder}", "num_images=3", f"vae={moved}")
    [file] = (folder / "generated").glob("*/samples.npz")
    images = np.load(file)["arr_0"]
    assert images.shape == (3, 8, 8, 3)
    call("sample.py", f"checkpoint={folder}", "num_images=3", "vae=none")
    [file] = (folder / "generated").glob("*/latents.npz")
    raw = torch.from_numpy(np.load(file)["arr_0"])
    decoded = to_uint8(load_vae(str(moved)).decode(raw)).permute(0, 2, 3, 1).numpy()
    assert np.abs(decoded.astype(int) - images.astype(int)).max() <= 1
