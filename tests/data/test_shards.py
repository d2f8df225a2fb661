"""Tar shards: every byte that the index points at, what is damaged, and names that would escape."""

import hashlib
import io
import json
import os
import pickle
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from tread_zoo.data import StepBatches, build_data, make_loader
from tread_zoo.data import shards as module
from tread_zoo.data.files import written_whole
from tread_zoo.data.loader import lost_items
from tread_zoo.data.shards import ShardReader, find_shards, open_index, scan_shard, write_shard

PAYLOAD = ("bin",)


def add(tar, name, content, kind=tarfile.REGTYPE):
    info = tarfile.TarInfo(name)
    info.size, info.type = len(content), kind
    if kind != tarfile.REGTYPE:
        info.size, info.linkname = 0, "/etc/passwd"
    tar.addfile(info, io.BytesIO(content) if kind == tarfile.REGTYPE else None)


def make_tar(path, members, **options):
    with tarfile.open(path, "w", **options) as tar:
        for name, content in members:
            add(tar, name, content)
    return path


def picture(value, size=8):
    stream = io.BytesIO()
    Image.fromarray(np.full((size, size, 3), value, np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def pictures(path, values, size=8):
    """Write a shard of flat grey pictures with labels value % 3."""
    members = []
    for value in values:
        members += [
            (f"s{value:04d}.png", picture(value, size)),
            (f"s{value:04d}.cls", b"%d" % (value % 3)),
        ]
    return make_tar(path, members)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_index_points_at_what_tarfile_reads(tmp_path, form):
    long = "deep/" + "x" * 80 + "/" + ("y" * 60 if form == tarfile.USTAR_FORMAT else "ü" * 120)
    contents = {long: b"long", "a": b"", "b/c": bytes(range(256)) * 5, "d.e": b"1"}
    members = [(f"{key.replace('.', '_')}.BIN", text) for key, text in contents.items()]
    members = [m for name, text in members for m in ((name, text), (name[:-3] + "cls", b" 7\n"))]
    path = make_tar(tmp_path / "a.tar", members, format=form)
    reader = ShardReader(open_index([path], PAYLOAD))
    assert [reader.read(i) for i in range(4)] == list(contents.values())
    assert reader.index.label.tolist() == [7] * 4


def test_links_folders_and_hidden_members_are_not_read(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "folder", b"", tarfile.DIRTYPE)
        add(tar, "secret.bin", b"", tarfile.SYMTYPE)
        add(tar, "hard.bin", b"", tarfile.LNKTYPE)
        add(tar, "._a.bin", b"mac")
        add(tar, "a.bin", b"yes")
    reader = ShardReader(open_index([tmp_path / "a.tar"], PAYLOAD))
    assert [reader.read(i) for i in range(len(reader))] == [b"yes"]


def test_names_that_would_escape_are_keys_alone(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    names = ["../../evil", "/tmp/evil_root", "..", "a/../../b"]
    make_tar(inside / "a.tar", [(f"{name}/x{i}.bin", b"%d" % i) for i, name in enumerate(names)])
    before = sorted(tmp_path.rglob("*"))
    reader = ShardReader(open_index(find_shards(str(inside)), PAYLOAD))
    assert [reader.read(i) for i in range(4)] == [b"0", b"1", b"2", b"3"]
    new = [p for p in sorted(tmp_path.rglob("*")) if p not in before]
    assert [(p.parent, p.name[:9], p.suffix) for p in new] == [(inside, "index_bin", ".npz")]


def test_a_shard_cut_anywhere_gives_what_is_whole(tmp_path):
    members = [(f"{i}.{kind}", bytes(700)) for i in range(3) for kind in ("bin", "txt")]
    whole = make_tar(tmp_path / "a.tar", members).read_bytes()
    assert scan_shard(tmp_path / "a.tar", PAYLOAD).damage is None
    for length in range(0, 6 * 1536 + 512, 128):
        (tmp_path / "cut.tar").write_bytes(whole[:length])
        found = scan_shard(tmp_path / "cut.tar", PAYLOAD)
        ends = [i * 3072 + 1536 + 512 + 700 for i in range(3)]  # of each sample's last byte
        complete = sum(end <= length for end in ends)
        # the first one's members are known to be all once a member of the second one is there
        expected = 0 if complete == 1 and length < 3072 + 512 + 700 else complete
        assert found.rows[:, 0].tolist() == [i * 3072 + 512 for i in range(expected)], length
        assert "cannot be indexed to its end" in found.damage


def test_a_damaged_header_in_the_middle_does_not_shorten_the_data(tmp_path, caplog):
    """tarfile alone takes it for the end, and three samples become one."""
    paths = [make_tar(tmp_path / f"{i}.tar", [(f"{j}.bin", b"x") for j in range(3)])
             for i in range(3)]  # fmt: skip
    content = bytearray(paths[1].read_bytes())
    content[2048 + 150] ^= 1  # in the checksum field of the third header
    paths[1].write_bytes(content)
    with tarfile.open(paths[1]) as tar:
        assert len(tar.getmembers()) == 2
    for _ in range(2):  # damage is not kept in the cache
        index = open_index(paths, PAYLOAD)
        assert index.shard.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert np.flatnonzero(index.size < 0).tolist() == [5]
    index.warn()
    assert "1.tar' cannot be indexed to its end: byte 2048 is neither a readable" in caplog.text
    assert "1 of its 3 samples are lost" in caplog.text
    reader = pickle.loads(pickle.dumps(ShardReader(index)))
    assert [reader.read(i) for i in (4, 6)] == [b"x", b"x"]
    with pytest.raises(ValueError, match=r"1.tar' cannot be indexed to its end"):
        reader.read(5)
    for path in paths:
        path.write_bytes(b"no tar")
    with pytest.raises(ValueError, match=r"0.tar' cannot be indexed to its end"):
        open_index(paths, PAYLOAD)


def test_a_cut_shard_of_pictures_is_known_before_anything_is_read(tmp_path, caplog):
    for i in range(3):
        pictures(tmp_path / f"{i}.tar", range(6 * i, 6 * i + 6))
    whole = (tmp_path / "1.tar").read_bytes()
    (tmp_path / "1.tar").write_bytes(whole[: len(whole) // 2])
    data = build_data("webdataset", path=str(tmp_path), held_out=0.0)
    found = lost_items(data.train)
    assert (len(data.train), data.num_classes) == (18, 3)
    assert 0 < len(found) < 6
    assert [item.index for item in found] == list(range(12 - len(found), 12))
    assert f"{len(found)} of its 6 samples are lost" in caplog.text
    assert found[0].name == f"{str(tmp_path / '1.tar')!r}, a lost sample"
    kept = [i for i in range(18) if i not in {item.index for item in found}]
    assert [int(data.train[i][0][0, 0, 0]) for i in kept] == kept


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.txt", b"")], r"sample 'a' has none of .bin"),
        ([("a.bin", b""), ("a.BIN", b"")], r"two members .bin"),
        ([("a.bin", b""), ("a.cls", b"cat")], r"has .cls b'cat'; it must be a whole number"),
        ([("a.bin", b""), ("a.cls", b"-1")], r"whole number"),
        ([("a.bin", b""), ("b.bin", b""), ("a.cls", b"1")], r"sample 'a' has none of .bin"),
    ],
)
def test_samples_that_do_not_fit_are_named(tmp_path, members, message):
    path = make_tar(tmp_path / "a.tar", members)
    with pytest.raises(ValueError, match=message):
        scan_shard(path, PAYLOAD)


def test_what_are_no_local_plain_tars_is_refused(tmp_path):
    make_tar(tmp_path / "a-00.tar", [("a.bin", b"")])
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "a.tar.gz").write_bytes(b"")
    for path, message in [
        ("pipe:curl https://host/a.tar", "a pipe has no random access"),
        ("s3://bucket/*.tar", "named one by one"),
        ("https://host/{0..3}.tar.gz", "is compressed"),
        (str(tmp_path / "packed"), "compressed.*gunzip"),
        (str(tmp_path / "a-{00..01}.tar"), r"a-01.tar' does not exist"),
        (str(tmp_path / "b-*.tar"), "has no tar shards"),
        (str(tmp_path / "nowhere"), "nowhere' does not exist"),
    ]:
        with pytest.raises(ValueError, match=message):
            find_shards(path)
    assert find_shards(str(tmp_path / "a-{00..00}.tar")) == [tmp_path / "a-00.tar"]
    assert find_shards(str(tmp_path)) == find_shards(str(tmp_path / "a-0?.tar"))


def test_the_index_is_made_once_and_again_when_a_shard_changes(tmp_path, monkeypatch):
    paths = [make_tar(tmp_path / f"{i}.tar", [(f"{i}.bin", b"%d" % i)]) for i in range(3)]
    scanned = []
    original = module.scan_shard
    monkeypatch.setattr(
        module, "scan_shard", lambda p, names: scanned.append(p.name) or original(p, names)
    )
    first, second = open_index(paths, PAYLOAD), open_index(paths, PAYLOAD)
    assert scanned == ["0.tar", "1.tar", "2.tar"]
    assert np.array_equal(first.offset, second.offset)
    make_tar(paths[1], [("1.bin", b"1"), ("2.bin", b"two")])
    reader = ShardReader(open_index(paths, PAYLOAD))
    assert [reader.read(i) for i in range(4)] == [b"0", b"1", b"two", b"2"]
    (cache,) = tmp_path.glob("index_bin_*.npz")
    cache.write_bytes(b"damaged")
    assert len(open_index(paths, PAYLOAD)) == 4
    assert len(scanned) == 9
    content = bytearray(cache.read_bytes())
    place = content.index(b"NUMPY")
    content[place + 64 : place + 192] = bytes(128)  # the archive opens, and a checksum fails
    cache.write_bytes(content)
    assert len(open_index(paths, PAYLOAD)) == 4
    assert len(scanned) == 12
    assert len(open_index(paths[:2], PAYLOAD)) == 3  # another set in the same folder
    assert len(open_index(paths, PAYLOAD)) == 4
    assert len(scanned) == 14


def test_reading_opens_a_file_once_however_many_samples_are_asked_for(tmp_path, monkeypatch):
    """The cost of a sample does not grow with the number of shards."""
    paths = [make_tar(tmp_path / f"{i}.tar", [(f"{j}.bin", b"%d" % j) for j in range(5)])
             for i in range(8)]  # fmt: skip
    reader = ShardReader(open_index(paths, PAYLOAD))
    opened = []
    monkeypatch.setattr(
        "builtins.open", lambda *a, _open=open, **k: opened.append(a[0]) or _open(*a, **k)
    )
    for _ in range(3):
        assert [reader.read(i) for i in reversed(range(40))] == [
            b"%d" % (i % 5) for i in reversed(range(40))
        ]
    assert sorted(opened) == sorted(map(str, paths))
    monkeypatch.setattr("resource.getrlimit", lambda kind: (16, 99))
    again = pickle.loads(pickle.dumps(reader))
    assert [again.read(i) for i in range(40)] == [reader.read(i) for i in range(40)]
    assert len(again._files) == 2


def test_how_many_files_are_held_open_follows_the_limit_of_the_process(monkeypatch):
    resource = pytest.importorskip("resource")
    for soft, expected in [(1024, 128), (20_000, 2500), (4, 1), (10**9, 4096),
                           (resource.RLIM_INFINITY, 4096)]:  # fmt: skip
        monkeypatch.setattr(resource, "getrlimit", lambda kind, soft=soft: (soft, 10**9))
        assert module.most_open() == expected


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    file, synced = tmp_path / "a", []
    file.write_bytes(b"old")
    original = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: synced.append(file.read_bytes()) or original(handle)
    )

    def stopped():
        with written_whole(file) as stream:
            stream.write(b"half")
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        stopped()
    assert (file.read_bytes(), list(tmp_path.iterdir())) == (b"old", [file])
    with written_whole(file) as stream:
        stream.write(b"new")
    assert (file.read_bytes(), synced) == (b"new", [b"old"])


def test_a_shard_is_there_whole_or_not(tmp_path):
    samples = [(f"k{i}", {"bin": bytes(range(i)), "cls": b"%d" % i}) for i in range(4)]

    def failing():
        yield samples[0]
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        write_shard(tmp_path / "a.tar", failing(), "bin")
    assert not (tmp_path / "a.tar").exists()
    written = write_shard(tmp_path / "a.tar", samples, "bin")
    found = scan_shard(tmp_path / "a.tar", PAYLOAD)
    assert np.array_equal(found.rows[:, 0], written.offset)
    assert np.array_equal(found.rows[:, 1], written.size)
    assert found.rows[:, 2].tolist() == [0, 1, 2, 3]
    assert written.sha256 == hashlib.sha256((tmp_path / "a.tar").read_bytes()).hexdigest()
    assert written.num_bytes == (tmp_path / "a.tar").stat().st_size


def test_webdataset_reads_what_is_written(tmp_path):
    wds = pytest.importorskip("webdataset")
    array = np.arange(6, dtype=np.float16).reshape(1, 2, 3)
    stream = io.BytesIO()
    np.save(stream, array)
    samples = [(f"train_{i}", {"latent.npy": stream.getvalue(), "cls": b"4"}) for i in range(2)]
    write_shard(tmp_path / "a.tar", samples, "latent.npy")
    read = list(wds.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False).decode())
    assert [sample["__key__"] for sample in read] == ["train_0", "train_1"]
    assert all(np.array_equal(sample["latent.npy"], array) for sample in read)
    assert [sample["cls"] for sample in read] == [4, 4]


