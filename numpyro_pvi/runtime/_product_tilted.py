"""Tilted moments of the factors of a product of families."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import in_batches
from ..expectations import (
    OVER_GRIDS,
    Chains,
    FactorStructure,
    LaplaceMoments,
    ProductGrid,
    ThetaPoints,
    Tilted,
    Unconstrained,
    chain_settings,
    discrete_of,
    draw,
    grid_of,
    linear_tilted,
    normal_cloud,
    num_draws,
    paired,
    probe_values,
    tilted_by_chains,
    tilted_by_draws,
    tilted_on_grid,
    weighable,
    with_settings,
)
from ..factors import chunk_log_likelihood
from ..families import MultivariateNormalFamily, ProductFamily, ProductNatural
from ..sites import SiteStack, posterior, select, take
from ..solvers import MatchRules, match_rules
from ._base import sum_span
from ._moments import MatchedFactors
from ._product_own import TOGETHER, OwnLatents
from ._product_plan import touched
from ._product_problem import ProductProblem
from ._tilted import MomentFactor, by_either, derivatives, lanes_pay, laplace_proposal

# ------------------------------------------------------------------------------------------------- draws about the mode
# Moments of a tilted distribution of a product of families from weighted draws about its mode.

# Degrees of freedom of the Student's t that is drawn from; and the least curvature, that of q being 1.
_FREEDOM, _LEAST_CURVATURE = 5.0, 1e-2
# Nats below the heaviest draw from which on one weighs nothing.
_NOTHING = 60.0


def tilted_by_laplace(
    space: Unconstrained,
    look: Callable[[Float[Array, "D"]], tuple[Array, Array, Array]],
    factor: Callable[[dict], Float[Array, "S"]],
    q: ProductNatural,
    site: ProductNatural,
    power: float | Float[Array, ""],
    key: Any,
    settings: LaplaceMoments,
) -> Tilted:
    """What matching the moments of ``q (p / t)^power`` asks for, from a Laplace approximation in unconstrained coordinates.

    Draws are of the Student's t (5 degrees of freedom) with the mode and the curvature there. ``look``: coordinates to the factor's
    log density, nats, its gradient and its Hessian in them; ``factor``: its log density at values by component with a leading axis
    of points; the other arguments, and what is returned, are those of :func:`numpyro_pvi.expectations.tilted_by_chains`.
    """
    family, cavity = space.family, q - site * power
    white_key, cloud_key = jax.random.split(key)
    white = space.whitening(q, white_key)
    gaussian = MultivariateNormalFamily(space.dim)
    dtype = white.loc.dtype
    eye = jnp.eye(space.dim, dtype=dtype)
    standard = gaussian.natural(jnp.zeros((space.dim,), dtype), eye)

    def rest(eps: Array) -> Array:
        return space.log_member(cavity, white.at(eps)) + 0.5 * jnp.sum(eps**2)

    def over_standard(eps: Array) -> tuple[Array, Array, Array]:
        value, slope, bend = look(white.at(eps))
        slope, bend = white.scale.T @ slope, white.scale.T @ bend @ white.scale
        own = rest(eps), jax.grad(rest)(eps), jax.hessian(rest)(eps)
        return own[0] + power * value, own[1] + power * slope, eye - _bent_down(eye - own[2] - power * bend)

    found = laplace_proposal(gaussian, over_standard, standard, standard * 0.0, 1.0, settings.num_steps)
    cloud_key, tail_key = jax.random.split(cloud_key)
    cloud = normal_cloud(cloud_key, space.dim, settings.num_draws, dtype).eps
    # Tails of gammas and betas fall off as an exponential of u, which no Gaussian's draws reach.
    spread = _FREEDOM / (2 * jax.random.gamma(tail_key, 0.5 * _FREEDOM, (settings.num_draws, 1), dtype))
    eps = gaussian.draw(found.moments, cloud * jnp.sqrt(spread))
    u = jax.vmap(white.at)(eps)
    values = jax.vmap(lambda point: space.values(point)[0])(u)
    statistics = {n: own.sufficient_statistics(values[n]) for n, own in family.components}
    log_q = jax.vmap(lambda point: space.log_member(q, point))(u) - family.log_partition(q)
    gap = eps - found.moments.loc
    square = jnp.sum(gap * jax.vmap(lambda x: gaussian.precision_product(found.natural, x))(gap), axis=-1)
    half = 0.5 * jnp.linalg.slogdet(found.natural.precision)[1] - jnp.sum(jnp.log(jnp.diagonal(white.scale)))
    most = 0.5 * (_FREEDOM + space.dim)
    log_g = half - most * jnp.log1p(square / _FREEDOM) - 0.5 * space.dim * math.log(_FREEDOM * math.pi)
    log_g = log_g + math.lgamma(most) - math.lgamma(0.5 * _FREEDOM)
    base, ratio = (log_q - log_g).astype(dtype), factor(values)
    site_says = paired(family, site, statistics)
    logs = base + power * (ratio - site_says)
    # Far out in the tails statistics overflow, and nothing is lost with draws that weigh nothing either way.
    finite = [jnp.isfinite(x.reshape(x.shape[0], -1)).all(axis=-1) for x in jax.tree.leaves(statistics)]
    seen = jnp.stack([jnp.isfinite(base), ~jnp.isnan(logs), *finite]).all(axis=0)
    near = seen & ((_relative(base, seen) > -_NOTHING) | (_relative(logs, seen) > -_NOTHING))
    first = jnp.argmax(near)
    statistics = select(near, statistics, take(statistics, first))
    base, ratio = jnp.where(near, base, -jnp.inf), jnp.where(near, ratio, ratio[first])
    weights = jax.nn.softmax(jnp.where(near, logs, -jnp.inf))
    ready = weighable(family, q, values, statistics, weights)
    return tilted_by_draws(family, ready, ratio, q, site, power, base)


def _relative(logs: Float[Array, "S"], seen: Array) -> Float[Array, "S"]:
    """Below the largest of those seen."""
    return logs - jnp.max(jnp.where(seen, logs, -jnp.inf))


def _bent_down(precision: Float[Array, "D D"]) -> Float[Array, "D D"]:
    """A curvature with all eigenvalues positive: Newton's steps then go uphill, in directions that bend up as in others."""
    values, vectors = jnp.linalg.eigh(0.5 * (precision + precision.T))
    size = jnp.maximum(jnp.abs(values), _LEAST_CURVATURE)
    return (vectors * size) @ vectors.T


