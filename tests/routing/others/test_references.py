"""Routed passes in float64 against loops written by hand, image by image."""

import pytest
import torch

pytest.importorskip("diffusers")

from tests.routing.others.cases import CASES, build, run
from tread_zoo import enable_routing


def by_hand(x, ids, blocks, start, end, call):
    """Return the tokens [1, N, D] of one image after all blocks; `call` takes (i, x, kept ids)."""
    everything = torch.arange(x.shape[1])
    for i in range(blocks):
        if i == start:
            full, x = x, x[:, ids]
        x = call(i, x, ids if start <= i < end else everything)
        if i == end - 1:
            full = full.clone()
            full[:, ids] = x
            x = full
    return x


def dit(network, inputs, b, ids, start, end):
    t, y = inputs["timestep"][b : b + 1], inputs["class_labels"][b : b + 1]

    def call(i, x, ids):
        return network.transformer_blocks[i](x, timestep=t, class_labels=y)

    x = network.pos_embed(inputs["hidden_states"][b : b + 1])
    return by_hand(x, ids, 4, start, end, call)


def sd3(network, inputs, b, ids, start, end):
    text = network.context_embedder(inputs["encoder_hidden_states"][b : b + 1])
    pooled = inputs["pooled_projections"][b : b + 1]
    temb = network.time_text_embed(inputs["timestep"][b : b + 1], pooled)

    def call(i, x, ids):
        nonlocal text
        text, x = network.transformer_blocks[i](
            hidden_states=x, encoder_hidden_states=text, temb=temb
        )
        return x

    x = network.pos_embed(inputs["hidden_states"][b : b + 1])
    return by_hand(x, ids, 4, start, end, call)


def flux(network, inputs, b, ids, start, end):
    text = network.context_embedder(inputs["encoder_hidden_states"][b : b + 1])
    pooled = inputs["pooled_projections"][b : b + 1]
    temb = network.time_text_embed(inputs["timestep"][b : b + 1] * 1000, pooled)
    cos, sin = network.pos_embed(torch.cat([inputs["txt_ids"], inputs["img_ids"]]))
    blocks = [*network.transformer_blocks, *network.single_transformer_blocks]

    def call(i, x, ids):
        nonlocal text
        rows = torch.cat([torch.arange(text.shape[1]), ids + text.shape[1]])
        text, x = blocks[i](
            hidden_states=x, encoder_hidden_states=text, temb=temb,
            image_rotary_emb=(cos[rows], sin[rows]),
        )  # fmt: skip
        return x

    x = network.x_embedder(inputs["hidden_states"][b : b + 1])
    return by_hand(x, ids, 4, start, end, call)


REFERENCES = {
    "DiTTransformer2DModel": dit,
    "SD3Transformer2DModel": sd3,
    "FluxTransformer2DModel": flux,
}


def float64(value):
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    return value


def tokens_before_head(network, inputs):
    """Return the output, and what the last block returned."""
    seen = []
    last = getattr(network, "single_transformer_blocks", network.transformer_blocks)[-1]

    def hook(module, args, out):
        seen.append(out)

    handle = last.register_forward_hook(hook)
    run(network, inputs)
    handle.remove()
    return seen[-1] if isinstance(seen[-1], torch.Tensor) else seen[-1][-1]


@pytest.mark.parametrize("name", REFERENCES)
def test_a_route_equals_the_loop_written_by_hand(name):
    network = build(name, torch.float64)
    inputs = {k: float64(v) for k, v in CASES[name].inputs(3).items()}
    routes = enable_routing(network, start=1, end=3, selection_rate=0.25)
    tokens = tokens_before_head(network, inputs)
    ids = routes.drawn[0].ids
    assert ids.shape == (3, 12)
    assert not torch.equal(ids[0], ids[1])
    reference = REFERENCES[name]
    for b in range(3):
        expected = reference(network, inputs, b, ids[b], 1, 3)
        torch.testing.assert_close(tokens[b : b + 1], expected, atol=1e-10, rtol=1e-10)
