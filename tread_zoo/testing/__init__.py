"""The contract of `tread_zoo.backbone` as checks that run on any backbone."""

from tread_zoo.testing.conformance import CHECKS, Probe

__all__ = ["CHECKS", "Probe"]