# ------------------------------------------------------------------------------------------------------- product tilted

# Points at which a factor is compared with what its message says, and how far off it may be, relative to what is compared.
_PROBES, _AFFINE = 24, {"float64": 1e-8, "float32": 3e-4}
# What is folded into a round's key for the draws of its moments, for chains of groups, and for points of the prior factor.
_MOMENTS, _CHAINS, _PRIOR = 0x51, 0x52, 0x53
# What is folded in for the draws of a visit's own steps.
_STEPS = 0x54
# What is folded in for draws of rows' own latents.
_OWN = 0x55
# Share of the draws, or of q's mass at points, of which no row's integral need be known; and nats below the heaviest point from
# which on one is not looked at for the params.
_LEFT_OUT, _SLIGHT = 0.01, 24.0


def jointly_affine(problem: ProductProblem, sites: SiteStack, key: Any) -> tuple[Array, Array]:
    """Whether the groups' factors, and the prior factor, are affine in the statistics of all latents jointly.

    A factor affine in each latent given the others need not be. Its message at one q is compared with its values elsewhere:
    ``log f - <message, T>`` has to be the same at all points.

    Args:
        problem: the factors.
        sites: where q is.
        key: a random key.

    Returns:
        Two flags; the second False where there is no prior factor.
    """
    q, plan = posterior(problem.prior, sites), problem.plan
    likelihood, prior = jnp.array(False), jnp.array(False)
    # A marginal over rows' own latents is affine only where it sees nothing else.
    if _may_be_affine(plan.likelihood) and not plan.inside:
        likelihood = jnp.all(problem.of_rows("affine", lambda: (rows_affine(problem, q, key),), q, key)[0])
    if plan.prior_factor is not None and _may_be_affine(plan.prior_factor):
        message, (points, same) = problem.prior_message(q, key), _affinity(problem.family, q, key)
        prior = same(jax.vmap(problem.prior_density)(points), message)
    return likelihood, prior