def test_pictures_come_from_shards_that_webdataset_wrote(tmp_path):
    wds = pytest.importorskip("webdataset")
    with wds.ShardWriter(str(tmp_path / "t-%03d.tar"), maxcount=4, verbose=0) as writer:
        for i in range(10):
            writer.write({"__key__": f"x{i}", "png": np.full((8, 8, 3), 10 * i, np.uint8),
                          "cls": i % 3, "json": {"i": i}})  # fmt: skip
    data = build_data("webdataset", path=str(tmp_path), held_out=0.0)
    assert (data.image_size, data.channels, data.num_classes, len(data.train)) == ((8, 8), 3, 3, 10)
    for i in range(10):
        image, label = data.train[i]
        assert image.dtype == torch.uint8
        assert image.unique().tolist() == [10 * i]
        assert label == i % 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_read_the_same_and_a_resume_sees_what_the_unbroken_run_sees(tmp_path, num_workers):
    pictures(tmp_path / "0.tar", range(20))
    pictures(tmp_path / "1.tar", range(20, 40))
    data = build_data("webdataset", path=str(tmp_path), held_out=0.25)
    assert (len(data.train), len(data.held_out)) == (30, 10)
    seen = {
        int(part[i][0][0, 0, 0]) for part in (data.train, data.held_out) for i in range(len(part))
    }
    assert seen == set(range(40))
    data.train[0]  # opened here, then copied into the workers

    def load(start, size=6, rank=0, num_ranks=1):
        plan = StepBatches(30, size, seed=0, num_steps=9, start_step=start, rank=rank,
                           num_ranks=num_ranks)  # fmt: skip
        return [
            (x[:, 0, 0, 0].tolist(), y.tolist())
            for x, y in make_loader(data.train, plan, num_workers)
        ]

    whole = load(0)
    assert load(7) == whole[7:]  # in the middle of the second epoch
    halves = [load(7, 3, rank, 2) for rank in range(2)]
    joined = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(*halves, strict=True)]
    assert joined == whole[7:]


