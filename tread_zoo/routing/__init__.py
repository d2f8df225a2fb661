"""Which tokens run through which blocks, when, and how they rejoin.

method.py       what a routing method is: `Method`, `Bypass`, `Stack`, `Step`
methods/        the methods: tread, sprint, maskdit, microdit, random_ltd, layer_drop, …
select.py       ranges of blocks that see fewer tokens, for most methods: `Select`, `Ranked`, `Skip`
selectors.py    which tokens a route keeps
timing.py       which steps of a run route, and at which rate
orders.py, scans.py   curves over the grid of tokens, and how scans and convolutions follow them
token_loss.py   an objective's loss per token
"""

from tread_zoo.routing.method import Bypass, Method, Stack, Step
from tread_zoo.routing.orders import ORDERS, inverse, scan_order
from tread_zoo.routing.scans import GAPS, Scan, make_scan
from tread_zoo.routing.select import Ranked, Select, Skip, bypassed_tokens, num_kept_tokens
from tread_zoo.routing.selectors import Selector

__all__ = [
    "GAPS", "ORDERS", "Bypass", "Method", "Ranked", "Scan", "Select", "Selector", "Skip", "Stack",
    "Step", "bypassed_tokens", "inverse", "make_scan", "num_kept_tokens", "scan_order",
]  # fmt: skip
