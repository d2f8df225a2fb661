"""The numbers between two lines of the log, and where a run's time went."""

import json
import math

import pytest
import torch

from tests.small_run import settings
from tread_zoo.comparison import read_run
from tread_zoo.comparison.machines import Machines
from tread_zoo.runtime import matmul_speed
from tread_zoo.training import train, window
from tread_zoo.training.trackers import read_metrics
from tread_zoo.training.window import (
    CLEAR_REFS,
    Clock,
    Window,
    forget_peak_memory,
    peak_memory,
)

CPU = torch.device("cpu")


class Alone:
    """What an accelerator does with one process."""

    def reduce(self, tensor, reduction):
        return tensor


def test_losses_by_level_are_means_of_the_sorted_images():
    counted = Window()
    counted.add(torch.tensor([8.0, 1.0, 2.0, 7.0]), torch.tensor([0.9, 0.1, 0.2, 0.8]), 4)
    counted.add(torch.tensor([3.0, 4.0, 5.0, 6.0]), torch.tensor([0.3, 0.4, 0.5, 0.6]), 4)
    values = counted.close(Alone())
    assert values["loss"] == 4.5
    assert [values[f"loss_level_{i}"] for i in (1, 2, 3, 4)] == [1.5, 3.5, 5.5, 7.5]
    assert values["images_per_s"] > 0
    counted.add(torch.tensor([1.0]), torch.tensor([0.5]), 1)
    values = counted.close(Alone())
    assert (values["loss"], values["loss_level_1"]) == (1.0, 1.0)
    assert math.isnan(values["loss_level_4"]), "no image; such numbers are not logged"


def test_what_is_timed_within_counts_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(window.time, "perf_counter", lambda: now[0])
    clock = Clock()
    with clock.timing("training"):
        now[0] += 1
        for wait in (2, 3):
            with clock.timing("data"):
                now[0] += wait
        now[0] += 10
    with clock.timing("data"):
        now[0] += 100
    assert clock.seconds == {"data": 105.0, "training": 11.0}


def test_a_run_tells_its_memory_its_time_and_the_speed_it_could_have(tmp_path):
    folder = train(**settings(f"run_dir={tmp_path / 'run'}", "training.sample_every=3"))
    found = json.loads((folder / "score.json").read_text())["run"]
    assert set(found["seconds"]) == {"data", "training", "samples", "saving", "score"}
    assert all(value >= 0 for value in found["seconds"].values())
    assert 2**26 < found["peak_memory_bytes"] <= peak_memory(CPU)
    rows = [row for row in read_metrics(folder) if "loss" in row]
    assert all({"peak_memory", "loss_level_1", "loss_level_4"} <= row.keys() for row in rows)
    result = read_run(folder)
    assert [step for step, _ in result.curve] == [3, 6]
    assert Machines([result]).utilisation(result) == pytest.approx(
        result.flops * result.images_per_s / found["matmul_flops_per_s"]
    )
    assert result.picture.endswith("step_00000006.png")


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="needs Linux, to watch memory anew")
def test_a_run_is_not_charged_for_the_memory_of_the_one_before():
    forget_peak_memory(CPU)
    before = peak_memory(CPU)
    torch.ones(2**28, dtype=torch.uint8)  # 256 MiB, gone at once
    assert peak_memory(CPU) > before + 2**27
    forget_peak_memory(CPU)
    assert peak_memory(CPU) < before + 2**27


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_multiplies_at_its_speed():
    assert matmul_speed(torch.device("cuda"), "bf16") > 1e12
