"""Token routing for networks of other projects, without changing their code.

handle.py     `enable_routing`, and the handle that it returns
calls.py      one forward pass: blocks called on some of the tokens
arguments.py  which arguments of a block are per token, and their values for some of the tokens
check.py      test that a block may be routed
families.py   facts about known classes of networks that their code does not show
"""

from tread_zoo.routing.others.families import FAMILIES, REFUSED, Family
from tread_zoo.routing.others.handle import Routes, enable_routing

__all__ = ["FAMILIES", "REFUSED", "Family", "Routes", "enable_routing"]
