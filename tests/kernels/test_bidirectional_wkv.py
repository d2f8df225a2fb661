"""The bidirectional WKV: torch form equals the formula in output and gradients, near and far.

The torch form has two ways, one for inputs of a bounded spread; a test that is given `way` runs
both and fails if another one ran.
"""

import math
from collections.abc import Iterator
from importlib import import_module

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tread_zoo.kernels import bidirectional_wkv
from tread_zoo.kernels.bidirectional_wkv import one_maximum, running_maximum
from tread_zoo.kernels.bidirectional_wkv.naive import bidirectional_wkv_naive
from tread_zoo.kernels.bidirectional_wkv.torch_form import bidirectional_wkv_torch

torch_form = import_module("tread_zoo.kernels.bidirectional_wkv.torch_form")

SHAPES = [(1, 2, 4), (3, 7, 5), (2, 16, 3), (2, 33, 8), (16, 18, 24)]  # B, L, C
ONE, RUNNING = "one_maximum", "running_maximum"


@pytest.fixture
def taken(monkeypatch) -> list[str]:
    """Return a list to which every block of rows adds the way that it takes."""
    names: list[str] = []

    def watched(name, function):
        return lambda *args: (names.append(name), function(*args))[1]

    for name, module in ((ONE, one_maximum), (RUNNING, running_maximum)):
        for verb in ("forward", "backward"):
            monkeypatch.setattr(module, verb, watched(name, getattr(module, verb)))
    return names


@pytest.fixture(params=[ONE, RUNNING])
def way(request, taken, monkeypatch) -> Iterator[str]:
    """Have the torch form go one way; the inputs must be such that they may go either."""
    if request.param == RUNNING:
        monkeypatch.setattr(one_maximum, "SPREAD", -1.0)
    yield request.param
    assert set(taken) == {request.param}


def make_inputs(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float64,
    *,
    device: str = "cpu",
    reach: float = 5.0,
    keys: float = 1.0,
) -> list[Tensor]:
    """Return k in ±2 keys or so, v, w up to `reach` and u, the same numbers for each dtype."""
    batch, length, channels = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    k = keys * normal(batch, length, channels).clamp(-2, 2)
    w = reach * torch.rand(channels, generator=generator) + 1e-3 * reach
    values = [k, normal(batch, length, channels), w, normal(channels)]
    return [x.to(device, dtype).requires_grad_() for x in values]


