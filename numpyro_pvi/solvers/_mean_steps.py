"""Steps in mean coordinates: how a site moves when expected statistics are asked to move by a share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._numerics import inverse_root, scaled_cholesky, symmetrise
from ..families import GaussianFamily, GaussianNatural, ProductFamily, ProductNatural, member_metrics


def posterior_step(family: GaussianFamily, q: Any, gap: Any, step: Float[Array, ""]) -> GaussianNatural:
    """The change of a site when q's mean parameters go a share of the way to those of another Gaussian.

    ``grad A*((1 - step) mu + step mu_hat) - eta`` with mu, eta of q and mu_hat of the Gaussian with natural parameters
    ``eta + gap``. The mean domain is convex, so q is normalisable after any step in [0, 1] where both Gaussians are. With the
    covariance ``V = S S^T`` and ``eps = S^-1 (theta - loc)`` everything follows from the gap, without a difference of large
    numbers: ``B = S^T D S`` for the precision's gap D,

        delta = (1 + B)^-1 S^T (gap in h - D loc),        E = (1 - step) delta delta^T - (1 + B)^-1 B,
        dLambda = -step S^-T (1 + step E)^-1 E S^-1,      dh = dLambda (loc + step S delta) + step S^-T delta.

    Args:
        family: the Gaussian family of q.
        q: its natural parameters.
        gap: natural parameters of the other Gaussian less those of q.
        step: share of the way, in [0, 1], in mean space.

    Returns:
        The change, in natural space.
    """
    moments = family.moments(q)
    force = family.pull(gap, moments.loc)
    if not family.full:
        sd = moments.scale
        bend = gap.precision * sd**2
        delta = sd * force / (1.0 + bend)
        spread = (1.0 - step) * delta**2 - bend / (1.0 + bend)
        precision = -step * spread / ((1.0 + step * spread) * sd**2)
        return GaussianNatural(precision * (moments.loc + step * sd * delta) + step * delta / sd, precision)
    root, eye = moments.scale, jnp.eye(family.dim, dtype=moments.scale.dtype)
    bend = symmetrise(root.T @ gap.precision @ root)
    shrink = _inverse(eye + bend)
    delta = shrink @ (root.T @ force)
    spread = symmetrise((1.0 - step) * delta[:, None] * delta - shrink @ bend)
    # S^-T of the covariance root S.
    back = q.precision @ root
    precision = -step * symmetrise(back @ (_inverse(eye + step * spread) @ spread) @ back.T)
    vector = precision @ (moments.loc + step * (root @ delta)) + step * (back @ delta)
    return GaussianNatural(vector, precision)


def site_step(
    family: GaussianFamily, site: Any, q: Any, gap: Any, step: Float[Array, ""]
) -> tuple[GaussianNatural, Bool[Array, ""]]:
    """The change of a site when its own mean parameters take a step: ``grad A*(gamma + step (mu_hat - mu)) - eta_m``.

    Here ``gamma = grad A(eta_m)`` are the site's own mean parameters, so the site has to be normalisable by itself, before and
    after.

    Args:
        family: the Gaussian family of q.
        site: natural parameters of the site, normalisable.
        q: natural parameters of q, with mean parameters mu.
        gap: natural parameters of the Gaussian with mean parameters mu_hat, less those of q.
        step: the step, in mean space.

    Returns:
        The change, in natural space, and whether the step stays in the mean domain.
    """
    own, here, there = (family.natural_to_mean(x) for x in (site, q, q + gap))
    new = own + (there - here) * step
    if family.full:
        inside = scaled_cholesky(-2 * new.second - new.first[:, None] * new.first)[1]
    else:
        inside = jnp.all(-2 * new.second > new.first**2)
    return family.mean_to_natural(new) - site, inside


def widening(family: GaussianFamily, q: Any, gap: Any) -> Float[Array, ""]:
    """The largest ratio, over all directions, of another Gaussian's variance to that of q.

    Args:
        family: the Gaussian family of q.
        q: its natural parameters.
        gap: natural parameters of the other Gaussian, which is normalisable, less those of q.

    Returns:
        A positive number; 1 where the two have the same covariance.
    """
    scale = family.moments(q).scale
    if not family.full:
        return 1.0 / jnp.min(1.0 + gap.precision * scale**2)
    bend = symmetrise(scale.T @ gap.precision @ scale)
    return 1.0 / (1.0 + jnp.linalg.eigvalsh(bend)[0])


def mean_step(family: ProductFamily, q: Any, gap: Any, step: Float[Array, ""]) -> ProductNatural:
    """:func:`posterior_step` of any family: ``grad A*((1 - step) mu + step mu_hat) - eta``.

    Args:
        family: the family of q.
        q: its natural parameters, with mean parameters mu.
        gap: natural parameters of the other member less those of q.
        step: share of the way, in [0, 1], in mean space.

    Returns:
        The change, in natural space; zero to the letter where the gap is.
    """
    here, there = family.natural_to_mean(q), family.natural_to_mean(q + gap)
    # The rounding of the way back is that of both.
    return family.mean_to_natural(here + (there - here) * step) - family.mean_to_natural(here)


def metric_widening(family: ProductFamily, q: Any, gap: Any) -> Float[Array, ""]:
    """The largest ratio, over all directions, of another member's Fisher metric to that of q.

    Of Gaussians that is the square of the largest ratio of variances, where that is above 1: see :func:`widening`.

    Args:
        family: the family of q.
        q: its natural parameters.
        gap: natural parameters of the other member, which is normalisable, less those of q.

    Returns:
        A positive number; 1 where the two are the same.
    """
    ratios = []
    for name, own in family.components:
        root, _ = scaled_cholesky(member_metrics(own, q.parts[name]))
        other = member_metrics(own, q.parts[name] + gap.parts[name])
        half = jax.scipy.linalg.solve_triangular(root, other, lower=True)
        whole = jax.scipy.linalg.solve_triangular(root, jnp.swapaxes(half, -1, -2), lower=True)
        ratios.append(jnp.max(jnp.linalg.eigvalsh(symmetrise(whole))))
    return jnp.max(jnp.stack(ratios))


def _inverse(matrix: Float[Array, "D D"]) -> Float[Array, "D D"]:
    root = inverse_root(scaled_cholesky(matrix)[0])
    return root @ root.T
