"""Tables in a bucket: what is read, in which order, and what stays on the disk."""

import shutil
from itertools import pairwise

import datasets
import fsspec
import pytest
import torch

from tests.data.tables import made_contexts, write_tar
from tests.small_run import train_small
from tests.training.test_resume import assert_same_end
from tread_zoo.checkpoint_config import EncodingConfig
from tread_zoo.data import StepBatches, make_loader
from tread_zoo.data.encode import encode, write_table
from tread_zoo.data.loader import Unavailable
from tread_zoo.fields import check
from tread_zoo.registry import create
from tread_zoo.seeding import make_generator

PART = 10


def write_bucket(folder, parts=8):
    """Write a table of latents that contain their own numbers; return the folder's address."""
    values = torch.arange(PART * parts).view(-1, 1, 1, 1, 1).expand(-1, 1, 2, 4, 4).float()
    batches = zip(values.split(PART), (torch.arange(len(values)) % 4).split(PART), strict=True)
    write_table(folder, batches, content="samples")
    return folder.as_uri()


def open_bucket(url, cache, cached_parts=4, **options):
    given = {"name": "latents", "path": url, "cache": str(cache), **options}
    return create("data", {**given, "cached_parts": cached_parts})


def parts_on_disk(cache):
    return sorted(path.name for path in cache.rglob("*.arrow"))


def test_a_table_in_a_bucket_is_that_of_the_folder(tmp_path):
    url = write_bucket(tmp_path / "table")
    given = {"name": "latents", "path": str(tmp_path / "table"), "held_out": 0.2}
    here, there = create("data", given), open_bucket(url, tmp_path / "cache", held_out=0.2)
    assert (there.class_names, there.image_size, there.codec) == (
        here.class_names, here.image_size, here.codec,
    )  # fmt: skip
    for part in ("train", "held_out"):
        first, second = getattr(here, part), getattr(there, part)
        assert len(first) == len(second)
        for index in range(len(first)):
            assert torch.equal(first[index][0], second[index][0])
            assert first[index][1] == second[index][1]


def test_an_epoch_has_every_item_once_and_needs_few_parts_at_a_time(tmp_path):
    data = open_bucket(write_bucket(tmp_path / "table", 40), tmp_path / "cache")
    orders = [data.train.epoch_order(make_generator("data", 0, epoch)) for epoch in (0, 0, 1)]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    assert torch.equal(orders[0].sort().values, torch.arange(len(data.train)))
    parts = (data.train.rows[orders[0]] // PART).tolist()
    spans = [len(parts) - parts[::-1].index(p) - parts.index(p) for p in set(parts)]
    assert max(spans) <= (2 + 1) * PART  # half of the four cached parts, and the next
    alike = sum(a == b for a, b in pairwise(parts))
    assert alike < 0.7 * len(parts)  # mixed with others, not one part after the other


def test_the_batches_of_two_ranks_are_those_of_one(tmp_path):
    data = open_bucket(write_bucket(tmp_path / "table"), tmp_path / "cache")

    def batches(batch_size, num_ranks, rank=0):
        return list(StepBatches(
            data.train, batch_size, seed=1, num_steps=12, num_ranks=num_ranks, rank=rank,
        ))  # fmt: skip

    halves = zip(batches(4, 2, 0), batches(4, 2, 1), strict=True)
    assert batches(8, 1) == [first + second for first, second in halves]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_oldest_parts_leave_the_disk(tmp_path, num_workers):
    data = open_bucket(write_bucket(tmp_path / "table", 12), tmp_path / "cache")
    steps = StepBatches(data.train, 6, seed=0, num_steps=18)
    seen = [
        v for x, _ in make_loader(data.train, steps, num_workers) for v in x[:, 0, 0, 0, 0].tolist()
    ]
    assert len(set(seen)) == len(seen) == 108
    assert len(parts_on_disk(tmp_path / "cache")) <= 4


def test_another_table_at_the_same_address_is_read_anew(tmp_path):
    url = write_bucket(tmp_path / "table")
    assert len(open_bucket(url, tmp_path / "cache").train) == 72
    write_bucket(tmp_path / "table", 4)
    data = open_bucket(url, tmp_path / "cache")
    assert [int(data.train[i][0].flatten()[0]) for i in range(36)] == data.train.rows.tolist()


@pytest.mark.slow
def test_a_run_resumes_to_the_bit_also_after_a_part_was_missing(tmp_path):
    url, missing = write_bucket(tmp_path / "table"), tmp_path / "table" / "train-00003.arrow"
    given = ["data=latents", f"data.path={url}", f"data.cache={tmp_path / 'cache'}",
             "data.cached_parts=2", "training.batch_size=8", "training.num_workers=1",
             "lr_schedule=constant", "training.checkpoint_every=1"]  # fmt: skip
    whole = train_small(tmp_path / "whole", *given, "training.num_steps=9")
    shutil.rmtree(tmp_path / "cache")
    missing.rename(tmp_path / "aside")
    with pytest.raises(Unavailable, match=r"train-00003\.arrow"):
        train_small(tmp_path / "parts", *given, "training.num_steps=9")
    (tmp_path / "aside").rename(missing)
    parts = train_small(tmp_path / "parts", *given, "training.num_steps=9", "resume=latest")
    assert_same_end(whole, parts)
    assert not (parts / "corrupt.txt").exists()


def test_a_table_is_not_written_into_a_folder_that_looks_like_a_bucket(tmp_path):
    with pytest.raises(ValueError, match="aws s3 sync FOLDER s3://bucket/x"):
        check(EncodingConfig, {"vae": "none", "out": "s3://bucket/x"})


# In S3 --------------------------------------------------------------------------------------------


@pytest.fixture
def s3(monkeypatch, tmp_path):
    """A bucket of a server on this machine."""
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'tread-zoo[s3]'")
    server = pytest.importorskip("moto.server", reason="moto is not installed")
    here = server.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    here.start()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*here.get_host_and_port()))
    monkeypatch.setenv("TREAD_ZOO_CACHE", str(tmp_path / "parts"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", str(tmp_path / "downloads"))
    system = fsspec.filesystem("s3", skip_instance_cache=True)
    system.mkdir("bucket")
    yield system
    here.stop()
    type(system).clear_instance_cache()


def test_shards_in_a_bucket_are_encoded_into_a_table_in_a_bucket(s3, tmp_path):
    contexts, shards = made_contexts(8), tmp_path / "in"
    shards.mkdir()
    for number in range(2):
        own = range(4 * number, 4 * number + 4)
        write_tar(shards / f"{number:03}.tar", own, contexts=[contexts[i] for i in own])
    s3.put(str(shards), "bucket/in", recursive=True)
    given = {"held_out": 0.25, "context": "context.npy"}
    data = create("data", "webdataset", path="s3://bucket/in/{000..001}.tar", **given)
    config = EncodingConfig(vae="none", out="", part_size=3)
    encode(data, None, tmp_path / "table", config)
    s3.put(str(tmp_path / "table"), "bucket/table", recursive=True)
    table = create("data", "table", path="s3://bucket/table")
    local = create("data", "webdataset", path=str(shards), **given)
    for part in ("train", "held_out"):
        one, other = getattr(local, part), getattr(table, part)
        assert len(one) == len(other) > 0
        for i in range(len(one)):
            assert torch.equal(one[i][0], other[i][0])
            assert torch.equal(one[i][1].half(), other[i][1])
