"""What stochastic solvers share: batches of a group's rows, draws, gradients, and any library's optimisers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.example_libraries import optimizers
from jaxtyping import Array, Bool, Float, Int
from numpyro.optim import Minimize, _NumPyroOptim

from ..errors import PVIError
from ..families import GaussianFamily, GaussianMoments, GaussianNatural
from ..sites import MAX_HALVINGS, back_off, select
from ._base import SolverDefaults

# A visit leaves at least this share of a precision of the local q: noise in the curvature may exceed the precision
# itself, and a mean of normalisable q's (a joint step of 1/M) is normalisable.
SMALLEST_SHARE = 0.1


@runtime_checkable
class Counted(Protocol):
    """What dealing out rows reads of a group's factor."""

    @property
    def num_rows(self) -> Any:
        """N_m."""
        ...

    @property
    def max_rows(self) -> int:
        """Rows of the largest group."""
        ...

    @property
    def fresh_batches(self) -> bool:
        """Whether the rows of every step are drawn anew."""
        ...


class Batches(NamedTuple):
    """The steps of one visit: how many, and the rows of each."""

    num_steps: Any
    # Step to positions of its rows within the group; None where every step takes all rows.
    rows: Callable[[Any], Int[Array, "B"]] | None
    # What a sum over the rows of a step is multiplied by: N_m / B.
    weight: Any


def plan_batches(
    factor: Counted, key: Any, batch_size: int | None, num_steps: int | None, epochs: int | float | None
) -> Batches:
    """Shuffle a group's rows and deal them out; after the last row the first come again.

    Every batch of ``batch_size`` different rows is equally likely at every step, so that its sum times ``N_m / B`` is an
    unbiased estimate of the group's. So it is where a group has fewer rows, which a batch then goes around: every row is in it as
    often as any other, or once more. Where the factor wants ``fresh_batches``, steps do not know of each other's rows.
    ``factor``: the group's factor; ``key``: a random key; ``batch_size``: B, or None for all rows at every step; ``num_steps``:
    steps of the visit, or None; ``epochs``: passes over the rows where ``num_steps`` is None; 1 by default. Returns the steps.
    """
    passes = 1.0 if epochs is None else float(epochs)
    if batch_size is None:
        return Batches(math.ceil(passes) if num_steps is None else num_steps, None, 1.0)
    count, length = factor.num_rows, num_steps
    if num_steps is None:
        # The last factor guards against 0.1 * 10 batches becoming two steps by rounding.
        steps = passes * count / batch_size * (1 - 1e-6)
        length = math.ceil(steps) if isinstance(count, int) else jnp.ceil(steps).astype(jnp.int32)
    late = jnp.arange(factor.max_rows) >= count

    def shuffled(key: Any) -> Int[Array, "R"]:
        return jnp.argsort(jax.random.uniform(key, (factor.max_rows,)) + late)

    order = None if factor.fresh_batches else shuffled(key)

    def rows(step):
        if order is None:
            return shuffled(jax.random.fold_in(key, step))[jnp.arange(batch_size) % count]
        return order[(step * batch_size + jnp.arange(batch_size)) % count]

    # Numbers of rows of 32 bits make a quotient of 32.
    return Batches(length, rows, jnp.asarray(count, jnp.result_type(float)) / batch_size)


def late_from(num_steps: Any, average: float) -> Int[Array, "..."]:
    """The first of a visit's steps whose naturals are averaged.

    ``num_steps``: of the visit, one number or one per group; ``average``: share of the steps, counted from the end. Returns its
    number; the last step's at most.
    """
    return jnp.minimum(num_steps - 1, jnp.ceil((1.0 - average) * num_steps)).astype(jnp.int32)


def late_weight(step: Any, first: Int[Array, "..."] | int) -> Float[Array, "..."]:
    """Weight of a step in the running mean of all from the first one on; 0 before."""
    late = jnp.maximum(step - first + 1, 0)
    return jnp.where(late > 0, 1.0 / jnp.maximum(late, 1), 0.0)


