"""Site algebra in natural space: sum, cavity, damping. Pure; no keys, no data, no densities."""

from ._algebra import SiteStack, cavity, damp, posterior, select, take
from ._local import LocalSites, keep_groups, marginal_sites
from ._rows import RowSites

__all__ = [
    "LocalSites",
    "RowSites",
    "SiteStack",
    "cavity",
    "damp",
    "keep_groups",
    "marginal_sites",
    "posterior",
    "select",
    "take",
]
