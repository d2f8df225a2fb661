"""What is shown while something takes long, and how fast a device could be."""

import io
import logging

import pytest

from tread_zoo import progress
from tread_zoo.training.meters import peak_flops


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_pipe_gets_lines_of_the_log(caplog, monkeypatch):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0)
    with caplog.at_level(logging.INFO):
        assert list(progress.progress("scoring", range(3), " batches")) == [0, 1, 2]
    assert any(line.startswith("scoring 2/3 batches  left 00:0") for line in caplog.messages)
    assert not any("\r" in line for line in caplog.messages)


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    with progress.progress("step", total=8, initial=4, delay=0) as bar:
        bar.update(2)
        bar.set_postfix_str("loss 0.5")
    assert "step 6/8" in shown.getvalue()
    assert "75%, loss 0.5" in shown.getvalue()
    shown.truncate(0)
    list(progress.progress("scoring", range(3), delay=0, shown=False))
    assert not shown.getvalue()


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA H100 80GB HBM3", "fp32", 67),
        ("NVIDIA RTX 6000 Ada Generation", "fp16", 364.2),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("NVIDIA A10G", "bf16", None),  # others are not guessed
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
    ],
)
def test_the_peak_of_a_known_gpu(name, precision, teraflops):
    peak = peak_flops(name, precision)
    assert peak == (None if teraflops is None else pytest.approx(teraflops * 1e12))
