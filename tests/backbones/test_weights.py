"""Every registered size keeps its parameters' names and shapes, its weights and its outputs.

`python -m tests.backbones.test_weights` measures them again and writes weights.json beside this
file; with names behind it, those sizes alone. Bits differ between processors: where this one draws
or multiplies otherwise than the one that measured, they are not compared.
"""

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch

from tread_zoo import create_backbone, list_backbones
from tread_zoo.kernels import set_form
from tread_zoo.testing import Probe
from tread_zoo.training.optimizers import hidden_matrices

FILE = Path(__file__).with_name("weights.json")
DIGITS = {"input_size": 8, "in_channels": 1, "num_classes": 10}
LATENTS = {"input_size": 32, "in_channels": 4, "num_classes": 1000}
LARGEST = 60e6  # parameters, of the sizes whose weights are drawn


def digest(*values):
    """Return a hash of texts and tensors."""
    total = hashlib.sha256()
    for value in values:
        tensor = isinstance(value, torch.Tensor)
        total.update(value.detach().contiguous().numpy().tobytes() if tensor else value.encode())
    return total.hexdigest()[:16]


def processor():
    """Return a hash of what this machine draws and how it rounds."""
    x = torch.randn(97, 97, generator=torch.Generator().manual_seed(0))
    return digest(x, x @ x, x.sigmoid(), (x * 9).cos().log1p())


def build(name):
    return create_backbone(name, **(DIGITS if name.endswith("_tiny") else LATENTS))


def named_tensors(network):
    return [*network.named_parameters(), *network.named_buffers()]


def shapes(name):
    with torch.device("meta"):
        network = build(name)
    texts = [f"{key} {tuple(tensor.shape)}" for key, tensor in named_tensors(network)]
    matrices = [f"{key} {sizes}" for key, sizes in sorted(hidden_matrices(network).items())]
    return sum(p.numel() for p in network.parameters()), digest("\n".join(texts + matrices))


def weights(name):
    torch.manual_seed(0)
    return digest(*(tensor for _, tensor in named_tensors(build(name))))


@torch.no_grad()
def outputs(name):
    """Return a hash of a dense and of a routed output, of a network of random weights. A scan runs
    in torch, also where there is a compiler."""
    probe = Probe(name)
    network, inputs = probe.build(), probe.inputs()
    set_form("selective_scan", "torch")
    try:
        routed = network(*inputs, routes=[probe.route(network, 2, -4, rate=0.5)])
        return digest(network(*inputs)), digest(routed)
    finally:
        set_form("selective_scan", "auto")


def measure(name):
    count, found = shapes(name)
    figures = {"parameters": count, "shapes": found}
    if count < LARGEST:
        figures["weights"] = weights(name)
    if name.endswith("_tiny"):
        figures["dense"], figures["routed"] = outputs(name)
    return figures


RECORDED = json.loads(FILE.read_text()) if FILE.exists() else {}
NAMES = sorted(RECORDED.keys() - {"processor"})
DRAWN = [
    pytest.param(name, marks=() if name.endswith("_tiny") else pytest.mark.slow)
    for name in NAMES
    if "weights" in RECORDED[name]
]


@pytest.fixture
def same_bits():
    """Let the test run where bits can be compared, in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if processor() != RECORDED["processor"]:
        pytest.skip("this processor rounds otherwise than the one that measured")
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", NAMES)
def test_names_shapes_and_matrices_are_those_recorded(name):
    recorded = RECORDED[name]
    assert shapes(name) == (recorded["parameters"], recorded["shapes"])


@pytest.mark.parametrize("name", DRAWN)
def test_weights_are_those_recorded_to_the_bit(name, same_bits):
    assert weights(name) == RECORDED[name]["weights"]


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("_tiny")])
def test_outputs_are_those_recorded_to_the_bit(name, same_bits):
    assert outputs(name) == (RECORDED[name]["dense"], RECORDED[name]["routed"])


def main():
    torch.set_num_threads(1)
    names = [name for name in list_backbones() if not name.startswith("mixer")]
    figures = {"processor": processor()}
    for name in names:
        given = sys.argv[1:] or names
        figures |= {name: measure(name)} if name in given else {name: RECORDED[name]}
    FILE.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
