"""Stored latents: formats, what a model sees of them, and what is refused. No autoencoder is run
but a stub: three channels, each pixel four times."""

import io
import json
import pickle
import shutil
import tarfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.data.vaes import image_data
from tread_zoo.data import StepBatches, build_data, make_loader
from tread_zoo.data.latents import codec as codec_module
from tread_zoo.data.latents import restore_codec
from tread_zoo.data.latents import source as source_module
from tread_zoo.data.latents.encode import EncodingOptions, encode_latents
from tread_zoo.data.loader import lost_items
from tread_zoo.data.ranges import to_uint8

CPU = torch.device("cpu")


class Stub:
    """An autoencoder with a posterior: the mean of 2x2 pixels, and of their first column."""

    name, kind, sha256, in_channels, latent_channels = "stub/vae", "AutoencoderKL", "5" * 64, 3, 3
    has_posterior = True

    def __init__(self):
        self.network = torch.nn.Linear(1, 1)
        self.facts = {
            "class": self.kind, "name": self.name, "sha256": self.sha256, "latent_channels": 3,
            "scaling_factor": 0.5, "shift_factor": 0.25,
        }  # fmt: skip

    def to(self, device):
        return self

    def latent_shape(self, size):
        return (3, size[0] // 2, size[1] // 2)

    def encode(self, x):
        mean = torch.nn.functional.avg_pool2d(x, 2)
        return mean, mean - 2

    def decode(self, z):
        return z.repeat_interleave(2, -1).repeat_interleave(2, -2)


@pytest.fixture(autouse=True)
def stub(monkeypatch):
    """Stand in for every autoencoder that is asked for by name."""
    found = Stub()
    monkeypatch.setattr(codec_module, "load_vae", lambda name: found)
    monkeypatch.setattr(source_module, "load_vae", lambda name: found)
    monkeypatch.setattr(codec_module, "check_vae", lambda name: None)
    return found


@pytest.fixture
def encoded(tmp_path, stub):
    def encode(**options):
        given = EncodingOptions(**{"batch_size": 4, "shard_size": 4, "dtype": "float32", **options})
        encode_latents(image_data(), stub, tmp_path / "latents", given, source={"name": "made"})
        return tmp_path / "latents"

    return encode


def test_a_folder_is_read_as_it_was_encoded(encoded):
    data = build_data("latents", path=str(encoded(flips=True)))
    assert (data.image_size, data.channels, data.num_classes) == ((4, 4), 3, 4)
    assert (len(data.train), len(data.held_out), data.class_names) == (11, 5, tuple("abcd"))
    images = image_data().train.images
    for i in range(11):
        found, label = data.train[i]
        assert label == i % 4
        x = images[i].float() / 127.5 - 1
        for copy, expected in enumerate((x, x.flip(-1))):
            mean = expected.view(3, 4, 2, 4, 2).mean((2, 4))
            torch.testing.assert_close(found[copy, :3], mean, atol=1e-6, rtol=0)
            torch.testing.assert_close(found[copy, 3:], mean - 2, atol=1e-6, rtol=0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_give_the_same_and_a_resume_in_an_epoch_too(encoded, num_workers):
    data = build_data("latents", path=str(encoded(dtype="bfloat16", shard_size=2)))
    data.train[0]

    def load(start):
        plan = StepBatches(11, 3, seed=0, num_steps=7, start_step=start)
        return [(x, y.tolist()) for x, y in make_loader(data.train, plan, num_workers)]

    whole, rest = load(0), load(4)
    assert whole[0][0].dtype == torch.bfloat16
    assert all(
        torch.equal(a[0], b[0]) and a[1] == b[1] for a, b in zip(whole[4:], rest, strict=True)
    )


def test_standardized_latents_have_mean_0_and_deviation_1_and_scaled_ones_the_factor(encoded):
    path = str(encoded(content="mode"))
    data = build_data("latents", path=path)
    stored = torch.stack([data.train[i][0] for i in range(11)])
    x = data.codec.to_model(stored, device=CPU)
    assert x.shape == (11, 3, 4, 4)
    assert x.mean((0, 2, 3)).abs().max() < 1e-6
    torch.testing.assert_close(x.std((0, 2, 3), correction=0), torch.ones(3))
    scaled = build_data("latents", path=path, normalization="scale").codec
    x = scaled.to_model(stored, device=CPU)
    torch.testing.assert_close(x, (stored[:, 0] - 0.25) * 0.5)
    torch.testing.assert_close(scaled.to_latents(x), stored[:, 0])
    with pytest.raises(
        ValueError, match=r"normalization='scaled' is unknown. Did you mean 'scale'"
    ):
        build_data("latents", path=path, normalization="scaled")


def test_moments_are_drawn_from_the_generator_and_their_mean_taken_without_one(encoded):
    data = build_data("latents", path=str(encoded(flips=True)), normalization="scale")
    stored = torch.stack([data.train[i][0] for i in range(5)])
    assert data.codec.model_shape(stored.shape) == (5, 3, 4, 4)
    flip = torch.tensor([True, False, True, True, False])
    noise = data.codec.draw(stored.shape, torch.Generator().manual_seed(3))
    assert torch.equal(noise, torch.randn(noise.shape, generator=torch.Generator().manual_seed(3)))
    x = data.codec.to_model(stored, device=CPU, noise=noise, flip=flip)
    copy = stored[torch.arange(5), flip.long()]
    expected = (copy[:, :3] + (copy[:, 3:] / 2).exp() * noise - 0.25) * 0.5
    torch.testing.assert_close(x, expected)
    mean = data.codec.to_model(stored, device=CPU)
    torch.testing.assert_close(mean, (stored[:, 0, :3] - 0.25) * 0.5)


def test_pixels_are_decoded_latents(encoded, stub):
    data = build_data("latents", path=str(encoded(content="mode")))
    stored = torch.stack([data.train[i][0] for i in range(11)])
    x = data.codec.to_model(stored, device=CPU)
    pixels, expected = data.codec.to_pixels(x, device=CPU), to_uint8(stub.decode(stored[:, 0]))
    assert (pixels.int() - expected.int()).abs().max() <= 1  # a mean of pixels may lie on a half
    assert (pixels == expected).float().mean() > 0.9
    restored = restore_codec(json.loads(json.dumps(data.codec.facts)), "stub/vae")
    assert torch.equal(restored.to_pixels(x, device=CPU), data.codec.to_pixels(x, device=CPU))
    bare = build_data("latents", path=str(encoded(content="mode")), vae="none").codec
    assert not bare.has_pixels
    assert bare.facts == data.codec.facts
    assert bare.to_pixels(x, device=CPU).shape == (11, 3, 4, 4)


def test_another_autoencoder_is_refused(encoded, stub):
    data = build_data("latents", path=str(encoded()))
    data.codec.prepare(CPU)
    stub.sha256 = "6" * 64
    again = build_data("latents", path=str(encoded()), vae="other/vae")
    with pytest.raises(ValueError, match=r"vae='other/vae' is another autoencoder .*666.*555"):
        again.codec.prepare(CPU)


def test_mirroring_without_mirrored_copies_is_refused(encoded):
    data = build_data("latents", path=str(encoded()))
    data.codec.check()
    with pytest.raises(ValueError, match=r"horizontal_flip=true.*Encode with flips=true"):
        data.codec.check(flip=True)


@pytest.mark.parametrize("indexed", [True, False])
def test_what_shards_lack_of_the_manifest_is_lost_and_the_rest_is_read(encoded, caplog, indexed):
    folder = encoded()
    shard, cache = folder / "train-000001.tar", folder / "index_latent_npy.npz"
    whole, index = shard.read_bytes(), cache.read_bytes()

    def load(**options):
        caplog.clear()
        cache.unlink() if not indexed else cache.write_bytes(index)
        found = build_data("latents", path=str(folder), vae="none", **options)
        cache.write_bytes(index)
        assert (len(found.train), len(found.held_out), found.num_classes) == (11, 5, 4)
        lost = [item.index for item in lost_items(found.train)]
        for i in set(range(11)) - set(lost):
            assert torch.equal(found.train[i][0], before[i])
            assert found.train[i][1] == i % 4
        for i in lost:
            with pytest.raises(ValueError, match=r"train-000001\.tar"):
                found.train[i]
            assert "train-000001.tar" in found.train.item_name(i)
        return lost

    before = [build_data("latents", path=str(folder), vae="none").train[i][0] for i in range(11)]
    assert load(verify="sha256") == []
    flipped = bytearray(whole)
    flipped[700] ^= 1  # in a latent: only the checksum can tell
    shard.write_bytes(flipped)
    assert load(verify="sha256") == [4, 5, 6, 7]
    assert "train-000001.tar' differs from what was written (sha256)" in caplog.text
    shard.write_bytes(whole[: 2 * 2048 + 100])
    cut = load()
    assert cut[-2:] == [6, 7]
    assert len(cut) == (2 if indexed else len(cut)) < 4
    assert "it is cut short. Copy it again, or give scripts/encode_latents.py" in caplog.text
    assert f"{len(cut)} of its 4 samples are lost" in caplog.text
    shard.write_bytes(whole + bytes(512))
    assert load() == [4, 5, 6, 7]
    assert "it is another one" in caplog.text
    shard.unlink()
    assert load() == [4, 5, 6, 7]
    assert "train-000001.tar' is missing, and in the manifest" in caplog.text
    shard.write_bytes(whole)
    assert load() == []


def test_a_folder_without_one_whole_shard_and_a_damaged_manifest_are_refused(encoded):
    folder = encoded()
    for shard in folder.glob("*.tar"):
        shard.write_bytes(b"")
    with pytest.raises(ValueError, match=r"train-000000.tar' has 0 bytes.*cut short"):
        build_data("latents", path=str(folder), vae="none")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 2}))
    with pytest.raises(ValueError, match=r"manifest.json' cannot be used \(it has format 2"):
        build_data("latents", path=str(folder), vae="none")


