"""The folder of `scripts/sample.py`: one set of settings, continued by number, nothing lost."""

import json

import numpy as np
import pytest
import torch

from tread_zoo.evaluation.sample_folder import SampleFolder, folder_name

ONE, OTHER = {"sampler": "euler", "seed": 0}, {"sampler": "euler", "seed": 1}


def images(*numbers):
    """Pictures [B,1,2,2] whose pixels are their numbers."""
    return torch.tensor(numbers, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)


def fill(folder, numbers, pictures, labels=None):
    folder.begin()
    folder.save(numbers, pictures)
    folder.finish(numbers, labels)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_set_is_continued_and_its_arrays_hold_all_of_it(tmp_path):
    for numbers in (range(2, 4), range(3)):
        labels = torch.tensor(numbers) + 10
        fill(SampleFolder(tmp_path / "s", ONE, {}), numbers, images(*numbers), labels)
    assert names(tmp_path) == ["s", "s_grid.png"]
    pictures = [f"{i:06d}.png" for i in range(4)]
    assert names(tmp_path / "s") == [*pictures, "samples.npz", "sampling.json"]
    found = np.load(tmp_path / "s" / "samples.npz")
    assert found["arr_0"][:, 0, 0, 0].tolist() == found["numbers"].tolist() == [0, 1, 2, 3]
    assert found["arr_1"].tolist() == [10, 11, 12, 13]


def test_other_settings_are_refused_or_replace_a_set_when_there_is_something_new(tmp_path):
    fill(SampleFolder(tmp_path / "s", ONE, {}), range(3), images(0, 1, 2))
    (tmp_path / "s" / "notes.txt").write_text("mine")
    before = names(tmp_path / "s")
    with pytest.raises(ValueError, match=r"seed=0, not 1.*overwrite=true"):
        SampleFolder(tmp_path / "s", OTHER, {})
    other = SampleFolder(tmp_path / "s", OTHER, {}, overwrite=True)
    assert names(tmp_path / "s") == before, "removed before anything new begins"
    assert not other.has(range(1))
    fill(other, range(1), images(7))
    assert names(tmp_path / "s") == ["000000.png", "notes.txt", "samples.npz", "sampling.json"]
    assert np.load(tmp_path / "s" / "samples.npz")["arr_0"].shape == (1, 2, 2, 1)
    assert json.loads((tmp_path / "s" / "sampling.json").read_text())["settings"] == OTHER


@pytest.mark.parametrize("overwrite", [False, True])
def test_pictures_of_unknown_origin_stay(tmp_path, overwrite):
    (tmp_path / "0001.png").write_text("somebody's photograph")
    with pytest.raises(ValueError, match=r"holds 0001.png, and no sampling.json"):
        SampleFolder(tmp_path, ONE, {}, overwrite=overwrite)
    assert names(tmp_path) == ["0001.png"]


def test_a_folder_is_named_by_its_settings_alone():
    settings = {"step": 750, "sampler": "heun", "seed": 1, "label": None}
    name = folder_name(settings)
    assert (
        folder_name(dict(reversed(settings.items())))
        == name
        != folder_name({**settings, "seed": 3})
    )
