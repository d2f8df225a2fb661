"""A fused form is compared with the torch form before it is trusted."""

import logging

import pytest
import torch

from tread_zoo.kernels import describe, dispatch, selective_scan, set_form
from tread_zoo.kernels.dispatch import Form

CPU = torch.device("cpu")


class Fused(Form):
    """A form of a package that seems to be there, and to need no GPU."""

    def unavailable(self, device):
        return None


def put(monkeypatch, run, op="selective_scan", **facts):
    """Put a fused form `fast` first, as it is in a new process."""
    forms = tuple(form for form in dispatch._FORMS[op] if form.name in ("torch", "naive"))
    monkeypatch.setitem(dispatch._FORMS, op, (Fused("fast", run, module="fast", **facts), *forms))
    monkeypatch.setattr(dispatch, "_REFUSED", {})
    monkeypatch.setattr(dispatch, "_CHOICE", dict.fromkeys(dispatch._FORMS, "auto"))
    return forms[0].run


def call():
    *args, segments = dispatch.get_example("selective_scan", CPU)
    return selective_scan(*args, segment_ids=segments)


def test_a_form_that_agrees_is_used(monkeypatch):
    calls = []
    truth = put(monkeypatch, lambda *args: calls.append(len(args)) or truth(*args))
    call()
    assert len(calls) == 2, "once compared, once used"
    call()
    assert len(calls) == 3, "compared at the first use alone"


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
    expected = truth(*dispatch.get_example("selective_scan", CPU))
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
    monkeypatch.setattr(dispatch, "import_problem", lambda module: None)
    set_form("selective_scan", "fast")
    with pytest.raises(ValueError, match="it differs"):
        call()


def test_the_comparison_leaves_no_trace_on_the_call_around_it(monkeypatch):
    """Not in the graph, not in what checkpointing counts, not under no_grad or autocast."""
    truth = put(monkeypatch, lambda *args: truth(*args))
    *args, _ = dispatch.get_example("selective_scan", CPU)
    for x in args:
        x.requires_grad_()
    y = torch.utils.checkpoint.checkpoint(selective_scan, *args, use_reentrant=False)
    y.sum().backward()
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        monkeypatch.setattr(dispatch, "_REFUSED", {})
        with context:
            call()
        assert set(dispatch._REFUSED.values()) == {None}
