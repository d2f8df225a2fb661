"""Every class of the table: dense and drawn to the bit, gradients, images, recomputation."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("diffusers")

from tests.routing.others.cases import CASES, build, image, run
from tread_zoo import enable_routing
from tread_zoo.routing.others import FAMILIES, REFUSED

ROUTED = sorted(FAMILIES.keys() - {"SanaTransformer2DModel"})
QUICK = {
    "CogVideoXTransformer3DModel", "DiTTransformer2DModel", "FluxTransformer2DModel",
    "Lumina2Transformer2DModel", "PRXTransformer2DModel", "SD3Transformer2DModel",
    "StableAudioDiTModel", "WanTransformer3DModel",
}  # fmt: skip
FEW = [n if n in QUICK else pytest.param(n, marks=pytest.mark.nightly) for n in ROUTED]


def routed(name, **options):
    network, case = build(name), CASES[name]
    return network, enable_routing(network, start=case.start, end=case.end, **options)


def gradients(network):
    found = {k: p.grad.clone() for k, p in network.named_parameters() if p.grad is not None}
    network.zero_grad(set_to_none=True)
    return found


def seeded(seed=7):
    return torch.Generator().manual_seed(seed)


def weigh(out, seed=7):
    return (out * torch.randn(out.shape, generator=seeded(seed))).sum()


def test_the_table_and_the_cases_name_the_same_classes():
    assert CASES.keys() == FAMILIES.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", ROUTED)
def test_a_pass_that_is_not_routed_is_dense_to_the_bit(name):
    network, inputs = build(name), CASES[name].inputs(2)
    keys, dense = list(network.state_dict()), run(network, inputs)
    random = torch.get_rng_state()
    routes = enable_routing(network, start=CASES[name].start, end=CASES[name].end)
    different = run(network, inputs)
    assert not torch.equal(different, dense)
    assert different.shape == dense.shape
    with routes.dense():
        assert torch.equal(run(network, inputs), dense)
    with torch.no_grad():
        assert torch.equal(run(network, inputs), dense)
    assert list(network.state_dict()) == keys
    routes.disable()
    assert torch.equal(run(network, inputs), dense)
    assert torch.equal(torch.get_rng_state(), random)
    assert not network._forward_pre_hooks
    assert not network._forward_hooks


@pytest.mark.parametrize("name", FEW)
def test_equal_steps_draw_equal_tokens_and_every_weight_learns(name):
    network, routes = routed(name)
    inputs, outs = CASES[name].inputs(2), []
    for step in (3, 4, 3):
        routes.set_step(step, 10)
        outs.append(run(network, inputs))
    assert torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], outs[1])
    weigh(outs[2]).backward()
    learnt = gradients(network)
    with routes.dense():
        weigh(run(network, inputs)).backward()
    assert learnt.keys() == gradients(network).keys()
    assert all(torch.isfinite(each).all() for each in learnt.values())


@pytest.mark.parametrize("name", FEW)
def test_an_image_in_a_batch_equals_that_image_alone(name):
    """Also in a batch of as many images as there are tokens."""
    network, routes = routed(name)
    for batch in (3, 16) if name.startswith(("DiT", "PRX")) else (3,):
        outs = []
        for size in (batch, 1):
            routes.set_step(5, 10)
            outs.append(run(network, CASES[name].one_of(size)))
        torch.testing.assert_close(outs[0][:1], outs[1], atol=1e-4, rtol=1e-3)


def test_a_class_with_one_table_for_all_images_keeps_the_same_tokens_of_each():
    network, routes = routed("StableAudioDiTModel")
    run(network, CASES["StableAudioDiTModel"].inputs(2))
    (route,) = routes.drawn
    assert torch.equal(route.ids[0], route.ids[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_recomputed_passes_have_the_gradients_of_plain_ones(name):
    """Also where two passes precede the backward pass of both."""
    network, routes = routed(name)
    if not network._supports_gradient_checkpointing:
        pytest.skip("diffusers does not recompute it")
    inputs = CASES[name].inputs(2)
    if name == "ChromaTransformer2DModel":
        del inputs["attention_mask"]  # recomputed, its single blocks lose it in diffusers 0.42
    results = []
    for again in (False, True):
        if again:
            network.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=False))
        for passes in (1, 2):
            routes.set_step(2, 10)
            outs = [run(network, inputs) for _ in range(passes)]
            sum(weigh(out, seed) for seed, out in enumerate(outs)).backward()
            results.append((torch.stack(outs), gradients(network)))
    for (out, grads), (out2, grads2) in zip(results[:2], results[2:], strict=True):
        assert torch.equal(out, out2)
        assert grads.keys() == grads2.keys()
        for key, grad in grads.items():
            torch.testing.assert_close(grads2[key], grad, atol=1e-5, rtol=1e-4, msg=key)


@pytest.mark.parametrize("name", ["SanaTransformer2DModel", *REFUSED])
def test_classes_that_use_the_place_of_a_token_are_refused(name):
    network = build(name)

    def use():
        enable_routing(network, start=1, end=-1)
        run(network, CASES[name].inputs(2))

    with pytest.raises(ValueError, match="be routed"):
        use()


def test_a_mode_that_uses_the_place_of_a_token_is_refused():
    """The first frame has as many tokens as are kept, and so they all seem to belong to it."""
    name = "HunyuanVideoTransformer3DModel"
    network = build(name, image_condition_type="token_replace")
    enable_routing(network, start=1, end=3, selection_rate=0.5)
    with pytest.raises(ValueError, match="token_replace"):
        run(network, CASES[name].inputs(2) | {"hidden_states": image(2, 4, 8, 2)})


def test_images_of_two_sizes_are_refused_where_text_follows_them():
    name = "ZImageTransformer2DModel"
    network, inputs = build(name), CASES[name].inputs(2)
    enable_routing(network, start=1, end=3)
    inputs["x"] = [inputs["x"][0], inputs["x"][1][..., :8, :8]]
    with pytest.raises(ValueError, match="several sizes"):
        run(network, inputs)


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("PRXTransformer2DModel", "attention_mask"),
        ("CogView4Transformer2DModel", "attention_mask"),
        ("CosmosTransformer3DModel", "attention_mask"),
        ("QwenImageTransformer2DModel", "encoder_hidden_states_mask"),
    ],
)
def test_a_text_as_long_as_the_image_is_whole(name, mask):
    """A mask that hides nothing changes nothing."""
    network, routes = routed(name)
    inputs, outs = dict(CASES[name].inputs(2)), []
    inputs["encoder_hidden_states"] = torch.randn(2, 16, 16, generator=seeded())
    for hidden in (None, torch.ones(2, 16, dtype=torch.bool)):
        routes.set_step(1, 10)
        outs.append(run(network, inputs | {mask: hidden}))
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-4)


def test_a_class_of_one_s_own_is_routed_as_its_base_class():
    name = "FluxTransformer2DModel"
    network, inputs = build(name), CASES[name].inputs(2)
    network.__class__ = type("MyFlux", (type(network),), {})
    dense = run(network, inputs)
    enable_routing(network, start=1, end=3)
    assert not torch.equal(run(network, inputs), dense)


def test_a_sequence_that_is_cut_between_blocks_is_an_error():
    """HiDream's single blocks; each of them alone may be routed."""
    name = "HiDreamImageTransformer2DModel"
    network, inputs = build(name), CASES[name].inputs(2)
    routes = enable_routing(network, start=4, end=6)
    with pytest.raises(RuntimeError, match="sequence"):
        run(network, inputs)
    routes.disable()
    dense = run(network, inputs)
    enable_routing(network, "random_ltd", start=4, end=6, selection_rate=0.5)
    assert not torch.equal(run(network, inputs), dense)


def test_values_that_are_added_between_routed_blocks_are_an_error():
    """As a ControlNet's."""
    name = "SD3Transformer2DModel"
    network, inputs = build(name), CASES[name].inputs(2)
    enable_routing(network, start=1, end=3)
    with pytest.raises(RuntimeError, match="size"):
        run(network, inputs | {"block_controlnet_hidden_states": [torch.randn(2, 16, 16)] * 4})


def test_a_routed_block_that_the_network_leaves_out_is_an_error():
    name = "SD3Transformer2DModel"
    network, inputs = build(name), CASES[name].inputs(2)
    enable_routing(network, start=1, end=3)
    for layer in (1, 2):
        with pytest.raises(RuntimeError, match="left out"):
            run(network, inputs | {"skip_layers": [layer]})
    assert run(network, inputs | {"skip_layers": [3]}).shape == (2, 4, 8, 8)
