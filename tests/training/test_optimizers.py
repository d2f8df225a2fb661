"""AdamW and Muon: what each parameter is trained by, split matrices, and how they resume."""

import io

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tread_zoo import create_backbone
from tread_zoo.config import make_config
from tread_zoo.registry import available, create

ARCHITECTURES = available("backbone", "*_tiny")
WEIGHT_DECAY, BETAS = 0.1, (0.9, 0.95)
OPTIONS = {
    "learning_rate": 0.02, "adamw_learning_rate": 0.01, "weight_decay": WEIGHT_DECAY,
    "beta1": BETAS[0], "beta2": BETAS[1],
}  # fmt: skip
WHOLE = StateDictOptions(full_state_dict=True)


def make_network(name="dit_tiny", depth=2, **sizes):
    if name == "rwkv_tiny":
        depth += 1
    torch.manual_seed(0)
    return create_backbone(name, input_size=4, in_channels=1, num_classes=3, depth=depth, **sizes)


def set_gradients(network, step):
    """Give every parameter the gradient that it has at `step`."""
    generator = torch.Generator().manual_seed(step)
    for parameter in network.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def take_steps(network, optimizer, steps):
    for step in steps:
        set_gradients(network, step)
        optimizer.step()


def parts_of(tensor, sizes):
    return [part.clone() for part in tensor.detach().flatten(0, -2).split(sizes)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hidden_matrices_are_whole_parameters_of_the_blocks(name):
    network = make_network(name)
    parameters, matrices = dict(network.named_parameters()), network.hidden_matrices()
    for key, sizes in matrices.items():
        assert key.startswith("blocks.")
        assert sum(sizes) == parameters[key].flatten(0, -2).shape[0]
        assert min(sizes) > 0
    taken = sum(parameters[key].numel() for key in matrices)
    assert taken > 0.5 * sum(p.numel() for p in network.blocks.parameters())


@pytest.mark.parametrize(
    ("name", "part", "sizes"),
    [
        ("dit_tiny", "qkv.weight", (64, 64, 64)),
        ("dit_tiny", "modulation.weight", 6 * (64,)),
        ("dit_tiny", "mlp.fc1.weight", (256,)),
        ("uvit_tiny", "qkv.weight", (74, 74, 74)),
        ("rwkv_tiny", "modulation.weight", 6 * (60,)),
        ("mamba_tiny", "mixer.in_proj.weight", (176, 176)),  # u, z
        ("mamba_tiny", "mixer.select", 2 * (6, 4, 4)),  # step, B, C of each direction
        ("mamba2_tiny", "mixer.in_proj.weight", (120, 120, 16, 16, 3)),  # z, u, B, C, step
        ("zigma_tiny", "mixer.select.weight", (6, 4, 4)),  # step, B, C
    ],
)
def test_fused_matrices_are_split_into_what_they_fuse(name, part, sizes):
    network = make_network(name)
    assert network.hidden_matrices()[f"blocks.1.{part}"] == sizes


NEVER = (
    "embed", "positions", "final", "linear", "conv", "bias", "norm", "A_log", ".D", "step_weight",
    "decay", "bonus", "own",
)  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_embeddings_heads_and_scan_parameters_are_no_hidden_matrices(name):
    matrices = [key.replace(".decay.", ".lora.") for key in make_network(name).hidden_matrices()]
    assert not [key for key in matrices if any(word in key for word in NEVER)]


@pytest.mark.parametrize("name", ["dit_tiny", "mamba_tiny", "mamba2_tiny"])
@pytest.mark.parametrize("adjust_lr_fn", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_part_moves_as_a_parameter_of_its_own(name, adjust_lr_fn, nesterov):
    network = make_network(name)
    matrices, parameters = network.hidden_matrices(), dict(network.named_parameters())
    parts = {k: parts_of(parameters[k], sizes) for k, sizes in matrices.items()}
    rest = {k: p.detach().clone() for k, p in parameters.items() if k not in matrices}
    muon = torch.optim.Muon(
        [part for each in parts.values() for part in each],
        lr=0.02, weight_decay=WEIGHT_DECAY, nesterov=nesterov, adjust_lr_fn=adjust_lr_fn,
    )  # fmt: skip
    adamw = torch.optim.AdamW(
        rest.values(), lr=0.01, weight_decay=WEIGHT_DECAY, betas=BETAS, fused=True
    )
    options = {**OPTIONS, "adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov}
    optimizer = create("optimizer", "muon", **options).build(network)
    for step in range(3):
        set_gradients(network, step)
        for key, each in parts.items():
            gradients = parts_of(parameters[key].grad, matrices[key])
            for part, gradient in zip(each, gradients, strict=True):
                part.grad = gradient
        for key, tensor in rest.items():
            tensor.grad = parameters[key].grad.clone()
        optimizer.step()
        muon.step()
        adamw.step()
    for key, each in parts.items():
        assert torch.equal(torch.cat(each), parameters[key].flatten(0, -2)), key
    for key, tensor in rest.items():
        assert torch.equal(tensor, parameters[key]), key


def test_the_rates_are_those_of_the_groups():
    network = make_network()
    before = [p.detach().clone() for p in network.parameters()]
    optimizer = create("optimizer", "muon", **OPTIONS).build(network)
    assert {group["lr"] for group in optimizer.param_groups} == {0.02, 0.01}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    take_steps(network, optimizer, range(2))
    assert all(torch.equal(*pair) for pair in zip(before, network.parameters(), strict=True))


def test_adamw_takes_the_rate_of_muon_unless_it_has_its_own():
    config = make_config(backbone="dit", optimizer={"name": "muon", "ns_steps": 4}).optimizer
    assert config["learning_rate"] == 1.2e-2
    optimizer = create("optimizer", config).build(make_network())
    assert {group["lr"] for group in optimizer.param_groups} == {1.2e-2}


@pytest.mark.parametrize(
    "options", [{"momentum": 1.0}, {"adjust_lr_fn": "none"}, {"ns_steps": 0}, {"beta2": 1.0}]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        make_config(optimizer={"name": "muon", **options})


def test_muon_needs_hidden_matrices():
    network = make_network()
    network.hidden_matrices = dict
    with pytest.raises(ValueError, match="hidden_matrices"):
        create("optimizer", "muon", **OPTIONS).build(network)


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def torch_state(network, optimizer, state=None):
    if state is None:
        return optimizer.state_dict()
    return optimizer.load_state_dict(state)


def named_state(network, optimizer, state=None):
    if state is None:
        return get_optimizer_state_dict(network, optimizer, options=WHOLE)
    return set_optimizer_state_dict(network, optimizer, state, options=WHOLE)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("exchange", [torch_state, named_state])
def test_a_resumed_optimizer_goes_on_to_the_bit(name, exchange):
    unbroken, first, second = (make_network("mamba_tiny") for _ in range(3))
    part = create("optimizer", name, learning_rate=0.02, weight_decay=WEIGHT_DECAY)
    take_steps(unbroken, part.build(unbroken), range(4))
    optimizer = part.build(first)
    take_steps(first, optimizer, range(2))
    state = through_a_file(exchange(first, optimizer))
    second.load_state_dict(first.state_dict())
    resumed = part.build(second)
    exchange(second, resumed, state)
    take_steps(second, resumed, range(2, 4))
    for one, other in zip(unbroken.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
