"""Encoding: what lies in the shards is what the autoencoder gave, and a stop loses nothing."""

import io
import json
import os
import runpy
import signal
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import accelerate
import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.data.vaes import image_data, save_vaes
from tread_zoo import process_group
from tread_zoo.data import build_data
from tread_zoo.data.latents import encode as module
from tread_zoo.data.latents import encoder, load_vae, read_manifest
from tread_zoo.data.latents.encode import encode_latents
from tread_zoo.data.latents.encoder import EncodingOptions, psnr
from tread_zoo.data.latents.vae import check_vae

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
SOURCE = {"name": "made"}


def encode(out, vae, data=None, **options):
    given = {"batch_size": 2, "shard_size": 4, **options}
    ranks = {key: given.pop(key) for key in ("rank", "num_ranks", "wait") if key in given}
    return encode_latents(
        data or image_data(), vae, out, EncodingOptions(**given), source=SOURCE, **ranks
    )


def read_tar(folder, part):
    """Return all latents and labels of a part, by tarfile and NumPy alone."""
    latents, labels = [], []
    for file in sorted(folder.glob(f"{part}-*.tar")):
        with tarfile.open(file) as tar:
            for member in tar:
                content = tar.extractfile(member).read()
                if member.name.endswith(".latent.npy"):
                    latents.append(np.load(io.BytesIO(content)))
                else:
                    labels.append(int(content))
    return np.stack(latents), labels