def test_a_latent_of_another_kind_in_a_shard_is_refused(encoded):
    folder = encoded(content="mode")
    data = build_data("latents", path=str(folder))
    content = bytearray((folder / "train-000000.tar").read_bytes())
    place = content.index(b"<f4")
    content[place : place + 3] = b"<i4"
    (folder / "train-000000.tar").write_bytes(content)
    with pytest.raises(ValueError, match=r"train-000000.tar' at byte 512 holds no float32 latent"):
        data.train[0]
    assert data.train[1][0].shape == (1, 3, 4, 4)


def test_options_that_do_not_fit_a_folder(encoded, tmp_path):
    path = str(encoded())
    for options, message in [
        ({"held_out": 0.2}, r"data.held_out=0.2, but these latents were split"),
        ({"content": "samples"}, r"data.content=samples, but the manifest says mean_logvar"),
        ({"format": "tar"}, r"data.format='tar' is unknown"),
        ({"verify": "md5"}, r"data.verify='md5' is unknown"),
        ({"num_classes": 3}, r"num_classes=3, but .* has the label 3; use at least 4"),
    ]:
        with pytest.raises(ValueError, match=message):
            build_data("latents", path=path, **options)
    assert build_data("latents", path=path, num_classes=0).num_classes == 0
    (tmp_path / "other").mkdir()
    for where, message in [("other", "holds none of them"), ("nowhere", "does not exist")]:
        with pytest.raises(ValueError, match=rf"{where}' {message}.*encode_latents"):
            build_data("latents", path=str(tmp_path / where))


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def write_npz(root, array, labels):
    np.savez(root / "set.npz", moments=array, labels=labels)
    return root / "set.npz"


