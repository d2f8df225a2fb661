"""The initial weights of layers: weights.json has the values of one seed, this table the
distributions."""

import pytest
import torch
import torch.nn.functional as F

from tread_zoo import create_backbone

READ_AS = {"step_bias": lambda b: F.softplus(b).log10(), "A_log": torch.exp, "decay": torch.log}
STEPS, ONES = ("step_bias", -2, 3**-0.5, -3, -1), (1, 0, 1, 1)  # steps: log-uniform
SCAN = [STEPS, ("A_log", 2.5, 1.25**0.5, 1, 4), ("mixer.D", *ONES)]
BOUND = (240 * 13) ** -0.5  # 1 / sqrt(fan_in · depth)
TABLE = [  # mean and deviation of a parameter and, unless it is normal, the ends
    ("mamba_tiny", {}, SCAN),
    ("zigma_tiny", {}, SCAN),
    ("mamba2_tiny", {"state_size": 8, "expand": 2, "head_size": 4},
     [STEPS, ("A_log", 8.5, 15 / 12**0.5, 1, 16), ("mixer.D", *ONES), ("conv_bias", 0, 0),
      ("out_proj.weight", 0, BOUND / 3**0.5, -BOUND, BOUND)]),
    ("rwkv_tiny", {},  # decays log-spaced in 0.3 … 30
     [("decay", 1.099, 1.352, -1.204, 3.401), ("bonus", 0, 0), ("own", 0.5, 0)]),
    *(("uvit_tiny", {"hidden_size": 128, "num_heads": 4, "init_std": std},
       [("blocks.0.proj.weight", 0, std), ("proj.bias", 0, 0), ("norm1.weight", *ONES),
        ("positions", 0, std), ("label_embed.table.weight", 0, std),
        ("conv.weight", 1 / 9, 8**0.5 / 9, 0, 1), ("conv.bias", 0, 0)]) for std in (0.02, 0.05)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "rows"), TABLE)
def test_initial_values_follow_the_table(name, options, rows):
    torch.manual_seed(0)
    network = create_backbone(name, input_size=8, in_channels=1, num_classes=10, **options)
    for part, mean, std, *ends in rows:
        drawn = [p.detach().flatten() for k, p in network.named_parameters() if k.endswith(part)]
        values = READ_AS.get(part, torch.Tensor.double)(torch.cat(drawn))
        assert values.mean().item() == pytest.approx(mean, abs=0.1 * std + 1e-6), part
        assert values.std(correction=0).item() == pytest.approx(std, rel=0.07, abs=1e-6), part
        for end, extreme in zip(ends, (values.min(), values.max())[: len(ends)], strict=True):
            assert extreme.item() == pytest.approx(end, abs=0.1 * std + 1e-6), part
