"""The loader: corrupt items, workers that hang or die, and the number of reads."""

import os
import signal
from contextlib import nullcontext
from itertools import chain

import pytest
import torch
from torch.utils.data import Dataset

from tread_zoo.data import (
    ArrayDataset,
    CorruptItem,
    CorruptLog,
    StepBatches,
    make_loader,
    read_items,
)
from tread_zoo.data.loader import MAX_TRIES


class Watched(Dataset):
    """Thirty items of value and label i. Reads are recorded in a file; some items are corrupt."""

    def __init__(self, folder, corrupt=(), doing=lambda index: None):
        self.log, self.corrupt, self.doing = folder / "reads", set(corrupt), doing
        self.log.touch()

    def __len__(self):
        return 30

    def __getitem__(self, index):
        with self.log.open("a") as stream:
            stream.write(f"{index} {os.getpid()}\n")
        self.doing(index)
        if index in self.corrupt:
            raise OSError(f"no {index}")
        return torch.full((1, 2, 2), index, dtype=torch.uint8), index

    def item_name(self, index):
        return f"file_{index}"

    def reads(self):
        return [int(line.split()[0]) for line in self.log.read_text().splitlines()]

    def pids(self):
        return {int(line.split()[1]) for line in self.log.read_text().splitlines()}


def labels_of(dataset, *, num_workers=0, met=None, seed=3, start=0):
    batches = StepBatches(30, 5, seed=3, num_steps=18, start_step=start)
    dataset.on_corrupt = [].append if met is None else met.append
    found = []
    for images, labels in make_loader(dataset, batches, num_workers, seed=seed):
        assert images[:, 0, 0, 0].tolist() == labels.tolist()
        found.append(labels.tolist())
    return found


def test_a_corrupt_item_is_replaced_by_one_that_seed_and_index_decide(tmp_path):
    clean = labels_of(Watched(tmp_path))
    bad = {4, 17, 20}
    met = []
    found = labels_of(Watched(tmp_path, bad), met=met)
    by_item = {}
    for one, other in zip(chain(*clean), chain(*found), strict=True):
        by_item.setdefault(one, set()).add(other)
    for index, seen in by_item.items():
        assert len(seen) == 1, "the replacement of an item differs between epochs"
        assert seen.isdisjoint(bad) if index in bad else seen == {index}
    assert sorted(item.index for item in met) == sorted(bad), "told more or less than once"
    assert {(item.name, item.reason) for item in met} == {(f"file_{i}", f"no {i}") for i in bad}
    met.clear()
    assert labels_of(Watched(tmp_path, bad), num_workers=2, met=met) == found
    assert sorted(item.index for item in met) == sorted(bad)
    assert labels_of(Watched(tmp_path, bad), start=7) == found[7:]
    assert labels_of(Watched(tmp_path, bad), seed=4) != found


@pytest.mark.parametrize("num_workers", [0, 1])
def test_when_nothing_can_be_read_it_says_so(tmp_path, num_workers):
    with pytest.raises(ValueError, match=rf"^{MAX_TRIES} items in a row .*file_.*no .*disk"):
        labels_of(Watched(tmp_path, range(30)), num_workers=num_workers)


def test_errors_that_are_no_corrupt_items_pass(tmp_path):
    def fault(index):
        raise TypeError("a programming error")

    with pytest.raises(TypeError, match="a programming error"):
        labels_of(Watched(tmp_path, doing=fault))


def test_a_resume_reads_nothing_twice(tmp_path):
    """A run that resumes at step 400,000, in the middle of an epoch, reads only what it needs."""
    dataset = Watched(tmp_path)
    start = 400_000
    batches = StepBatches(30, 5, seed=0, num_steps=start + 100, start_step=start)
    loaded = make_loader(dataset, batches)
    assert dataset.reads() == [], "read before the first batch was asked for"
    _, labels = next(loaded)
    assert dataset.reads() == labels.tolist() == next(iter(batches))


