"""A fused form is compared with the torch form before it is trusted."""

import logging

import pytest
import torch

from tread_zoo.kernels import describe, dispatch, selective_scan, set_form
from tread_zoo.kernels.dispatch import Implementation, get_example, get_implementation
from tread_zoo.kernels.packages import LibraryFunction

CPU = torch.device("cpu")


class Fused(Implementation):
    """A fused form of an installed package that needs no GPU."""

    def unavailable(self, device):
        return None


def put(monkeypatch, run, op="selective_scan", **facts):
    """Put a fused form `fast` first, as it is in a new process; return the torch form."""
    plain = tuple(get_implementation(op, name) for name in ("torch", "naive"))
    fast = Fused("fast", run, LibraryFunction("torch", "add", "pip install torch"), **facts)
    before = dispatch.OPERATIONS[op]
    operation = dispatch.Operation((fast, *plain), before.example, before.half)
    monkeypatch.setitem(dispatch.OPERATIONS, op, operation)
    return plain[0].run


def call(dtype=torch.float32):
    *args, segments = get_example("selective_scan", CPU, dtype)
    return selective_scan(*args, segment_ids=segments)


def test_a_form_that_agrees_is_used(monkeypatch):
    calls = []
    truth = put(monkeypatch, lambda *args: calls.append(len(args)) or truth(*args))
    call()
    assert len(calls) == 2, "once compared, once used"
    call()
    assert len(calls) == 3, "compared at the first use alone"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_compared_in_the_precision_of_the_call(dtype, monkeypatch, caplog):
    """Right in float32 and wrong in bfloat16, as a kernel with a state of the inputs' type is."""
    given = []

    def run(*args):
        given.append([x.dtype for x in args if x.is_floating_point()])
        return truth(*args) * (1 if args[0].dtype == torch.float32 else 1.1)

    truth = put(monkeypatch, run)
    call(dtype)
    full, half = torch.float32, dtype
    assert given[0] == [half, full, full, half, half, full, full]  # u, B, C alone
    assert ("is refused" in caplog.text) == (dtype == torch.bfloat16)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda y, args: y * 1.01, id="the output"),
        pytest.param(lambda y, args: y + (args[1] - args[1].detach()).sum(), id="a gradient"),
        pytest.param(lambda y, args: y * float("nan"), id="not finite"),
    ],
)
def test_a_form_that_differs_is_refused_and_said_so_once(monkeypatch, caplog, wrong):
    truth = put(monkeypatch, lambda *args: wrong(truth(*args), args))
    expected = truth(*get_example("selective_scan", CPU))
    with caplog.at_level(logging.WARNING):
        assert torch.equal(call(), expected)
        call()
    (record,) = caplog.records
    assert "selective_scan: fast is refused" in record.message
    assert any("fast not used: it differs" in line for line in describe(CPU))


def test_a_form_that_fails_is_refused_with_its_error(monkeypatch, caplog):
    def broken(*args):
        raise RuntimeError("no kernel image is available")

    put(monkeypatch, broken)
    call()
    assert "no kernel image is available" in caplog.text


def test_a_refused_form_set_by_hand_raises(monkeypatch):
    truth = put(monkeypatch, lambda *args: 2 * truth(*args))
    set_form("selective_scan", "fast")
    with pytest.raises(ValueError, match="it differs"):
        call()


def test_the_comparison_leaves_no_trace_on_the_call_around_it(monkeypatch):
    """Not in the graph, not in what checkpointing counts, not under no_grad or autocast."""
    truth = put(monkeypatch, lambda *args: truth(*args))
    *args, _, _ = get_example("selective_scan", CPU)
    for x in args:
        x.requires_grad_()
    y = torch.utils.checkpoint.checkpoint(selective_scan, *args, use_reentrant=False)
    y.sum().backward()
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        put(monkeypatch, lambda *args: truth(*args))
        with context:
            call()
        assert not any(" refused" in line for line in describe(CPU))
