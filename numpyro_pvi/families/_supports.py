"""Families over finitely many values: their probabilities, and messages from what each value contributes.

Every function of a latent with finitely many values is affine in its indicators, so its expectation is the sum over the
values and the derivative in the mean parameters is the function itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._base import Family
from ._discrete import BernoulliFamily, BernoulliNatural, CategoricalFamily, CategoricalNatural
from ._independent import base_family


class Support(NamedTuple):
    """The values ``0 .. size - 1`` of a family; leading axes of everything are batch axes and members'.

    Attributes:
        size: K.
        binary: whether the natural parameter is one logit.
    """

    size: int
    binary: bool

    def probs(self, natural: Any) -> Float[Array, "*batch K"]:
        """The probability of every value under given natural parameters."""
        if self.binary:
            return jnp.stack([jax.nn.sigmoid(-natural.logit), jax.nn.sigmoid(natural.logit)], axis=-1)
        return jax.nn.softmax(natural.logits, axis=-1)

    def message(self, gradient: Float[Array, "*batch K"]) -> Any:
        """Natural parameters ``dF/dmu`` from the derivative of F in the probabilities, each taken on its own."""
        if self.binary:
            return BernoulliNatural(gradient[..., 1] - gradient[..., 0])
        # Adding a number to all logits changes nothing; without a large one they keep their digits in sums.
        return CategoricalNatural(gradient - jnp.max(gradient, axis=-1, keepdims=True))

    def natural(self, probs: Float[Array, "*batch K"]) -> Any:
        """Natural parameters of given probabilities, all positive."""
        return self.message(jnp.log(probs))


def support_of(family: Family) -> Support | None:
    """The values of a family.

    Args:
        family: a family; repetitions are looked through.

    Returns:
        The values; None where there are infinitely many.
    """
    family = base_family(family)
    if isinstance(family, BernoulliFamily):
        return Support(2, True)
    return Support(family.dim, False) if isinstance(family, CategoricalFamily) else None
