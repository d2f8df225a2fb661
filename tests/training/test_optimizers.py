"""AdamW and Muon: what each parameter is trained by, split matrices, and how they resume."""

import pytest
import torch

from tread_zoo import create_backbone
from tread_zoo.config import make_config
from tread_zoo.registry import available, create
from tread_zoo.training.optimizers import hidden_matrices

ARCHITECTURES = available("backbone", "*_tiny")
WEIGHT_DECAY, BETAS = 0.1, (0.9, 0.95)
RATES = ("A_log", "D", "step_bias")  # of scans, which are not decayed
OPTIONS = {
    "learning_rate": 0.02, "adamw_learning_rate": 0.01, "weight_decay": WEIGHT_DECAY,
    "beta1": BETAS[0], "beta2": BETAS[1],
}  # fmt: skip


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


def parts_of(tensor, sizes):
    return [part.clone() for part in tensor.detach().flatten(0, -2).split(sizes)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hidden_matrices_are_whole_parameters_of_the_blocks(name):
    """Of their layers' weights: no convolution, no bias, no parameter of a scan."""
    network = make_network(name)
    parameters, matrices = dict(network.named_parameters()), hidden_matrices(network)
    for key, sizes in matrices.items():
        assert key.startswith("blocks.")
        assert not any(word in key for word in ("conv", "bias", "norm", "A_log", ".D", "bonus"))
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
    assert hidden_matrices(network)[f"blocks.1.{part}"] == sizes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "adjust_lr_fn", "nesterov"),
    [
        ("dit_tiny", "match_rms_adamw", True),
        ("mamba_tiny", "original", False),
        ("mamba2_tiny", "match_rms_adamw", False),
    ],
)
@pytest.mark.parametrize("stacked", [2**24, 2**15])
def test_a_part_moves_as_a_parameter_of_its_own(name, adjust_lr_fn, nesterov, stacked, monkeypatch):
    """Also where one stack does not hold all matrices of a shape."""
    monkeypatch.setattr("tread_zoo.training.optimizers.STACKED", stacked)
    network = make_network(name)
    matrices, parameters = hidden_matrices(network), dict(network.named_parameters())
    parts = {k: parts_of(parameters[k], sizes) for k, sizes in matrices.items()}
    rest = {k: p.detach().clone() for k, p in parameters.items() if k not in matrices}
    muon = torch.optim.Muon(
        [part for each in parts.values() for part in each],
        lr=0.02, weight_decay=WEIGHT_DECAY, nesterov=nesterov, adjust_lr_fn=adjust_lr_fn,
    )  # fmt: skip
    decayed = [tensor for k, tensor in rest.items() if k.rpartition(".")[2] not in RATES]
    others = [tensor for k, tensor in rest.items() if k.rpartition(".")[2] in RATES]
    adamw = torch.optim.AdamW(
        [{"params": others, "weight_decay": 0.0}, {"params": decayed}],
        lr=0.01, weight_decay=WEIGHT_DECAY, betas=BETAS, fused=True,
    )  # fmt: skip
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
    for key, each in parts.items():  # up to a rounding of bfloat16 in a move of 4e-3
        whole = parameters[key].detach().flatten(0, -2)
        torch.testing.assert_close(whole, torch.cat(each), rtol=0, atol=1e-4)
    for key, tensor in rest.items():
        assert torch.equal(tensor, parameters[key]), key


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("name", ["dit_tiny", "mamba_tiny", "mamba2_tiny", "kda_tiny"])
def test_weight_decay_leaves_out_the_rates_of_scans_and_vectors_if_asked(optimizer, name):
    """Where the gradient is zero, weight decay alone moves parameters."""

    def unmoved(decayed):
        network = make_network(name)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.fill_(1).grad = torch.zeros_like(parameter)
        options = {"learning_rate": 0.02, "weight_decay": WEIGHT_DECAY, "weight_decay_on": decayed}
        create("optimizer", optimizer, **options).build(network).step()
        return {key for key, p in network.named_parameters() if torch.equal(p, torch.ones_like(p))}

    rates = {
        key for key, _ in make_network(name).named_parameters() if key.rpartition(".")[2] in RATES
    }
    assert unmoved("all") == rates
    network = dict(make_network(name).named_parameters())
    still, moved = unmoved("matrices"), network.keys() - unmoved("matrices")
    assert rates < still
    assert {key for key, p in network.items() if p.ndim < 2} <= still
    assert "label_embed.table.weight" in still
    assert moved >= hidden_matrices(make_network(name)).keys() | {"final.linear.weight"}


def test_adamw_takes_the_rate_of_muon_unless_it_has_its_own():
    config = make_config(backbone="dit", optimizer={"name": "muon", "ns_steps": 4}).optimizer
    assert config["learning_rate"] == 1.2e-2
    optimizer = create("optimizer", config).build(make_network())
    assert {group["lr"] for group in optimizer.param_groups} == {1.2e-2}


def test_muon_needs_hidden_matrices():
    network = make_network()
    network.blocks = torch.nn.ModuleList()
    with pytest.raises(ValueError, match="hidden matrices"):
        create("optimizer", "muon", **OPTIONS).build(network)