def rows_affine(problem: ProductProblem, q: ProductNatural, key: Any) -> Bool[Array, "M"]:
    """Whether every group's factor is affine in the statistics of all latents jointly: see :func:`jointly_affine`."""
    points, same = _affinity(problem.family, q, key)
    messages, tilted = problem.group_messages(q, key).groups, ProductTilted(problem, None, key)
    numbers = jnp.arange(problem.num_groups)
    return jax.lax.map(lambda g: same(tilted.group_values(g)(points), take(messages, g)), numbers)


def _affinity(family: ProductFamily, q: ProductNatural, key: Any) -> tuple[dict, Callable[[Array, Any], Array]]:
    """Points, and whether a factor's values there differ from what its message says by a constant."""
    near = jax.vmap(lambda k: probe_values(family, q, k))(jax.random.split(key, _PROBES))
    drawn = family.sample(q, jax.random.fold_in(key, 1), (_PROBES,))
    points = {n: jnp.concatenate([near[n], drawn[n]]) for n in near}
    own: Any = {n: f.sufficient_statistics(points[n]) for n, f in family.components}
    limit = _AFFINE[jnp.result_type(float).name]

    def same(values: Array, message: Any) -> Array:
        parts = [jax.vmap(lambda t, n=n, f=f: f.inner(message.parts[n], t))(own[n]) for n, f in family.components]
        left, size = values - sum(parts), jnp.abs(values) + sum(jnp.abs(x) for x in parts)
        return jnp.max(jnp.abs(left - left[0])) <= limit * (1 + jnp.max(size))

    return points, same


def _may_be_affine(factor: FactorStructure) -> bool:
    return factor.closed