def make_positions(batch: int, length: int, whole: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(batch, whole, generator=generator)
    return scores.argsort(dim=1)[:, :length].sort(dim=1).values


def run(form, inputs: list[Tensor], positions: Tensor | None, length: int) -> list[Tensor]:
    """Return the output and the gradient of every input for one fixed gradient of the output."""
    out = form(*inputs, positions, length)
    generator = torch.Generator().manual_seed(2)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def relative_error(ours: Tensor, truth: Tensor) -> float:
    return ((ours.double() - truth).norm() / truth.norm().clamp_min(1e-6)).item()


def test_formula_by_hand() -> None:
    k, v, w, u = (x.detach() for x in make_inputs((1, 4, 2)))
    positions, length = torch.tensor([[1, 2, 5, 9]]), 12
    out = bidirectional_wkv(k, v, w, u, positions, length)
    for t, here in enumerate(positions[0].tolist()):
        for c in range(2):
            top = bottom = 0.0
            for i, there in enumerate(positions[0].tolist()):
                decay = -(abs(here - there) - 1) * w[c].item() / length
                weight = math.exp(k[0, i, c].item() + (u[c].item() if i == t else decay))
                top += weight * v[0, i, c].item()
                bottom += weight
            assert out[0, t, c].item() == pytest.approx(top / bottom, rel=1e-12)


@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_torch_form_equals_formula(shape, dtype, subset, way) -> None:
    batch, num_tokens, _ = shape
    length = 3 * num_tokens if subset else num_tokens
    positions = make_positions(batch, num_tokens, length) if subset else None
    truth = run(bidirectional_wkv_naive, make_inputs(shape), positions, length)
    ours = run(bidirectional_wkv_torch, make_inputs(shape, dtype), positions, length)
    bound = 1e-12 if dtype == torch.float64 else 5e-6
    assert ours[0].dtype == dtype
    for mine, true in zip(ours, truth, strict=True):
        assert relative_error(mine, true) <= bound


@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize("way", [ONE, RUNNING], indirect=True)
@pytest.mark.parametrize(
    ("reach", "keys"), [(0, 1), (1e-3, 8), (3, 8), (-3, 7), (1000, 8), (1e6, 8), (1e6, 1)]
)
def test_long_decays_stay_exact(reach, keys, subset, way) -> None:
    """Log-decays that sum to -1000 and more, none at all, and growth, with keys of ±16."""
    check_exactness(reach, keys, subset)


@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize(
    ("reach", "keys"), [(0, 25), (1e-3, 25), (3, 25), (-3, 25), (1000, 25), (1e6, 25), (-25, 7)]
)
def test_large_keys_stay_exact(reach, keys, subset, taken) -> None:
    """Keys of ±50, or of ±14 and growth by e^25, where one maximum a channel would not do."""
    check_exactness(reach, keys, subset)
    assert set(taken) == {RUNNING}


def check_exactness(reach: float, keys: float, subset: bool) -> None:
    shape, length = (2, 61, 16), 256 if subset else 61  # no whole number of chunks
    positions = make_positions(2, 61, 256) if subset else None
    exact = make_inputs(shape, reach=reach, keys=keys)
    truth = run(bidirectional_wkv_naive, exact, positions, length)
    inputs = make_inputs(shape, torch.float32, reach=reach, keys=keys)
    ours = run(bidirectional_wkv_torch, inputs, positions, length)
    assert (ours[0] - truth[0]).abs().max() <= 2e-5
    for mine, true in zip(ours[1:], truth[1:], strict=True):
        assert mine.isfinite().all()
        assert relative_error(mine, true) <= 1e-5


@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize(
    ("keys", "bonus", "decay"),
    [(1, 0, 2), (0, 1, 2), (0, -1, 2), (0.5, -0.2, -0.3), (0.2, -0.5, -0.3)],
)
def test_both_ways_are_exact_up_to_the_bound(keys, bonus, decay, subset, taken, monkeypatch):
    """The spread of one channel is all of `SPREAD`, shared by keys, u and a negative w."""
    shape, length = (2, 40, 6), 90 if subset else 40
    positions = make_positions(2, 40, 90) if subset else None
    exact = [x.detach() for x in make_inputs(shape)]
    share = torch.linspace(0.1, 1, 6, dtype=torch.float64) * one_maximum.SPREAD * (1 - 1e-5)
    exact[0].uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(3))
    exact[0][:, 3], exact[0][:, 31] = -0.5, 0.5
    exact[0].mul_(keys * share)
    exact[2], exact[3] = decay * share, bonus * share
    inputs = [x.float().requires_grad_() for x in exact]
    truth = run(bidirectional_wkv_naive, [x.requires_grad_() for x in exact], positions, length)
    results = [run(bidirectional_wkv_torch, inputs, positions, length)]
    assert set(taken) == {ONE}
    monkeypatch.setattr(one_maximum, "SPREAD", one_maximum.SPREAD * (1 - 2e-5))
    results.append(run(bidirectional_wkv_torch, inputs, positions, length))
    assert set(taken[2:]) == {RUNNING}
    for ours in results:
        for mine, true in zip(ours, truth, strict=True):
            assert relative_error(mine, true) <= 1e-5


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_gradients_of_any_size_are_exact_up_to_the_bound(scale, taken) -> None:
    """1/D is up to e^40 there; a loss may be scaled, and a gradient small."""
    exact = [x.detach() for x in make_inputs((2, 40, 6))]
    exact[0] = torch.linspace(-20, 19.9, 40, dtype=torch.float64).view(1, 40, 1).expand(2, 40, 6)
    exact[3].zero_()
    inputs = [x.float().requires_grad_() for x in exact]
    exact = [x.requires_grad_() for x in exact]
    truth = run(lambda *args: scale * bidirectional_wkv_naive(*args), exact, None, 40)
    ours = run(lambda *args: scale * bidirectional_wkv_torch(*args), inputs, None, 40)
    for mine, true in zip(ours, truth, strict=True):
        assert relative_error(mine / scale, true / scale) <= 1e-5
    assert set(taken) == {ONE}


