"""Which tokens leave which blocks, when, and how they rejoin."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tread_zoo.routing.fusion import Fusion
    from tread_zoo.routing.masks import MaskTokens
    from tread_zoo.routing.options import RouteConfig, RoutingConfig
    from tread_zoo.routing.orders import ORDERS, inverse, scan_order
    from tread_zoo.routing.pending import PendingRoute, resolve_routes
    from tread_zoo.routing.plan import NO_ROUTING, RoutePlan, Routing, build_routing
    from tread_zoo.routing.routes import (
        Bypass,
        PathDrop,
        Route,
        bypassed_tokens,
        check_routes,
        num_kept_tokens,
    )
    from tread_zoo.routing.scans import GAPS, Scan, make_scan
    from tread_zoo.routing.schedules import RateSchedule
    from tread_zoo.routing.selectors import Selector

__all__ = [
    "GAPS", "NO_ROUTING", "ORDERS", "Bypass", "Fusion", "MaskTokens", "PathDrop", "PendingRoute",
    "RateSchedule", "Route", "RouteConfig", "RoutePlan", "Routing", "RoutingConfig", "Scan",
    "Selector", "build_routing", "bypassed_tokens", "check_routes", "inverse", "make_scan",
    "num_kept_tokens", "resolve_routes", "scan_order",
]  # fmt: skip

_MODULES = (
    "routes", "plan", "pending", "options", "scans", "orders", "fusion", "masks", "schedules",
    "selectors",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load names, and torch with them, at first use: a command line reads the options alone."""
    if name in __all__:
        modules = (import_module(f"{__name__}.{module}") for module in _MODULES)
        return next(getattr(module, name) for module in modules if hasattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
