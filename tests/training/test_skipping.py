"""A step whose loss or gradient is not finite changes nothing, and too many of them end the run."""

import copy
import json
import math
import multiprocessing
import os

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from tread_zoo.training import loop as module
from tread_zoo.training.checkpoints import find_checkpoint
from tread_zoo.training.reporting import Reporter
from tread_zoo.training.skipping import StepGuard, gradient_norm, spoil


@pytest.fixture
def plan_losses(monkeypatch):
    """Multiply the loss of given micro-steps; leave the scoring out."""

    def arrange(factors):
        original, count = module.loss_of, iter(range(1000))
        monkeypatch.setattr(
            module, "loss_of", lambda *a: original(*a) * factors.get(next(count), 1.0)
        )
        monkeypatch.setattr(Reporter, "finish", lambda *a: None)

    return arrange


def tensors(folder, step):
    path = folder / "checkpoints" / f"step_{step:08d}"
    return {
        f"{part}.{name}": value
        for part in ("model", "ema", "optimizer")
        for name, value in load_file(path / f"{part}.safetensors").items()
    }


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


EVERY = ["training.checkpoint_every=1", "training.keep_checkpoints=9", "training.log_every=1"]


@pytest.mark.parametrize(
    "options",
    [
        ["training.gradient_accumulation_steps=2"],
        [
            "training.gradient_accumulation_steps=2",
            "training.max_grad_norm=0",
            "training.precision=bf16",
        ],
    ],
)
def test_one_bad_micro_step_spoils_its_step_and_no_other(run, plan_losses, options):
    plan_losses({5: math.nan})  # the second micro-step of the third step
    folder = run("run", *EVERY, *options, "training.num_steps=4")
    states = {step: tensors(folder, step) for step in (1, 2, 3, 4)}
    assert same(states[2], states[3])
    assert not any(
        torch.equal(states[1][n], states[2][n]) for n in states[1] if n.endswith(".step")
    )
    assert not same(states[3], states[4])
    assert all(value.isfinite().all() for value in states[4].values())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert [row.get("skipped_steps") for row in rows if "learning_rate" in row] == [
        None, None, 1, 1,
    ]  # fmt: skip
    assert all(math.isfinite(value) for row in rows for value in row.values())


def test_too_many_in_a_row_end_the_run_and_the_last_good_checkpoint_stays(
    run, plan_losses, tmp_path
):
    plan_losses(dict.fromkeys(range(3, 99), math.inf) | {1: math.nan})
    options = [
        "training.checkpoint_every=1", "training.keep_checkpoints=1", "training.log_every=1",
        "training.num_steps=50", "training.max_skipped_in_a_row=4",
    ]  # fmt: skip
    with pytest.raises(FloatingPointError, match=r"4 steps in a row.*=4\).*learning_rate"):
        run("run", *options)
    folder = tmp_path / "run"
    kept = [path.name for path in sorted((folder / "checkpoints").iterdir())]
    assert kept == ["step_00000003", "step_00000006"]
    assert same(tensors(folder, 3), tensors(folder, 6))
    meta = find_checkpoint(folder).meta["skipped_steps"]
    assert meta == {"total": 4, "in_a_row": 3, "since_last": 1}
    plan_losses({0: math.nan})
    with pytest.raises(FloatingPointError, match=r"seen at step 7"):  # the count goes on
        run("run", *options, "resume=latest")


def small(fused):
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    return network, torch.optim.AdamW(network.parameters(), lr=0.1, fused=fused)


def one_step(network, optimizer, guard, loss_of, scaler=None):
    loss = loss_of(network(torch.linspace(-1, 1, 20).view(4, 5)).square().mean())
    guard.see(loss)
    loss = spoil(loss)
    (scaler.scale(loss) if scaler else loss).backward()
    if scaler:
        scaler.unscale_(optimizer)
    guard.decide(gradient_norm(network.parameters()))
    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad()


def overflow(loss):
    return loss * 1e30 * 1e30


def jump(loss):
    """Infinite, with a finite gradient."""
    return loss + (loss.detach() * math.inf)


def bad_gradient(loss):
    """Finite, with a gradient that is not: d sqrt(x) at 0."""
    return loss + (loss * 0).sqrt()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bad", [overflow, jump, bad_gradient])
