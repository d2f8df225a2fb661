import pytest
import torch

from tread_zoo import create_backbone
from tread_zoo.evaluation.flops import count_flops
from tread_zoo.routing import Route


def dit_forward_flops(tokens, width, depth, kept, routed, patch_values):
    """FLOPs of a DiT forward pass by hand; a multiply-add is 2."""

    def block(n):
        linear = 2 * n * width * (3 * width + width + 8 * width)
        attention = 2 * 2 * n * n * width
        modulation = 2 * width * 6 * width
        return linear + attention + modulation

    ends = 2 * tokens * patch_values * width * 2  # in and out
    time = 2 * (256 * width + width * width)
    head = 2 * width * 2 * width
    return ends + time + head + (depth - routed) * block(tokens) + routed * block(kept)


@pytest.mark.parametrize(("kept", "routed"), [(16, 0), (4, 3), (8, 6)])
def test_dit_equals_the_count_by_hand(kept, routed):
    backbone = create_backbone("dit_tiny", input_size=8, in_channels=1, num_classes=10)
    routes = [Route(2, 2 + routed, torch.arange(kept)[None])] if routed else []
    expected = dit_forward_flops(16, 64, 12, kept, routed, patch_values=4)
    assert count_flops(backbone, routes=routes) == expected


def test_backward_is_twice_forward_but_for_the_input():
    backbone = create_backbone("dit_tiny", input_size=8, in_channels=1, num_classes=10)
    forward, both = count_flops(backbone), count_flops(backbone, backward=True)
    first_layers = 2 * 16 * 4 * 64 + 2 * 256 * 64  # no gradient is needed for pixels and sinusoids
    assert both == 3 * forward - first_layers


@pytest.mark.parametrize("name", ["dit_tiny", "mamba_tiny"])
def test_the_meta_device_counts_what_the_cpu_does(name):
    from torch.utils.flop_counter import FlopCounterMode

    backbone = create_backbone(name, input_size=8, in_channels=1, num_classes=10)
    with FlopCounterMode(display=False) as counter:
        backbone(torch.randn(2, 1, 8, 8), torch.rand(2), torch.tensor([1, 2]))
    assert counter.get_total_flops() == count_flops(backbone, batch=2)


def test_flops_grow_with_the_batch_alone():
    backbone = create_backbone("mamba_tiny", input_size=8, in_channels=1, num_classes=10)
    assert count_flops(backbone, batch=6) == 6 * count_flops(backbone)
