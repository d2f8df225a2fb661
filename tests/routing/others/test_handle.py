"""The handle: draws, schedules, kept tokens, copies, errors; blocks that must be refused."""

import copy
import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tread_zoo import enable_routing
from tread_zoo.routing import Skip

WIDTH = 8


def attend(x, mask=None):
    return F.scaled_dot_product_attention(x, x, x, mask)


class Block(nn.Module):
    """A block x + MLP(attention(x)), with a planted `fault`."""

    def __init__(self, fault="none", num_tokens=16):
        super().__init__()
        self.fault, self.linear = fault, nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.register_buffer("table", torch.randn(num_tokens, WIDTH))

    def forward(self, x, rotary_emb=None, mask=None, time=None, skip=None):
        inner = x
        if rotary_emb is not None:
            inner = inner + rotary_emb[None]
        if time is not None:
            inner = inner + time
        if skip is not None:
            inner = inner + skip
        if self.fault == "conv":
            inner = self.conv(inner.mT).mT
        if self.fault == "window":
            inner = attend(inner.unflatten(1, (-1, 2))).flatten(1, 2)
        if self.fault == "window of 8":
            inner = attend(inner.unflatten(1, (-1, 8))).flatten(1, 2)
        if self.fault == "causal":
            inner = F.scaled_dot_product_attention(inner, inner, inner, is_causal=True)
        if self.fault == "rotary":  # its own table, of the first tokens
            inner = inner + self.table[: inner.shape[1]]
        if self.fault == "scan":
            inner = inner.cumsum(dim=1)
        return x + self.linear(attend(inner, mask)).tanh()


class Plain(nn.Module):
    """A network of our own, whose blocks are called from a list."""

    def __init__(self, depth=4, fault="none", recompute=False, skips=False, loop="list"):
        super().__init__()
        self.blocks = nn.ModuleList(Block(fault) for _ in range(depth))
        self.recompute, self.skips, self.loop, self.broken = recompute, skips, loop, False

    def forward(self, hidden_states, **arguments):
        x, made = hidden_states, []
        blocks = self.blocks
        if self.loop == "children":
            blocks = list(next(self.children()))
        for i in range(len(blocks)):
            own = dict(arguments)
            if self.skips and i >= len(blocks) // 2:
                own["skip"] = made.pop()
            if self.recompute:
                reentrant = self.recompute == "reentrant"
                x = checkpoint(blocks[i], x, use_reentrant=reentrant, **own)
            else:
                x = blocks[i](x, **own)
            if self.skips and i < len(blocks) // 2:
                made.append(x)
            if self.broken and i == 1:
                raise KeyError("broken")
        return x


def plain(**options):
    torch.manual_seed(0)
    return Plain(**options).train()


def tokens(batch=3, count=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, count, WIDTH, generator=generator)


def routed(start=1, end=3, **options):
    network = plain()
    return network, enable_routing(network, start=start, end=end, extra=0, **options)


# Blocks


@pytest.mark.parametrize("fault", ["conv", "window", "causal", "rotary", "scan"])
def test_blocks_that_use_the_place_of_a_token_are_refused(fault):
    network = plain(fault=fault)
    enable_routing(network, start=1, end=3, extra=0)
    with pytest.raises(ValueError, match="Block"):
        network(tokens())
    routes = enable_routing(other := plain(fault=fault), "layer_drop", drop=0.99, extra=0)
    assert other(tokens()).shape == (3, 16, WIDTH)
    assert routes.drawn  # leaving blocks out asks nothing of them


def test_a_window_that_held_all_tokens_is_found_in_a_larger_image():
    network = plain(fault="window of 8")
    enable_routing(network, start=1, end=3, extra=0, selection_rate=0.5)
    network(tokens(count=16))
    with pytest.raises(ValueError, match="Block"):
        network(tokens(count=32))


def test_a_block_that_changes_nothing_yet_is_asked_again():
    network, routes = routed()
    for block in network.blocks:
        nn.init.zeros_(block.linear.weight)
        nn.init.zeros_(block.linear.bias)
    network(tokens())
    assert "unverified" in routes.describe()
    for block in network.blocks:
        nn.init.normal_(block.linear.weight)
    network(tokens())
    assert "unverified" not in routes.describe()


