"""The benchmark of the loader on a handful of pictures."""

import json

import pytest

from tests.scripts.test_command_line import call


@pytest.mark.slow
def test_it_measures_each_source_and_number_of_files(tmp_path):
    said = call(
        "benchmark_loader.py", "sources=[npz,image_folder]", "files.image_folder=[4,8]",
        "workers=[0,1]", "num_items=8", "image_size=8", "batch_size=4", "num_batches=2",
        "num_rounds=1", "backbone.depth=1", "device=cpu", cwd=tmp_path,
    )  # fmt: skip
    record = json.loads(said.splitlines()[-1])
    measured = [(row["source"], row["files"], row["workers"]) for row in record["rows"]]
    folders = [("image_folder", files, workers) for files in (4, 8) for workers in (0, 1)]
    assert measured == [("npz", 1, 0), *folders]
    assert all(row["images_per_s"] > 0 and row["ratio"] > 0 for row in record["rows"])
    assert [row["cpu_us"] is None for row in record["rows"]] == [False, False, True, False, True]
    assert record["training"]["images_per_s"] > 0
    assert list(tmp_path.iterdir()) == [], "something is left"
