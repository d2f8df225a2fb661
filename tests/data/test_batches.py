"""Ranges of values, order of the data, the held-out split, loading."""

from itertools import chain

import pytest
import torch

from tread_zoo.data import ArrayDataset, StepBatches, to_model_range, to_uint8
from tread_zoo.data.split import split_held_out


def test_the_ranges_are_exact_inverses_for_all_bytes():
    values = torch.arange(256, dtype=torch.uint8)
    x = to_model_range(values)
    assert x.dtype == torch.float32
    assert (x[0], x[-1]) == (-1.0, 1.0)
    assert torch.equal(to_uint8(x), values)
    x = torch.tensor([-9.0, -1.0, 0.0, 1.0, 9.0, -1 + 0.6 / 127.5, float("inf")])
    assert to_uint8(x).tolist() == [0, 0, 128, 255, 255, 1, 255]


def test_ranges_refuse_what_would_be_wrong_silently():
    with pytest.raises(ValueError, match=r"dtype torch.float32.*uint8"):
        to_model_range(torch.zeros(3))
    with pytest.raises(ValueError, match="NaN"):
        to_uint8(torch.tensor([0.0, float("nan")]))
    with pytest.raises(ValueError, match="2 images and 3 labels"):
        ArrayDataset(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(3).long())


def test_a_resume_sees_what_the_unbroken_run_sees():
    unbroken = list(StepBatches(50, 8, seed=3, num_steps=20))
    for start in (0, 1, 5, 6, 7, 19, 20):  # 6 steps an epoch: on, before and after its edge
        batches = StepBatches(50, 8, seed=3, num_steps=20, start_step=start)
        assert list(batches) == list(batches) == unbroken[start:]
        assert len(batches) == 20 - start


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


@pytest.mark.parametrize(("num_items", "num_ranks"), [(7, 1), (15, 2)])
def test_a_batch_that_the_data_cannot_fill_is_refused(num_items, num_ranks):
    with pytest.raises(ValueError, match=f"has {num_items}"):
        StepBatches(num_items, 8, seed=0, num_steps=5, num_ranks=num_ranks)


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


@pytest.mark.parametrize("fraction", [0.0, 0.9])
def test_the_split_at_its_limits(fraction):
    labels = torch.tensor([0, 0, 1])
    train, held_out = split_held_out(labels, fraction)
    assert len(train) + len(held_out) == 3
    assert set(labels[train].tolist()) == {0, 1}