def test_workers_live_for_the_whole_run_and_start_when_they_are_needed(tmp_path):
    dataset = Watched(tmp_path)
    batches = StepBatches(30, 5, seed=0, num_steps=18)  # three epochs
    loaded = make_loader(dataset, batches, 2)
    assert dataset.reads() == []
    next(loaded)
    assert len(dataset.reads()) <= (1 + 2 * 2) * 5, "more than two batches ahead for each worker"
    list(loaded)
    assert len(dataset.pids()) == 2
    assert os.getpid() not in dataset.pids()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_leaves_the_workers_alive(tmp_path, number):
    sent = tmp_path / "sent"

    def stop(index):
        if not sent.exists():
            sent.touch()
            os.kill(os.getpid(), number)

    assert labels_of(Watched(tmp_path, doing=stop), num_workers=1) == labels_of(Watched(tmp_path))
    assert sent.exists()


def test_items_in_memory_are_gathered_and_the_order_is_kept(tmp_path, monkeypatch):
    memory = ArrayDataset(torch.arange(30, dtype=torch.uint8).view(30, 1, 1, 1), torch.arange(30))
    monkeypatch.setattr(ArrayDataset, "__getitem__", None)  # no item is read by itself
    state = torch.get_rng_state()
    batches = list(StepBatches(30, 5, seed=3, num_steps=18))
    assert labels_of(memory) == labels_of(Watched(tmp_path), num_workers=2) == batches
    assert torch.equal(torch.get_rng_state(), state)


def test_items_read_at_once_are_replaced_too(tmp_path, caplog):
    images, labels = read_items(Watched(tmp_path, {2}), range(4))
    assert labels.tolist()[:2] + labels.tolist()[3:] == [0, 1, 3]
    assert images.shape == (4, 1, 2, 2)
    assert labels[2] != 2
    assert caplog.text.count("file_2") == 1


def test_a_list_of_corrupt_items_is_kept_by_all_processes_and_ends_a_run(tmp_path):
    parts = [Watched(tmp_path)]
    one, other = (CorruptLog(tmp_path / "corrupt.txt", parts, 0.05) for _ in range(2))
    one(CorruptItem(4, "file_4", "cut\tshort\n"))
    other(CorruptItem(17, "file_17", "no 17"))
    one(CorruptItem(17, "file_17", "no 17"))
    assert len(one.items) == len(other.items) == 2
    lines = (tmp_path / "corrupt.txt").read_text().splitlines()
    assert lines == ["4\tfile_4\tcut short", "17\tfile_17\tno 17"]
    with pytest.raises(ValueError, match=r"3 of 30 .*corrupt\.txt"):
        one(CorruptItem(20, "file_20", "no 20"))


def test_items_that_were_mended_do_not_count_when_a_run_continues(tmp_path):
    file, still = tmp_path / "corrupt.txt", Watched(tmp_path, {4})
    log = CorruptLog(file, [Watched(tmp_path, {4, 17})], 0.05)
    for index in (4, 17):
        log(CorruptItem(index, f"file_{index}", "cut short"))
    assert CorruptLog(file, [still], 0.05).items == {"4\tfile_4"}


@pytest.mark.parametrize("share", [0.001, 0.0])
def test_one_corrupt_item_of_few_is_passed_over_unless_none_may_be(tmp_path, share):
    log = CorruptLog(tmp_path / "corrupt.txt", [Watched(tmp_path)], share)
    with nullcontext() if share else pytest.raises(ValueError, match=r"1 of 30"):
        log(CorruptItem(4, "file_4", "cut short"))


@pytest.mark.parametrize("name", ["a\nb", "a\u2028b", "a\x85b", "a\tb\tc", "a\udcffb", "\r"])
def test_a_corrupt_item_of_any_name_is_one_line(tmp_path, name):
    dataset = Watched(tmp_path, {2, 3})
    dataset.item_name = lambda index: f"{index} {name}"
    log = CorruptLog(tmp_path / "corrupt.txt", [dataset], 0.1)
    for _ in range(2):
        read_items(dataset, range(5))
    assert len(log.items) == 2
    text = log.file.read_bytes().decode()
    assert len(text.splitlines()) == 2
    assert len(text.split("\n")) == 3
    assert {line.count("\t") for line in text.splitlines()} == {2}
