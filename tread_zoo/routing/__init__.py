"""Which tokens leave which blocks, and how they rejoin: selectors, routes, placement, fusion."""

from tread_zoo.routing.fusion import Fusion
from tread_zoo.routing.plan import RoutePlan, Routing, build_routing
from tread_zoo.routing.routes import PathDrop, Route, check_routes, num_kept_tokens
from tread_zoo.routing.selectors import SELECTORS, Selector, build_selector

__all__ = [
    "SELECTORS",
    "Fusion",
    "PathDrop",
    "Route",
    "RoutePlan",
    "Routing",
    "Selector",
    "build_routing",
    "build_selector",
    "check_routes",
    "num_kept_tokens",
]
