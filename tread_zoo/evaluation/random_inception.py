"""Inception with random weights, in a file as the real ones come: to measure speed, not images."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from tread_zoo.evaluation.features import INCEPTION_EXTRACTOR


def write_random_inception(file: Path, seed: int = 0) -> Path:
    """Write weights of a size that keeps signals alive, for `inception_weights`; return `file`.

    The global random numbers are left as they were.
    """
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    class Random(FeatureExtractorInceptionV3):
        def load_state_dict(self, *args: Any, **keywords: Any) -> None:
            """Leave what was drawn."""

    with TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        nothing = Path(folder) / "nothing.pth"  # without a file it would be downloaded
        torch.save({}, nothing)
        network = Random(INCEPTION_EXTRACTOR, ["2048"], feature_extractor_weights_path=str(nothing))
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
    torch.save(network.state_dict(), file)
    return file