def test_options_of_pictures_in_shards(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    pictures(tmp_path / "train" / "0.tar", range(9))
    pictures(tmp_path / "val" / "0.tar", range(100, 103), size=16)
    path, val = str(tmp_path / "train"), str(tmp_path / "val")
    data = build_data("webdataset", path=path, held_out_path=val, image_size=4, channels=1)
    assert (len(data.train), len(data.held_out), data.train[0][0].shape) == (9, 3, (1, 4, 4))
    assert build_data("webdataset", path=path, num_classes=0).num_classes == 0
    assert build_data("webdataset", path=path, num_classes=5).num_classes == 5
    with pytest.raises(ValueError, match=r"num_classes=2, .*label 2; use at least 3"):
        build_data("webdataset", path=path, num_classes=2)
    with pytest.raises(ValueError, match=r"differ in size: \(8, 8\).*\(16, 16\)"):
        build_data("webdataset", path=path, held_out_path=val)
    make_tar(tmp_path / "val" / "1.tar", [("a.png", picture(0))])
    with pytest.raises(ValueError, match=r"1 of 4 samples have no label"):
        build_data("webdataset", path=val, image_size=4)
    with pytest.raises(ValueError, match=r"differ in size.*16x16.*Set data.image_size"):
        build_data("webdataset", path=val, num_classes=0)
    make_tar(tmp_path / "val" / "1.tar", [("a.png", b"no picture")])
    data = build_data("webdataset", path=val, num_classes=0, image_size=4, held_out=0.0)
    with pytest.raises(ValueError, match=r"1.tar' at byte 512.*cannot be read"):
        data.train[3]
    assert json.dumps(data.name) == '"val/*.tar"'
