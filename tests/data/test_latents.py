"""Tables of latents: encoding, what a model sees of them, decoding, and other projects' files."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from scripts.convert_latents import convert, maskdit
from tests.data.tables import Stub, image_data, write_latents
from tests.data.vaes import save_vaes
from tests.processes import run_python
from tread_zoo.data import to_model_range, to_uint8
from tread_zoo.data.encode import EncodingConfig, encode, write_table
from tread_zoo.data.latents import imported_codec, latents, restore_codec
from tread_zoo.data.vae import Vae, load_vae
from tread_zoo.registry import create
from tread_zoo.seeding import make_image_generator

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _stub(monkeypatch):
    """Let the stub stand for the autoencoder of its name."""
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
    """As diffusers' one: takes and gives images in 0 … 1, and scales latents itself."""

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


def write_maskdit(folder, moments):
    lmdb = pytest.importorskip("lmdb", reason="lmdb is not installed")
    with (
        lmdb.open(str(folder / "train"), map_size=2**24) as opened,
        opened.begin(write=True) as txn,
    ):
        for i, one in enumerate(moments.flatten(0, 1)):
            txn.put(f"z-{i}".encode(), one.numpy().tobytes())
            txn.put(f"y-{i}".encode(), str(i % 6 % 3).encode())
        txn.put(b"length", str(len(moments.flatten(0, 1))).encode())


def write_lightningdit(folder, samples):
    for shard in range(2):
        own = slice(3 * shard, 3 * shard + 3)
        tensors = {"latents": samples[0, own], "latents_flip": samples[1, own]}
        labels = torch.arange(6)[own] % 3
        save_file(
            {key: value.contiguous() for key, value in {**tensors, "labels": labels}.items()},
            folder / f"latents_rank00_shard{shard:03d}.safetensors",
        )


def write_repa(folder, moments):
    labels = []
    (folder / "00000").mkdir()
    for i, one in enumerate(moments[0]):
        name = f"00000/img-mean-std-{i:08d}.npy"
        np.save(folder / name, one.numpy())
        labels.append([name, i % 3])
    (folder / "dataset.json").write_text(json.dumps({"labels": labels}))


