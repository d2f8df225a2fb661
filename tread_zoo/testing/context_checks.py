"""Checks of contexts, embeddings in place of labels; a backbone that takes none has to refuse them.

B batch, T embeddings, S width of one, E extra tokens, K kept tokens.
"""

from functools import partial

import torch

from tread_zoo.registry import takes_contexts
from tread_zoo.routing import Route
from tread_zoo.testing.probe import BATCH, Probe, raises, watching


def check_contexts_condition_or_are_refused(probe: Probe) -> None:
    """Each embedding changes the output; y=None equals zeros, to the bit; half precision is taken;
    what does not fit raises. A constructor without the keywords refuses them."""
    contextual = probe.with_contexts()
    if not takes_contexts(probe.name):
        assert raises(ValueError, contextual.build), "contexts are ignored silently"
        return
    backbone = contextual.build()
    x, t, y = contextual.inputs()
    assert y is not None
    out = backbone(x, t, y)
    null = backbone(x, t, torch.zeros_like(y))
    assert torch.equal(backbone(x, t), null), "y=None is not the context of zeros"
    for place in range(y.shape[1]):
        changed = y.clone()
        changed[:, place] += 1
        assert not torch.equal(backbone(x, t, changed), out), f"embedding {place} is ignored"
    half = y.half()
    assert torch.equal(backbone(x, t, half), backbone(x, t, half.float())), "half differs"
    labels = torch.zeros(BATCH, dtype=torch.int64)
    for bad in (y[:, 1:], y[:, :, 1:], y[:1], y.long(), labels):
        refused = raises(ValueError, partial(backbone, x, t, bad))
        assert refused, f"a condition {list(bad.shape)}, {bad.dtype} was accepted"
    both = Probe(probe.name, overrides=contextual.overrides)
    both.num_classes = 5
    assert raises(ValueError, both.build), "labels and contexts were accepted together"


def check_contexts_do_not_mix(probe: Probe) -> None:
    """An image's output depends on its own context alone, also under a route."""
    if not takes_contexts(probe.name):
        return
    contextual = probe.with_contexts()
    backbone = contextual.build()
    x, t, y = contextual.inputs()
    assert y is not None
    route = contextual.route(backbone)
    others = y + 1
    others[1] = y[1]
    out, changed = (backbone(x, t, given, routes=[route]) for given in (y, others))
    assert torch.equal(out[1], changed[1]), "another image's context changes this one's output"
    one = Route(route.start, route.end, route.ids[1:2])
    alone = backbone(x[1:2], t[1:2], y[1:2], routes=[one])
    torch.testing.assert_close(out[1:2], alone, atol=1e-5, rtol=1e-4)


def check_contexts_are_not_routed(probe: Probe) -> None:
    """Routed blocks see the context as dense ones do: all E extra tokens beside K, unchanged where
    they enter, and what each embedding says reaches the output with every block routed."""
    if not takes_contexts(probe.name):
        return
    contextual = probe.with_contexts()
    backbone = contextual.build()
    x, t, y = contextual.inputs()
    assert y is not None
    extra, route = backbone.num_extra_tokens, contextual.route(backbone, rate=0.5)
    with watching(backbone) as seen:
        backbone(x, t, y, routes=[route])
    for full, kept in zip(seen[route.start - 1][2], seen[route.start][0], strict=True):
        assert kept.shape[1] == extra + route.num_kept, "the routed blocks see another number"
        assert torch.equal(kept[:, :extra], full[:, :extra]), "extra tokens were routed"
    for left, rejoined in zip(seen[route.end - 1][2], seen[route.end][0], strict=True):
        assert torch.equal(left[:, :extra], rejoined[:, :extra]), "extra tokens did not rejoin"
    everywhere = contextual.route(backbone, 0, backbone.num_blocks, rate=0.5)
    out = backbone(x, t, y, routes=[everywhere])
    for place in range(y.shape[1]):
        changed = y.clone()
        changed[:, place] += 1
        again = backbone(x, t, changed, routes=[everywhere])
        assert not torch.equal(again, out), f"embedding {place} does not reach routed tokens"
