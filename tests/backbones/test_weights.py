"""Every registered size keeps its parameters' names and shapes, its weights and its outputs.

`python -m tests.backbones.test_weights` measures them again and writes weights.json beside this
file; with names behind it, those sizes alone. Other processors round differently, so weights
and outputs are compared by two sums, within 1e-6 and 1e-5 of their norm.
"""

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch

from tread_zoo import create_backbone, list_backbones
from tread_zoo.registry import get_entry
from tread_zoo.testing import Probe
from tread_zoo.training.optimizers import hidden_matrices

FILE = Path(__file__).with_name("weights.json")
DIGITS = {"input_size": 8, "in_channels": 1, "num_classes": 10}
LATENTS = {"input_size": 32, "in_channels": 4, "num_classes": 1000}
LARGEST = 60e6  # parameters, of the sizes whose weights are drawn


def digest(text):
    """Return a hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sums(*tensors):
    """Return the norm of all values, and a weighted sum whose weights differ by position."""
    values = torch.cat([tensor.detach().flatten() for tensor in tensors]).double()
    places = torch.arange(len(values), dtype=torch.float64)
    return [float(f"{value:.9g}") for value in (values.norm(), values @ places.cos())]


def near(found, recorded, within):
    return found == pytest.approx(recorded, rel=0, abs=within * recorded[0])


def build(name):
    return create_backbone(name, **(DIGITS if name.endswith("_tiny") else LATENTS))


def named_tensors(network):
    return [*network.named_parameters(), *network.named_buffers()]


def shapes(name):
    with torch.device("meta"):
        network = build(name)
    assert network.default_selector in ("random", "rows", "blocks", "segments")
    texts = [f"{key} {tuple(tensor.shape)}" for key, tensor in named_tensors(network)]
    matrices = [f"{key} {sizes}" for key, sizes in sorted(hidden_matrices(network).items())]
    return sum(p.numel() for p in network.parameters()), digest("\n".join(texts + matrices))


def weights(name):
    torch.manual_seed(0)
    return sums(*(tensor for _, tensor in named_tensors(build(name))))


@torch.no_grad()
def outputs(name):
    """Return the sums of a dense and of a routed output, of a network of random weights."""
    probe = Probe(name)
    network, inputs = probe.build(), probe.inputs()
    routed = network(*inputs, routes=[probe.route(network, 2, -4, rate=0.5)])
    return sums(network(*inputs)), sums(routed)


def measure(name):
    count, found = shapes(name)
    figures = {"parameters": count, "shapes": found}
    if count < LARGEST:
        figures["weights"] = weights(name)
    if name.endswith("_tiny"):
        figures["dense"], figures["routed"] = outputs(name)
    return figures


RECORDED = json.loads(FILE.read_text()) if FILE.exists() else {}
NAMES = [  # of ours; `diffusers` has no size of its own
    name
    for name in list_backbones()
    if get_entry("backbone", name).target.__module__.startswith("backbones.")
    and name != "diffusers"
]
DRAWN = [
    pytest.param(name, marks=() if name.endswith("_tiny") else pytest.mark.nightly)
    for name in NAMES
    if "weights" in RECORDED.get(name, ())
]


@pytest.mark.parametrize("name", NAMES)
def test_names_shapes_and_matrices_are_those_recorded(name):
    recorded = RECORDED[name]
    assert shapes(name) == (recorded["parameters"], recorded["shapes"])


@pytest.mark.parametrize("name", DRAWN)
def test_weights_are_those_recorded(name):
    assert near(weights(name), RECORDED[name]["weights"], 1e-6)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("_tiny")])
def test_outputs_are_those_recorded(name):
    dense, routed = outputs(name)
    assert near(dense, RECORDED[name]["dense"], 1e-5)
    assert near(routed, RECORDED[name]["routed"], 1e-5)


def main():
    figures, given = {}, sys.argv[1:] or NAMES
    for name in NAMES:
        figures |= {name: measure(name)} if name in given else {name: RECORDED[name]}
    lines = (f" {json.dumps(name)}: {json.dumps(of)}" for name, of in figures.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
