"""DINOv2 as a feature extractor, from files that are on this machine.

torch-fidelity resizes and normalises the images; the network comes from a copy of its authors' code
and a file of its weights, both where `torch.hub.load("facebookresearch/dinov2", …)` leaves them.
torch-fidelity itself would fetch them without a word, so it is not let.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

REPOSITORY = "https://github.com/facebookresearch/dinov2"
FOLDER = "facebookresearch_dinov2_main"
DOWNLOADS = "https://dl.fbaipublicfiles.com/dinov2"

# Ours and torch-fidelity's name -> that of the authors' code. The large one is that of
# "Exposing flaws of generative model evaluation metrics" (arXiv 2306.04675).
DINOV2_EXTRACTORS = {
    "dinov2-vit-l-14": "dinov2_vitl14",
    "dinov2-vit-s-14": "dinov2_vits14",
    "dinov2-vit-b-14": "dinov2_vitb14",
    "dinov2-vit-g-14": "dinov2_vitg14",
}
DINOV2_WIDTHS = {  # of the vector that distances are taken in
    "dinov2-vit-s-14": 384,
    "dinov2-vit-b-14": 768,
    "dinov2-vit-l-14": 1024,
    "dinov2-vit-g-14": 1536,
}


@dataclass(frozen=True)
class DINOv2Files:
    """The folder of the authors' code, and the file of the weights."""

    code: Path
    weights: Path


def find_dinov2(extractor: str, weights: str | None = None) -> DINOv2Files:
    """Return the files of a network. Never downloads.

    Args:
        extractor: a key of `DINOV2_EXTRACTORS`.
        weights: their file; None: in torch's hub folder.

    Raises:
        ValueError: one is not there; says where it was looked for and how to get it.
    """
    hub = Path(torch.hub.get_dir())
    code = hub / FOLDER
    name = f"{DINOV2_EXTRACTORS[extractor]}_pretrain.pth"
    file = Path(weights).expanduser() if weights else hub / "checkpoints" / name
    if file.is_dir():
        file = file / name
    url = f"{DOWNLOADS}/{DINOV2_EXTRACTORS[extractor]}/{name}"
    if not (code / "hubconf.py").is_file():
        raise ValueError(
            f"extractor={extractor!r} needs the code of DINOv2, and {str(code)!r} is not there. "
            f"Nothing is downloaded here: git clone {REPOSITORY} {code}"
        )
    if not file.is_file():
        raise ValueError(
            f"extractor={extractor!r} needs its weights, {name}, and {str(file)!r} does not exist. "
            f"Nothing is downloaded here: get it from {url} and put it there, or set "
            "dinov2_weights to where it is."
        )
    return DINOv2Files(code, file)


def load_dinov2(extractor: str, weights: Path) -> nn.Module:
    """Return torch-fidelity's extractor around the network: uint8 [B,3,H,W] -> ([B,D],), frozen.

    Raises:
        ValueError: the files are not there, or do not fit each other.
    """
    from torch_fidelity.feature_extractor_base import FeatureExtractorBase
    from torch_fidelity.feature_extractor_dinov2 import FeatureExtractorDinoV2

    files = find_dinov2(extractor, str(weights))
    os.environ.setdefault("XFORMERS_DISABLED", "1")  # as torch-fidelity has it: plain attention
    try:
        network = torch.hub.load(
            str(files.code), DINOV2_EXTRACTORS[extractor], source="local", pretrained=False
        )
        network.load_state_dict(torch.load(files.weights, map_location="cpu", weights_only=True))
    except Exception as error:  # code of another project, and files of any kind
        raise ValueError(
            f"extractor={extractor!r}: {str(files.weights)!r} does not load into the network of "
            f"{str(files.code)!r} ({str(error).splitlines()[0]}). Get both anew: {REPOSITORY}."
        ) from error

    class Local(FeatureExtractorDinoV2):
        """Its forward pass, around a network that is there already."""

        def __init__(self) -> None:
            FeatureExtractorBase.__init__(self, extractor, ["dinov2"])
            self.feature_extractor_internal_dtype = torch.float32
            self.model = network

    return Local().eval().requires_grad_(False)
