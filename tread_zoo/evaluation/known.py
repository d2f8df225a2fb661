"""What one evaluation leaves for the next of the same data, network and sampler.

A run that is scored again and again measures once, and keeps in memory: the features of the
reference, what real images score, what the sampler costs, and what the held-out loss depends on.
The samples are always new.
"""

from dataclasses import dataclass
from typing import Any

from tread_zoo.evaluation.extraction import FeatureSet
from tread_zoo.evaluation.sharing import Share


@dataclass
class Known:
    """Filled by the first `evaluate` that gets it; of use as long as its other arguments stay.

    Of several processes each has its own. The main one alone keeps features, which may be
    gigabytes; the others note that they were taken.

    Args:
        real: what real images score, by metric.
        sampling: see `sampling_record`.
        reference: the features that samples are compared with.
        held_out: see `tread_zoo.evaluation.protocol.held_out_record`.
    """

    real: dict[str, float] | None = None
    sampling: dict[str, Any] | None = None
    reference: FeatureSet | None = None
    held_out: dict[str, Any] | None = None

    def keep_reference(self, features: FeatureSet, share: Share) -> None:
        """Keep the reference's features, where they are needed."""
        self.reference = features if share.is_main else FeatureSet(None, features.shape, "")
