"""Labels of every source: integers of any type, words, and what is neither."""

import unicodedata

import numpy as np
import pytest

from tests.data.tables import picture_table, write_tar
from tread_zoo.data import ImageData
from tread_zoo.diffusion.conditions import class_number
from tread_zoo.registry import create

NFD = unicodedata.normalize("NFD", "café")


def from_npz(folder, labels):
    np.savez(folder / "x.npz", images=np.zeros((len(labels), 8, 8), np.uint8), labels=labels)
    return create("data", "npz", path=str(folder / "x.npz"), held_out=0.0)


def from_column(folder, labels, column="label"):
    table = picture_table(range(len(labels))).remove_columns("kind")
    table.add_column(column, labels).save_to_disk(folder / "set")
    return create("data", "hf", path=str(folder / "set"), held_out=0.0)


def from_tar(folder, labels):
    write_tar(folder / "a.tar", range(len(labels)), labels=[str(label) for label in labels])
    return create("data", "webdataset", path=str(folder), held_out=0.0)


def labels_of(data: ImageData):
    return [data.train[i][1] for i in range(len(data.train))]


@pytest.mark.parametrize("read", [from_npz, from_column, from_tar])
@pytest.mark.parametrize(
    ("values", "labels", "names"),
    [
        ([2, 0, 1], [2, 0, 1], ("0", "1", "2")),
        (["dog", "cat", "dog"], [1, 0, 1], ("cat", "dog")),
        (["10", "2", "0"], [10, 2, 0], tuple(map(str, range(11)))),
        (["café", NFD, "tea"], [0, 0, 1], ("café", "tea")),
    ],
)
def test_integers_stay_and_words_become_classes_wherever_they_are(
    tmp_path, read, values, labels, names
):
    data = read(tmp_path, values)
    assert (labels_of(data), data.class_names) == (labels, names)


def test_a_label_that_is_no_text_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"a \.cls file is no text in UTF-8: b'\\xff'"):
        from_tar(tmp_path, ["a", "\udcff", "b"])


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint64, np.float32, bool])
def test_integers_of_any_type_and_of_one_column(tmp_path, dtype):
    assert labels_of(from_npz(tmp_path, np.array([[1], [0], [1]], dtype))) == [1, 0, 1]


@pytest.mark.parametrize("read", [from_npz, from_column, from_tar])
@pytest.mark.parametrize("values", [[0.5, 1.5], [0, 2**40], [1, -1]])
def test_other_labels_are_refused_with_what_to_do(tmp_path, read, values):
    with pytest.raises(ValueError, match=r"(?s)x\.npz|hf:set|:tar.*data\.num_classes=0"):
        read(tmp_path, values)


@pytest.mark.parametrize("values", [[1, None, 0], [[1, 2], [0]], [[1, 0], [0, 1]]])
def test_missing_labels_and_lists_are_refused(tmp_path, values):
    with pytest.raises(ValueError, match=r"'label' has .*data\.num_classes=0"):
        from_column(tmp_path, values)


def test_a_column_named_class_is_taken_and_others_are_named(tmp_path, caplog):
    taken = from_column(tmp_path, ["ant", "bee"], column="class")
    assert taken.class_names == ("ant", "bee")
    table = picture_table(range(40)).remove_columns("kind")
    table = table.add_column("species", ["ant", "bee"] * 20)
    table = table.add_column("caption", [f"number {i}" for i in range(40)])
    table.save_to_disk(tmp_path / "other")
    data = create("data", "hf", path=str(tmp_path / "other"))
    assert data.num_classes == 0
    assert "no labels; columns that are not used: species (" in caplog.text


def test_a_class_is_found_however_its_name_is_composed():
    assert class_number(NFD, ["bar", "café"]) == 1
    assert class_number("café", ["bar", NFD]) == 1


def test_files_without_images_or_of_another_kind_are_one_line(tmp_path):
    np.savez(tmp_path / "empty.npz", images=np.zeros((0, 8, 8), np.uint8))
    np.savez(tmp_path / "none.npz")
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "empty.npz").read_bytes()[:60])
    (tmp_path / "text.npz").write_text("no archive")
    for name in ("empty.npz", "none.npz", "array.npy", "cut.npz", "text.npz"):
        with pytest.raises(ValueError, match=rf"data\.path=.*{name}|pickle"):
            create("data", "npz", path=str(tmp_path / name))
