"""Runs on folders with pictures that cannot be read."""

import errno
import io
import json
import logging
import os
import tarfile
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from tests.small_run import SMALL
from tests.training.test_distributed import launch
from tests.training.test_resume import assert_same_end
from tread_zoo.data import CorruptItem, StepBatches
from tread_zoo.training import ranks
from tread_zoo.training.checkpoints import find_checkpoint
from tread_zoo.training.corruption import CorruptItems
from tread_zoo.training.reporting import Reporter

CUT = (3, 11)


@pytest.fixture(autouse=True)
def _no_samples(monkeypatch):
    """Leave out what takes the most time of such short runs."""
    for name in ("samples", "finish"):
        monkeypatch.setattr(Reporter, name, lambda *args: None)


@pytest.fixture
def folder(tmp_path):
    """40 pictures, 8x8, two of them cut short."""
    root = tmp_path / "pictures"
    root.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8)
    for i, one in enumerate(pixels):
        Image.fromarray(one).save(root / f"{i:02d}.png")
    for i in CUT:
        file = root / f"{i:02d}.png"
        file.write_bytes(file.read_bytes()[:60])
    return root


def options(folder, *more):
    return [
        "data=image_folder", f"data.path={folder}", "data.channels=1", "data.image_size=8",
        "data.held_out=0", "routing=none", "backbone.depth=1",
        "training.max_corrupt_share=0.05", "training.schedule=constant", *more,
    ]  # fmt: skip


def listed(run_folder):
    rows = [line.split("\t") for line in (run_folder / "corrupt.txt").read_text().splitlines()]
    assert all(len(row) == 3 and "cannot be read" in row[2] for row in rows)
    return [row[1] for row in rows]


def test_corrupt_pictures_are_counted_told_and_listed(run, folder, caplog):
    with caplog.at_level(logging.INFO):
        done = run("run", *options(folder, "training.num_steps=10"))  # 5 steps an epoch: all, twice
    names = [str(folder / f"{i:02d}.png") for i in CUT]
    assert sorted(listed(done)) == names
    for name in names:
        assert caplog.text.count(f"{name}; another item takes its place") == 1
    rows = [json.loads(line) for line in (done / "metrics.jsonl").open()]
    counts = [row.get("corrupt_items") for row in rows if "loss" in row]
    assert counts[-1] == 2
    assert counts == sorted(counts, key=lambda count: count or 0), "it does not only grow"


def test_a_run_with_corrupt_pictures_resumes_exactly(run, folder):
    unbroken = run("unbroken", *options(folder, "training.num_steps=8"))
    first = run("parts", *options(folder, "training.num_steps=4"))
    assert len(listed(first)) < 3
    parts = run(
        "parts", *options(folder, "training.num_steps=8", "training.num_workers=2"), "resume=latest"
    )
    assert_same_end(unbroken, parts)
    assert sorted(listed(parts)) == sorted(listed(unbroken))


@pytest.mark.parametrize("share", [0, 0.03])
def test_past_the_share_the_run_ends_and_can_be_continued(run, folder, share):
    strict = [f"training.max_corrupt_share={share}", "training.num_steps=10"]
    checkpoints = ["training.checkpoint_every=1", "training.log_every=5"]
    with pytest.raises(
        ValueError, match=r"of 40 training images .*allows: .*png.*resume=latest"
    ) as e:
        run("run", *options(folder, *strict, *checkpoints))
    assert f"training.max_corrupt_share={share:g}" in str(e.value)
    stopped = folder.parent / "run"
    assert find_checkpoint(stopped).step == 4
    assert set(listed(stopped)) <= {str(folder / f"{i:02d}.png") for i in CUT}
    for i in CUT:  # repaired, as the error says: the same command goes on
        (folder / f"{i:02d}.png").write_bytes((folder / "00.png").read_bytes())
    done = run("run", *options(folder, *strict), "resume=latest")
    assert find_checkpoint(done).step == 10
    assert not (done / "corrupt.txt").exists()


def test_a_new_run_on_whole_pictures_has_no_trace_of_them(run, folder):
    run("run", *options(folder))
    for i in CUT:
        (folder / f"{i:02d}.png").write_bytes((folder / "00.png").read_bytes())
    done = run("run", *options(folder), "overwrite=true")
    assert not (done / "corrupt.txt").exists()
    assert "corrupt" not in (done / "metrics.jsonl").read_text()


class Alone:
    num_processes, process_index, is_main_process = 1, 0, True


def met(items, *indices):
    for index in indices:
        items.add(CorruptItem(index, f"{index}.png", "cannot be read"))


def test_a_list_that_cannot_be_written_is_a_warning_and_tried_again(tmp_path, caplog, monkeypatch):
    items = CorruptItems(Alone(), tmp_path / "corrupt.txt", num_items=40, max_share=0.5)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    met(items, 3)
    assert items.settle() == {"corrupt_items": 1}
    assert items.settle() == {"corrupt_items": 1}
    assert caplog.text.count("corrupt.txt could not be written") == 1
    assert "No space left" in caplog.text
    assert list(tmp_path.iterdir()) == [], "half a list is left"
    monkeypatch.undo()
    assert items.settle() == {"corrupt_items": 1}, "nothing new, and yet it is written now"
    assert listed(tmp_path) == ["3.png"]
    inode = (tmp_path / "corrupt.txt").stat().st_ino
    items.settle()
    assert (tmp_path / "corrupt.txt").stat().st_ino == inode, "written without need"


