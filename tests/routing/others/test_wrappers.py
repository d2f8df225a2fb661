"""Routed networks within what users wrap them in: peft, accelerate, DDP, compiled blocks."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytest.importorskip("diffusers")

from tests.routing.others.cases import CASES, build, run
from tread_zoo import enable_routing

SD3, FLUX = "SD3Transformer2DModel", "FluxTransformer2DModel"
TARGETS = ["to_q", "to_k", "to_v"]


def lora(network):
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    config = peft.LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False)
    return peft.get_peft_model(network, config)


def weigh(out):
    return out.square().sum()


@pytest.mark.parametrize("first", ["lora", "routes"])
@pytest.mark.parametrize("name", [SD3, FLUX])
def test_lora_before_and_after(name, first):
    """Only adapters learn, and they get the gradients of the other order."""
    results = []
    for order in (first, "both"):
        network = build(name)
        if order == "routes":
            routes = enable_routing(network, start=1, end=3)
            network = lora(network)
        else:
            network = lora(network)
            routes = enable_routing(network, start=1, end=3)
        network.train()
        routes.set_step(1, 4)
        out = run(network, CASES[name].inputs(2))
        weigh(out).backward()
        grads = {k: p.grad for k, p in network.named_parameters() if p.grad is not None}
        assert grads
        assert all("lora" in key for key in grads)
        results.append((out, grads))
    assert torch.equal(results[0][0], results[1][0])
    for key, grad in results[0][1].items():
        assert torch.equal(grad, results[1][1][key])


def test_adapters_of_diffusers_itself():
    peft = pytest.importorskip("peft")
    network = build(SD3)
    routes = enable_routing(network, start=1, end=3)
    network.add_adapter(peft.LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False))
    network.train()
    weigh(run(network, CASES[SD3].inputs(2))).backward()
    assert routes.drawn
    assert any("lora" in k and p.grad is not None for k, p in network.named_parameters())


def test_accelerate_prepares_saves_and_resumes(tmp_path):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    network = build(SD3)
    routes = enable_routing(network, start=1, end=3)
    network = accelerator.prepare(network)
    accelerator.register_for_checkpointing(routes)
    inputs = CASES[SD3].inputs(2)
    accelerator.backward(weigh(run(network, inputs)))
    accelerator.save_state(str(tmp_path))
    expected = run(network, inputs)
    run(network, inputs)
    accelerator.load_state(str(tmp_path))
    assert torch.equal(run(network, inputs), expected)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [FLUX, *(f"{n}DModel" for n in ("LTXVideoTransformer3", "QwenImageTransformer2"))]
)
def test_compiled_blocks_have_no_break(name):
    network = build(name)
    routes = enable_routing(network, start=1, end=3)
    inputs = CASES[name].inputs(2)
    outs = []
    for compiled in (False, True):
        if compiled:
            torch.compiler.reset()
            network.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        routes.set_step(1, 4)
        out = run(network, inputs)
        network.zero_grad()
        weigh(out).backward()
        grads = {k: p.grad.clone() for k, p in network.named_parameters() if p.grad is not None}
        outs.append((out, grads))
    torch.testing.assert_close(*(out for out, _ in outs), atol=1e-4, rtol=1e-4)
    for key, grad in outs[0][1].items():
        assert (grad - outs[1][1][key]).norm() <= 1e-3 * grad.norm() + 1e-5, key


def test_a_network_compiled_as_a_whole_says_so():
    network = build("DiTTransformer2DModel")
    enable_routing(network, start=1, end=3)
    torch.compiler.reset()
    whole = torch.compile(network, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="compile"):
        run(whole, CASES["DiTTransformer2DModel"].inputs(2))


def one_of_two(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    network = build(SD3)
    routes = enable_routing(network, start=1, end=3)
    whole = torch.nn.parallel.DistributedDataParallel(network)
    inputs = {k: v[rank : rank + 1] for k, v in CASES[SD3].inputs(2).items()}
    routes.set_step(1, 4)
    weigh(run(whole, inputs)).backward()
    grads = [p.grad * 2 for p in network.parameters() if p.grad is not None]
    torch.save((routes.drawn[0].ids, grads), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.nightly
def test_two_processes_draw_and_learn_as_one(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(one_of_two, (port, str(tmp_path)), nprocs=2)
    (first, grads), (second, same) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    network = build(SD3)
    routes = enable_routing(network, start=1, end=3)
    routes.set_step(1, 4)
    weigh(run(network, CASES[SD3].inputs(2))).backward()
    assert torch.equal(routes.drawn[0].ids, torch.cat([first, second]))
    expected = [p.grad for p in network.parameters() if p.grad is not None]
    for one, two, three in zip(grads, same, expected, strict=True):
        assert torch.equal(one, two)
        assert (one - three).norm() <= 1e-4 * three.norm() + 1e-5
