"""Token routing for networks of other projects, without changing their code.

handle.py     `enable_routing`, and the handle that it returns
calls.py      one forward pass: blocks called on some of the tokens
arguments.py  which arguments of a block have one row per token, and their rows
check.py      proof that a block may be routed
families.py   what cannot be read off a network, by the name of its class
"""

from tread_zoo.routing.others.families import FAMILIES, REFUSED, Family
from tread_zoo.routing.others.handle import Routes, enable_routing

__all__ = ["FAMILIES", "REFUSED", "Family", "Routes", "enable_routing"]
