"""Tables of latents: encoding, what a model sees of them, decoding, and other projects' files."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from tests.data.tables import Stub, image_data, write_latents
from tests.data.vaes import save_vaes
from tread_zoo.checkpoint_config import EncodingConfig
from tread_zoo.data import to_model_range, to_uint8
from tread_zoo.data.encode import encode, write_table
from tread_zoo.data.latents import imported_codec, latents, restore_codec
from tread_zoo.data.vae import Vae, load_vae
from tread_zoo.registry import create
from tread_zoo.seeding import make_image_generator

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _stub(monkeypatch):
    """Load the stub when an autoencoder of its name is asked for."""
    place = "tread_zoo.data.latents.load_vae"
    monkeypatch.setattr(place, lambda name: Stub() if name == Stub.name else load_vae(name))


@pytest.fixture
def encoded(tmp_path):
    def write(**options):
        given = {"content": "moments", "part_size": 4, "dtype": "float32", **options}
        return str(write_latents(tmp_path / "latents", image_data(), **given))

    return write


def stack(part):
    return torch.stack([part[i][0] for i in range(len(part))])


def test_a_table_is_read_as_it_was_encoded(encoded):
    data = latents(encoded(flips=True))
    assert (data.image_size, data.channels, data.num_classes) == ((4, 4), 3, 4)
    assert (len(data.train), len(data.held_out), data.class_names) == (11, 5, tuple("abcd"))
    assert [data.train[i][1] for i in range(11)] == [i % 4 for i in range(11)]
    x = to_model_range(image_data().train.images)
    for copy, images in enumerate((x, x.flip(-1))):
        mean = torch.nn.functional.avg_pool2d(images, 2)
        stored = stack(data.train)[:, copy]
        torch.testing.assert_close(stored, torch.cat([mean, mean - 2], 1), atol=1e-6, rtol=0)


def test_standardized_latents_have_mean_0_and_deviation_1_and_scaled_ones_the_factor(encoded):
    path = encoded(content="mode")
    data = latents(path)
    stored = stack(data.train)
    x = data.codec.to_model(stored, device=CPU)
    assert x.mean((0, 2, 3)).abs().max() < 1e-6
    torch.testing.assert_close(x.std((0, 2, 3), correction=0), torch.ones(3))
    scaled = latents(path, normalization="scale").codec
    x = scaled.to_model(stored, device=CPU)
    torch.testing.assert_close(x, (stored[:, 0] - 0.25) * 0.5)
    torch.testing.assert_close(scaled.to_latents(x), stored[:, 0])
    images = scaled.to_pixels(x, device=CPU)
    assert torch.equal(images[:, :, ::2, ::2], to_uint8(stored[:, 0]))
    with pytest.raises(ValueError, match="normalization='scaled'"):
        create("data", "latents", path=path, normalization="scaled")


def test_moments_are_drawn_with_the_noise_and_flips_choose_the_copy(encoded):
    data = latents(encoded(flips=True))
    stored, codec = stack(data.train), data.codec
    noise = codec.draw(stored.shape, make_image_generator("test", images=range(11)))
    flip = torch.arange(11) % 2 == 1
    x = codec.to_model(stored, device=CPU, noise=noise, flip=flip)
    chosen = stored[torch.arange(11), flip.long()]
    z = chosen[:, :3] + (chosen[:, 3:] / 2).exp() * noise
    torch.testing.assert_close(codec.to_latents(x), z)
    assert codec.model_shape(stored.shape) == noise.shape == (11, 3, 4, 4)
    draws = torch.cat([
        codec.to_model(stored, device=CPU, noise=torch.randn(noise.shape), flip=flip)
        for _ in range(400)
    ])  # fmt: skip
    assert draws.mean((0, 2, 3)).abs().max() < 0.02
    assert (draws.std((0, 2, 3)) - 1).abs().max() < 0.02
    data.codec.check(flip=True)


def test_splits_and_classes(encoded):
    path = encoded()
    with pytest.raises(ValueError, match="mirrored"):
        latents(path).codec.check(flip=True)
    assert latents(path, num_classes=0).train[3][1] == 0
    split = latents(path, held_out=0.5)
    assert (len(split.train), len(split.held_out)) == (5, 6)
    with pytest.raises(ValueError, match="from 0 to 3"):
        latents(path, num_classes=3)


@pytest.mark.slow
def test_a_checkpoint_restores_the_codec_and_another_autoencoder_is_refused(encoded, tmp_path):
    codec = latents(encoded(), normalization="scale").codec
    metadata = json.loads(json.dumps(codec.metadata))
    x = torch.randn(2, 3, 4, 4)
    again = restore_codec(metadata, Stub.name)
    assert torch.equal(again.to_pixels(x, device=CPU), codec.to_pixels(x, device=CPU))
    assert again.decoded_by == {"class": "AutoencoderKL", "sha256": "5" * 64}
    bare = restore_codec(metadata, "none")
    assert (bare.has_pixels, bare.decoded_by) == (False, None)
    other = save_vaes(tmp_path, "AutoencoderTiny")["AutoencoderTiny"]
    with pytest.raises(ValueError, match="is another autoencoder"):
        restore_codec(metadata, other).to_pixels(x, device=CPU)
    with pytest.raises(ValueError, match="latents of 2 channels"):
        imported_codec(other, 3)
    assert imported_codec(Stub.name, 3).scale == (0.5,) * 3


# Encoding -----------------------------------------------------------------------------------------


def test_a_stopped_encoding_goes_on_and_processes_share_the_parts(encoded, tmp_path):
    whole = Path(encoded(content="samples"))
    config = EncodingConfig(
        vae="", out="", content="samples", part_size=4, dtype="float32", batch_size=3
    )
    out = tmp_path / "other"
    given = {"num_ranks": 2}
    assert not encode(image_data(), Stub(), out, config, rank=1, **given)
    with pytest.raises(ValueError, match="not finished"):
        latents(str(out))
    times = {file.name: file.stat().st_mtime_ns for file in out.glob("*.arrow")}
    assert 0 < len(times) < 5
    assert encode(image_data(), Stub(), out, config, rank=0, **given)
    assert all((out / name).stat().st_mtime_ns == time for name, time in times.items())
    one, other = latents(str(whole)), latents(str(out))
    torch.testing.assert_close(stack(one.train), stack(other.train))  # drawn by (part, item)
    torch.testing.assert_close(stack(one.held_out), stack(other.held_out))
    assert one.codec.scale == pytest.approx(other.codec.scale)
    config = EncodingConfig(vae="", out="", content="samples", part_size=4)
    with pytest.raises(ValueError, match="differs in dtype"):
        encode(image_data(), Stub(), out, config, **given)
    config = EncodingConfig(vae="", out="", content="samples", part_size=4, flips=True)
    with pytest.raises(ValueError, match="differs in settings"):
        encode(image_data(), Stub(), out, config, **given)


def test_images_that_cannot_be_read_are_left_out_and_listed(tmp_path):
    data = image_data()

    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 11

        def __getitem__(self, index):
            if index in (3, 8):
                raise ValueError("cut short")
            return data.train[index]

    broken = type(data)(**{**vars(data), "train": Broken()})
    with pytest.raises(ValueError, match="2 of 16 images"):
        write_latents(tmp_path / "strict", broken)
    folder = write_latents(tmp_path / "latents", broken, max_corrupt_share=0.2)
    found = latents(str(folder))
    assert [found.train[i][1] for i in range(9)] == [0, 1, 2, 0, 1, 2, 3, 1, 2]
    listed = (folder / "corrupt.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in listed] == ["3", "8"]


@pytest.mark.parametrize("kind", ["AutoencoderKL", "AutoencoderTiny", "AutoencoderDC"])
def test_autoencoders_of_diffusers_from_encoding_to_pixels(tmp_path, kind):
    path = save_vaes(tmp_path, kind)[kind]
    pipeline = tmp_path / "pipeline"
    shutil.copytree(path, pipeline / "vae")
    vae = load_vae(str(pipeline))
    assert vae.sha256 == load_vae(path).sha256
    config = EncodingConfig(vae="", out="", batch_size=4, dtype="float32")
    assert encode(image_data(), vae, tmp_path / "latents", config)
    data = latents(str(tmp_path / "latents"), normalization="scale", vae=path)
    x = data.codec.to_model(stack(data.train), device=CPU)
    images = to_model_range(image_data().train.images)
    network = vae.network
    if kind == "AutoencoderKL":
        mean = network.encode(images).latent_dist.mean
        expected = (mean - 0.25) * 0.5
        assert data.codec.content == "mean_logvar"
    else:
        encoded = network.encode(images)
        mean = encoded.latents if kind == "AutoencoderTiny" else encoded.latent
        expected = mean * network.config.scaling_factor
    torch.testing.assert_close(x, expected, atol=1e-5, rtol=1e-4)
    pixels = data.codec.to_pixels(x, device=CPU)
    gap = pixels.int() - to_uint8(network.decode(mean).sample).int()
    assert gap.abs().max() <= 1


class AutoencoderRAE(torch.nn.Module):
    """Like diffusers' class of this name: images are in 0 … 1, and it scales latents itself."""

    config = SimpleNamespace(encoder_hidden_size=3, scaling_factor=0.5)

    def encode(self, images):
        return SimpleNamespace(latent=0.5 * torch.nn.functional.avg_pool2d(images, 2))

    def decode(self, latents):
        return SimpleNamespace(
            sample=latents.repeat_interleave(2, -1).repeat_interleave(2, -2) / 0.5
        )


