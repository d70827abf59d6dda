"""Diagnostics: read a state, never edit it."""

from ._calls import map_draws
from ._khat import khat
from ._khat_groups import khat_by_group
from ._khat_product import khat_of_product, khat_of_product_by_group
from ._prequential import LogScore, log_score

__all__ = ["LogScore", "khat", "khat_by_group", "khat_of_product", "khat_of_product_by_group", "log_score", "map_draws"]
