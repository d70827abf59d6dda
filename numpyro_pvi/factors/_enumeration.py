"""Which discrete latents are summed out."""

from __future__ import annotations

import dataclasses

from numpyro import distributions as dist


class EnumeratedRows(dist.Unit):
    """The log-likelihood of every row with its discrete latents summed out, as an observed site's distribution.

    A type of its own, since no structure may be looked for in a log of sums: wherever one value of a latent explains
    every row it passes for a quadratic, which it is not elsewhere.
    """


@dataclasses.dataclass(frozen=True)
class Enumeration:
    """Which discrete latents of a model are summed out, and where. Static and hashable.

    Args:
        plates: partitioned plates that hold discrete latents; none where the model is kept whole.
        dims: their batch dimensions, negative.
        latents: the discrete latents.
        names: per plate, the name of the site that stands for its rows: the observed sites' names, joined by "+".
        depth: batch dimensions that the model's plates take; enumeration uses those to the left.
    """

    plates: tuple[str, ...]
    dims: tuple[int, ...]
    latents: tuple[str, ...]
    names: tuple[str, ...]
    depth: int

    def __str__(self) -> str:
        if not self.plates:
            return f"{', '.join(self.latents)}, summed out exactly"
        where = " and ".join(repr(plate) for plate in self.plates)
        return f"{', '.join(self.latents)} in plate {where}, summed out exactly row by row"
