import pytest
import torch
import torch.nn.functional as F

from backbones.mixers.delta import BidirectionalDelta
from tests.backbones.test_mamba import walks_of
from tread_zoo.contract.backbone import Layout

GRID, HEADS = (3, 4), 2


def make_mixer(per_channel, gaps="ignore", name="raster"):
    torch.manual_seed(0)
    mixer = BidirectionalDelta(8, HEADS, per_channel, scan_order=name, index=3, gaps=gaps).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixer


def mix_by_loop(mixer, x, walks):
    """The mixer written out: one direction, one step, one head at a time; heads of 4 channels."""
    q, k, v, z = F.linear(x, mixer.in_proj.weight).chunk(4, dim=-1)
    beta = F.linear(x, mixer.beta_proj.weight).sigmoid()
    down = x if mixer.step_down is None else mixer.step_down(x)
    steps = F.softplus(F.linear(down, mixer.step_proj.weight) + mixer.step_bias)
    total = torch.zeros_like(v)
    for way in range(2):
        for b, path in enumerate(paths[way] for paths in walks):
            for head in range(HEADS):
                own, turned = slice(4 * head, 4 * head + 4), HEADS * way + head
                rate, state = mixer.A_log[turned].exp(), torch.zeros(4, 4, dtype=x.dtype)
                for step, (now, place) in enumerate(path):
                    gap = abs(place - path[step - 1][1]) if step else 1
                    taken = steps[b, now, turned]
                    if mixer.per_channel:
                        taken = steps[b, now, 8 * way :][own].unsqueeze(1)
                    decay = torch.exp(-rate * taken * (gap if mixer.gaps == "decay" else 1))
                    key = F.normalize(F.silu(k[b, now, own]), dim=0)
                    query = F.normalize(F.silu(q[b, now, own]), dim=0)
                    state = decay * state
                    error = F.silu(v[b, now, own]) - key @ state
                    state = state + beta[b, now, turned] * torch.outer(key, error)
                    total[b, now, own] += query @ state / 2
    by_head = total.unflatten(-1, (HEADS, 4))
    normed = by_head / (by_head.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mixer.norm.weight
    return F.linear(normed.flatten(2) * F.silu(z), mixer.out_proj.weight)


@torch.no_grad()
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(
    ("gaps", "name"), [("ignore", "raster"), ("decay", "raster"), ("decay", "serpentine8")]
)
def test_mixer_equals_the_written_out_loop(per_channel, gaps, name):
    mixer = make_mixer(per_channel, gaps, name)
    ids = torch.tensor([[0, 1, 2, 5, 6, 9], [1, 3, 4, 5, 10, 11]])
    for kept, layout in (
        (ids, Layout(GRID, 0, ids)),
        (torch.arange(12).expand(2, -1), Layout(GRID, 0, batch=2)),
        (ids, Layout(GRID, 2, ids, num_context=2)),
    ):
        extra = layout.num_extra
        x = torch.randn(2, extra + kept.shape[1], 8, dtype=torch.float64)
        mixed = mixer(x, mixer.prepare(layout))
        torch.testing.assert_close(
            mixed, mix_by_loop(mixer, x, walks_of(kept, name, 3, extra, num_context=extra))
        )