def files(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.suffix == ".tar"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return save_vaes(tmp_path_factory.mktemp("vaes"))


@pytest.fixture(scope="module")
def kl(paths):
    return load_vae(paths["AutoencoderKL"])


def test_moments_and_flips_are_those_of_the_bare_autoencoder(tmp_path, kl):
    data = image_data()
    done = encode(tmp_path, kl, data, flips=True, dtype="float32")
    for part, dataset in (("train", data.train), ("held_out", data.held_out)):
        found, labels = read_tar(tmp_path, part)
        assert labels == dataset.labels.tolist()
        x = dataset.images.float() / 127.5 - 1
        for copy, images in enumerate((x, x.flip(-1))):
            with torch.no_grad():
                posterior = kl.network.encode(images).latent_dist
            expected = torch.cat([posterior.mean, posterior.logvar], dim=1)
            torch.testing.assert_close(torch.from_numpy(found[:, copy]), expected)
    m = done.manifest
    assert (m.image_size, m.latent_shape, m.content) == ((8, 8), (2, 4, 4), "mean_logvar")
    assert [(s.name, s.count) for s in m.shards] == [
        ("train-000000.tar", 4), ("train-000001.tar", 4), ("train-000002.tar", 3),
        ("held_out-000000.tar", 4), ("held_out-000001.tar", 1),
    ]  # fmt: skip
    assert (m.num_classes, m.class_names) == (4, tuple("abcd"))
    assert m == read_manifest(tmp_path)
    assert done.images == 16


def test_mean_and_deviation_are_those_of_what_is_drawn(tmp_path, kl):
    m = encode(tmp_path, kl, flips=True).manifest
    moments = read_tar(tmp_path, "train")[0].astype(np.float64)
    mean, logvar = moments[:, :, :2], moments[:, :, 2:]
    noise = np.random.default_rng(0).standard_normal((4000, *mean.shape))
    axes = (0, 1, 2, 4, 5)
    drawn = mean + np.exp(0.5 * logvar) * noise
    np.testing.assert_allclose(m.mean, drawn.mean(axis=axes), atol=2e-3)
    np.testing.assert_allclose(m.std, drawn.std(axis=axes), rtol=2e-3)


@pytest.mark.parametrize("kind", ["AutoencoderTiny", "AutoencoderDC"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_autoencoders_without_a_posterior_and_half_precision(tmp_path, paths, kind, dtype):
    vae = load_vae(paths[kind])
    m = encode(tmp_path, vae, image_data(channels=1), dtype=dtype).manifest
    assert m.content == "mode"
    data = build_data("latents", path=str(tmp_path), vae="none")
    x = image_data(channels=1).train.images.float() / 127.5 - 1
    with torch.no_grad():
        encoded = vae.network.encode(x.repeat(1, 3, 1, 1))
    exact = encoded.latents if kind == "AutoencoderTiny" else encoded.latent
    found = torch.cat([data.train[i][0] for i in range(11)])
    assert found.dtype == getattr(torch, dtype)
    step = {"float16": 2**-10, "bfloat16": 2**-7}[dtype]
    torch.testing.assert_close(found.float(), exact, rtol=step, atol=1e-5)
    values = found.double()
    np.testing.assert_allclose(m.mean, values.mean((0, 2, 3)), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(m.std, values.std((0, 2, 3), correction=0), rtol=1e-6)


def test_samples_depend_on_the_image_alone_not_on_batches(tmp_path, kl):
    encode(tmp_path / "a", kl, content="samples", dtype="float32")
    encode(tmp_path / "b", kl, content="samples", dtype="float32", batch_size=3, shard_size=5)
    encode(tmp_path / "m", kl, content="mode", dtype="float32")
    a, b, mode = (read_tar(tmp_path / name, "train")[0] for name in "abm")
    np.testing.assert_allclose(a, b, atol=1e-5)
    assert np.abs(a - mode).min(axis=(1, 2, 3)).max() > 0


def test_what_was_stopped_goes_on_with_what_is_missing(tmp_path, kl, monkeypatch):
    encode(tmp_path / "unbroken", kl)
    original, seen = module.Encoder.encode, []

    def failing(self, images, part, items):
        seen.append((part, items))
        if len(seen) == 4:
            raise RuntimeError("power cut")
        return original(self, images, part, items)

    monkeypatch.setattr(module.Encoder, "encode", failing)
    with pytest.raises(RuntimeError, match="power cut"):
        encode(tmp_path / "broken", kl)
    assert list(files(tmp_path / "broken")) == ["train-000000.tar"]
    with pytest.raises(
        ValueError, match=r"no manifest.json. If scripts/encode_latents.py was stop"
    ):
        build_data("latents", path=str(tmp_path / "broken"))
    with pytest.raises(ValueError, match=r"flips=False, not True"):
        encode(tmp_path / "broken", kl, flips=True)
    assert encode(tmp_path / "broken", kl).images == 12
    assert files(tmp_path / "broken") == files(tmp_path / "unbroken")
    assert {p.name for p in (tmp_path / "broken").iterdir()} == {
        *files(tmp_path / "unbroken"), "manifest.json", "index_latent_npy.npz",
    }  # fmt: skip
    assert encode(tmp_path / "broken", kl).images == 0
    with pytest.raises(ValueError, match=r"dtype='float16', not 'float32'"):
        encode(tmp_path / "broken", kl, dtype="float32")


def test_a_shard_that_is_missing_or_damaged_is_encoded_anew_to_its_bytes(tmp_path, kl, caplog):
    folder = tmp_path / "latents"
    m = encode(folder, kl).manifest
    whole, manifest = files(folder), (folder / "manifest.json").read_bytes()
    (folder / "train-000001.tar").unlink()
    (folder / "train-000002.tar").write_bytes(whole["train-000002.tar"][:-512])
    flipped = bytearray(whole["held_out-000000.tar"])
    flipped[700] ^= 1
    (folder / "held_out-000000.tar").write_bytes(flipped)
    done = encode(folder, kl)
    assert (done.images, done.manifest) == (4 + 3, m)  # the length does not tell of the flipped bit
    assert files(folder) == {**whole, "held_out-000000.tar": bytes(flipped)}
    assert encode(folder, kl, verify="sha256").images == 4
    assert files(folder) == whole
    assert (folder / "manifest.json").read_bytes() == manifest
    assert encode(folder, kl, verify="sha256").images == 0
    assert not list(folder.glob(".*"))
    assert not (folder / "encoding.json").exists()
    with pytest.raises(ValueError, match=r"batch_size=2, not 3"):
        encode(folder, kl, batch_size=3)
    with pytest.raises(ValueError, match=r"verify='md5' is unknown"):
        encode(folder, kl, verify="md5")


def test_a_stop_while_a_shard_is_replaced_is_mended_by_the_next_start(tmp_path, kl, monkeypatch):
    """The shard has other bytes than the manifest says, at the same length, and no record."""
    folder = tmp_path / "latents"
    first = encode(folder, kl).manifest
    other = image_data()
    other.train.images[5] ^= 255
    (folder / "train-000001.tar").unlink()

    def failing(*args):
        raise RuntimeError("power cut")

    with monkeypatch.context() as patched:
        patched.setattr(encoder, "write_record", failing)
        with pytest.raises(RuntimeError, match="power cut"):
            encode(folder, kl, other)
    assert (folder / "train-000001.tar").stat().st_size == first.shards[1].num_bytes
    again = encode(folder, kl, other)
    assert again.images == 4
    assert again.manifest.shards[1].sha256 != first.shards[1].sha256
    assert again.manifest == read_manifest(folder)
    assert (again.manifest.mean, again.manifest.std) == (first.mean, first.std)
    build_data("latents", path=str(folder), vae="none", verify="sha256")
    assert encode(folder, kl, other, verify="sha256").images == 0


class Torn(torch.utils.data.Dataset):
    """Images of which some cannot be read."""

    def __init__(self, dataset, torn):
        self.dataset, self.torn = dataset, torn

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        if index in self.torn:
            raise ValueError(f"the picture {self.item_name(index)!r} cannot be read (cut short).")
        return self.dataset[index]

    def item_name(self, index):
        return f"{index:02d}.png"


def torn_data(train=(), held_out=()):
    data = image_data()
    return replace(
        data, train=Torn(data.train, set(train)), held_out=Torn(data.held_out, set(held_out))
    )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_pictures_that_cannot_be_read_are_left_out_and_listed(tmp_path, kl, caplog, num_workers):
    data = image_data()
    encode(tmp_path / "whole", kl, content="samples", dtype="float32")
    options = {"content": "samples", "dtype": "float32", "max_corrupt_share": 0.2, "image_size": 8}
    options["num_workers"] = num_workers
    done = encode(tmp_path / "torn", kl, torn_data((4, 5), (1,)), **options)
    m = done.manifest
    assert m == read_manifest(tmp_path / "torn")
    assert [s.count for s in m.shards] == [4, 2, 3, 3, 1]
    assert [(i.index, i.name) for s in m.parts["train"] for i in s.left_out] == [
        (4, "04.png"), (5, "05.png")
    ]  # fmt: skip
    assert "cannot be read (cut short)" in m.parts["held_out"][0].left_out[0].reason
    assert caplog.text.count("left out  0") == 3
    assert "left out  3 images that cannot be read; manifest.json lists them" in caplog.text
    for part, kept in (("train", [0, 1, 2, 3, 6, 7, 8, 9, 10]), ("held_out", [0, 2, 3, 4])):
        dataset = data.train if part == "train" else data.held_out
        latents, labels = read_tar(tmp_path / "torn", part)
        assert labels == [int(dataset.labels[i]) for i in kept]
        whole, _ = read_tar(tmp_path / "whole", part)
        np.testing.assert_allclose(latents, whole[kept], atol=1e-5)
    x = read_tar(tmp_path / "torn", "train")[0].astype(np.float64)
    np.testing.assert_allclose(m.mean, x.mean((0, 2, 3)), atol=1e-6)
    found = build_data("latents", path=str(tmp_path / "torn"), vae="none")
    assert (len(found.train), len(found.held_out)) == (9, 4)
    assert encode(tmp_path / "torn", kl, torn_data((4, 5), (1,)), **options).images == 0
    # one is repaired: its shard is encoded anew, and no other
    assert encode(tmp_path / "torn", kl, torn_data((5,), (1,)), **options).images == 3
    assert [s.count for s in read_manifest(tmp_path / "torn").shards] == [4, 3, 3, 3, 1]


def test_too_many_pictures_that_cannot_be_read_stop_the_encoding(tmp_path, kl):
    with pytest.raises(ValueError, match=r"1 of 16 images .*=0.001 allows: 09.png .*cut short"):
        encode(tmp_path, kl, torn_data((9,)))
    assert list(files(tmp_path)) == ["train-000000.tar", "train-000001.tar"]
    # what was left out before the stop counts after it
    some = {"max_corrupt_share": 0.1}
    with pytest.raises(ValueError, match=r"2 of 16 images cannot be read.* 09.png; 00.png"):
        encode(tmp_path, kl, torn_data((9,), (0,)), **some)
    assert "train-000002.tar" in files(tmp_path)
    with pytest.raises(ValueError, match=r"2 of 16 images cannot be read"):
        encode(tmp_path, kl, torn_data((9,), (0,)), **some)
    assert encode(tmp_path, kl, torn_data(), **some).images == 3 + 5  # repaired
    assert encode(tmp_path / "new", kl).manifest.shards == read_manifest(tmp_path).shards
    with pytest.raises(ValueError, match=r"max_corrupt_share=1.5 must lie between 0 and 1"):
        encode(tmp_path, kl, max_corrupt_share=1.5)


def test_a_damaged_record_is_as_none_and_a_damaged_plan_is_told(tmp_path, kl, monkeypatch):
    def failing(*args):
        raise RuntimeError("power cut")

    with monkeypatch.context() as patched:
        patched.setattr(module, "_finish", failing)
        with pytest.raises(RuntimeError, match="power cut"):
            encode(tmp_path, kl)
    record = tmp_path / ".train-000001.tar.npz"
    content = bytearray(record.read_bytes())
    place = content.index(b"NUMPY")
    content[place + 64 : place + 192] = bytes(128)  # the archive opens, and a checksum fails
    record.write_bytes(content)
    (tmp_path / ".train-000002.tar.npz").write_bytes(content[:40])
    assert encode(tmp_path, kl).images == 4 + 3
    (tmp_path / "encoding.json").write_text("{")
    with pytest.raises(ValueError, match=r"encoding.json' cannot be read .*encode again"):
        encode(tmp_path, kl)


def test_the_log_tells_how_far_it_is_without_a_terminal(tmp_path, kl, caplog):
    with caplog.at_level("INFO"):
        encode(tmp_path, kl)
    lines = [r.getMessage() for r in caplog.records if "images/s in this" in r.getMessage()]
    assert [line.split("(")[0] for line in lines] == [
        f"encoding  {n} of 5 shards " for n in range(1, 6)
    ]
    assert "(60 %)" in lines[2]


def test_processes_share_the_shards(tmp_path, kl):
    encode(tmp_path / "one", kl)
    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(encode, tmp_path / "two", kl, rank=r, num_ranks=2, wait=barrier.wait)
            for r in (0, 1)
        ]
    assert [one.result().images for one in both] == [4 + 3 + 1, 4 + 4]
    assert [one.result().manifest is None for one in both] == [False, True]
    assert files(tmp_path / "one") == files(tmp_path / "two")
    read = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("one", "two")]
    assert read[0] == read[1]


def test_images_are_resized_and_psnr_is_what_it_says(tmp_path, kl):
    m = encode(tmp_path, kl, image_data(size=20), image_size=8).manifest
    assert (m.image_size, m.latent_shape) == ((8, 8), (2, 4, 4))
    assert 0 < m.psnr_db < 30
    assert m.psnr_images == 5
    black, grey = torch.zeros(1, 3, 2, 2, dtype=torch.uint8), torch.full((1, 3, 2, 2), 51)
    assert psnr(black, grey).item() == pytest.approx(13.9794, abs=1e-4)  # 20 log10(255 / 51)
    assert psnr(black, black).item() == 100


def test_what_does_not_fit_is_refused(tmp_path, paths, kl, monkeypatch):
    tiny = load_vae(paths["AutoencoderTiny"])
    for vae, data, options, message in [
        (tiny, None, {"content": "moments"}, "AutoencoderTiny gives one latent.*content=mode"),
        (kl, image_data(channels=2), {}, "has 2 channels; .* takes 3"),
        (kl, image_data(size=9), {}, r"9x9 do not come back.*Set image_size"),
        (kl, None, {"dtype": "float8"}, "dtype='float8' is unknown"),
        (kl, None, {"batch_size": 0}, "batch_size=0 must be 1 or more"),
    ]:
        with pytest.raises(ValueError, match=message):
            encode(tmp_path / "out", vae, data, **options)
    encode(tmp_path / "out", kl)
    with pytest.raises(ValueError, match="holds latents already"):
        encode(tmp_path / "new", kl, build_data("latents", path=str(tmp_path / "out"), vae="none"))
    with pytest.raises(ValueError, match=r"'/nowhere/vae' does not exist.*data.vae="):
        load_vae("/nowhere/vae")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty' cannot be loaded .*config.json"):
        load_vae(str(tmp_path / "empty"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "tread-zoo\[latents\]"'):
        check_vae(paths["AutoencoderKL"])


def test_latents_beyond_the_dtype_are_refused(tmp_path, kl, monkeypatch):
    monkeypatch.setattr(kl, "encode", lambda x: (x[:, :2, ::2, ::2] * 1e5, x[:, :2, ::2, ::2]))
    with pytest.raises(ValueError, match=r"train images 0 … 1 are not finite as float16.*float32"):
        encode(tmp_path, kl)


def call(*overrides, **options):
    command = [sys.executable, ROOT / "scripts" / "encode_latents.py", "device=cpu", *overrides]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, **options,
    )  # fmt: skip


def test_the_script_leaves_the_connections_for_what_follows(tmp_path, paths, monkeypatch):
    """Alone in a group here, as `accelerate launch` would make it of several."""
    script = str(ROOT / "scripts" / "encode_latents.py")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group, registered = dist.group.WORLD, []
    monkeypatch.setattr(process_group.atexit, "register", registered.append)
    try:
        for out in ("one", "other"):
            overrides = ["data=digits", f"vae={paths['AutoencoderTiny']}", f"out={tmp_path / out}"]
            sizes = ["image_size=8", "batch_size=300", "shard_size=2000", "device=cpu"]
            monkeypatch.setattr(sys, "argv", [script, *overrides, *sizes])
            runpy.run_path(script, run_name="__main__")
            assert dist.group.WORLD is group
        assert registered.count(process_group._close) == 2
    finally:
        dist.destroy_process_group()
    assert files(tmp_path / "one") == files(tmp_path / "other") != {}


def test_the_script_tells_in_a_line_that_another_process_is_gone(
    tmp_path, paths, monkeypatch, capsys
):
    """As gloo tells it: alone in a group here, at a barrier that a peer has left."""
    script = str(ROOT / "scripts" / "encode_latents.py")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def gone(self):
        raise RuntimeError("[../gloo/transport/tcp/pair.cc:525] Read error: Connection closed")

    monkeypatch.setattr(accelerate.PartialState, "wait_for_everyone", gone)
    two = property(lambda self: 2, lambda self, value: None)
    monkeypatch.setattr(accelerate.PartialState, "num_processes", two, raising=False)
    overrides = ["data=digits", f"vae={paths['AutoencoderTiny']}", f"out={tmp_path / 'out'}"]
    monkeypatch.setattr(sys, "argv", [script, *overrides, "image_size=8", "device=cpu"])
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(script, run_name="__main__")
    finally:
        dist.destroy_process_group()
    said = f"{ended.value.code} {capsys.readouterr().err}"
    assert "error: rank 0 of 2 stops: another process of this run ended" in said
    assert "the same command again, for all of them, encodes what is missing." in said
    assert "resume=latest" not in said


@pytest.mark.slow
def test_the_script_killed_for_real_and_started_again(tmp_path):
    """On real images with a real autoencoder."""
    vae = SHARED / "weights" / "taesd"
    if not vae.exists():
        pytest.skip("the weights of TAESD are not here")
    options = ["data=digits", "image_size=16", f"vae={vae}", "shard_size=100", "batch_size=50"]
    broken = tmp_path / "broken"
    started = call(*options, f"out={broken}")
    while not list(broken.glob(".train-000001.tar.npz")) and started.poll() is None:
        time.sleep(0.05)
    started.send_signal(signal.SIGKILL)
    started.wait()
    left = len(files(broken))
    assert 2 <= left < 19
    for out in (broken, tmp_path / "unbroken"):
        said, _ = call(*options, f"out={out}").communicate()
        assert "1438 + 359 latents [4, 2, 2]" in said, said[-2000:]
    assert f"{left - 1} of 19" in said or "0 of 19" in said
    assert files(broken) == files(tmp_path / "unbroken")
    assert not list(broken.glob(".*"))
