"""How good samples are: feature extractors, scores with their protocol, agreement with labels."""

from tread_zoo.evaluation.agreement import digits_agreement, digits_agreement_reference
from tread_zoo.evaluation.features import DigitsFeatures, load_digits_features
from tread_zoo.evaluation.metrics import EXTRACTORS, METRICS, score

__all__ = [
    "EXTRACTORS",
    "METRICS",
    "DigitsFeatures",
    "digits_agreement",
    "digits_agreement_reference",
    "load_digits_features",
    "score",
]