def test_a_representation_autoencoder_scales_its_latents_itself():
    vae, images = Vae(AutoencoderRAE(), "rae"), to_model_range(image_data().train.images)
    means = torch.nn.functional.avg_pool2d(images, 2)
    latents, _ = vae.encode(images)
    torch.testing.assert_close(latents, (means + 1) / 2)
    torch.testing.assert_close(vae.decode(latents)[:, :, ::2, ::2], means)


# Other projects -----------------------------------------------------------------------------------


def test_the_page_s_lines_write_latents_of_another_project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vae = save_vaes(tmp_path, "AutoencoderTiny")["AutoencoderTiny"]
    Path("vavae_folder").symlink_to(vae)
    values = torch.randn(6, 2, 2, 4, 4)
    Path("imagenet_train_256").mkdir()
    for shard in range(2):
        own, labels = values[3 * shard :][:3], torch.arange(3)
        tensors = {"latents": own[:, 0], "latents_flip": own[:, 1], "labels": labels}
        whole = {key: value.contiguous() for key, value in tensors.items()}
        save_file(whole, f"imagenet_train_256/latents_rank00_shard{shard:03d}.safetensors")
    page = (ROOT / "docs" / "data.md").read_text().partition("### From other projects")[2]
    exec(page.partition("```python\n")[2].partition("```")[0], {})
    data = latents("imagenet_latents", held_out=0.0, normalization="scale")
    assert (data.num_classes, data.codec.flips, data.codec.has_pixels) == (3, True, True)
    assert torch.equal(stack(data.train), values)
    assert [data.train[i][1] for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_ones_own_latents_become_a_table(tmp_path):
    values = torch.randn(5, 1, 2, 4, 4).half()
    write_table(tmp_path, ((x, [-1] * len(x)) for x in values.split(2)), content="samples")
    data = latents(str(tmp_path), held_out=0.0)
    assert (len(data.train), data.num_classes, data.class_names) == (5, 0, ())
    assert torch.equal(stack(data.train), values)
    with pytest.raises(ValueError, match="normalization=scale"):
        latents(str(tmp_path), normalization="scale")


def test_means_and_deviations_of_others_are_drawn_as_they_are(tmp_path):
    values = torch.randn(6, 1, 8, 4, 4).abs()
    write_table(tmp_path, [(values, torch.arange(6))], content="mean_std")
    noise, codec = torch.randn(6, 4, 4, 4), latents(str(tmp_path), held_out=0.0).codec
    x = codec.to_model(values, device=CPU, noise=noise)
    z = values[:, 0, :4] + values[:, 0, 4:] * noise
    torch.testing.assert_close(codec.to_latents(x), z)


@pytest.mark.parametrize(
    ("second", "content", "words"),
    [
        (torch.ones(1, 1, 8, 6, 4), "mean_std", "shape"),
        (torch.full((1, 1, 8, 4, 6), torch.nan), "mean_std", "not finite"),
        (-torch.ones(1, 1, 8, 4, 6), "mean_std", "negative"),
    ],
)
def test_latents_that_do_not_fit_are_refused_by_file(tmp_path, second, content, words):
    batches = [(torch.ones(1, 1, 8, 4, 6), [0]), (second, [1])]
    with pytest.raises(ValueError, match=rf"train-00001\.arrow.*{words}"):
        write_table(tmp_path, batches, content=content)
    with pytest.raises((ValueError, OSError)):
        latents(str(tmp_path))


def test_no_latents_and_labels_beside_none_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no latents"):
        write_table(tmp_path, [], content="samples")
    with pytest.raises(ValueError, match="labels"):
        write_table(tmp_path, [(torch.ones(2, 1, 4, 4, 4), [0, -1])], content="samples")


def test_latents_beyond_their_type_are_refused(tmp_path):
    class Broken(Stub):
        def encode(self, x):
            return super().encode(x)[0] * 1e6, None

    config = EncodingConfig(vae="", out="", content="mode")
    with pytest.raises(ValueError, match=r"train-00000.*float32"):
        encode(image_data(), Broken(), tmp_path, config)
