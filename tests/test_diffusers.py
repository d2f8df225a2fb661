"""Our networks in diffusers, and our samplers beside its schedulers. Slow: importing it is."""

import numpy as np
import pytest
import torch

from tests.data.vaes import save_vaes
from tests.small_run import train_small
from tests.test_pretrained import random_backbone
from tread_zoo import create, create_backbone
from tread_zoo.diffusion import Problem, build_sampling, generate
from tread_zoo.model_card import write_model_folder
from tread_zoo.runs.checkpoint import CheckpointError, find_checkpoint, load_backbone

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def diffusers():
    return pytest.importorskip("diffusers", reason="diffusers is not installed")


def seeded(seed=3):
    return torch.Generator().manual_seed(seed)


def test_a_pipeline_knows_its_classes_by_name(tmp_path):
    from tread_zoo.pipeline import TreadZooPipeline

    backbone = random_backbone("mamba_tiny")
    names = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibis", "jay"]
    pipe = TreadZooPipeline(backbone, class_names=names[: backbone.num_classes])
    pipe.save_pretrained(tmp_path)
    given = {"num_inference_steps": 2, "output_type": "latent"}
    expected = pipe([2, 0], generator=seeded(), **given).images
    for own in (pipe, TreadZooPipeline.from_pretrained(tmp_path)):
        named = own(["cat", "ant"], generator=seeded(), **given).images
        assert torch.equal(named, expected)
    with pytest.raises(ValueError, match="Did you mean 'cat'"):
        pipe("cta")


def test_a_pipeline_with_weights_that_are_not_finite_is_refused(tmp_path):
    from tread_zoo.pipeline import TreadZooPipeline

    pipe = TreadZooPipeline(random_backbone("dit_tiny"))
    torch.nn.init.constant_(pipe.backbone.network.final.linear.bias, torch.nan)
    pipe.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"backbone: 1 of .* NaN"):
        TreadZooPipeline.from_pretrained(tmp_path)


@pytest.mark.parametrize("case", ["fused", "mamba_tiny", "contexts", "wide"])
def test_a_pipeline_saves_and_loads_any_backbone(tmp_path, case):
    from tread_zoo.pipeline import TreadZooPipeline

    backbone = random_backbone(case)
    condition = {"num_images": 2}
    if backbone.num_classes:
        condition = {"class_labels": [2, 0]}
    if backbone.context_size:
        condition = {"contexts": torch.randn(2, backbone.context_length, backbone.context_size)}
    pipe = TreadZooPipeline(backbone, sampler="heun")
    pipe.save_pretrained(tmp_path)
    loaded = TreadZooPipeline.from_pretrained(tmp_path)
    given = {**condition, "num_inference_steps": 3, "output_type": "latent"}
    images = pipe(generator=seeded(), **given).images
    assert torch.equal(loaded(generator=seeded(), **given).images, images)
    expected = generate(
        backbone, create("objective", "flow"), build_sampling({"name": "heun", "num_steps": 3}),
        indices=range(2), seed=int(torch.randint(2**31, (), generator=seeded())), batch_size=2,
        labels=torch.tensor([2, 0]) if backbone.num_classes else condition.get("contexts"),
    )  # fmt: skip
    assert torch.equal(images, expected)


def test_a_run_is_a_pipeline(tmp_path):
    from tread_zoo.pipeline import TreadZooPipeline

    run = train_small(tmp_path / "run")
    pipe = TreadZooPipeline.from_checkpoint(write_model_folder(run, tmp_path / "pushed"))
    given = {"class_labels": [1], "output_type": "pt"}
    images = pipe(**given, generator=seeded()).images
    other = TreadZooPipeline(load_backbone(find_checkpoint(run)), sampler=pipe.config.sampler)
    assert pipe.config.sampler["num_steps"] == 2
    assert torch.equal(other(**given, generator=seeded()).images, images)
    for option in ("sampler.selection_rate=0.5", "guidance=sparse"):
        routed = str(train_small(tmp_path / option, option))
        assert TreadZooPipeline.from_checkpoint(routed)(**given).images.shape == (1, 1, 8, 8)
    undropped = str(train_small(tmp_path / "undropped", "training.label_dropout=0"))
    with pytest.raises(ValueError, match="label_dropout=0"):
        TreadZooPipeline.from_checkpoint(undropped)(**given, guidance_scale=2.0)


