"""Ranges of values, order of the data, held-out split, loading."""

from itertools import chain

import pytest
import torch
from torch.utils.data import Dataset

from tread_zoo.data import (
    ArrayDataset,
    StepBatches,
    make_loader,
    to_model_range,
    to_uint8,
)
from tread_zoo.data.split import split_held_out


def test_the_ranges_are_exact_inverses_for_all_bytes():
    values = torch.arange(256, dtype=torch.uint8)
    x = to_model_range(values)
    assert x.dtype == torch.float32
    assert (x[0], x[-1]) == (-1.0, 1.0)
    assert torch.equal(to_uint8(x), values)


def test_to_uint8_clamps_and_rounds():
    x = torch.tensor([-9.0, -1.0, 0.0, 1.0, 9.0, -1 + 0.6 / 127.5, float("inf")])
    assert to_uint8(x).tolist() == [0, 0, 128, 255, 255, 1, 255]


def test_ranges_refuse_what_would_be_wrong_silently():
    with pytest.raises(ValueError, match=r"dtype torch.float32.*uint8"):
        to_model_range(torch.zeros(3))
    with pytest.raises(ValueError, match="NaN"):
        to_uint8(torch.tensor([0.0, float("nan")]))


def test_array_dataset_items_and_gather_agree():
    images = torch.randint(0, 256, (5, 2, 3, 4), dtype=torch.uint8)
    data = ArrayDataset(images, torch.arange(5))
    gathered, labels = data.gather(torch.tensor([3, 1]))
    assert torch.equal(gathered[0], data[3][0])
    assert (data[3][1], labels.tolist(), len(data)) == (3, [3, 1], 5)
    assert isinstance(data[3][1], int)
    assert ArrayDataset(images).labels.tolist() == [0] * 5


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 1, 4, 4), None, r"images has dtype torch.float32"),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), None, r"shape \(2, 4, 4\)"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(3).long(), r"shape \(3,\)"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2), r"dtype torch.float32"),
    ],
)
def test_array_dataset_refuses(images, labels, message):
    with pytest.raises(ValueError, match=message):
        ArrayDataset(images, labels)


def test_a_resume_sees_what_the_unbroken_run_sees():
    unbroken = list(StepBatches(50, 8, seed=3, num_steps=20))
    for start in (0, 1, 5, 6, 7, 19):  # 6 steps an epoch: on, before and after its edge
        assert list(StepBatches(50, 8, seed=3, num_steps=20, start_step=start)) == unbroken[start:]


def test_batches_can_be_iterated_twice_and_know_their_length():
    batches = StepBatches(50, 8, seed=3, num_steps=20, start_step=4)
    assert len(batches) == len(list(batches)) == 16
    assert list(batches) == list(batches)
    assert list(StepBatches(50, 8, seed=3, num_steps=20, start_step=20)) == []


def test_an_epoch_has_no_image_twice_and_epochs_and_seeds_differ():
    batches = list(StepBatches(50, 8, seed=0, num_steps=12))
    first, second = (list(chain(*batches[i : i + 6])) for i in (0, 6))
    assert len(set(first)) == len(set(second)) == 48
    assert first != second
    assert batches != list(StepBatches(50, 8, seed=1, num_steps=12))


def test_ranks_share_a_global_batch():
    whole = list(StepBatches(50, 8, seed=0, num_steps=9))
    ranks = [list(StepBatches(50, 2, seed=0, num_steps=9, rank=r, num_ranks=4)) for r in range(4)]
    assert [list(chain(*parts)) for parts in zip(*ranks, strict=True)] == whole


def test_the_order_does_not_touch_the_global_generator():
    state = torch.get_rng_state()
    list(StepBatches(50, 8, seed=0, num_steps=9))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_items": 7}, r"batch_size=8 on 1 rank.*has 7.*at most 7"),
        ({"num_items": 15, "num_ranks": 2}, r"16 images a step.*has 15.*at most 7"),
        ({"num_items": 3, "num_ranks": 4}, r"at most 1 on fewer ranks"),
        ({"batch_size": 0}, r"batch_size=0.*at least 1"),
        ({"rank": 1}, r"rank=1 is outside 0 … num_ranks - 1 = 0"),
        ({"start_step": 6}, r"start_step=6 is outside 0 … num_steps=5.*raise it"),
    ],
)
def test_batches_refuse(options, message):
    good = {"num_items": 50, "batch_size": 8, "seed": 0, "num_steps": 5}
    with pytest.raises(ValueError, match=message):
        StepBatches(**{**good, **options})


class _Counting(Dataset):
    """Item i is a 1x2x2 image of value i with label i: not in memory, so through DataLoader."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.full((1, 2, 2), index, dtype=torch.uint8), index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_keeps_the_order_and_the_global_generator(num_workers):
    batches = StepBatches(20, 4, seed=0, num_steps=7)
    state = torch.get_rng_state()
    loaded = list(make_loader(_Counting(), batches, num_workers))
    assert torch.equal(torch.get_rng_state(), state)
    assert [labels.tolist() for _, labels in loaded] == list(batches)
    images, labels = loaded[0]
    assert images.shape == (4, 1, 2, 2)
    assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)


def test_both_ways_of_loading_give_the_same():
    counting = _Counting()
    in_memory = ArrayDataset(torch.stack([counting[i][0] for i in range(20)]), torch.arange(20))
    batches = StepBatches(20, 4, seed=0, num_steps=7)
    pairs = zip(make_loader(counting, batches), make_loader(in_memory, batches), strict=True)
    for (images, labels), (same_images, same_labels) in pairs:
        assert torch.equal(images, same_images)
        assert torch.equal(labels, same_labels)


def test_the_loader_refuses_negative_workers():
    with pytest.raises(ValueError, match=r"training.num_workers=-1"):
        make_loader(_Counting(), StepBatches(20, 4, seed=0, num_steps=1), -1)


def test_the_split_is_stratified_disjoint_and_fixed():
    labels = torch.tensor([0] * 100 + [1] * 50 + [2] * 3 + [3])
    train, held_out = split_held_out(labels, 0.2)
    assert torch.equal(torch.cat([train, held_out]).sort().values, torch.arange(154))
    assert len(held_out) == round(0.2 * 154)
    counts = labels[held_out].bincount(minlength=4).tolist()
    assert abs(counts[0] - 20) <= 1
    assert abs(counts[1] - 10) <= 1
    assert set(labels[train].tolist()) == {0, 1, 2, 3}
    assert torch.equal(split_held_out(labels, 0.2)[1], held_out)


def test_the_split_of_many_small_classes_holds_out_its_fraction():
    labels = torch.arange(100).repeat_interleave(4)
    train, held_out = split_held_out(labels, 0.1)
    assert len(held_out) == 40
    assert len(labels[train].unique()) == 100


@pytest.mark.parametrize("fraction", [0.0, 0.9])
def test_the_split_at_its_limits(fraction):
    labels = torch.tensor([0, 0, 1])
    train, held_out = split_held_out(labels, fraction)
    assert len(train) + len(held_out) == 3
    assert set(labels[train].tolist()) == {0, 1}


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 20])
def test_the_split_refuses(fraction):
    with pytest.raises(ValueError, match=rf"data.held_out={fraction}.*say 0.1"):
        split_held_out(torch.zeros(5, dtype=torch.int64), fraction)