def test_names_of_any_bytes_can_be_listed_and_told(tmp_path, caplog):
    items = CorruptItems(Alone(), tmp_path / "corrupt.txt", num_items=40, max_share=0.5)
    name = os.fsdecode(b"caf\xe9.png")
    items.add(CorruptItem(1, name, f"{name} cannot be read"))
    items.settle()
    assert listed(tmp_path) == ["caf\\udce9.png"]
    assert r"corrupt   caf\udce9.png; another" in caplog.text


@pytest.mark.parametrize("line", ["x.png\tcut", "", "-1\ta.png\tcut", "40\ta.png\tcut", "1.5"])
def test_a_list_that_no_run_wrote_is_refused_with_its_line(tmp_path, line):
    file = tmp_path / "corrupt.txt"
    file.write_text(f"3\t03.png\tcut\n{line}\n")
    parts = SimpleNamespace(
        data=SimpleNamespace(train=[None] * 40), options=SimpleNamespace(max_corrupt_share=0.1)
    )
    with pytest.raises(ValueError, match=r"corrupt.txt, line 2: .*0 … 39.*delete the file") as e:
        CorruptItems.of_run(parts, Alone(), tmp_path, resumed=True)
    assert repr(line) in str(e.value)


def test_a_rank_that_cannot_read_the_list_takes_no_other_along_waiting(tmp_path, monkeypatch):
    """It tells the others before it ends, and all of them close what connects them."""
    (tmp_path / "corrupt.txt").write_text("nonsense\n")
    told, closed = [], []
    monkeypatch.setattr(ranks, "largest", lambda accelerator, number: told.append(number) or 1)
    monkeypatch.setattr(ranks, "leave_connections", lambda: closed.append(True))
    parts = SimpleNamespace(
        data=SimpleNamespace(train=[None] * 40), options=SimpleNamespace(max_corrupt_share=0.1)
    )
    two = SimpleNamespace(num_processes=2, process_index=0, is_main_process=True)
    with pytest.raises(ValueError, match="line 1"):
        CorruptItems.of_run(parts, two, tmp_path, resumed=True)
    assert (told, closed) == ([1], [True])
    (tmp_path / "corrupt.txt").unlink()
    with pytest.raises(ConnectionError):
        CorruptItems.of_run(parts, two, tmp_path, resumed=True)
    assert told == [1, 0]


def shards(root):
    """Three tar shards of 12, 12 and 12 pictures; the second one is cut in its last quarter."""
    root.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (36, 8, 8), np.uint8)
    for number in range(3):
        with tarfile.open(root / f"{number}.tar", "w") as tar:
            for i in range(12 * number, 12 * number + 12):
                stream = io.BytesIO()
                Image.fromarray(pixels[i]).save(stream, "PNG")
                info = tarfile.TarInfo(f"{i:02d}.png")
                info.size = len(stream.getvalue())
                tar.addfile(info, io.BytesIO(stream.getvalue()))
    whole = (root / "1.tar").read_bytes()
    (root / "1.tar").write_bytes(whole[: 10 * 1024 + 600])  # a header and a picture are 1024 bytes
    return whole


def test_a_cut_shard_is_counted_listed_and_stops_the_run_before_its_first_step(
    run, tmp_path, caplog
):
    whole = shards(tmp_path / "shards")
    given = [
        "data=webdataset", *options(tmp_path / "shards", "training.schedule=constant")[1:],
        "training.num_steps=6", "training.checkpoint_every=3",
    ]  # fmt: skip
    with pytest.raises(
        ValueError, match=r"2 of 36 training images are lost, .*=0.05 allows: the shard .*1.tar"
    ):
        run("strict", *given)
    assert not (tmp_path / "strict").exists()
    some = "training.max_corrupt_share=0.06"
    done = run("run", *given, some)
    rows = [line.split("\t") for line in (done / "corrupt.txt").read_text().splitlines()]
    assert [(row[0], "1.tar" in row[1], "1.tar" in row[2]) for row in rows] == [
        ("22", True, True), ("23", True, True)
    ]  # fmt: skip
    counts = [json.loads(line).get("corrupt_items") for line in (done / "metrics.jsonl").open()]
    assert set(counts) - {None} == {2}
    assert caplog.text.count("2 of its 12 samples are lost") == 2
    (tmp_path / "shards" / "1.tar").write_bytes(whole)
    again = run("run", *given, "training.num_steps=9", "resume=latest")
    assert find_checkpoint(again).step == 9
    assert not (again / "corrupt.txt").exists()


@pytest.mark.slow
def test_two_processes_count_together_and_stop_together(tmp_path, folder, free_port):
    """Each rank meets one of the two in its own half of the first epoch; only together are they
    too many."""
    for rank in range(2):
        half = chain(*StepBatches(40, 4, seed=0, num_steps=5, rank=rank, num_ranks=2))
        assert len(set(CUT) & set(half)) == 1
    strict = ["training.batch_size=4", "training.log_every=5", "training.max_corrupt_share=0.03"]
    with pytest.raises(AssertionError) as failed:
        launch(
            "scripts/train.py", *SMALL, *options(folder, *strict), f"run_dir={tmp_path / 'run'}",
            port=free_port,
        )  # fmt: skip
    assert "2 of 40 training images cannot be read" in str(failed.value)
    assert sorted(listed(tmp_path / "run")) == [str(folder / f"{i:02d}.png") for i in CUT]