def test_each_block_of_rows_takes_its_own_way(taken, monkeypatch) -> None:
    monkeypatch.setattr(torch_form, "BLOCK_VALUES", 2 * 7 * 4)
    inputs = make_inputs((6, 7, 4))
    with torch.no_grad():
        inputs[0][2, 1, 3] = 60.0  # of the second block of two rows
    truth = run(bidirectional_wkv_naive, inputs, None, 7)
    for mine, true in zip(run(bidirectional_wkv_torch, inputs, None, 7), truth, strict=True):
        torch.testing.assert_close(mine, true)
    assert taken == [ONE, RUNNING, ONE] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_key_that_is_no_number_is_seen(value, taken) -> None:
    k, v, w, u = (x.detach() for x in make_inputs((1, 5, 2), torch.float32))
    k[0, 2, 1] = value
    out = bidirectional_wkv(k, v, w, u)
    assert taken == [RUNNING]
    assert out[..., 0].isfinite().all()
    assert out[..., 1].isnan().all()


def test_bar_shape_in_float32_is_as_exact_as_promised(way) -> None:
    shape = (1, 256, 48)
    truth = run(bidirectional_wkv_naive, make_inputs(shape, reach=30), None, 256)
    ours = run(bidirectional_wkv_torch, make_inputs(shape, torch.float32, reach=30), None, 256)
    assert (ours[0] - truth[0]).abs().max() <= 2e-5
    assert max(map(relative_error, ours[1:], truth[1:])) <= 1e-5


def test_the_largest_key_may_be_far_away() -> None:
    """A key that is out of reach must not set the scale: with one maximum a channel this is 0/0."""
    k = torch.zeros(1, 50, 1)
    k[0, 0] = 300.0
    v = torch.arange(50.0).view(1, 50, 1)
    out = bidirectional_wkv(k, v, torch.full((1,), 5000.0), torch.zeros(1))
    torch.testing.assert_close(out[0, 5:-1, 0], torch.arange(5.0, 49.0))


def test_tokens_without_weight_may_as_well_be_left_out() -> None:
    """A subset with its positions equals the whole in which the others weigh nothing."""
    inputs = make_inputs((2, 12, 4))
    k, v, w, u = (x.detach() for x in inputs)
    kept = make_positions(2, 5, 12)
    index = kept.unsqueeze(-1).expand(-1, -1, 4)
    masked = torch.full_like(k, -1e4).scatter(1, index, k.gather(1, index))
    whole = bidirectional_wkv(masked, v, w, u)
    part = bidirectional_wkv(k.gather(1, index), v.gather(1, index), w, u, kept, 12)
    torch.testing.assert_close(part, whole.gather(1, index))


@pytest.mark.parametrize("shape", [(3, 9, 4), (2, 37, 20)])
def test_all_positions_equal_none_to_the_bit(shape, way) -> None:
    batch, length, _ = shape
    inputs = make_inputs(shape, torch.float32)
    everywhere = torch.arange(length).expand(batch, length)
    listed, unlisted = (
        run(bidirectional_wkv_torch, inputs, places, length) for places in (everywhere, None)
    )
    for one, other in zip(listed, unlisted, strict=True):
        assert torch.equal(one, other)
    naive = bidirectional_wkv_naive
    assert torch.equal(naive(*inputs, everywhere, length), naive(*inputs, None, length))


