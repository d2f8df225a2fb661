"""Shards from elsewhere are copied once, whole or not at all."""

import functools
import http.server
import io
import tarfile
import threading

import fsspec
import pytest
import torch
from PIL import Image

from tread_zoo.data import build_data
from tread_zoo.data.remote import fetch_shards


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TREAD_ZOO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shards"


def shard(first, count):
    """Return the bytes of a tar with pictures of one grey each, and their labels."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for index in range(first, first + count):
            picture = io.BytesIO()
            Image.new("RGB", (8, 8), (index, index, index)).save(picture, "PNG")
            for suffix, data in (("png", picture.getvalue()), ("cls", str(index % 3).encode())):
                member = tarfile.TarInfo(f"{index:04d}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


@pytest.fixture
def memory():
    """Three shards in fsspec's own memory, under memory://set/."""
    system = fsspec.filesystem("memory")
    for number in range(3):
        system.pipe(f"/set/train-{number}.tar", shard(10 * number, 4))
    yield system
    system.rm("/set", recursive=True)


def test_a_range_of_addresses_is_read_like_local_shards(memory, tmp_path):
    found = build_data("webdataset", path="memory://set/train-{0..2}.tar", held_out=0.0)
    folder = tmp_path / "here"
    folder.mkdir()
    for number in range(3):
        (folder / f"train-{number}.tar").write_bytes(shard(10 * number, 4))
    local = build_data("webdataset", path=str(folder), held_out=0.0)
    assert len(found.train) == len(local.train) == 12
    for index in range(12):
        assert torch.equal(found.train[index][0], local.train[index][0])
        assert found.train[index][1] == local.train[index][1]


def test_each_is_fetched_once_and_a_broken_one_leaves_nothing(memory, cache, monkeypatch):
    urls = [f"memory://set/train-{number}.tar" for number in range(3)]
    original, asked = type(memory).open, []

    def counting(self, path, *args, **keywords):
        asked.append(path)
        return original(self, path, *args, **keywords)

    monkeypatch.setattr(type(memory), "open", counting)
    monkeypatch.setattr(type(memory), "size", lambda self, path: 10**6 if "-1" in path else None)
    with pytest.raises(ValueError, match=r"train-1\.tar could not be fetched .*came, of 1000"):
        fetch_shards(urls)
    (folder,) = cache.iterdir()
    assert [path.name for path in folder.glob("*.tar")] == ["train-0.tar"]
    assert not list(folder.glob(".partial*"))
    monkeypatch.undo()
    monkeypatch.setenv("TREAD_ZOO_CACHE", str(cache.parent))
    monkeypatch.setattr(type(memory), "open", counting)
    asked.clear()
    copies = fetch_shards(urls)
    assert [path.rpartition("/")[2] for path in asked] == ["train-1.tar", "train-2.tar"]
    assert [copy.read_bytes() for copy in copies] == [memory.cat(url[8:]) for url in urls]


def test_sets_of_the_same_name_do_not_mix(memory):
    memory.pipe("/other/set/train-0.tar", shard(50, 1))
    one, other = fetch_shards(["memory://set/train-0.tar", "memory://other/set/train-0.tar"])
    assert one != other
    assert one.read_bytes() != other.read_bytes()


def test_shards_come_over_http(tmp_path):
    pytest.importorskip("aiohttp", reason="fsspec reads http through aiohttp")
    (tmp_path / "train-0.tar").write_bytes(shard(0, 2))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    handler.log_message = lambda *words: None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        (copy,) = fetch_shards([f"{address}/train-0.tar"])
        assert copy.read_bytes() == (tmp_path / "train-0.tar").read_bytes()
        with pytest.raises(ValueError, match=r"train-1\.tar could not be fetched"):
            fetch_shards([f"{address}/train-1.tar"])
    finally:
        server.shutdown()


def test_a_missing_package_is_named(monkeypatch):
    def missing(url):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(ValueError, match="Run `pip install s3fs`"):
        fetch_shards(["s3://bucket/train-0.tar"])
