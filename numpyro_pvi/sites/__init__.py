"""Site algebra in natural space: sum, cavity, damping. Pure; no keys, no data, no densities."""

from ._algebra import SiteStack, cavity, damp, posterior, select, take

__all__ = ["SiteStack", "cavity", "damp", "posterior", "select", "take"]