def test_one_token_gives_its_value(way) -> None:
    out, *grads = run(bidirectional_wkv_torch, make_inputs((2, 1, 3)), torch.tensor([[4], [0]]), 9)
    torch.testing.assert_close(out, make_inputs((2, 1, 3))[1].detach())
    for grad in (grads[0], grads[2], grads[3]):
        torch.testing.assert_close(grad, torch.zeros_like(grad), atol=1e-12, rtol=0)


def test_the_mirror_image_gives_the_mirror_image() -> None:
    k, v, w, u = make_inputs((2, 11, 4))
    out = bidirectional_wkv(k.flip(1), v.flip(1), w, u)
    torch.testing.assert_close(out.flip(1), bidirectional_wkv(k, v, w, u))


@pytest.mark.parametrize("subset", [False, True])
def test_gradcheck(subset, way, monkeypatch) -> None:
    monkeypatch.setattr(one_maximum, "CHUNK", 4)
    monkeypatch.setattr(torch_form, "BLOCK_VALUES", 40)
    positions = make_positions(3, 6, 15) if subset else None
    length = 15 if subset else 6
    assert torch.autograd.gradcheck(
        lambda *args: bidirectional_wkv_torch(*args, positions, length), make_inputs((3, 6, 3))
    )


@pytest.mark.parametrize("values", [1, 100, 10**9])
def test_blocks_do_not_matter(values, way, monkeypatch) -> None:
    inputs, positions = make_inputs((5, 9, 4)), make_positions(5, 9, 20)
    truth = run(bidirectional_wkv_naive, inputs, positions, 20)
    monkeypatch.setattr(torch_form, "BLOCK_VALUES", values)
    for mine, true in zip(run(bidirectional_wkv_torch, inputs, positions, 20), truth, strict=True):
        torch.testing.assert_close(mine, true)


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
@pytest.mark.parametrize("subset", [False, True])
def test_chunks_do_not_matter(subset, chunk, monkeypatch) -> None:
    inputs, positions = make_inputs((2, 23, 4)), make_positions(2, 23, 50) if subset else None
    truth = run(bidirectional_wkv_naive, inputs, positions, 50)
    monkeypatch.setattr(one_maximum, "CHUNK", chunk)
    for mine, true in zip(run(bidirectional_wkv_torch, inputs, positions, 50), truth, strict=True):
        torch.testing.assert_close(mine, true)


