"""Site algebra in natural space: sum, cavity, damping. Pure; no keys, no data, no densities."""

from ._algebra import MAX_HALVINGS, SiteStack, back_off, cavity, damp, posterior, select, take, with_shares
from ._late_averaging import late_share, next_step, swings
from ._local import LocalSites, OwnConditionals, keep_groups, marginal_sites
from ._members import MemberSites
from ._rows import RowSites
from ._slots import add_slots, keep_slots, stack_sites, sum_slots
from ._tied import tie, tied_site

__all__ = [
    "MAX_HALVINGS",
    "back_off",
    "LocalSites",
    "MemberSites",
    "OwnConditionals",
    "RowSites",
    "SiteStack",
    "add_slots",
    "cavity",
    "damp",
    "keep_groups",
    "keep_slots",
    "late_share",
    "marginal_sites",
    "next_step",
    "posterior",
    "select",
    "stack_sites",
    "sum_slots",
    "swings",
    "take",
    "tie",
    "tied_site",
    "with_shares",
]
