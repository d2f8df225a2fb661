"""The contract of all backbones: their base class, how routes enter and leave, shared layers."""
