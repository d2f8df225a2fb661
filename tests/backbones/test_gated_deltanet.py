import pytest
import torch
import torch.nn.functional as F

from backbones.mixers.delta import BidirectionalDelta, KimiDelta
from tests.backbones.test_mamba import check_against
from tread_zoo import create_backbone

HEADS = 2
KINDS = {
    "per head": (BidirectionalDelta, {}),
    "per channel": (BidirectionalDelta, {"per_channel": True}),
    "kda": (KimiDelta, {}),
    "convolved": (BidirectionalDelta, {"short_conv": True}),
    "convolved kda": (KimiDelta, {"short_conv": True}),
}


def make_mixer(kind, gaps="ignore", name="raster"):
    torch.manual_seed(0)
    mixer, options = KINDS[kind]
    mixer = mixer(8, HEADS, **options, scan_order=name, index=3, gaps=gaps).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixer


def convolve(mixer, u, b, way, path, step):
    """Return SiLU of the convolved inputs at a step of a walk; without a convolution of them as
    they are. `u` [B, L, C], the walk as of `walks_of`."""
    if mixer.conv is None:
        return F.silu(u[b, path[step][0]])
    taps = mixer.conv.weight.unflatten(0, (2, -1))[way]
    total = torch.zeros_like(u[0, 0])
    for lag in range(min(4, step + 1)):
        before, place = path[step - lag]
        if mixer.gaps == "ignore" or abs(path[step][1] - place) == lag:
            total = total + taps[:, 3 - lag] * u[b, before]
    return F.silu(total)


def gate(mixer, x):
    if isinstance(mixer, KimiDelta):
        down = x @ mixer.gate_down.weight.T
        return torch.sigmoid(down @ mixer.gate_up.weight.T + mixer.gate_up.bias)
    return F.silu(x @ mixer.in_proj.weight[24:].T)


def mix_by_loop(mixer, x, walks):
    """The mixer written out: one direction, one step, one head at a time; heads of 4 channels."""
    u = x @ mixer.in_proj.weight[:24].T
    beta = F.linear(x, mixer.beta_proj.weight).sigmoid()
    down = x if mixer.step_down is None else mixer.step_down(x)
    steps = F.softplus(F.linear(down, mixer.step_proj.weight) + mixer.step_bias)
    total = torch.zeros_like(x)
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
                    q, k, v = convolve(mixer, u, b, way, path, step).chunk(3)
                    key, query = (z[own] / (z[own] @ z[own] + 1e-6).sqrt() for z in (k, q))
                    state = decay * state
                    error = v[own] - key @ state
                    state = state + beta[b, now, turned] * torch.outer(key, error)
                    total[b, now, own] += query @ state / 2
    by_head = total.unflatten(-1, (HEADS, 4))
    eps = 1e-5 if isinstance(mixer, KimiDelta) else 1e-6
    normed = by_head / (by_head.square().mean(-1, keepdim=True) + eps).sqrt() * mixer.norm.weight
    return F.linear(normed.flatten(2) * gate(mixer, x), mixer.out_proj.weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("gaps", "name"),
    [("ignore", "raster"), ("decay", "raster"), ("decay", "serpentine8"), ("reset", "raster")],
)
def test_mixer_equals_the_written_out_loop(kind, gaps, name):
    if gaps == "reset" and "convolved" not in kind:
        with pytest.raises(ValueError, match="short_conv"):
            make_mixer(kind, gaps, name)
        return
    check_against(mix_by_loop, make_mixer(kind, gaps, name), name)


def test_kda_has_no_option_for_what_makes_it_kda():
    sizes = {"input_size": 8, "in_channels": 1, "num_classes": 10, "depth": 2}
    with pytest.raises(ValueError, match="per_channel"):
        create_backbone("kda_tiny", **sizes, per_channel=False)
    names = dict(create_backbone("kda_tiny", **sizes).named_parameters())
    assert "blocks.0.mixer.gate_up.bias" in names
