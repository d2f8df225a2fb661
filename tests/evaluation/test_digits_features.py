"""The extractor that ships here, the script that makes it, and the judge of labels."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tread_zoo.data import digits
from tread_zoo.evaluation import (
    DigitsFeatures,
    digits_agreement,
    digits_agreement_reference,
    load_digits_features,
)
from tread_zoo.evaluation.features import DIGITS_WEIGHTS, extractor_id

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_digits_features.py"


def test_the_shipped_network_is_small_and_knows_digits():
    network = load_digits_features()
    held_out = digits().held_out
    features, logits = network(held_out.images)
    assert features.shape == (359, 64)
    assert (logits.argmax(1) == held_out.labels).double().mean() > 0.99
    assert sum(parameter.numel() for parameter in network.parameters()) <= 60_000
    assert DIGITS_WEIGHTS.stat().st_size <= 300_000
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_no_feature_is_dead():
    features, _ = load_digits_features()(digits().train.images)
    assert (features.std(dim=0) > 1e-3).all()


def test_the_file_says_where_it_comes_from():
    from safetensors import safe_open

    with safe_open(DIGITS_WEIGHTS, framework="pt") as file:
        about = file.metadata()["about"]
    assert "scripts/make_digits_features.py" in about
    assert "training part" in about
    assert "Held-out accuracy 0.99" in about


def test_the_name_in_records_changes_with_the_weights(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(b"")
    assert extractor_id("x", file) == "x@e3b0c442"  # sha256 of nothing
    file.write_bytes(b"1")
    assert extractor_id("x", file) != "x@e3b0c442"


@pytest.mark.parametrize(
    "images", [torch.zeros(2, 1, 8, 8), torch.zeros(2, 3, 8, 8, dtype=torch.uint8)]
)
def test_the_network_refuses_other_images(images):
    with pytest.raises(ValueError, match=r"digits-cnn-64 wants uint8 \[B,1,8,8\]"):
        DigitsFeatures()(images)


def test_the_script_writes_the_same_bytes_twice(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("make_digits_features", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    threads = torch.get_num_threads()
    files = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    try:
        for file in files:
            argv = [str(SCRIPT), "--output", str(file), "--num-steps", "3"]
            monkeypatch.setattr(sys, "argv", argv)
            script.main()
    finally:
        torch.set_num_threads(threads)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].stat().st_mode & 0o444 == 0o444
    assert "held-out accuracy 0." in capsys.readouterr().out


def test_the_judge():
    assert digits_agreement_reference() > 0.98
    train = digits().train
    assert digits_agreement(train.images[:200], train.labels[:200]) == 1.0
    assert digits_agreement(train.images[:200], (train.labels[:200] + 1) % 10) == 0.0
    noise = torch.randint(0, 256, (200, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    assert digits_agreement(noise.to(torch.uint8), train.labels[:200]) < 0.4


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 1, 8, 8), torch.zeros(2), r"images has dtype torch.float32"),
        (torch.zeros(0, 1, 8, 8, dtype=torch.uint8), torch.zeros(0), r"N at least 1"),
        (torch.zeros(2, 1, 9, 8, dtype=torch.uint8), torch.zeros(2), r"shape \(2, 1, 9, 8\)"),
        (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.zeros(3), r"labels has shape \(3,\)"),
    ],
)
def test_the_judge_refuses(images, labels, message):
    with pytest.raises(ValueError, match=message):
        digits_agreement(images, labels)


def test_importing_brings_in_nothing_heavy():
    heavy = "('sklearn', 'torch_fidelity', 'PIL', 'torchvision', 'scipy')"
    code = (
        "import sys, tread_zoo.data, tread_zoo.evaluation; "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    command, root = [sys.executable, "-c", code], SCRIPT.parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
