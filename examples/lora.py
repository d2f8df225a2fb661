"""Finetune a transformer of diffusers, dense and routed: all of its weights, and by LoRA.

python examples/lora.py fashion_mnist.npz 40 8 3    (pip install diffusers peft)

The numbers are seconds of training on half of the classes, seconds of finetuning on the others, and
seeds. It prints, at equal time: the number of steps, the bytes that a step keeps for its backward
pass, and the loss of the dense network on held-out images at fixed noise. On a CPU, seconds are
processor time, so other programs do not count.
"""

import copy
import sys
import time

import numpy as np
import torch
from accelerate import Accelerator
from diffusers import DiTTransformer2DModel
from peft import LoraConfig, get_peft_model

from tread_zoo import enable_routing

if len(sys.argv) < 2:
    sys.exit(__doc__)
pretrain_s, finetune_s, seeds = [int(word) for word in sys.argv[2:]] or (40, 8, 3)
accelerator = Accelerator()
clock = time.process_time if accelerator.device.type == "cpu" else time.perf_counter
data = np.load(sys.argv[1])


def part(name, is_new):
    """Return the images [N, 1, 28, 28] and labels of classes 5 … 9 if `is_new`, else of 0 … 4."""
    x, y = torch.from_numpy(data[f"x_{name}"]), torch.from_numpy(data[f"y_{name}"]).long()
    chosen = (y >= 5) == is_new
    return x[chosen, None].float() / 127.5 - 1, y[chosen]


def flow_loss(network, x, y, generator):
    noise = torch.randn(x.shape, generator=generator)
    t = torch.rand(len(x), 1, 1, 1, generator=generator)
    x, y, noise, t = (each.to(accelerator.device) for each in (x, y, noise, t))
    out = network((1 - t) * x + t * noise, timestep=1000 * t.flatten(), class_labels=y).sample
    return (out - (noise - x)).square().mean()


def train(network, is_new, seconds, seed, **routing):
    """Train; return as text the number of steps, MiB kept for backward, dense held-out loss."""
    routes = enable_routing(network, seed=seed, **routing) if routing else None
    weights = [each for each in network.parameters() if each.requires_grad]
    network, optimizer = accelerator.prepare(network, torch.optim.AdamW(weights, 1e-3))
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # for the labels that are dropped
    (x, y), start, steps, saved = part("train", is_new), clock(), 0, []

    def pack(tensor):
        saved.append(tensor.nbytes)
        return tensor

    while clock() - start < seconds:
        saved.clear()
        batch = torch.randint(len(x), (32,), generator=generator)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = flow_loss(network.train(), x[batch], y[batch], generator)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    if routes:
        routes.disable()
    with torch.no_grad():
        x, y = (each[:1000] for each in part("test", is_new))
        loss = float(flow_loss(network.eval(), x, y, torch.Generator().manual_seed(0)))
    return f"{steps} steps, {sum(saved) / 2**20:.1f} MiB, loss {loss:.4f}"


torch.manual_seed(0)
pretrained = DiTTransformer2DModel(
    num_attention_heads=4, attention_head_dim=16, in_channels=1, num_layers=8, sample_size=28,
    patch_size=4, num_embeds_ada_norm=10,
)  # fmt: skip
print("before:", train(pretrained, False, pretrain_s, 0), "on the first half", flush=True)
print("before:", train(pretrained, True, 0, 0), "on the second half", flush=True)
for seed in range(seeds):
    for name in ("full", "LoRA"):
        for routing in ({}, {"start": 2, "end": -2, "selection_rate": 0.5}):
            network = copy.deepcopy(pretrained)
            if name == "LoRA":
                config = LoraConfig(r=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
                network = get_peft_model(network, config)
            result = train(network, True, finetune_s, seed, **routing)
            print(f"seed {seed}, {name}, {'routed' if routing else 'dense'}: {result}", flush=True)
