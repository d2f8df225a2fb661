"""The doctor tells what is there and what computes wrongly."""

import dataclasses

import pytest
import torch

from tread_zoo import available, doctor
from tread_zoo.kernels import dispatch, get_forms

CPU = torch.device("cpu")


@pytest.mark.slow
def test_every_operation_and_small_backbone_is_tested_and_fine():
    checks = doctor.check_kernels(CPU) + doctor.check_backbones(CPU)
    assert all(fine for _, fine in checks), checks
    names = " ".join(words for words, _ in checks)
    assert all(name in names for name in (*get_forms(), *available("backbone", "*_tiny")))


def test_a_form_that_computes_wrongly_fails(monkeypatch):
    right = dispatch.get_implementation("attention", "torch").run
    wrong = dispatch.Implementation("torch", lambda *a: 1.1 * right(*a))
    forms = (wrong, dispatch.get_implementation("attention", "naive"))
    operation = dataclasses.replace(dispatch.OPERATIONS["attention"], implementations=forms)
    monkeypatch.setitem(dispatch.OPERATIONS, "attention", operation)
    (fine,) = [ok for words, ok in doctor.check_kernels(CPU) if words.startswith("attention")]
    assert not fine


@pytest.mark.slow
def test_the_table_of_backbones_has_each_with_less_work_where_it_routes():
    lines = doctor.list_sizes("[dm]*_tiny", input_size=8, in_channels=1, num_classes=10)
    rows = [line.split() for line in lines[1:]]
    assert [row[0] for row in rows] == available("backbone", "[dm]*_tiny")
    assert all(float(row[3]) < float(row[2]) for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_self_test_is_fine_on_a_gpu():
    device = torch.device("cuda")
    assert all(fine for _, fine in doctor.check_kernels(device) + doctor.check_backbones(device))
