"""The routing methods of the package, one per file; importing this package registers them."""

from tread_zoo.routing.methods.layer_drop import LayerDrop
from tread_zoo.routing.methods.masking import MaskDiT, MicroDiT
from tread_zoo.routing.methods.mixture_of_depths import MixtureOfDepths
from tread_zoo.routing.methods.none import NoRouting
from tread_zoo.routing.methods.random_ltd import RandomLTD
from tread_zoo.routing.methods.sprint import Sprint
from tread_zoo.routing.methods.token_merging import TokenMerging
from tread_zoo.routing.methods.tread import Tread

__all__ = [
    "LayerDrop", "MaskDiT", "MicroDiT", "MixtureOfDepths", "NoRouting", "RandomLTD", "Sprint",
    "TokenMerging", "Tread",
]  # fmt: skip