@pytest.mark.parametrize("batch", [16, 8, 5])
@pytest.mark.parametrize("others", [0, 8, 16])
def test_sizes_that_coincide(batch, others):
    """N = 16 equals the batch or the text, and K = 8 the batch or the text."""
    network = plain()
    routes = enable_routing(network, start=1, end=3, extra=others)
    x, table = tokens(batch, 16 + others), torch.randn(16 + others, WIDTH)
    time = torch.randn(batch, 16 + others, WIDTH)
    out = network(x, rotary_emb=table, time=time)
    ids = routes.drawn[0].ids
    for b in range(batch):
        rows = torch.cat([torch.arange(others), ids[b] + others])
        y = network.blocks[0](x[b : b + 1], table, time=time[b : b + 1])
        kept = y[:, rows]
        for i in (1, 2):
            kept = network.blocks[i](kept, table[rows], time=time[b : b + 1, rows])
        y = y.index_copy(1, rows, kept)
        y = network.blocks[3](y, table, time=time[b : b + 1])
        torch.testing.assert_close(out[b : b + 1], y, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("others", [0, 8])
@pytest.mark.parametrize("recompute", [False, True])
def test_long_skips_from_within_a_route_are_made_whole(recompute, others):
    """With 8 others, a skip from within the route is as long as the whole image."""
    network = plain(depth=6, skips=True, recompute=recompute)
    routes = enable_routing(network, start=1, end=4, extra=others)
    x = tokens(1, 16 + others)
    out = network(x)
    ids, blocks = torch.cat([torch.arange(others), routes.drawn[0].ids[0] + others]), network.blocks
    first = blocks[0](x)
    a = blocks[1](first[:, ids])
    b = blocks[2](a)
    c = blocks[3](b, skip=b)
    whole_a, whole = (first.index_copy(1, ids, each) for each in (a, c))
    expected = blocks[5](blocks[4](whole, skip=whole_a), skip=first)
    torch.testing.assert_close(out, expected)
    grads = torch.autograd.grad(out.square().sum(), list(blocks.parameters()), allow_unused=True)
    others = torch.autograd.grad(
        expected.square().sum(), list(blocks.parameters()), allow_unused=True
    )
    for one, two in zip(grads, others, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("method", ["tread", "random_ltd", "layer_drop", "token_merging"])
def test_recomputation_of_every_method(method):
    """Also of two passes before a backward pass, and of a route within a route's range."""
    results = []
    for recompute in (False, True):
        network = plain(recompute=recompute)
        routes = enable_routing(network, method, start=1, end=3, extra=0, seed=3)
        routes.set_step(0, 10)
        outs = [network(tokens(seed=seed)) for seed in (1, 2)]
        (outs[0].square().sum() + outs[1].square().sum()).backward()
        grads = [p.grad for p in network.parameters() if p.grad is not None]
        results.append((outs, grads))
    (outs, grads), (outs2, grads2) = results
    assert all(map(torch.equal, outs, outs2))
    for one, two in zip(grads, grads2, strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_a_recomputed_pass_that_is_dropped_leaves_nothing_behind():
    network = plain(recompute=True)
    enable_routing(network, start=1, end=3, extra=0)
    x = tokens().requires_grad_() * 1
    alive = weakref.ref(x)
    out = network(x)
    del x, out
    gc.collect()
    assert alive() is None


# Draws


def test_passes_draw_anew_and_resume_where_they_were():
    network, routes = routed()
    state = torch.get_rng_state()
    drawn = []
    for _ in range(4):
        network(tokens())
        drawn.append(routes.drawn[0].ids)
    assert len({str(each.tolist()) for each in drawn}) == 4
    assert len({str(row) for row in drawn[0].tolist()}) == 3
    assert torch.equal(torch.get_rng_state(), state)
    other, again = routed()
    for _ in range(2):
        other(tokens())
    saved = again.state_dict()
    third, resumed = routed(seed=9)
    resumed.load_state_dict(saved)
    for expected in drawn[2:]:
        third(tokens())
        assert torch.equal(resumed.drawn[0].ids, expected)


def test_passes_of_one_step_differ_and_a_step_repeats():
    network, routes = routed()
    drawn = []
    for step in (4, 5, 4):
        routes.set_step(step, 10)
        for _ in range(2):
            network(tokens())
            drawn.append(routes.drawn[0].ids)
    assert torch.equal(drawn[0], drawn[4])
    assert torch.equal(drawn[1], drawn[5])
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_schedules_need_the_step():
    network, routes = routed(selection_rate=["linear", 0.75, 0.25], dense_tail=0.5)
    with pytest.raises(RuntimeError, match="set_step"):
        network(tokens())
    kept = []
    for step in range(8):
        routes.set_step(step, 8)
        network(tokens())
        kept.append(routes.drawn[0].num_kept if routes.drawn else 16)
    assert kept[0] == 4
    assert kept[3] == 12
    assert kept[4:] == [16] * 4


def test_kept_tokens_stay():
    network, routes = routed()
    mask = torch.zeros(3, 16, dtype=torch.bool)
    mask[:, [2, 7, 15]] = True
    routes.keep(mask)
    for _ in range(5):
        network(tokens())
        assert not (routes.bypassed() & mask).any()
        assert int(routes.bypassed().sum()) == 3 * 8
    routes.keep(mask[:, :9])
    with pytest.raises(ValueError, match="16"):
        network(tokens())
    routes.keep(None)
    network(tokens())


@pytest.mark.parametrize("options", [{"selector": "norm"}, {"method": "token_merging"}])
def test_tokens_chosen_by_their_states_are_not_said_to_stay(options):
    network, routes = routed(**options)
    network(tokens())
    with pytest.raises(ValueError, match="by their states"):
        routes.bypassed()


# The network


def test_eval_is_dense_and_warns_once_with_gradients():
    network, _ = routed()
    x = tokens()
    dense = plain().eval()(x)
    network.eval()
    with pytest.warns(UserWarning, match="train"):
        assert torch.equal(network(x), dense)
    network(x)


def test_an_exception_within_a_pass_leaves_all_usable():
    network, routes = routed()
    network.broken = True
    with pytest.raises(KeyError, match="broken"):
        network(tokens())
    assert "blocks" not in vars(network)
    network.broken = False
    routes.set_step(1, 2)
    first = network(tokens())
    routes.set_step(1, 2)
    assert torch.equal(network(tokens()), first)


def test_copies_are_routed_on_their_own():
    network, routes = routed()
    network(tokens())
    twin = copy.deepcopy(network)
    outs = [network(tokens()), twin(tokens())]
    assert torch.equal(*outs)
    assert routes.count == 2
    network(tokens())
    network(tokens())
    assert torch.equal(twin(tokens()), plain_third(tokens()))
    assert list(twin.state_dict()) == list(network.state_dict())


def plain_third(x):
    network, routes = routed()
    routes.load_state_dict({"count": 2, "seed": 0})
    return network(x)


def test_a_network_called_within_itself_is_routed_each_time():
    class Twice(Plain):
        def forward(self, hidden_states, again=True):
            if again:
                hidden_states = self(hidden_states, again=False)
            return super().forward(hidden_states)

    torch.manual_seed(0)
    network = Twice().train()
    routes = enable_routing(network, start=1, end=3, extra=0)
    network(tokens())
    assert routes.count == 2
    assert not routes.running
    assert "blocks" not in vars(network)


def test_lists_within_parts_are_named_by_path():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = plain()

        def forward(self, x):
            return self.inner(x)

    network = Outer().train()
    routes = enable_routing(network, start=1, end=3, extra=0, blocks=["inner.blocks"])
    assert network(tokens()).shape == (3, 16, WIDTH)
    assert routes.drawn


def test_rounding_of_half_precision_is_no_reason_to_refuse():
    network, routes = routed()
    with torch.autocast("cpu", torch.bfloat16):
        out = network(tokens())
    assert math.isfinite(float(out.detach().sum()))
    assert routes.verdicts


# Errors


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({}, "extra"),
        ({"extra": 0, "method": "sprint"}, "weights"),
        ({"extra": 0, "method": "mixture_of_depths"}, "weights"),
        ({"extra": 0, "method": "maskdit"}, "weights"),
        ({"extra": 0, "selection_rat": 0.5}, "selection_rate"),
        ({"extra": 0, "start": 9}, "start"),
        ({"extra": 0, "blocks": ["stages"]}, "blocks"),
    ],
)
def test_errors_at_the_call(options, word):
    network = plain()
    with pytest.raises(ValueError, match=word):
        enable_routing(network, **options)
    assert torch.equal(network(tokens()), plain()(tokens()))
    enable_routing(network, extra=0)


def test_enabling_twice_is_an_error_until_disabled():
    network, routes = routed()
    with pytest.raises(ValueError, match="disable"):
        enable_routing(network, extra=0)
    routes.disable()
    enable_routing(network, extra=0)


def test_routes_that_overlap_are_refused(monkeypatch):
    network, routes = routed()
    monkeypatch.setattr(type(routes.method), "draw", lambda *_: (Skip(1, 3), Skip(2, 3)))
    with pytest.raises(ValueError, match="disjoint"):
        network(tokens())


def test_parallel_plans_are_refused():
    network = plain()
    network._parallel_config = object()
    with pytest.raises(ValueError, match="parallel"):
        enable_routing(network, extra=0)


def test_a_loop_around_the_list_is_an_error():
    network = plain(loop="children")
    enable_routing(network, start=1, end=3, extra=0)
    with pytest.raises(RuntimeError, match="children"):
        network(tokens())


def test_reentrant_checkpointing_is_an_error():
    network = plain(recompute="reentrant")
    enable_routing(network, start=1, end=3, extra=0)
    with pytest.raises(RuntimeError, match="use_reentrant"):
        network(tokens().requires_grad_())
