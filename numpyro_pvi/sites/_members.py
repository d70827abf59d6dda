"""Sites of latents inside the partitioned plate: every member belongs to one row and has its group's site alone."""

from __future__ import annotations

from typing import Any

from ..families import Vector, natural_parameters


@natural_parameters
class MemberSites(Vector):
    """Natural parameters by latent, all rows' members once: the sum of all groups' sites, of which one is not zero each."""

    parts: Any