def share_of_steps(step_size: Any, num_steps: Any, average: float) -> Float[Array, ""]:
    """So much of the way to a target that stands still, on the average of the iterates that are averaged."""
    return 1.0 - (1.0 - step_size) ** (0.5 * (late_from(num_steps, average) + 1 + num_steps))


def next_draws(key: Any, step: Any, last: Float[Array, "S D"]) -> Float[Array, "S D"]:
    """Standard normal draws of one step: pairs of both signs, or a single draw whose sign the next step turns over.

    ``last``: the last step's draws; only the shape matters at step 0.
    """
    count, dim = last.shape
    if count > 1:
        half = jax.random.normal(jax.random.fold_in(key, step), (count // 2, dim), last.dtype)
        return jnp.concatenate([half, -half])

    def fresh():
        return jax.random.normal(jax.random.fold_in(key, step), last.shape, last.dtype)

    return jax.lax.cond(step % 2 == 0, fresh, lambda: -last)


def stein_moment(family: GaussianFamily, noise: Float[Array, "S D"], gradient: Float[Array, "S D"]):
    """``E[eps grad^T]`` (mean-field: ``E[eps * grad]``), which :func:`stein_precision` turns into a curvature."""
    if family.full:
        return noise.T @ gradient / noise.shape[0]
    return jnp.mean(noise * gradient, axis=0)


def stein_precision(family: GaussianFamily, q: GaussianNatural, moments: GaussianMoments, moment):
    """``-E[hess f]`` from Stein's moment: ``-sym(S^-T E[eps grad^T])``, or ``-E[eps * grad] / sd`` (S S^T the covariance)."""
    if not family.full:
        return -moment / moments.scale
    # S^-T = Lambda S.
    half = -(q.precision @ moments.scale) @ moment
    return 0.5 * (half + half.T)


def move_precision(family: GaussianFamily, site: Any, q: Any, wanted: Any, step: Any) -> tuple[Any, Int[Array, ""]]:
    """The change of a site's precision towards a target that keeps the local q normalisable.

    ``step``: share of the way in (0, 1]. Returns ``(change, halvings)``; a mean-field q's precisions are bounded below one by
    one, a full one's step is halved.
    """
    change = step * (wanted - site.precision)
    if not family.full:
        return jnp.maximum(change, -(1 - SMALLEST_SHARE) * q.precision), jnp.int32(0)

    def valid(share):
        precision = (1 - SMALLEST_SHARE) * q.precision + share * change
        return family.in_domain(family.natural(q.precision_mean, precision))

    share, tries = back_off(valid, jnp.ones((), change.dtype))
    return jnp.where(tries < MAX_HALVINGS, share, 0.0) * change, tries


def check_steps(owner: str, batch_size: Any, num_steps: Any, epochs: Any, num_particles: Any) -> None:
    """Refuse senseless settings of the steps of a visit.

    ``batch_size``: rows of a step, or None; ``num_steps``: steps of a visit, or None; ``epochs``: passes over a group's rows in
    a visit, or None. Raises PVIError naming the option, its value and what is expected.
    """
    if num_steps is not None and epochs is not None:
        raise PVIError(
            f"{owner}(num_steps={num_steps!r}, epochs={epochs!r}): both say how long a visit is; give one of the two."
        )
    for name, value in (("num_steps", num_steps), ("batch_size", batch_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise PVIError(f"{owner}({name}={value!r}): expected a positive int or None.")
    if epochs is not None and (isinstance(epochs, bool) or not isinstance(epochs, (int, float)) or not epochs > 0):
        raise PVIError(
            f"{owner}(epochs={epochs!r}): expected a positive number of passes over a group's rows, or None."
        )
    if epochs is not None and batch_size is None and epochs != int(epochs):
        raise PVIError(
            f"{owner}(epochs={epochs!r}): without batch_size every step is a whole pass; give a whole number."
        )
    good = isinstance(num_particles, int) and num_particles >= 1 and (num_particles == 1 or num_particles % 2 == 0)
    if not good:
        raise PVIError(
            f"{owner}(num_particles={num_particles!r}): expected 1 (a draw whose sign the next step turns over) or an "
            "even number (pairs of both signs)."
        )


def check_batch_size(
    owner: str, batch_size: int | None, sizes: dict[Hashable, int], mechanism: str, filled: bool = False
) -> None:
    """Refuse batches that no rows can be taken for, or that some group cannot fill.

    ``batch_size``: rows of a step, or None; ``sizes``: rows of each group, by label; ``filled``: whether every
    group has to have as many rows. Raises PVIError naming the group.
    """
    if batch_size is None:
        return
    if mechanism == "mask":
        raise PVIError(
            f"{owner}(batch_size={batch_size}): groups are evaluated by masks here, a full pass whatever the batch, so there are "
            "no mini-batches. Leave batch_size=None, or write the model so that rows can be taken: see Partition.plan(*args)."
        )
    label = min(sizes, key=lambda k: sizes[k])
    if filled and batch_size > sizes[label]:
        raise PVIError(
            f"{owner}(batch_size={batch_size}): group {label!r} has only {sizes[label]} row(s). Use a batch_size of at most that, "
            "or None for all rows at every step."
        )


class BatchSolver(SolverDefaults):
    """What solvers that take batches of rows check before a fit."""

    # Steps by batches of rows are of the shared latents, at draws of the rows' own given these.
    keeps_conditionals = True
    batch_size: int | None

    def check(self, structure: str, full: bool, where: str) -> None:
        """Factors of every structure will do."""

    def check_groups(self, sizes: dict[Hashable, int], mechanism: str) -> None:
        """Raise where batches are asked for, and groups are read by masks. Raises PVIError saying what to write."""
        check_batch_size(type(self).__name__, self.batch_size, sizes, mechanism)


# ----------------------------------------------------------------------------------------------------------- optimisers
# One interface for optax's and NumPyro's optimisers: of a flat vector, and of a model's ``numpyro.param`` values.

_DEFAULT_STEP = 0.01
# Units of rounding that a value may rise by in a step of a line search.
_ROUNDINGS = 8.0
# What share of what a visit was asked at first, and of how far it went, is little.
_LESS = 0.5
# Sds of q that draws' noise may be taken to ask for.
_NOISE = 0.1

Objective = Callable[[Float[Array, "D"]], tuple[Float[Array, ""], Float[Array, "D"]]]
"""A point to the loss there, in nats, and its gradient."""


class Optimiser(NamedTuple):
    """``init(point)`` to a state, and ``step(objective, point, state)`` to the next point and state."""

    init: Callable[[Float[Array, "D"]], Any]
    step: Callable[[Objective, Float[Array, "D"], Any], tuple[Float[Array, "D"], Any]]
    # Whether a step looks at the objective more than once, so that it must not be noisy (a line search).
    searches: bool


def _only_down(step: Callable) -> Callable:
    """Steps of an optimiser with a line search, less those that end where the loss is no lower.

    At a minimum the values that it compares are rounding, and where it finds none that is lower it may end anywhere.
    """

    def guarded(objective: Objective, point: Float[Array, "D"], state: Any) -> tuple[Float[Array, "D"], Any]:
        before, (new, after) = objective(point)[0], step(objective, point, state)
        value = objective(new)[0]
        rounding = _ROUNDINGS * jnp.finfo(value.dtype).eps * jnp.abs(before)
        down = jnp.isfinite(value) & ((value <= before + rounding) | ~jnp.isfinite(before))
        return select(down, new, point), select(down, after, state)

    return guarded


class Gaps(NamedTuple):
    """What a factor asks of its site: where a visit began, and on average over its late iterates.

    An optimiser whose steps have a length of their own, as Adam's, walks about a minimum that is within their reach; where the
    walk's late iterates lie about its beginning, rounds stand still beside the minimum, however far that is.
    """

    first: Any
    late: Any
    # How far late iterates are from the beginning on average.
    reach: Float[Array, ""]

    def seen(self, k: Any, weight: Any, gap: Any, point: Float[Array, "K"]) -> Gaps:
        """Those after step ``k`` to a point: what was asked for where it was taken, its ``weight`` among late iterates."""
        late = jax.tree.map(lambda old, new: old + weight * (new - old), self.late, gap)
        reach = self.reach + weight * (jnp.linalg.norm(point) - self.reach)
        return Gaps(select(k == 0, gap, self.first), late, reach)

    def about(self, average: Float[Array, "K"], length: Callable[[Any], Float[Array, ""]]) -> Bool[Array, ""]:
        """Whether a visit walked about its beginning and came no nearer: what it was asked at first serves better.

        Of visits that see all rows: what batches ask for differs by their rows. ``average``: of late iterates; ``length``: of a
        gap, in sds of q.
        """
        return ~self.nearer(length) & (jnp.linalg.norm(average) < _LESS * self.reach)

    def swung(self, average: Float[Array, "K"], length: Callable[[Any], Float[Array, ""]]) -> Bool[Array, ""]:
        """Whether it did not go far of a way that no noise of draws asks for: late looks on both sides may cancel one another.

        ``average``, ``length``: as of :meth:`about`.
        """
        begun, net = length(self.first), jnp.linalg.norm(average)
        return (begun > _NOISE) & (net < _LESS * begun) & (net < _LESS * self.reach)

    def nearer(self, length: Callable[[Any], Float[Array, ""]]) -> Bool[Array, ""]:
        """Whether much less is asked for late in a visit than where it began. ``length``: as of :meth:`about`."""
        return length(self.late) <= _LESS * length(self.first)


def as_optimiser(optim: Any, owner: str) -> Optimiser:
    """Wrap an optimiser.

    ``optim``: an optax ``GradientTransformation``, a ``numpyro.optim`` optimiser, or None for Adam with step 0.01. Raises
    PVIError for anything else.
    """
    if isinstance(optim, _NumPyroOptim):
        return _of_numpyro(optim, isinstance(optim, Minimize))
    if optim is None:
        import optax

        return _of_optax(optax.adam(_DEFAULT_STEP))
    if not isinstance(optim, type) and callable(getattr(optim, "init", None)) and callable(getattr(optim, "update", 0)):
        return _of_optax(optim)
    raise PVIError(
        f"{owner}(optim={optim!r}): expected an optax or numpyro optimiser, such as optax.adam(0.01) or "
        "numpyro.optim.Adam(0.01)."
    )


class OptaxOptim(_NumPyroOptim):
    """An optax optimiser of a tree of params under NumPyro's interface, which sees the objective and not its gradient alone.

    NumPyro's own adapter passes the value on, which is enough for ``optax.contrib.reduce_on_plateau``; line searches
    (``optax.lbfgs``) also ask for the gradient and for the function.
    """

    def __init__(self, transformation: Any) -> None:
        super().__init__(lambda: (lambda params: (params, transformation.init(params)), None, lambda state: state[0]))
        self._transformation = transformation

    def update(self, g: Any, state: Any, value: Any = None, **known: Any) -> Any:
        """A step along a gradient that is known already, as in SVI."""
        return self._step(g, state, known if value is None else {"value": value, **known})

    def eval_and_update(self, fn: Callable, state: Any, forward_mode_differentiation: bool = False) -> Any:
        """Value and gradient at the state's params, and a step."""

        def twice(params: Any) -> Any:
            found = fn(params)
            return found[0], found

        derivative = jax.jacfwd if forward_mode_differentiation else jax.grad
        gradient, (value, aux) = derivative(twice, has_aux=True)(self.get_params(state))
        known = {"grad": gradient, "value_fn": lambda params: fn(params)[0]}
        return (value, aux), self.update(gradient, state, value, **known)

    def _step(self, gradient: Any, state: Any, known: dict) -> Any:
        import optax

        count, (params, inner) = state
        update, inner = optax.with_extra_args_support(self._transformation).update(gradient, inner, params, **known)
        return count + 1, (optax.apply_updates(params, update), inner)


def step_and_slope(optim: _NumPyroOptim, fn: Callable, state: Any, forward: bool = False) -> tuple[Any, Any, Any]:
    """A step of an optimiser, and the slope that it took it by.

    ``optim``: NumPyro's, or what stands for another; ``fn``: params to the loss, in nats, that the optimiser looks at itself;
    ``state``: of the optimiser; ``forward``: whether to differentiate in forward mode. Returns ``(value, state, slope)``; the
    slope is None of an optimiser that takes no gradient, as ``Minimize``.
    """
    seen, watched = [], copy.copy(optim)

    def update(g: Any, *rest: Any, **known: Any) -> Any:
        seen.append(g)
        return optim.update(g, *rest, **known)

    # On the instance, where its own ``eval_and_update`` finds it.
    watched.update = update  # type: ignore[method-assign]
    (value, _), state = watched.eval_and_update(
        lambda params: (fn(params), None), state, forward_mode_differentiation=forward
    )
    return value, state, seen[-1] if seen else None


def of_params(optim: Any) -> _NumPyroOptim:
    """The optimiser of a model's ``numpyro.param`` values under NumPyro's interface.

    ``optim``: an optimiser of ``numpyro.optim``, ``jax.example_libraries.optimizers`` or optax. Returns NumPyro's, as it is, or
    what stands for the others. Raises PVIError for anything else.
    """
    if isinstance(optim, _NumPyroOptim):
        return optim
    if isinstance(optim, optimizers.Optimizer):
        return _NumPyroOptim(lambda: tuple(optim))
    if not isinstance(optim, type) and callable(getattr(optim, "init", None)) and callable(getattr(optim, "update", 0)):
        return OptaxOptim(optim)
    made = f"{optim.__name__}(0.01)" if isinstance(optim, type) or callable(optim) else "numpyro.optim.Adam(0.01)"
    raise PVIError(
        f"optim={optim!r}: expected an optimiser of numpyro.optim, jax.example_libraries.optimizers or optax, made with its "
        f"settings, such as {made}; None where the model has no numpyro.param site."
    )


def _of_numpyro(optim: Any, searches: bool) -> Optimiser:
    def step(objective: Objective, point, state):
        if searches:
            function = differentiable(objective)
            _, state = optim.eval_and_update(lambda x: (function(x), None), state)
        else:
            value, gradient = objective(point)
            before, state = optim.get_params(state), optim.update(gradient, state, value=value)
            # A state that was kept holds the point where the last visit ended: what counts is the step.
            after = optim.get_params(state)
            return jnp.where(before == point, after, point + (after - before)), state
        return optim.get_params(state), state

    return Optimiser(optim.init, _only_down(step) if searches else step, searches)


def _of_optax(optim: Any) -> Optimiser:
    import optax

    def step(objective: Objective, point, state):
        value, gradient = objective(point)
        update, state = optax.with_extra_args_support(optim).update(
            gradient, state, point, value=value, grad=gradient, value_fn=differentiable(objective)
        )
        return optax.apply_updates(point, update), state

    state = jax.eval_shape(optim.init, jax.ShapeDtypeStruct((2,), jnp.result_type(float)))
    kinds = (optax.ScaleByZoomLinesearchState, optax.ScaleByBacktrackingLinesearchState, optax.ScaleByLBFGSState)
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds))
    searches = any(isinstance(x, kinds) for x in nodes)
    return Optimiser(optim.init, _only_down(step) if searches else step, searches)


def differentiable(objective: Objective) -> Callable[[Float[Array, "D"]], Float[Array, ""]]:
    """The loss as a function that reverse mode differentiates by the gradient that comes with it.

    ``objective``: a point to value and gradient; loops of traced length inside have no reverse mode of their own. Returns a
    point to the value.
    """

    @jax.custom_vjp
    def function(point):
        return objective(point)[0]

    def forward(point):
        return objective(point)

    def backward(gradient, cotangent):
        return (cotangent * gradient,)

    function.defvjp(forward, backward)
    return function