@pytest.mark.parametrize(
    ("write", "channels", "content", "options"),
    [
        (write_maskdit, 8, "mean_logvar", ["--mirrored"]),
        (write_lightningdit, 4, "samples", []),
        (write_repa, 8, "mean_std", []),
    ],
)
def test_latents_of_other_projects_become_a_table(tmp_path, write, channels, content, options):
    values = torch.randn(2, 6, channels, 4, 4, generator=torch.Generator().manual_seed(0)).abs()
    (tmp_path / "in").mkdir()
    write(tmp_path / "in", values)
    name = write.__name__.removeprefix("write_")
    script = ROOT / "scripts" / "convert_latents.py"
    done = run_python(script, name, tmp_path / "in", tmp_path / "out", *options, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    data = latents(str(tmp_path / "out"), held_out=0.0)
    copies = 1 if content == "mean_std" else 2
    assert (data.codec.content, data.codec.flips) == (content, copies == 2)
    assert torch.equal(stack(data.train), values[:copies].transpose(0, 1))
    assert [data.train[i][1] for i in range(6)] == [0, 1, 2, 0, 1, 2]
    assert (data.num_classes, data.codec.has_pixels, data.channels) == (3, False, 4)
    if content == "mean_std":
        noise = torch.randn(6, 4, 4, 4)
        x = data.codec.to_model(values[:1].transpose(0, 1), device=CPU, noise=noise)
        z = values[0, :, :4] + values[0, :, 4:] * noise
        torch.testing.assert_close(data.codec.to_latents(x), z)
    with pytest.raises(ValueError, match="normalization=scale"):
        latents(str(tmp_path / "out"), normalization="scale")


def test_a_database_of_something_else_is_no_latents(tmp_path):
    lmdb = pytest.importorskip("lmdb", reason="lmdb is not installed")
    lmdb.open(str(tmp_path / "train")).close()
    with pytest.raises(ValueError, match="length"):
        list(maskdit(tmp_path, mirrored=False)[1])


def test_ones_own_latents_become_a_table(tmp_path):
    values = torch.randn(5, 1, 2, 4, 4).half()
    written = write_table(tmp_path, ((one, -1) for one in values), content="samples", part_size=2)
    data = latents(str(tmp_path), held_out=0.0)
    assert (written, data.num_classes, data.class_names) == (5, 0, ())
    assert torch.equal(stack(data.train), values)


@pytest.mark.parametrize(
    ("second", "content", "words"),
    [
        (torch.ones(1, 8, 6, 4), "mean_std", "a.npy"),
        (torch.ones(1, 8, 4, 6).half(), "mean_std", "a.npy"),
        (torch.full((1, 8, 4, 6), torch.nan), "mean_std", "not finite"),
        (-torch.ones(1, 8, 4, 6), "mean_std", "negative"),
        (torch.ones(1, 7, 4, 6), "mean_logvar", "shape"),
        (torch.ones(8, 4, 6), "samples", "shape"),
    ],
)
@pytest.mark.parametrize("part_size", [1, 10])
def test_latents_that_do_not_fit_are_refused_by_name(tmp_path, second, content, words, part_size):
    items = [(torch.ones(1, 8, 4, 6), 0, "a.npy"), (second, 1, "b.npy"), (second, 2, "c.npy")]
    with pytest.raises(ValueError, match=rf"of b\.npy .*{words}|b\.npy.*{words}"):
        write_table(tmp_path, items, content=content, part_size=part_size)
    with pytest.raises((ValueError, OSError)):
        latents(str(tmp_path))


def test_no_latents_and_labels_beside_none_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no latents"):
        write_table(tmp_path, [], content="samples")
    one = torch.ones(1, 4, 4, 4)
    for labels in ([0, -1], [0, 0.5], [0, 2**40], ["cat", "dog"]):
        with pytest.raises(ValueError, match="labels"):
            write_table(tmp_path, [(one, label) for label in labels], content="samples")


def test_latents_beyond_their_type_are_refused_by_image(tmp_path):
    class Broken(Stub):
        def encode(self, x):
            return super().encode(x)[0] * 1e6, None

    config = EncodingConfig(vae="", out="", content="mode")
    with pytest.raises(ValueError, match=r"train image 0 .*float32"):
        encode(image_data(), Broken(), tmp_path, config)


@pytest.mark.parametrize(
    ("content", "labels", "names"),
    [
        ({"labels": [["0.npy", 1.0], ["1.npy", 0]]}, [1, 0], ("0", "1")),
        ({"labels": [["0.npy", "dog"], ["1.npy", "cat"]]}, [1, 0], ("cat", "dog")),
        ({"labels": None}, [0, 0], ()),
        ({"labels": [["0.npy", 0.5], ["1.npy", 1]]}, "0.5", ()),
        ({"labels": [["0.npy", [1]], ["1.npy", 1]]}, "labels", ()),
        ({"labels": [["0.npy", 1]]}, "1.npy", ()),
        ({"labels": [3]}, "dataset.json", ()),
        ([], "dataset.json", ()),
    ],
)
def test_labels_of_dataset_json(tmp_path, content, labels, names):
    (tmp_path / "in").mkdir()
    for number in range(2):
        np.save(tmp_path / "in" / f"{number}.npy", np.ones((8, 4, 4), np.float32))
    (tmp_path / "in" / "dataset.json").write_text(json.dumps(content))
    given = {"vae": None, "mirrored": False}
    if isinstance(labels, str):
        with pytest.raises(ValueError, match=labels):
            convert("repa", tmp_path / "in", tmp_path / "out", **given)
        return
    convert("repa", tmp_path / "in", tmp_path / "out", **given)
    data = latents(str(tmp_path / "out"), held_out=0.0)
    assert ([data.train[i][1] for i in range(2)], data.class_names) == (labels, names)


@pytest.mark.parametrize("kind", ["repa", "lightningdit", "maskdit"])
def test_what_cannot_be_converted_is_one_line(tmp_path, kind):
    if kind == "maskdit":
        pytest.importorskip("lmdb", reason="lmdb is not installed")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    for name in ("dataset.json", "a.npy", "a.safetensors", "data.mdb"):
        (tmp_path / "broken" / name).write_text("nothing")
    for name in ("empty", "broken", "nowhere"):
        with pytest.raises((ValueError, OSError)):
            convert(kind, tmp_path / name, tmp_path / "out", vae=None, mirrored=False)
    script = ROOT / "scripts" / "convert_latents.py"
    done = run_python(script, kind, tmp_path / "broken", tmp_path / "out", cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
