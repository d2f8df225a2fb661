"""Does sparse guidance pay? Time of a guided step of each kind, beside its share of the FLOPs.

python scripts/benchmark_guidance.py backbone=dit backbone.hidden_size=256
python scripts/benchmark_guidance.py backbone=mamba weak_rate=0.5

One step of Euler's rule at flow matching's t = 1/2 for a batch; the forms take turns, so that a
machine whose speed drifts slows all of them, and medians are printed. Ratios are to classifier-free
guidance, of the same round. `cfg doubled` is what it would be as one call of 2B images instead of
two of B. The last line is JSON.
"""

import json
import logging
import statistics
import time
from collections.abc import Callable

import hydra
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors, register_configs

register_configs()
logger = logging.getLogger(__name__)


@hydra.main(version_base="1.3", config_path="../configs", config_name="benchmark_guidance")
@clear_errors
def main(config: DictConfig) -> None:
    import torch

    from tread_zoo import create_backbone
    from tread_zoo.diffusion import (
        ClassifierFree,
        Euler,
        FlowMatching,
        ImageBatch,
        NoGuidance,
        SamplingOptions,
        SparseGuidance,
    )
    from tread_zoo.evaluation.flops import count_sampling
    from tread_zoo.kernels import set_forms
    from tread_zoo.runtime import autocast, describe_device, resolve_device, resolve_precision

    settings = as_keywords(config)
    set_forms(settings["kernels"])
    device = resolve_device(settings["device"])
    precision = resolve_precision(settings["precision"], device)
    batch, objective = settings["batch_size"], FlowMatching()
    network = create_backbone(
        input_size=settings["input_size"],
        in_channels=settings["in_channels"],
        num_classes=settings["num_classes"],
        **settings["backbone"],
    )
    network = network.to(device).eval()
    kinds = {
        "none": NoGuidance(),
        "cfg": ClassifierFree(scale=2.0),
        "sparse": SparseGuidance(
            scale=2.0, strong_rate=settings["strong_rate"], weak_rate=settings["weak_rate"]
        ),
    }
    flops = {}
    for name, guidance in kinds.items():
        guidance.check(network, objective)
        options = SamplingOptions(Euler(), 1, guidance=guidance)
        flops[name] = count_sampling(network, objective, options).flops
    flops["cfg doubled"] = flops["cfg"]

    x = torch.randn(batch, network.in_channels, *network.input_size, device=device)
    level = torch.full((batch,), 0.5, device=device)
    labels = torch.arange(batch, device=device) % network.num_classes
    null = torch.full_like(labels, network.null_label)

    def doubled() -> torch.Tensor:
        both = torch.cat([null, labels])
        weak, strong = objective.drift(
            lambda x_t, t: network(x_t, t, both), torch.cat([x, x]), torch.cat([level, level])
        ).chunk(2)
        return weak + 2.0 * (strong - weak)

    images = ImageBatch(network, objective, labels, range(batch), seed=0)
    drifts = {name: guidance.drift(images) for name, guidance in kinds.items()}
    forms: dict[str, Callable[[], torch.Tensor]] = {
        name: (lambda drift=drift: drift(x, level)) for name, drift in drifts.items()
    }
    forms["cfg doubled"] = doubled

    def measure(form: Callable[[], torch.Tensor]) -> float:
        began = time.perf_counter()
        with torch.no_grad(), autocast(device, precision):
            form()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for form in list(forms.values()) * 2:
        measure(form)
    rounds = [
        {name: measure(form) for name, form in forms.items()} for _ in range(settings["num_rounds"])
    ]
    logger.info("%s on %s, %s", network.name, describe_device(device), precision)
    logger.info(
        "%d tokens, batch %d, rates %g and %g, %d rounds", network.num_tokens, batch,
        settings["strong_rate"], settings["weak_rate"], settings["num_rounds"],
    )  # fmt: skip
    record = {"backbone": network.name}
    for name in forms:
        milliseconds = 1e3 * statistics.median(one[name] for one in rounds)
        time_ratio = statistics.median(one[name] / one["cfg"] for one in rounds)
        flops_ratio = flops[name] / flops["cfg"]
        logger.info(
            "%-11s %8.1f ms a step  %8.1f MFLOPs an image  time / cfg %.3f  FLOPs / cfg %.3f: "
            "%.3f of it", name, milliseconds, flops[name] / 1e6, time_ratio, flops_ratio,
            time_ratio / flops_ratio,
        )  # fmt: skip
        record[name] = {"ms": milliseconds, "time_ratio": time_ratio, "flops_ratio": flops_ratio}
    logger.info("%s", json.dumps(record))


if __name__ == "__main__":
    main()
