"""How far apart do runs drift: DDP against FSDP2, and against DDP from weights a rounding away?

accelerate launch --config_file configs/accelerate/cpu.yaml -m tests.training.drift

U-ViT tiny, digits, twenty steps, at a usual learning rate and at one that is too high, in float32
and in float64. If FSDP2 computed something else, float64 would not bring it nearer; if a difference
is rounding, a perturbed DDP drifts as it does. No test: it prints; docs/distributed.md has what.
"""

import os
from contextlib import ExitStack
from dataclasses import replace
from tempfile import TemporaryDirectory
from unittest import mock

import torch
import torch.distributed as dist

from tests.small_run import full_settings
from tread_zoo.diffusion import Draw, flow
from tread_zoo.training import loop, sharding
from tread_zoo.training.reporting import Reporter

STEPS, FIRST = 20, 7
RATES = (5e-4, 6e-3)
RUNS = {
    torch.float32: (("FSDP2", 0.0), ("DDP", 1e-7)),
    torch.float64: (("FSDP2", 0.0), ("DDP", 1e-7), ("DDP", 1e-15)),
}


def losses(kind, rate, dtype, perturbation, folder):
    """Return the loss of each step of a run, float64 [STEPS], the mean of all ranks.

    Args:
        kind: DDP or FSDP2.
        rate: of learning, after two steps of warm-up.
        dtype: that everything is computed in.
        perturbation: initial weights are multiplied by 1 + perturbation * n, n standard normal.
        folder: for the run.
    """
    os.environ |= {"FSDP_VERSION": "2", "ACCELERATE_USE_FSDP": str(kind == "FSDP2").lower()}
    build, draw, losses_of = loop.build_parts, loop.draw_step, loop.losses_of
    seen = []

    def build_perturbed(**keywords):
        parts = build(**keywords)
        parts.backbone.to(dtype)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for weight in parts.backbone.parameters():
                n = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                weight.copy_(weight.double() * (1 + perturbation * n))
        return parts

    def draw_in_dtype(*args, **keywords):
        drawn = draw(*args, **keywords)
        noise, level = drawn.draw.noise.to(dtype), drawn.draw.level.to(dtype)
        return replace(drawn, images=drawn.images.to(dtype), draw=Draw(noise, level))

    def watch(*args):
        found = losses_of(*args)
        seen.append(found.detach().double().mean())
        return found

    with ExitStack() as stack:
        for module, name, other in (
            (loop, "build_parts", build_perturbed),
            (loop, "draw_step", draw_in_dtype),
            (loop, "losses_of", watch),
            (loop, "_save", lambda run, step: None),
            (flow, "prediction", lambda output, channels: output[:, :channels]),  # no cast
            (sharding, "_compute_in", lambda network, device, precision: None),  # nor here
            (Reporter, "samples", lambda self, network, step: None),
            (Reporter, "finish", lambda self, *given: None),
        ):
            stack.enter_context(mock.patch.object(module, name, other))
        loop.train(
            **full_settings(
                "backbone=uvit_tiny", f"training.num_steps={STEPS}", "training.batch_size=8",
                "training.warmup_steps=2", "training.schedule=constant",
                f"training.learning_rate={rate}", "training.precision=fp32",
                "training.log_every=1000", "device=cpu", "overwrite=true", f"run_dir={folder}",
            )
        )  # fmt: skip
    mean = torch.stack(seen)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def main():
    with TemporaryDirectory() as folder:
        for rate in RATES:
            for dtype, others in RUNS.items():
                plain = losses("DDP", rate, dtype, 0.0, folder)
                for kind, perturbation in others:
                    gap = (losses(kind, rate, dtype, perturbation, folder) - plain).abs()
                    if dist.get_rank() == 0:
                        print(
                            f"rate {rate:g} {dtype} {kind} perturbed by {perturbation:g}: "
                            f"{gap[:FIRST].max():.0e} apart in {FIRST} steps, {gap.max():.0e} in "
                            f"{STEPS}", flush=True,
                        )  # fmt: skip


if __name__ == "__main__":
    main()