def test_keeps_its_inputs_alone() -> None:
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    inputs = make_inputs((4, 256, 384), torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = bidirectional_wkv(*inputs)
    assert out.requires_grad
    assert sum(kept.values()) == sum(x.nbytes for x in inputs)


def test_half_precision_inputs_keep_float32_sums(way) -> None:
    k, v, w, u = make_inputs((2, 70, 8), torch.float32, keys=3)
    inputs = [*(x.detach().bfloat16().requires_grad_() for x in (k, v)), w, u]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    truth = run(bidirectional_wkv_naive, exact, None, 70)
    with torch.autocast("cpu", torch.bfloat16):
        ours = run(bidirectional_wkv_torch, inputs, None, 70)
    assert ours[0].dtype == torch.bfloat16
    assert [g.dtype for g in ours[1:]] == [x.dtype for x in inputs]
    for mine, true in zip(ours, truth, strict=True):
        assert relative_error(mine, true) <= 4e-3  # one rounding to bfloat16


def test_output_has_the_dtype_of_v() -> None:
    k, v, w, u = (x.detach() for x in make_inputs((1, 5, 4), torch.float32))
    for form in (bidirectional_wkv_torch, bidirectional_wkv_naive):
        assert form(k, v.bfloat16(), w, u, None, 5).dtype == torch.bfloat16
        assert form(k.bfloat16(), v, w, u, None, 5).dtype == torch.float32


def test_autocast_changes_nothing_in_float32() -> None:
    inputs = make_inputs((2, 9, 4), torch.float32)
    plain = run(bidirectional_wkv, inputs, None, 9)
    with torch.autocast("cpu", torch.bfloat16):
        cast = run(bidirectional_wkv, inputs, None, 9)
    for mine, true in zip(cast, plain, strict=True):
        assert torch.equal(mine, true)


def test_views_are_taken_as_inputs(way) -> None:
    inputs, positions = make_inputs((2, 9, 4)), make_positions(2, 9, 12)
    strided = [
        x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for x in inputs
    ]
    places = positions.t().contiguous().t()
    truth = run(bidirectional_wkv_naive, inputs, positions, 12)
    for mine, true in zip(run(bidirectional_wkv, strided, places, 12), truth, strict=True):
        torch.testing.assert_close(mine, true)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(0, 5, 4)}, r"k has shape \(0, 5, 4\)"),
        ({"k": torch.zeros(2, 0, 4)}, r"k has shape \(2, 0, 4\)"),
        ({"k": torch.zeros(5, 4)}, r"k has shape \(5, 4\)"),
        ({"v": torch.zeros(2, 5, 3)}, "v has shape"),
        ({"w": torch.zeros(3)}, r"w has shape \(3,\); it must be \(4,\)"),
        ({"u": torch.zeros(1)}, "u has shape"),
        ({"length": 4}, "length=4 is below the 5 tokens"),
        ({"positions": torch.zeros(2, 4, dtype=torch.int64)}, "positions are torch.int64"),
        ({"positions": torch.zeros(2, 5)}, "positions are torch.float32"),
        ({"positions": torch.tensor([[0, 1, 2, 4, 3]] * 2)}, "must ascend"),
        ({"positions": torch.tensor([[0, 1, 2, 2, 3]] * 2)}, "must ascend"),
        ({"positions": torch.tensor([[0, 1, 2, 3, 5]] * 2)}, "outside 0 … 4"),
        ({"positions": torch.tensor([[-1, 1, 2, 3, 4]] * 2), "length": 9}, "outside 0 … 8"),
    ],
)
def test_what_does_not_fit_is_refused(change, message) -> None:
    good = dict(zip("kvwu", make_inputs((2, 5, 4)), strict=True))
    with pytest.raises(ValueError, match=message):
        bidirectional_wkv(**{**good, **change})


@pytest.mark.parametrize("subset", [False, True])
def test_opcheck(subset) -> None:
    inputs = make_inputs((2, 9, 4), torch.float32)
    positions = make_positions(2, 9, 20) if subset else None
    rest = (positions, 20)
    torch.library.opcheck(torch.ops.tread_zoo.bidirectional_wkv.default, (*inputs, *rest))
    values = [x.detach() for x in inputs]
    out = torch.ops.tread_zoo.bidirectional_wkv(*values, *rest)
    backward = torch.ops.tread_zoo.bidirectional_wkv_backward.default
    torch.library.opcheck(backward, (out, *values, *rest))


@pytest.mark.slow
def test_compiles_whole() -> None:
    inputs, positions = make_inputs((2, 9, 4), torch.float32), make_positions(2, 9, 20)
    compiled = torch.compile(lambda *args: bidirectional_wkv(*args).sin(), fullgraph=True)
    expected = run(lambda *args: bidirectional_wkv(*args).sin(), inputs, positions, 20)
    for mine, true in zip(run(compiled, inputs, positions, 20), expected, strict=True):
        torch.testing.assert_close(mine, true)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_flops_are_counted_once(device) -> None:
    inputs = make_inputs((2, 5, 8), torch.float32)
    inputs = [x.detach().to(device).requires_grad_() for x in inputs]
    with FlopCounterMode(display=False) as counter:
        out = bidirectional_wkv(*inputs)
    assert counter.get_total_flops() == 54 * 2 * 5 * 8
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 94 * 2 * 5 * 8
