"""Train a routed backbone for some steps and sample from it in Python, in under a minute.

python examples/quickstart.py mamba_tiny
"""

import sys
from functools import partial
from pathlib import Path

import torch

from tread_zoo import create, create_backbone
from tread_zoo.data import StepBatches, digits, make_loader, to_model_range, to_uint8
from tread_zoo.diffusion import Euler, FlowMatching, SamplingOptions, default_labels, generate
from tread_zoo.evaluation.pictures import save_grid
from tread_zoo.routing import Stack, Step
from tread_zoo.seeding import make_image_generator

NUM_STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 200
data, objective = digits(), FlowMatching()
torch.manual_seed(0)
backbone = create_backbone(
    sys.argv[1] if len(sys.argv) > 1 else "dit_tiny", input_size=8, in_channels=1, num_classes=10
)
# half of the tokens bypass the middle blocks, chosen as suits the backbone
routing, stack = create("routing", "tread", selection_rate=0.5), Stack.of(backbone)
optimizer = torch.optim.AdamW(backbone.parameters(), lr=3e-3)
draws = torch.Generator().manual_seed(0)  # for all that is random in a step
batches = make_loader(data.train, StepBatches(len(data.train), 64, seed=0, num_steps=NUM_STEPS))
for step, (images, labels) in enumerate(batches):
    drawn = make_image_generator("route", 0, step, images=range(len(images)))
    routes = routing.draw(stack, drawn, Step(step, NUM_STEPS, seed=0))
    draw = objective.draw(images.shape, draws)
    network = partial(backbone, y=labels, routes=routes)
    losses, _ = objective.loss(network, to_model_range(images), draw)
    loss = losses.mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % 20 == 0:
        print(f"step {step + 1}  loss {loss.item():.3f}")

samples = generate(
    backbone.eval(), objective, SamplingOptions(Euler(), 25), indices=range(100),
    labels=default_labels(range(100), 10), seed=0, batch_size=100,
)  # fmt: skip
save_grid(to_uint8(samples), Path("quickstart.png"))
print("samples in quickstart.png")
