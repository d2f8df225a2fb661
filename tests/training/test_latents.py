"""Training on latents: exact resume, what a step draws, decoding, and what is refused later."""

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.vaes import save_vaes
from tests.scripts.test_command_line import call
from tests.small_run import parts_of, settings, train_small
from tests.training.test_resume import assert_same_end
from tread_zoo.checkpoint_config import EncodingConfig
from tread_zoo.data.encode import encode, write_table
from tread_zoo.data.vae import load_vae
from tread_zoo.evaluation.held_out import held_out_loss
from tread_zoo.registry import create
from tread_zoo.routing import Stack, Step
from tread_zoo.runs.checkpoint import find_checkpoint
from tread_zoo.runs.restore import restore
from tread_zoo.seeding import make_image_generator
from tread_zoo.training.step import draw_step

CPU = torch.device("cpu")


def write_moments(folder, factor=1.0):
    """Write 40 moments of 2 channels, with mirrored copies."""
    generator = torch.Generator().manual_seed(0)
    values = factor * torch.randn(40, 2, 4, 8, 8, generator=generator)
    write_table(folder, [(values, torch.arange(40) % 4)], content="mean_logvar")
    return ["data=latents", f"data.path={folder}", "data.held_out=0.2"]


def test_noise_of_moments_is_drawn_apart_and_flips_choose_the_copy(tmp_path):
    """Levels, noise, labels and kept ids equal those for data without random numbers of its own."""
    more = ["training.horizontal_flip=true", "training.label_dropout=0.4"]
    setup = parts_of(settings(*write_moments(tmp_path), *more))
    stored, labels = next(setup.batches())
    x, y, draw, routes, _ = draw_step(setup, (stored, labels), 3, 0, CPU)

    def generator(purpose):
        return make_image_generator(purpose, 0, 3, images=range(8))

    flipped = generator("flip").rand() < 0.5
    dropped = generator("label").rand() < 0.4
    expected = setup.objective.draw((8, 2, 8, 8), generator("noise"))
    stack = Stack.of(setup.backbone)
    ids = setup.routing.draw(stack, generator("route"), Step(3, 6, seed=0))[0].ids
    noise = generator("latents").randn(2, 8, 8)
    assert torch.equal(draw.noise, expected.noise)
    assert torch.equal(draw.level, expected.level)
    assert torch.equal(routes[0].ids, ids)
    assert torch.equal(y == 4, dropped)
    assert 0 < flipped.sum() < 8 > dropped.sum() > 0
    chosen = stored[torch.arange(8), flipped.long()]
    z = chosen[:, :2] + (chosen[:, 2:] / 2).exp() * noise
    torch.testing.assert_close(setup.data.codec.to_latents(x), z)


@pytest.mark.slow
def test_a_run_on_moments_resumes_to_the_bit_unless_they_are_normalized_otherwise(run, tmp_path):
    given = [*write_moments(tmp_path / "set"), "training.horizontal_flip=true"]  # 4 steps an epoch
    given += ["training.num_workers=1", "lr_schedule=constant"]
    run("parts", *given, "training.num_steps=2")
    folder = run("parts", *given, "resume=latest")
    assert_same_end(run("unbroken", *given), folder)
    write_moments(tmp_path / "set", factor=2)
    with pytest.raises(ValueError, match="scale"):
        run("parts", *given, "resume=latest")
    restored = restore(folder, weights="ema", device="cpu", precision="fp32")
    with pytest.raises(ValueError, match="scale"):
        restored.data({})


def test_the_held_out_loss_draws_moments_with_fixed_noise(tmp_path):
    setup = parts_of(settings(*write_moments(tmp_path)))
    arguments = (setup.backbone, setup.objective, setup.data)
    one, again = (held_out_loss(*arguments, seed=0, precision="fp32") for _ in range(2))
    assert one == again
    # a fresh network gives 0: the loss is the mean square of noise - x
    generator = make_image_generator("held_out", 0, 0, images=range(8))
    draw = setup.objective.draw((8, 2, 8, 8), generator)
    stored = torch.stack([setup.data.held_out[i][0] for i in range(8)])
    noise = setup.data.codec.draw(stored.shape, generator)
    x = setup.data.codec.to_model(stored, device=CPU, noise=noise)
    assert one[0] == pytest.approx(float((draw.noise - x).double().square().mean()), rel=1e-5)


@pytest.mark.slow
def test_from_encoded_digits_to_decoded_samples(run, tmp_path):
    vaes = save_vaes(tmp_path)
    config = EncodingConfig(vae="", out="", batch_size=200, flips=True)
    vae = load_vae(vaes["AutoencoderKL"])
    assert encode(create("data", "digits"), vae, tmp_path / "latents", config)
    given_data = (
        "backbone=mamba", "data=latents", f"data.path={tmp_path / 'latents'}",
        "training.horizontal_flip=true", "evaluation.num_reference=20", "lr_schedule=constant",
    )  # fmt: skip
    folder = run("run", *given_data)
    picture = np.asarray(Image.open(folder / "samples" / "step_00000006.png"))
    assert picture.shape[-1] == 3  # decoded: grey digits came back in colour
    given = [f"checkpoint={folder}", "num_images=3", "device=cpu"]
    call("sample.py", *given)  # with the autoencoder that the table names
    [file] = (folder / "generated").glob("*/samples.npz")
    first = np.load(file)["arr_0"]
    moved = (tmp_path / "AutoencoderKL").rename(tmp_path / "moved")
    call("sample.py", *given, expect=1)  # it is gone
    assert "another autoencoder" in call(
        "sample.py", *given, f"vae={vaes['AutoencoderTiny']}", expect=1
    )
    call("sample.py", *given, f"vae={moved}", f"out={tmp_path / 'again'}")
    assert np.load(tmp_path / "again" / "samples.npz")["arr_0"].shape == first.shape == (3, 8, 8, 3)
    longer = (f"data.vae={moved}", "training.num_steps=7", "resume=latest")
    assert find_checkpoint(train_small(folder, *given_data, *longer)).step == 7


@pytest.mark.slow
def test_decoded_samples_of_another_size_than_in_training(run, tmp_path):
    vaes = save_vaes(tmp_path, "AutoencoderKL")  # which halves a picture's sides
    config = EncodingConfig(vae="", out="", batch_size=200)
    encode(create("data", "digits"), load_vae(vaes["AutoencoderKL"]), tmp_path / "set", config)
    given = ["backbone=dit", "data=latents", f"data.path={tmp_path / 'set'}"]
    folder = run("run", *given, "evaluation.metrics=[]")
    given = [f"checkpoint={folder}", "num_images=2", "device=cpu"]
    call("sample.py", *given, "image_size=[16,8]", f"out={tmp_path / 'tall'}")
    assert np.load(tmp_path / "tall" / "samples.npz")["arr_0"].shape == (2, 16, 8, 3)
    call("sample.py", *given, "image_size=[8,4]", "vae=none", f"out={tmp_path / 'stored'}")
    assert np.load(tmp_path / "stored" / "latents.npz")["arr_0"].shape == (2, 2, 8, 4)
    assert "multiples of 4" in call("sample.py", *given, "image_size=10", expect=1)