def test_with_and_without_the_fused_kernel(fused, bad):
    network, optimizer = small(fused)
    guard = StepGuard(optimizer, Accelerator(cpu=True), limit=2)
    one_step(network, optimizer, guard, lambda loss: loss)
    before = copy.deepcopy((network.state_dict(), optimizer.state_dict()["state"]))
    one_step(network, optimizer, guard, bad)
    assert guard.applied == 0
    assert same(before[0], network.state_dict())
    after = optimizer.state_dict()["state"]
    assert all(same(before[1][index], after[index]) for index in before[1])
    assert guard.check(2) == {"skipped_steps": 1}
    one_step(network, optimizer, guard, lambda loss: loss)
    assert guard.applied == 1
    assert not same(before[0], network.state_dict())
    assert guard.state() == {"total": 1, "in_a_row": 0, "since_last": 1}
    one_step(network, optimizer, guard, bad)
    guard.check(4)
    one_step(network, optimizer, guard, bad)
    one_step(network, optimizer, guard, lambda loss: loss)  # it was too late before this one
    with pytest.raises(FloatingPointError, match="2 steps in a row"):
        guard.check(6)


@pytest.mark.parametrize("fused", [True, False])
def test_steps_without_faults_are_those_of_plain_adamw_to_the_bit(fused):
    guarded, plain = small(fused), small(fused)
    guard = StepGuard(guarded[1], Accelerator(cpu=True), limit=2)
    for _ in range(5):
        one_step(*guarded, guard, lambda loss: loss)
        plain[0](torch.linspace(-1, 1, 20).view(4, 5)).square().mean().backward()
        plain[1].step()
        plain[1].zero_grad()
    assert same(guarded[0].state_dict(), plain[0].state_dict())


def test_overflows_of_half_precision_are_the_scalers_and_no_fault():
    network, optimizer = small(fused=True)
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    guard = StepGuard(optimizer, accelerator, limit=3)
    before = copy.deepcopy(network.state_dict())
    for _ in range(4):  # the loss is finite, its scaled gradient is not
        one_step(network, optimizer, guard, lambda loss: loss * 1e3, scaler)
        assert guard.applied == 0
    assert guard.check(4) == {}
    assert same(before, network.state_dict())
    assert scaler.get_scale() < 2.0**127
    for _ in range(3):
        one_step(network, optimizer, guard, overflow, scaler)
    assert same(before, network.state_dict())
    with pytest.raises(FloatingPointError, match="3 steps in a row"):
        guard.check(7)


def test_spoiling_leaves_finite_losses_alone_to_the_bit():
    x = torch.tensor(0.1, requires_grad=True)
    for value in (x * 3.3, x.square()):
        (expected,) = torch.autograd.grad(value, x, retain_graph=True)
        (given,) = torch.autograd.grad(spoil(value), x, retain_graph=True)
        assert torch.equal(spoil(value), value)
        assert torch.equal(given, expected)


def be_a_rank(rank, port, to_parent):
    """Step 0 is good, in step 1 the loss of rank 1 is nan; then the same with an fp16 scaler."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    accelerator = Accelerator(cpu=True)
    told = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=8.0)):
        network, optimizer = small(fused=True)
        model = torch.nn.parallel.DistributedDataParallel(network)
        accelerator.scaler = scaler
        guard = StepGuard(optimizer, accelerator, limit=9)
        one_step(model, optimizer, guard, lambda loss: loss * (1 + rank), scaler)
        before = copy.deepcopy((network.state_dict(), optimizer.state_dict()["state"]))
        one_step(model, optimizer, guard, overflow if rank else lambda loss: loss, scaler)
        moments = optimizer.state_dict()["state"]
        untouched = same(before[0], network.state_dict())
        untouched &= all(same(before[1][index], moments[index]) for index in moments)
        told.append((untouched, float(guard.applied), guard.state()))
        one_step(model, optimizer, guard, lambda loss: loss, scaler)
        told.append(bool(guard.applied) and not same(before[0], network.state_dict()))
    to_parent.put((rank, told))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_all_ranks_skip_what_one_cannot_compute(free_port):
    context = multiprocessing.get_context("spawn")
    to_parent = context.Queue()
    ranks = [context.Process(target=be_a_rank, args=(r, free_port, to_parent)) for r in range(2)]
    for process in ranks:
        process.start()
    told = dict(to_parent.get(timeout=100) for _ in ranks)
    for process in ranks:
        process.join(60)
    skipped = (True, 0.0, {"total": 1, "in_a_row": 1, "since_last": 1})
    assert told == {rank: [skipped, True, skipped, True] for rank in range(2)}