@dataclasses.dataclass(frozen=True)
class ProductTilted(MatchedFactors):
    """Takes the tilted moments of the factors of one round.

    ``solver``: whose ``power`` and ``moments`` count; ``key``: of the round's draws, common to all groups; ``first``: what draws of
    one group's own know of its position: that of the problem's first group among all.
    """

    problem: ProductProblem
    solver: Any
    key: Any
    first: Any = 0
    # Natural parameters of rows' own latents in q, where there are some.
    members: Any = None
    # What visits at the q that they begin with have in common: see :meth:`shared`.
    common: Any = None

    @property
    def family(self) -> ProductFamily:
        """Of what is matched."""
        return self.problem.plan.matched

    @property
    def own(self) -> OwnLatents | None:
        """What integrates rows' own latents out, where there are some."""
        if self.members is None:
            return None
        return OwnLatents(self.problem, self.members, jax.random.fold_in(self.key, _OWN))

    @property
    def methods(self) -> tuple[str, ...]:
        """How moments are taken, of groups and of the prior factor."""
        return self.problem.plan.tilted

    def _chunk_value(self, chunk: Any) -> Callable[[dict], Array]:
        """A chunk's log-likelihood, in nats, a function of one value of every component that is matched."""
        plan, own = self.problem.plan, self.own
        if own is not None:
            return own.log_marginal(chunk)
        arguments = plan.partition.rows, plan.partition.reading, self.problem.packing, chunk, plan.exact_latents
        return lambda values: chunk_log_likelihood(self.problem.call, plan.latent_values(values), *arguments)

    def _over_chunks(self, index: Any, of_chunk: Callable) -> Any:
        """The sum of a function of a chunk over one group's chunks."""
        problem, chunks = self.problem, self.problem.chunks
        if problem.one_chunk_each:
            return problem.runtime.total(of_chunk(take(chunks, index)))
        return problem.runtime.total(sum_span(of_chunk, chunks, *problem.span(index)))

    def group_values(self, index: Any) -> Callable[[dict], Float[Array, "S"]]:
        """One group's log-likelihood, in nats, a function of values of all components with a leading axis of points."""
        rows = max(self.problem.plan.partition.chunk_rows, 1) * (1 if self.own is None else self.own.tries)

        def of(values: dict) -> Array:
            return self._over_chunks(index, lambda chunk: _over_points(self._chunk_value(chunk), values, rows))

        return of

    def _group_slopes(self, index: Any) -> Callable:
        """One group's log-likelihood at coordinates u with derivatives: ``(values of u, order) -> (u -> value, gradient, ...)``."""

        def of(values: Callable, order: int) -> Callable:
            # Chunk by chunk, because a loop of unknown length has no reverse mode.
            def at(chunk: Any, u: Array) -> tuple:
                value = self._chunk_value(chunk)
                return derivatives(lambda point: value(values(point)), u, order)

            return lambda u: self._over_chunks(index, lambda chunk: at(chunk, u))

        return of

    def _prior_slopes(self, values: Callable, order: int) -> Callable:
        return lambda u: derivatives(lambda at: self.problem.prior_density(values(at)), u, order)

    def shared(self, q: ProductNatural) -> Any:
        """What the groups' visits at one q have in common.

        Constants and natural parameters of all groups' factors where these are exact, weighable draws, or None.
        """
        if self.methods[0] == "exact" and self.own is None:
            values, messages = self.problem.values_and_messages(q, self.key)
            constants = self.problem._by_group(values) - jax.vmap(lambda own: self._paired(own, q))(messages.groups)
            return constants, messages.groups
        return self._draws(q, self.problem.plan.likelihood) if self.methods[0] == "importance" else None

    def alone(self, index: Int[Array, ""], q: ProductNatural) -> ProductTilted:
        """The same for one visit at a q that no other group sees: with draws of its own, whose errors add up as if independent."""
        if self.methods[0] != "importance":
            return self
        key = jax.random.fold_in(self.key, self.first + index)
        return dataclasses.replace(self, common=dataclasses.replace(self, key=key).shared(q))

    def together(self, q: ProductNatural) -> ProductTilted:
        """The same for visits of all groups at one q."""
        return dataclasses.replace(self, common=self.shared(q))

    def _alone(self, index: Int[Array, ""], q: ProductNatural, site: ProductNatural) -> tuple[Array, ProductNatural]:
        """Constant and natural parameters of one group's factor that is affine in the statistics."""
        if self.own is not None:
            # Rows that see their own latents alone.
            points = jax.tree.map(lambda x: x[None], self.family.sample(q, jax.random.key(0)))
            return self.group_values(index)(points)[0], jax.tree.map(jnp.zeros_like, q)
        stack = SiteStack(jax.tree.map(lambda x: x[None], site), None)
        message, _, value = self.problem.group_value_and_message(q, stack, index, self.key)
        return value - self._paired(message, q), message

    def _paired(self, message: ProductNatural, q: ProductNatural) -> Array:
        return jnp.asarray(self.family.inner(message, self.family.natural_to_mean(q)))

    def _draws(self, q: ProductNatural, factor: FactorStructure) -> Any:
        family = touched(self.family, factor)
        return draw(family, _some(q, family), jax.random.fold_in(self.key, _MOMENTS), self._num_draws)

    @property
    def _num_draws(self) -> int:
        return num_draws(self.solver.moments)

    def group(
        self,
        index: Int[Array, ""],
        q: ProductNatural,
        site: ProductNatural,
        shared: Any,
        chains: Chains | None,
        power: Any,
    ) -> Tilted:
        """One group's tilted moments; ``shared``: as of :meth:`shared` at this q; ``chains``: where its chains stand, or None."""
        if self.methods[0] == "exact":
            constant, own = self._alone(index, q, site) if shared is None else take(shared, index)
            return linear_tilted(self.family, own, constant, q, site, power)
        looks = _Looks(
            self.problem.plan.likelihood,
            self.methods[0],
            self.group_values(index),
            self._group_slopes(index),
            jax.random.fold_in(jax.random.fold_in(self.key, _CHAINS), self.first + index),
        )
        return self._pointed(looks, q, site, shared, chains, power)

    def prior(self, q: ProductNatural, site: ProductNatural, chains: Chains | None, power: Any) -> Tilted:
        """The prior factor's tilted moments: see :meth:`group`."""
        factor = self.problem.plan.prior_factor
        assert factor is not None  # asked for where there is one
        if self.methods[1] == "exact":
            found = self.problem.prior_value_and_message(self._whole(q), self.key)
            assert found is not None
            value, message = found[0], _some(found[1], self.family)
            constant = value - self._paired(message, q)
            return linear_tilted(self.family, message, constant, q, site, power)
        draws = self._draws(q, factor) if self.methods[1] == "importance" else None
        key = jax.random.fold_in(self.key, _PRIOR)
        looks = _Looks(factor, self.methods[1], self._prior_values, self._prior_slopes, key)
        return self._pointed(looks, q, site, draws, chains, power)

    def factor(self, index: Int[Array, ""] | None) -> MomentFactor:
        """One group's factor, or the prior factor. Without a key its draws are those that visits have in common."""

        def tilted(q: Any, site: Any, power: Any, key: Any, chains: Chains | None = None) -> Tilted:
            own = self if key is None else dataclasses.replace(self, key=key)
            if index is None:
                return own.prior(q, site, chains, power)
            own = own if key is None else own.alone(index, q)
            return own.group(index, q, site, own.common, chains, power)

        return MomentFactor(self.family, self._rules(int(index is None)), tilted)

    def over_groups(self, visit: Callable[..., Any], operands: tuple) -> Any:
        """One after another; those whose chains run side by side, where that pays, all together."""
        problem = self.problem
        pays = problem.runtime.vectorised and problem.one_chunk_each and lanes_pay(problem.plan.partition.chunk_rows)
        lanes = problem.num_groups if self.methods[0] == "mcmc" and pays else None
        return jax.lax.map(lambda own: visit(self, *own), operands, batch_size=lanes)

    def step_key(self, index: Int[Array, ""] | None) -> Any:
        """Of the draws of a visit's own steps."""
        own = _PRIOR if index is None else self.first + index
        return jax.random.fold_in(jax.random.fold_in(self.key, _STEPS), own)

    def _rules(self, which: int) -> MatchRules:
        """What a visit of a group (0) or of the prior factor (1) reads beside its moments."""
        plan = self.problem.plan
        factor = plan.prior_factor if which else plan.likelihood
        assert factor is not None  # asked for where there is one
        seen, way = touched(self.family, factor), self.methods[which]
        size = seen.to_minimal(seen.zeros()).shape[-1] if seen.components else 0
        plain = self.solver.moments == "auto" and self.solver.factors == "group" and way == "importance"
        return match_rules(self.solver, size, plain and not which and not discrete_of(seen), shared=True)

    def _whole(self, q: ProductNatural) -> ProductNatural:
        """q with what it says of rows' own latents."""
        return q if self.members is None else q.combine(self.members)

    def theta_points(self, q: ProductNatural) -> ThetaPoints:
        """Weighted points of q's shared components, which rows' own latents are matched to: the same draws in every round.

        Args:
            q: natural parameters.

        Returns:
            The points, by the grid where moments are by quadrature.
        """
        seen = touched(self.family, self.problem.plan.likelihood)
        fixed = self.family.sample(q, jax.random.key(0))
        grid = self._grid(seen, self.problem.plan.likelihood) if self.methods[0] == "quadrature" else None
        if grid is not None:
            found = grid.member(_some(q, seen))
        else:
            count = self._num_draws if seen.components else 1
            values = seen.sample(_some(q, seen), jax.random.key(_OWN), (count,)) if seen.components else {}
            found = ThetaPoints(values, jnp.full((count,), -math.log(count)))
        every = {n: jnp.broadcast_to(x, (found.logs.shape[0], *x.shape)) for n, x in fixed.items()}
        return ThetaPoints(every | found.values, found.logs)

    def settled(self, q: ProductNatural, moved: Bool[Array, "M"]) -> ProductNatural:
        """Members of rows' own latents matched to the shared ones under q, of the groups that moved; the others' as they are."""
        return self._fixed.settled(self.theta_points(q), moved)

    def settled_group(self, q: ProductNatural, index: Int[Array, ""]) -> ProductNatural:
        """The same of one group."""
        return self._fixed.settled_group(self.theta_points(q), index)

    def averages(self, q: ProductNatural) -> Float[Array, "M"]:
        """Every group's ``E_q[log p(y_m | theta)]`` in nats, rows' own latents integrated out; differentiable in the params.

        Over :meth:`theta_points`; those of next to no weight count for nothing, whatever the factor is there, and so do a few of
        which it is not known.
        """
        theta, problem = self.theta_points(q), self.problem.differentiable()
        own = dataclasses.replace(self._fixed, problem=problem)
        rows, weights = problem.plan.partition.chunk_rows * own.tries, jnp.exp(theta.logs)
        here, best = theta.logs > jnp.max(theta.logs) - _SLIGHT, jnp.argmax(theta.logs)
        # Where nothing is asked the factor is looked at elsewhere: what it has no number for has no derivative either.
        values = select(here, theta.values, take(theta.values, best))

        def one(held: tuple) -> Array:
            # What a derivative needs of all points at once is more than there is room for.
            value = jax.checkpoint(own.log_marginal(held[0]))
            found = _over_points(value, values, max(rows, 1))
            lost = here & jnp.isnan(found)
            known = here & ~(lost & (jnp.sum(jnp.where(lost, weights, 0.0)) <= _LEFT_OUT))
            return jnp.sum(jnp.where(known, weights * jnp.where(known, found, 0.0), 0.0))

        return problem._by_group(problem._map_chunks(one))

    @property
    def _fixed(self) -> OwnLatents:
        """On the same draws in every round: members settle where q does."""
        return OwnLatents(self.problem, self.members, jax.random.key(_OWN))

    def _grid(self, seen: ProductFamily, factor: FactorStructure) -> ProductGrid | None:
        """Over the components that a factor sees; coarser where every row has a grid over its own latents at every point."""
        plan = self.problem.plan
        nested = self.members is not None and bool(plan.own_without_form) and factor is plan.likelihood
        return grid_of(seen, OVER_GRIDS) if nested else grid_of(seen)

    def _prior_values(self, values: dict) -> Array:
        return _over_points(self.problem.prior_density, values, 1)

    def _pointed(
        self, looks: _Looks, q: ProductNatural, site: ProductNatural, draws: Any, chains: Chains | None, power: Any
    ) -> Tilted:
        """Moments from points of the components that the factor sees; of the others its site is taken out in closed form."""
        family = self.family
        seen = touched(family, looks.factor)
        others = ProductFamily([(n, f) for n, f in family.components if n not in dict(seen.components)])
        fixed = others.sample(_some(q, others), jax.random.key(0))

        def everywhere(own: dict) -> Array:
            count = jax.tree.leaves(own)[0].shape[0]
            return looks.values({n: jnp.broadcast_to(x, (count, *x.shape)) for n, x in fixed.items()} | own)

        arguments, space = (_some(q, seen), _some(site, seen), power), Unconstrained(seen, _some(q, seen))
        integrates = self.members is not None and looks.factor is self.problem.plan.likelihood

        def told(found: Tilted, unknown: Any) -> Tilted:
            """Where rows' own latents are integrated out, a value that is no number is an integral that is not known."""
            return found._replace(unknown=unknown if integrates else None)

        def slopes(order: int) -> Callable:
            return looks.slopes(lambda u: fixed | space.values(u)[0], order)

        def by_chains() -> Tilted:
            settings = chain_settings(self.solver.moments)
            assert settings is not None  # the plan says so
            found = tilted_by_chains(space, slopes(1), *arguments, looks.key, settings, chains)
            return told(found, ~found.finite)

        def weighed() -> Tilted:
            values = everywhere(draws.values)
            if integrates:
                # Of a draw or two rounding may leave no row's integral; of more, nothing is known of the factor.
                lost = jnp.isnan(values)
                values = jnp.where(lost & (jnp.mean(lost) <= _LEFT_OUT), -jnp.inf, values)
            return told(tilted_by_draws(seen, draws, values, *arguments), jnp.any(jnp.isnan(values)))

        if looks.method == "quadrature":
            grid = self._grid(seen, looks.factor)
            assert grid is not None  # the plan says so
            found = tilted_on_grid(grid, everywhere, *arguments)
            found = told(found, found.unknown)
        elif looks.method == "laplace":
            wanted = with_settings(self.solver.moments)
            assert isinstance(wanted, LaplaceMoments)  # the plan says so
            found = tilted_by_laplace(space, slopes(2), everywhere, *arguments, looks.key, wanted)
            found = told(found, ~found.finite)
        elif looks.method == "mcmc":
            found = by_chains()
        else:
            found = by_either(chains, by_chains, weighed)
        if not others.components:
            return found
        own, known = _some(q, others), _some(site, others)
        gap = (others.log_partition(own - known * power) - others.log_partition(own)) / power
        change = ProductNatural((known * -1.0).parts | found.change.parts)
        return found._replace(change=change, value=found.value + gap)


@dataclasses.dataclass(frozen=True)
class _Looks:
    """How a factor is looked at: at points, and with derivatives in coordinates of the latents that it sees."""

    factor: FactorStructure
    method: str
    values: Callable
    slopes: Callable
    key: Any


def _some(natural: ProductNatural, family: ProductFamily) -> ProductNatural:
    return ProductNatural({n: natural.parts[n] for n, _ in family.components})


def _over_points(one: Callable, values: dict, rows: int) -> Array:
    return in_batches(one, values, TOGETHER // rows)
