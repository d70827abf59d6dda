"""Site algebra in natural space: sum, cavity, damping. Pure; no keys, no data, no densities."""

from ._algebra import SiteStack, cavity, damp, posterior, select, take
from ._local import LocalSites, keep_groups, marginal_sites

__all__ = [
    "LocalSites",
    "SiteStack",
    "cavity",
    "damp",
    "keep_groups",
    "marginal_sites",
    "posterior",
    "select",
    "take",
]