def write_npy_folder(root, array, labels):
    names = [f"0000{i % 2}/img-mean-std-{i:08d}.npy" for i in range(len(array))]
    for name, one in zip(names, array, strict=True):
        (root / name).parent.mkdir(exist_ok=True)
        np.save(root / name, one[None])
    table = [[name, int(label)] for name, label in zip(names, labels, strict=True)]
    (root / "dataset.json").write_text(json.dumps({"labels": table[::-1]}))
    return root


def write_safetensors(root, array, labels):
    for number, rows in enumerate((slice(0, 3), slice(3, None))):
        tensors = {
            "latents": torch.from_numpy(array[rows]), "labels": torch.from_numpy(labels[rows]),
            "latents_flip": torch.from_numpy(-array[rows]),
        }  # fmt: skip
        save_file(tensors, root / f"latents_rank0{number}_shard000.safetensors")
    stats = {"mean": torch.full((1, 6, 1, 1), 0.5), "std": torch.full((1, 6, 1, 1), 2.0)}
    torch.save(stats, root / "latents_stats.pt")
    return root


@pytest.mark.parametrize(
    ("write", "content", "copies"),
    [(write_npz, "mean_logvar", 1), (write_npy_folder, "mean_std", 1),
     (write_safetensors, "samples", 2)],
)  # fmt: skip
def test_each_format_gives_what_its_files_hold(tmp_path, write, content, copies):
    array, labels = random(8, 6, 2, 2), np.arange(8) % 3
    path = write(tmp_path, array, labels)
    data = build_data("latents", path=str(path), held_out=0.25)
    assert (data.num_classes, len(data.train), len(data.held_out)) == (3, 6, 2)
    assert data.codec.content == content
    assert data.channels == (6 if content == "samples" else 3)
    # npy files lie in two folders: first the even ones
    order = [*range(0, 8, 2), *range(1, 8, 2)] if write is write_npy_folder else range(8)
    seen = []
    for part in (data.train, pickle.loads(pickle.dumps(data.held_out))):
        for i in range(len(part)):
            found, label = part[i]
            item = order[int(part.indices[i])]
            seen.append(item)
            assert torch.equal(found[0], torch.from_numpy(array[item]))
            assert label == item % 3
            assert len(found) == copies
            if copies == 2:
                assert torch.equal(found[1], torch.from_numpy(-array[item]))
    assert sorted(seen) == list(range(8))
    if content == "samples":
        assert (data.codec.shift, data.codec.scale) == ((0.5,) * 6, (0.5,) * 6)
    else:
        items = [order[i] for i in data.train.indices]
        mean, spread = array[items, :3].astype(np.float64), array[items, 3:].astype(np.float64)
        spread = np.exp(spread / 2) if content == "mean_logvar" else spread
        np.testing.assert_allclose(data.codec.shift, mean.mean((0, 2, 3)), rtol=1e-6)
        variance = (mean**2 + spread**2).mean((0, 2, 3)) - mean.mean((0, 2, 3)) ** 2
        np.testing.assert_allclose(data.codec.scale, variance**-0.5, rtol=1e-6)
    plan = StepBatches(6, 2, seed=0, num_steps=3)
    assert [x.shape for x, _ in make_loader(data.train, plan, 1)] == [(2, copies, 6, 2, 2)] * 3


