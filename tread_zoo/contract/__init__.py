"""The contract of all backbones: base class, what routes do to tokens, shared layers."""
