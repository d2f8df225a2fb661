"""Which tokens leave which blocks: selectors, routes, placement."""

from tread_zoo.routing.plan import RoutePlan, Routing, build_routing
from tread_zoo.routing.routes import Route, check_routes, num_kept_tokens
from tread_zoo.routing.selectors import SELECTORS, Selector, build_selector

__all__ = [
    "SELECTORS",
    "Route",
    "RoutePlan",
    "Routing",
    "Selector",
    "build_routing",
    "build_selector",
    "check_routes",
    "num_kept_tokens",
]