def test_folders_of_classes_without_a_table(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        for i in range(3):
            np.save(tmp_path / name / f"{i}.npy", random(4, 2, 2, seed=i))
    with pytest.raises(ValueError, match=r"what its 4 channels are: set data.content="):
        build_data("latents", path=str(tmp_path))
    data = build_data("latents", path=str(tmp_path), content="samples", held_out=0.0)
    assert [data.train[i][1] for i in range(6)] == [0, 0, 0, 1, 1, 1]
    np.save(tmp_path / "a" / "1.npy", random(4, 2, 3))
    with pytest.raises(ValueError, match=r"1.npy has shape \[1, 4, 2, 3\], and the first"):
        data.train[1]
    np.save(tmp_path / "loose.npy", random(4, 2, 2))
    with pytest.raises(ValueError, match=r"'loose.npy' beside sub-folders"):
        build_data("latents", path=str(tmp_path), content="samples")


@pytest.mark.parametrize(
    "names",
    [("00000/a.npy", "00001/a.npy"), ("00000/a.npy",), ("a/img-mean-std-0.npy", "b/x.npy")],
)
def test_chunks_of_a_set_are_not_taken_for_classes(tmp_path, names):
    """As EDM2 and REPA write them: 1000 images a folder, whatever they show."""
    for name in names:
        (tmp_path / name).parent.mkdir()
        np.save(tmp_path / name, random(4, 2, 2))
    options = {"path": str(tmp_path), "content": "samples", "held_out": 0.0}
    with pytest.raises(ValueError, match=r"no dataset.json, .*chunks.*data.num_classes=0"):
        build_data("latents", **options)
    assert build_data("latents", **options, num_classes=0).num_classes == 0
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": [[n, 2] for n in names]}))
    assert build_data("latents", **options).num_classes == 3


def test_one_folder_of_latents_is_no_class(tmp_path):
    (tmp_path / "latents").mkdir()
    for i in range(3):
        np.save(tmp_path / "latents" / f"{i}.npy", random(4, 2, 2))
    data = build_data("latents", path=str(tmp_path), content="samples", held_out=0.0)
    assert (len(data.train), data.num_classes) == (3, 0)


def test_codes_of_a_discrete_tokenizer_are_refused(tmp_path):
    codes = torch.zeros(3, 4, 2, 2, dtype=torch.int32)
    save_file({"latents": codes}, tmp_path / "latents_rank00_shard000.safetensors")
    with pytest.raises(ValueError, match=r"'latents' has .*dtype I32; .*discrete tokenizer"):
        build_data("latents", path=str(tmp_path))


@pytest.mark.parametrize("start", [8, 300])
def test_a_cut_safetensors_shard_is_lost_as_a_whole(tmp_path, caplog, start):
    """With its header (300 bytes) or without; labels of the others stay."""
    array = random(9, 6, 2, 2)
    for number in range(3):
        rows = slice(3 * number, 3 * number + 3)
        tensors = {"latents": torch.from_numpy(array[rows]), "labels": torch.arange(3)}
        save_file(tensors, tmp_path / f"latents_rank0{number}_shard000.safetensors")
    cut = tmp_path / "latents_rank01_shard000.safetensors"
    cut.write_bytes(cut.read_bytes()[:start])
    data = build_data("latents", path=str(tmp_path), held_out=0.0)
    found = lost_items(data.train)
    assert [item.index for item in found] == [3, 4, 5]
    assert found[0].name == f"{str(cut)!r}, row 0"
    assert "rank01_shard000.safetensors' cannot be read" in caplog.text
    assert "3 latents are lost" in caplog.text
    for i in (0, 1, 2, 6, 7, 8):
        assert torch.equal(data.train[i][0][0], torch.from_numpy(array[i]))
    kept = array[[0, 1, 2, 6, 7, 8]].astype(np.float64)
    np.testing.assert_allclose(data.codec.shift, kept.mean((0, 2, 3)), rtol=1e-6)


def test_a_damaged_npz_is_named(tmp_path):
    np.savez(tmp_path / "set.npz", moments=random(8, 4, 2, 2))
    whole = bytearray((tmp_path / "set.npz").read_bytes())
    for damaged in (whole[:-30], whole[:200] + bytes(100) + whole[300:]):
        (tmp_path / "set.npz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"set.npz' cannot be read as an .npz.*copy it again"):
            build_data("latents", path=str(tmp_path / "set.npz"))


def test_moments_where_latents_are_expected_are_refused_by_name(tmp_path):
    np.savez(tmp_path / "set.npz", latents=random(4, 6, 2, 2))
    with pytest.raises(
        ValueError, match=r"6 channels as data.content=samples.* of 3. They look li"
    ):
        build_data("latents", path=str(tmp_path / "set.npz"), vae="stub/vae")
    data = build_data(
        "latents", path=str(tmp_path / "set.npz"), vae="stub/vae", content="mean_logvar"
    )
    assert data.channels == 3
    np.savez(tmp_path / "odd.npz", moments=random(4, 5, 2, 2))
    with pytest.raises(ValueError, match=r"wants an even number of channels.* has 5"):
        build_data("latents", path=str(tmp_path / "odd.npz"))
    with pytest.raises(ValueError, match=r"normalization=scale takes the factor.*set data.vae"):
        build_data("latents", path=str(tmp_path / "set.npz"), normalization="scale")


class Evil:
    """Pickled, it would leave a file behind where it is loaded."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (shutil.copy, (__file__, str(self.target)))


def test_no_pickle_is_run(tmp_path):
    target = tmp_path / "escaped"
    evil = np.array([Evil(target)], dtype=object)
    np.savez(tmp_path / "set.npz", moments=evil)
    with pytest.raises(
        ValueError, match=r"set.npz' cannot be read as an .npz file of plain arrays"
    ):
        build_data("latents", path=str(tmp_path / "set.npz"))
    (tmp_path / "npy").mkdir()
    np.save(tmp_path / "npy" / "a.npy", evil)
    with pytest.raises(ValueError, match=r"a.npy' cannot be read"):
        build_data("latents", path=str(tmp_path / "npy"), content="samples")
    (tmp_path / "st").mkdir()
    write_safetensors(tmp_path / "st", random(8, 6, 2, 2), np.arange(8))
    torch.save({"mean": Evil(target), "std": Evil(target)}, tmp_path / "st" / "latents_stats.pt")
    with pytest.raises(ValueError, match=r"latents_stats.pt' cannot be read as tensors"):
        build_data("latents", path=str(tmp_path / "st"))
    assert not target.exists()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": 1}, r"must have one of the arrays 'moments' and 'latents'; it has x"),
        ({"moments": (3, 4, 2)}, r"shape \(3, 4, 2\).*\[N,C,h,w\]"),
        ({"latents": (3, 4, 2, 2), "latents_flip": (2, 4, 2, 2)}, r"all alike"),
        ({"latents": (3, 4, 2, 2), "labels": (3,)}, r"labels have shape \(3,\) and dtype float32"),
    ],
)
def test_arrays_that_do_not_fit_are_named(tmp_path, arrays, message):
    np.savez(
        tmp_path / "set.npz", **{key: np.zeros(shape, np.float32) for key, shape in arrays.items()}
    )
    with pytest.raises(ValueError, match=message):
        build_data("latents", path=str(tmp_path / "set.npz"))


def test_every_member_can_be_read_by_its_name_alone(encoded):
    """What the documentation says of the layout."""
    with tarfile.open(encoded(flips=True) / "train-000000.tar") as tar:
        assert tar.getnames()[:2] == ["train_000000000.latent.npy", "train_000000000.cls"]
        array = np.load(io.BytesIO(tar.extractfile("train_000000003.latent.npy").read()))
        assert (array.shape, array.dtype) == ((2, 6, 4, 4), np.float32)
        assert tar.extractfile("train_000000003.cls").read() == b"3"