def test_pictures_guidance_and_half_precision():
    from tread_zoo.pipeline import TreadZooPipeline

    pipe = TreadZooPipeline(random_backbone("dit_tiny"))
    (picture,) = pipe(class_labels=2, num_inference_steps=2).images
    assert picture.size == (8, 8)
    given = {"class_labels": [0, 1], "num_inference_steps": 2, "output_type": "pt"}
    plain = pipe(**given, generator=seeded()).images
    guided = pipe(**given, generator=seeded(), guidance_scale=3.0).images
    assert 0 <= guided.min() < guided.max() <= 1
    assert (guided - plain).abs().max() > 0.01
    undropped = TreadZooPipeline(pipe.backbone, label_dropout=0.0)
    with pytest.raises(ValueError, match="needs a label"):
        undropped()
    with pytest.raises(ValueError, match="0 … 2"):
        pipe(class_labels=11)
    half = pipe.to(torch.bfloat16)(**given, generator=seeded()).images
    torch.testing.assert_close(half.float(), plain, rtol=0, atol=0.05)


def test_latents_are_decoded_by_the_vae(tmp_path, diffusers):
    from tread_zoo.pipeline import TreadZooPipeline

    vae = diffusers.AutoencoderKL.from_pretrained(save_vaes(tmp_path)["AutoencoderKL"])
    sizes = {"input_size": 8, "in_channels": 2, "num_classes": 3, "depth": 4}
    pipe = TreadZooPipeline(create_backbone("dit_tiny", **sizes), vae)
    pipe.save_pretrained(tmp_path / "pipe")
    pipe = TreadZooPipeline.from_pretrained(tmp_path / "pipe")
    given = {"class_labels": [1, 2], "num_inference_steps": 2}
    latents = pipe(**given, generator=seeded(), output_type="latent").images
    pictures = pipe(**given, generator=seeded(), output_type="np").images
    with torch.no_grad():
        decoded = vae.decode(latents).sample.permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(pictures, (decoded / 2 + 0.5).clip(0, 1), atol=1e-5)
    shifted = TreadZooPipeline(pipe.backbone, vae, latent_shift=[1.25, 1.25])
    found = shifted(**given, generator=seeded(), output_type="latent").images
    torch.testing.assert_close(found, latents + 1.0)
    noise = (latents - 0.25) * 0.5  # what AutoencoderKL's shift and scale undo
    assert noise.mean().abs() < 0.3
    assert 0.7 < noise.std() < 1.3
    with pytest.raises(ValueError, match="vae"):
        TreadZooPipeline(create_backbone("dit_tiny", **sizes))(**given)


def network(x, t):
    """Return a smooth function of both, in place of a trained one."""
    return torch.tanh(x.roll(1, -1) + t.view(-1, 1, 1, 1)) - 0.3 * x


def sampled(objective, x, levels):
    problem = Problem(lambda x, t: objective.dx_dt(network, x, t), objective, lambda step: None)
    return create("sampler", "euler")(problem, x, levels)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_euler_is_that_of_diffusers_for_flow_matching(diffusers, shift):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 7, 7))
    x = noise = torch.randn(2, 1, 4, 4, generator=seeded())
    for time in scheduler.timesteps:
        x = scheduler.step(network(x, time.expand(2) / 1000), time, x).prev_sample
    objective = create("objective", "flow")
    options = build_sampling({"name": "euler", "num_steps": 7, "shift": shift})
    own = sampled(objective, noise, options.levels(objective))
    torch.testing.assert_close(x, own, rtol=1e-4, atol=1e-4)


def test_euler_is_that_of_diffusers_for_edm(diffusers):
    scheduler = diffusers.EDMEulerScheduler(sigma_min=0.002, sigma_max=80.0, sigma_data=0.5)
    scheduler.set_timesteps(7)
    x = noise = 80 * torch.randn(2, 1, 4, 4, generator=seeded())
    for time in scheduler.timesteps:
        raw = network(scheduler.scale_model_input(x, time), time.expand(2))
        x = scheduler.step(raw, time, x).prev_sample
    objective = create("objective", "edm")
    torch.testing.assert_close(
        x, sampled(objective, noise, objective.levels(7)), rtol=1e-4, atol=1e-4
    )
