"""A guide whose latents keep their own supports: each has the exponential family conjugate to its prior."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.core import Tracer
from jaxtyping import Array, Float
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.distributions.util import periodic_repeat
from numpyro.infer import init_to_median, init_to_sample
from numpyro.infer.autoguide import AutoGuide

from ._compiling import look
from .errors import GuideError, lacking
from .families import (
    BernoulliFamily,
    BetaFamily,
    DirichletFamily,
    Family,
    FamilyDefaults,
    LogNormalFamily,
    MarkovNormal,
    MultivariateNormalFamily,
    ScalarNormalFamily,
    TransformedNormalFamily,
    VonMisesFamily,
    WishartFamily,
    family_for,
    repeated,
)
from .guides import Marginal, event_rank, in_own_support, marginal_quantiles

# ------------------------------------------------------------------------------------------------------ latent families
# The family of one latent, and its members as params of a guide.

# Parameters a member is optimised by, where its class could be built from several sets of them.
_PARAMETERS: dict[type, tuple[str, ...]] = {
    dist.MultivariateNormal: ("loc", "scale_tril"),
    dist.Wishart: ("concentration", "scale_tril"),
}
# Draws that a prior outside its latent's family is matched by.
NUM_MATCHED = 2000
# Settings of the other latents, drawn from their priors, at which ends of supports have to be where they were.
_LOOKS = 3


class Latent(NamedTuple):
    """What the guide knows of one latent: its family, and how a member is written as params."""

    family: Family
    # The member's own class, and the event axes that were added to it.
    kind: type
    rank: int
    # Parameter -> value at the start, and its constraint.
    start: dict[str, Array]
    constraint: dict[str, Any]
    # What carries a normal member to the latent's support.
    transforms: tuple[Any, ...] = ()

    def params(self, member: Any) -> dict[str, Array]:
        """A member of the family as params, in its constrained space: the inverse of :meth:`member`."""
        bare, _ = _before_transforms(_bare(member)[0])
        return _chain_start(bare)[0] if self.kind is MarkovNormal else {p: getattr(bare, p) for p in self.start}

    def member(self, params: dict[str, Array]) -> dist.Distribution:
        """The member of the family with these params, events of the latent's own shape."""
        if self.kind is MarkovNormal:
            return _chain(len(self.family.event_shape) == 1, **params)
        own = self.kind(**params)
        whole = Marginal(own, list(self.transforms)) if self.transforms else own
        return whole.to_event(self.rank)


def _bare(member: Any) -> tuple[Any, int]:
    """A distribution without ``to_event``, and how many axes that had added."""
    rank = 0
    while isinstance(member, dist.Independent):
        member, rank = member.base_dist, rank + member.reinterpreted_batch_ndims
    return member, rank


def _before_transforms(member: Any) -> tuple[Any, tuple[Any, ...]]:
    """The normal that a member is the image of, and the transforms; any other member, and none."""
    if isinstance(member, Marginal) or type(member) is dist.TransformedDistribution:
        return member.base_dist, tuple(member.transforms)
    return member, ()


def make_latent(name: str, fn: Any, given: Any) -> Latent:
    """Find a latent's family and where its params start.

    ``given``: the family asked for, or None for that of the prior. Returns the latent, its params with the prior's batch axes
    leading; a mask leaves a latent out of the density, and its family as it is. Raises GuideError where there is no family, or
    one with other shapes or another support.
    """
    fn = _without_mask(fn)
    family = _family_of(name, fn, given)
    conjugate = _is_member(family, fn, given is not None)
    origin = fn if conjugate else _matched(name, family, fn)
    about: list[Any] = []

    def read(origin: Any) -> dict[str, Array]:
        natural = family.from_distribution(origin) if conjugate else origin
        member, rank = _bare(family.to_distribution(natural))
        member, transforms = _before_transforms(member)
        kind = type(member)
        if kind is MarkovNormal:
            start, constraint = _chain_start(member)
        else:
            wanted = _PARAMETERS.get(kind) or tuple(kind.arg_constraints)
            start = {p: jnp.asarray(getattr(member, p)) for p in wanted}
            constraint = {p: kind.arg_constraints[p] for p in wanted}
        about[:] = kind, rank, constraint, transforms
        return start

    # One program: by themselves these are dozens, as many as the family has operations.
    start = look(read, origin)
    kind, rank, constraint, transforms = about
    return Latent(family, kind, rank, {p: start[p] for p in constraint}, constraint, transforms)


def _without_mask(fn: Any) -> Any:
    if isinstance(fn, dist.MaskedDistribution):
        return _without_mask(fn.base_dist)
    if not isinstance(fn, dist.ExpandedDistribution | dist.Independent):
        return fn
    inner = _without_mask(fn.base_dist)
    if inner is fn.base_dist:
        return fn
    whole = isinstance(fn, dist.Independent)
    return inner.to_event(fn.reinterpreted_batch_ndims) if whole else inner.expand(fn.batch_shape)


def _family_of(name: str, fn: dist.Distribution, given: Any) -> Family:
    """The family of one latent, with its event axes."""
    if given is not None:
        if not isinstance(given, Family):
            said = lacking(given, Family, FamilyDefaults, "numpyro_pvi.families")
            raise GuideError(f"families[{name!r}]={given!r} is not a family.{said}")
        own, shape = tuple(given.event_shape), tuple(fn.event_shape)
        if shape[len(shape) - len(own) :] != own or len(own) > len(shape):
            raise GuideError(
                f"families[{name!r}] has events of shape {own}, but the latent's are {shape}: the last axes must agree."
            )
        return repeated(given, shape[: len(shape) - len(own)])
    try:
        return family_for(fn)
    except GuideError as error:
        try:
            return _by_support(fn)
        except GuideError as other:
            raise GuideError(
                f"latent {name!r}: {error} There is no family for its support, {fn.support}, either: {other} Pass "
                f"families={{{name!r}: ...}}, or use a guide in unconstrained space such as AutoNormal."
            ) from None


def _by_support(fn: Any) -> Family:
    """A family with a prior's support. Raises GuideError where there is none."""
    base, shape = _base_support(fn), tuple(fn.event_shape)
    scalar: list[tuple[Any, Family]] = [
        (constraints.real, ScalarNormalFamily()),
        (constraints.positive, LogNormalFamily()),
        (constraints.nonnegative, LogNormalFamily()),
        (constraints.unit_interval, BetaFamily()),
        (constraints.circular, VonMisesFamily()),
        (constraints.boolean, BernoulliFamily()),
    ]
    for constraint, family in scalar:
        if base is constraint or _same_interval(base, constraint):
            return repeated(family, shape)
    if base is constraints.simplex:
        return repeated(DirichletFamily(shape[-1]), shape[:-1])
    if base is constraints.real_vector:
        return repeated(MultivariateNormalFamily(shape[-1]), shape[:-1])
    if base is constraints.positive_definite:
        return repeated(WishartFamily(shape[-1]), shape[:-2])
    own = shape[len(shape) - base.event_dim :]
    return repeated(TransformedNormalFamily(base, own), shape[: len(shape) - len(own)])


def _base_support(fn: Any) -> Any:
    """The support of single members."""
    return getattr(fn.support, "base_constraint", fn.support)


def _ends(fn: Any) -> dict[str, Any]:
    """The ends of the support of single members that a distribution was given, by name."""
    support = _base_support(fn)
    if isinstance(support, constraints.ParameterFreeConstraint):
        return {}
    return {end: getattr(support, end) for end in ("lower_bound", "upper_bound") if hasattr(support, end)}


def _nudged(x: Any) -> Array:
    """A param's value a hundredth further up."""
    x = jnp.asarray(x)
    return x + 1e-2 * (1 + jnp.abs(x)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _same_interval(one: Any, other: Any) -> bool:
    """Whether two supports are intervals with the same known ends: that of ``Uniform(0, 1)`` is another object."""
    ends = [(getattr(x, "lower_bound", None), getattr(x, "upper_bound", None)) for x in (one, other)]
    if any(isinstance(end, Tracer) for pair in ends for end in pair) or ends[0] == (None, None):
        return False
    return all((a is None) == (b is None) and (a is None or bool(np.all(a == b))) for a, b in zip(*ends, strict=True))


def _is_member(family: Family, fn: Any, given: bool) -> bool:
    """Whether a prior is a member of the family, so that q may start there."""
    try:
        return (not given or fn.support.is_discrete) and family_for(fn) == family
    except GuideError:
        return False


def _matched(name: str, family: Family, fn: Any) -> Any:
    """The member of the family with the prior's mean statistics, by draws."""
    draws = _draws(fn)
    member = family.to_distribution
    mean = jax.tree.map(lambda x: jnp.mean(x, axis=0), family.sufficient_statistics(draws))
    natural = family.nearest_valid(family.mean_to_natural(mean))
    own = member(natural)
    inside = (
        np.all(np.asarray(own.support(draws))),
        np.all(np.asarray(fn.support(own.sample(jax.random.key(1), (64,))))),
    )
    if not all(inside):
        raise GuideError(
            f"families[{name!r}]: the family's support, {own.support}, is not that of the prior, {fn.support}. Give a "
            "family over the same values."
        )
    return natural


def _draws(fn: Any) -> Array:
    """Of a prior; of one that nothing can be drawn of, as an improper one, images of standard normals in unconstrained space."""
    try:
        return fn.sample(jax.random.key(0), (NUM_MATCHED,))
    except NotImplementedError:
        transform = dist.biject_to(fn.support)
        shape = transform.inverse_shape(tuple(fn.shape()))
        return jnp.asarray(transform(jax.random.normal(jax.random.key(0), (NUM_MATCHED, *shape))))


def _chain_start(member: MarkovNormal) -> tuple[dict[str, Array], dict[str, Any]]:
    """A chain by its mean and the block-bidiagonal Cholesky factor of its precision, which no step can make improper."""
    blocks, lower = member.precision, member.lower

    def step(carry: Array, here: tuple) -> tuple:
        block, below = here
        root = jnp.linalg.cholesky(block - carry @ jnp.swapaxes(carry, -1, -2))
        off = jnp.swapaxes(jax.scipy.linalg.solve_triangular(root, jnp.swapaxes(below, -1, -2), lower=True), -1, -2)
        return off, (root, off)

    below = jnp.concatenate([lower, jnp.zeros_like(blocks[..., :1, :, :])], axis=-3)
    along = tuple(jnp.moveaxis(x, -3, 0) for x in (blocks, below))
    _, (roots, offs) = jax.lax.scan(step, jnp.zeros_like(along[0][0]), along)
    roots, offs = jnp.moveaxis(roots, 0, -3), jnp.moveaxis(offs, 0, -3)[..., :-1, :, :]
    start = {"loc": member.mean, "root": roots, "below": offs}
    kinds = {
        "loc": constraints.real_vector if member.scalar else constraints.real_matrix,
        "root": constraints.independent(constraints.lower_cholesky, 1),
        "below": constraints.independent(constraints.real_matrix, 1),
    }
    return start, kinds


def _chain(scalar: bool, loc: Array, root: Array, below: Array) -> MarkovNormal:
    """The inverse of :func:`_chain_start`: ``Lambda = R R^T`` with R block-bidiagonal."""
    transposed = jnp.swapaxes(root, -1, -2)
    precision = root @ transposed
    inner = below @ jnp.swapaxes(below, -1, -2)
    precision = precision.at[..., 1:, :, :].add(inner)
    lower = below @ transposed[..., :-1, :, :]
    states = loc[..., None] if scalar else loc
    image = jnp.einsum("...tij,...tj->...ti", precision, states)
    image = image.at[..., 1:, :].add(jnp.einsum("...tij,...tj->...ti", lower, states[..., :-1, :]))
    image = image.at[..., :-1, :].add(jnp.einsum("...tji,...tj->...ti", lower, states[..., 1:, :]))
    return MarkovNormal(image, precision, lower, scalar=scalar)


# ---------------------------------------------------------------------------------------------------- exponential guide


@dataclasses.dataclass(frozen=True)
class _Block:
    """Latents that share one Gaussian with full covariance."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def dim(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes)

    def split(self, values: Float[Array, "*S D"]) -> dict[str, Array]:
        """Name -> values in the latent's own shape."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes])
        parts = jnp.split(values, ends[:-1], axis=-1)
        return {n: x.reshape(*values.shape[:-1], *s) for n, s, x in zip(self.names, self.shapes, parts, strict=True)}


class AutoExponentialFamily(AutoGuide):
    """Gives each latent the exponential family conjugate to its prior, in its own support.

    Families are found by the class of the prior (:func:`numpyro_pvi.families.register_family`): a Gamma prior gets a Gamma, a
    Dirichlet a Dirichlet, a multivariate normal one a normal with full covariance. A prior without a conjugate family, such as
    a half-Cauchy, gets a family with its support: normal, log-normal, beta, Dirichlet, von Mises or Wishart, and on any other
    support (of a ``Pareto``, a ``Uniform`` between other ends than 0 and 1, an ``LKJCholesky``, ordered values) a normal in its
    unconstrained coordinates, of full covariance within an event. Latents are independent of one another but for the blocks in
    ``joint``. A latent whose prior's parameters are latents themselves gets the family all the same, unless these move its
    support.

    Works wherever a NumPyro guide does, and in :class:`numpyro_pvi.PVI`. Params are named ``{latent}_{prefix}_{parameter}``
    after the parameters of the family's NumPyro distribution (``rate_auto_concentration``), blocks'
    ``{first}_{prefix}_joint_loc`` and ``..._scale_tril``.
    It starts at the prior (at its best fit within the family by 2,000 draws, where the prior is not a member), given the
    prototype's values of the latents that the prior depends on.

    Args:
        model: a NumPyro model.
        families: latent -> family of one event, for latents that shall not have their prior's; event axes that the latent has
            beyond the family's are independent repetitions.
        joint: groups of real-valued latents, each with one Gaussian of full covariance.
        prefix: prefix of the params.
        init_loc_fn: where latents stand while the model is inspected, and where q begins, narrow, in a fit that cannot leave the
            prior.
        create_plates: as for every NumPyro guide.

    Raises:
        GuideError: when the model is first run, for a latent without a family, or whose support moves with other latents or with
            params, a family with another support, a name that is no latent, or a block that cannot be Gaussian.

    References:
        Khan and Lin, Conjugate-computation variational inference, 2017, section 3 (their approximation q).
    """

    # PVI reads this: sites are then terms of the latents' families.
    keeps_supports = True

    def __init__(
        self,
        model: Callable,
        families: Mapping[str, Family] | None = None,
        joint: Sequence[Sequence[str]] | None = None,
        *,
        prefix: str = "auto",
        init_loc_fn: Callable = init_to_median,
        create_plates: Callable | None = None,
    ):
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn, create_plates=create_plates)
        self.families = dict(families or {})
        self.joint = tuple(tuple(block) for block in joint or ())
        self._latents: dict[str, Latent] = {}
        self._blocks: tuple[_Block, ...] = ()

    # ------------------------------------------------------------------------------------------------------- set-up

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        self.finish_setup(self.prototype(*args, **kwargs), args, kwargs)

    def prototype(self, *args: Any, **kwargs: Any) -> dict:
        """A trace of the model with latents where ``init_loc_fn`` puts them; inside a ``seed`` handler.

        Args:
            *args: the model's arguments.
            **kwargs: its keyword arguments.

        Returns:
            The trace.
        """
        key = numpyro.prng_key()
        with handlers.block():
            model = handlers.substitute(handlers.seed(self.model, key), substitute_fn=self.init_loc_fn)
            return handlers.trace(model).get_trace(*args, **kwargs)

    def finish_setup(self, trace: dict, args: tuple, kwargs: dict) -> None:
        """Find every latent's family and start from a trace of the model.

        Args:
            trace: as :meth:`prototype` returns it.
            args: the model's arguments.
            kwargs: its keyword arguments.
        """
        self._set_frames(trace)
        sites = {n: s for n, s in trace.items() if s["type"] == "sample" and not s["is_observed"]}
        sites = {n: s for n, s in sites.items() if n in self.families or not _is_summed_out(s)}
        self._check_names(sites)
        blocked = {name for block in self.joint for name in block}
        own = {n: s for n, s in sites.items() if n not in blocked}
        self._refuse_moving_ends(own, trace, args, kwargs)
        self._latents = {n: self._latent(n, s) for n, s in own.items()}
        self._blocks = tuple(self._block(names, sites) for names in self.joint)
        self._deterministic = any(s["type"] == "deterministic" for s in trace.values())
        self._call = args, kwargs
        # Set last: a model that raises above is inspected anew.
        self.prototype_trace = trace

    def _set_frames(self, trace: dict) -> None:
        self._prototype_frames, self._prototype_frame_full_sizes = {}, {}
        for name, site in trace.items():
            if site["type"] == "plate":
                self._prototype_frame_full_sizes[name] = site["args"][0]
            elif site["type"] == "sample" and not site["is_observed"]:
                self._prototype_frames.update({frame.name: frame for frame in site["cond_indep_stack"]})

    def _check_names(self, sites: dict) -> None:
        named = [*self.families, *(name for block in self.joint for name in block)]
        unknown = sorted(set(named) - set(sites))
        if unknown:
            raise GuideError(
                f"AutoExponentialFamily names {', '.join(unknown)}, which the model does not have as latents; it has "
                f"{', '.join(sites) or 'none'}."
            )
        twice = sorted({name for name in named if named.count(name) > 1})
        if twice:
            raise GuideError(
                f"AutoExponentialFamily names {', '.join(twice)} more than once: a latent has a family of its own or stands in one "
                "block of `joint`."
            )

    def _refuse_moving_ends(self, sites: dict, trace: dict, args: tuple, kwargs: dict) -> None:
        """Refuse latents between ends that move with other latents or with params. Raises GuideError."""
        ended = {n: ends for n, s in sites.items() if (ends := _ends(s["fn"]))}
        numbers = [x for ends in ended.values() for x in ends.values()]
        still = not any(isinstance(x, jax.Array) for x in numbers) and not any(
            s["type"] == "param" for s in trace.values()
        )
        # Python's and NumPy's numbers stay as they are; ends that are not known are refused by the family.
        if still or any(isinstance(x, Tracer) for x in numbers):
            return
        moved = {n: jax.tree.map(_nudged, s["value"]) for n, s in trace.items() if s["type"] == "param"}
        for seed in range(_LOOKS):
            model = handlers.seed(handlers.substitute(self.model, moved), jax.random.key(seed))
            with handlers.block(), numpyro.validation_enabled(False):
                again = handlers.trace(handlers.substitute(model, substitute_fn=init_to_sample)).get_trace(
                    *args, **kwargs
                )
            for name, end in ((n, end) for n, ends in ended.items() for end in ends):
                x = _ends(again[name]["fn"])[end]
                if not isinstance(x, Tracer) and not np.array_equal(x, ended[name][end]):
                    raise GuideError(
                        f"latent {name!r}: the {end.replace('_', ' ')} of its support moves with other latents or with params, so "
                        "that no q of its own has that support: shift and scale a latent whose support is fixed, such as a "
                        "Uniform(0, 1)."
                    )

    def _latent(self, name: str, site: dict) -> Latent:
        latent = make_latent(name, site["fn"], self.families.get(name))
        start, batch = latent.start, len(site["fn"].batch_shape)
        for frame in site["cond_indep_stack"]:
            full = self._prototype_frame_full_sizes[frame.name]
            if full != frame.size:
                start = {p: periodic_repeat(x, full, frame.dim - (x.ndim - batch)) for p, x in start.items()}
        return latent._replace(start=start)

    def _block(self, names: tuple[str, ...], sites: dict) -> _Block:
        for name in names:
            fn = sites[name]["fn"]
            if _base_support(fn) is not constraints.real and fn.support is not constraints.real_vector:
                raise GuideError(
                    f"joint={list(names)}: latent {name!r} has support {fn.support}, and a Gaussian with full covariance needs "
                    "real values: leave it out of the block, or model its logarithm."
                )
            for frame in sites[name]["cond_indep_stack"]:
                if self._prototype_frame_full_sizes[frame.name] != frame.size:
                    raise GuideError(
                        f"joint={list(names)}: latent {name!r} lies in the subsampled plate {frame.name!r}, so that its block has "
                        "another size in every batch: leave it out of the block."
                    )
        return _Block(names, tuple(tuple(jnp.shape(sites[name]["value"])) for name in names))

    # -------------------------------------------------------------------------------------------------------- guide

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Sample every latent from q; see :class:`numpyro.infer.autoguide.AutoGuide`."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        plates, found = self._create_plates(*args, **kwargs), {}
        for block in self._blocks:
            found |= self._sample_block(block)
        for name, latent in self._latents.items():
            frames = self.prototype_trace[name]["cond_indep_stack"]
            # Of a plate that draws mini-batches a param has all rows, and its plate picks those of the batch.
            params = None
            if all(self._prototype_frame_full_sizes[frame.name] == frame.size for frame in frames):
                params = self._params(name, latent)
                if _is_of_no_row(latent, params):
                    continue
            with ExitStack() as stack:
                for frame in frames:
                    stack.enter_context(plates[frame.name])
                own = self._params(name, latent) if params is None else params
                found[name] = numpyro.sample(name, latent.member(own))
        return found

    def _params(self, name: str, latent: Latent) -> dict[str, Any]:
        batch = len(self.prototype_trace[name]["fn"].batch_shape)
        return {
            p: numpyro.param(self._name(name, p), x, constraint=latent.constraint[p], event_dim=x.ndim - batch)
            for p, x in latent.start.items()
        }

    def _sample_block(self, block: _Block) -> dict[str, Array]:
        start = {"loc": self._block_start(block, "loc"), "scale_tril": self._block_start(block, "scale_tril")}
        kinds = {"loc": constraints.real_vector, "scale_tril": constraints.lower_cholesky}
        params = {
            p: numpyro.param(self._name(block.names[0], f"joint_{p}"), x, constraint=kinds[p]) for p, x in start.items()
        }
        flat = numpyro.sample(
            f"_{self.prefix}_{'_'.join(block.names)}", dist.MultivariateNormal(**params), infer={"is_auxiliary": True}
        )
        values = block.split(flat)
        for name, value in values.items():
            numpyro.sample(name, dist.Delta(value, event_dim=value.ndim))
        return values

    def _block_start(self, block: _Block, what: str) -> Array:
        """The prior's marginal means and sds given the prototype's values."""
        fns = [self.prototype_trace[name]["fn"] for name in block.names]
        draws = [fn.sample(jax.random.key(0), (NUM_MATCHED,)).reshape(NUM_MATCHED, -1) for fn in fns]
        flat = jnp.concatenate(draws, axis=-1)
        return jnp.median(flat, axis=0) if what == "loc" else jnp.diag(_robust_sd(flat))

    def _name(self, latent: str, parameter: str) -> str:
        return f"{latent}_{self.prefix}_{parameter}"

    # --------------------------------------------------------------------------------------------------- posteriors

    def get_posterior(self, params: Mapping[str, Array]) -> dict[Hashable, dist.Distribution]:
        """The distribution of each latent in its own support.

        Args:
            params: the guide's params, as from ``svi.get_params(state)``.

        Returns:
            Distributions by latent; a block's joint Gaussian stands under the tuple of its names as well. Latents of rows that are
            not at hand, whose params are empty, are left out.

        Raises:
            GuideError: when the guide has not been run on data yet, or where params of a latent are missing.
        """
        if self.prototype_trace is None:
            raise GuideError("the guide is not set up: run svi.init(key, *args) or guide(*args) once.")
        found: dict[Hashable, dist.Distribution] = {}
        for block in self._blocks:
            loc, root = (params[self._name(block.names[0], f"joint_{p}")] for p in ("loc", "scale_tril"))
            found |= block_marginals(
                block.names, block.shapes, dist.MultivariateNormal(loc, scale_tril=root), self.prototype_trace
            )
        for name, latent in self._latents.items():
            if missing := [self._name(name, p) for p in latent.start if self._name(name, p) not in params]:
                raise GuideError(
                    f"params lack {', '.join(map(repr, missing))} of latent {name!r}: give all of the guide's, as "
                    "pvi.get_params(state) or svi.get_params(state) has them."
                )
            own = {p: params[self._name(name, p)] for p in latent.start}
            if not _is_of_no_row(latent, own):
                found[name] = latent.member(own)
        return found

    def sample_posterior(
        self, rng_key: Array, params: Mapping[str, Array], *args: Any, sample_shape: tuple[int, ...] = (), **kwargs: Any
    ) -> dict[str, Array]:
        """Draws of every latent, and of the model's deterministic sites.

        Args:
            rng_key: a JAX random key.
            params: the guide's params.
            *args: the model's arguments, for deterministic sites; those of the first call where left out.
            sample_shape: leading axes of the draws.
            **kwargs: the model's keyword arguments.

        Returns:
            Values by name, in the latents' own supports. Without latents of rows that are not at hand, and then without
            deterministic sites: ``Predictive(model, posterior_samples=draws)(key, *args)`` has both, of the rows that it is given.
        """
        posterior = self.get_posterior(params)
        blocked = {name for block in self._blocks for name in block.names}
        keys = dict(zip(posterior, jax.random.split(rng_key, len(posterior)), strict=True))
        draws: dict[str, Array] = {}
        for block in self._blocks:
            draws |= block.split(posterior[block.names].sample(keys[block.names], sample_shape))
        for name in self._latents:
            if name not in blocked and name in posterior:
                draws[name] = posterior[name].sample(keys[name], sample_shape)
        if not self._latents.keys() <= posterior.keys():
            return draws
        return self._with_deterministic(draws, sample_shape, args, kwargs)

    def median(self, params: Mapping[str, Array]) -> dict[str, Array]:
        """The median of every element of every latent.

        Args:
            params: the guide's params.

        Returns:
            Values by latent.
        """
        return {name: x[0] for name, x in self.quantiles(params, [0.5]).items()}

    def quantiles(self, params: Mapping[str, Array], quantiles: Any) -> dict[str, Array]:
        """Quantiles of every element of every latent: see :func:`marginal_quantiles` for their accuracy.

        Args:
            params: the guide's params.
            quantiles: numbers in [0, 1], a list or an array of one axis.

        Returns:
            Values by latent, with the quantiles' axis first.
        """
        levels = jnp.atleast_1d(jnp.asarray(quantiles))
        posterior = self.get_posterior(params)
        return {name: marginal_quantiles(d, levels) for name, d in posterior.items() if isinstance(name, str)}

    def _with_deterministic(self, draws: dict[str, Array], shape: tuple[int, ...], args: tuple, kwargs: dict) -> dict:
        if not self._deterministic:
            return draws
        given, named = (args, kwargs) if args or kwargs else self._call

        def run(values: dict[str, Array]) -> dict[str, Array]:
            model = handlers.substitute(handlers.seed(self.model, 0), values)
            trace = handlers.trace(model).get_trace(*given, **named)
            return {n: s["value"] for n, s in trace.items() if s["type"] == "deterministic"}

        flat = {n: x.reshape(-1, *x.shape[len(shape) :]) for n, x in draws.items()}
        found = jax.lax.map(run, flat)
        return draws | {n: x.reshape(*shape, *x.shape[1:]) for n, x in found.items()}


def _is_summed_out(site: dict) -> bool:
    """Whether a latent is discrete and marked for enumeration, which is the default for those without a family."""
    if not site["fn"].support.is_discrete:
        return False
    if site["infer"].get("enumerate") == "parallel":
        return True
    name = site["name"]
    raise GuideError(
        f"latent {name!r} is discrete: mark it for enumeration (infer={{'enumerate': 'parallel'}}, TraceEnum_ELBO), or give it "
        f"a family, families={{{name!r}: CategoricalFamily(n)}} or BernoulliFamily()."
    )


def of_no_row(latent: Latent, axis: int) -> dict[str, Array]:
    """Params of a latent inside the partitioned plate where no row is at hand: empty along the plate's axis."""
    return {p: jnp.zeros((*x.shape[:axis], 0, *x.shape[axis + 1 :]), x.dtype) for p, x in latent.start.items()}


def _is_of_no_row(latent: Latent, params: Mapping[str, Any]) -> bool:
    """Whether params are those that :func:`of_no_row` gives."""
    return any(jnp.size(params[p]) == 0 < jnp.size(x) for p, x in latent.start.items())


def _robust_sd(draws: Float[Array, "S D"]) -> Float[Array, "D"]:
    """Half the central 68 percent: the sd of a normal, and finite for heavy tails."""
    low, high = jnp.quantile(draws, jnp.array([0.1587, 0.8413]), axis=0)
    return 0.5 * (high - low)


def block_marginals(
    names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], whole: Any, trace: Mapping[str, Any]
) -> dict[Hashable, dist.Distribution]:
    """The distributions of latents that share one Gaussian: each latent's own, and the whole under the tuple of their names.

    ``whole``: of their values, end to end; ``trace``: an entry for every latent, with its distribution or its support.
    """
    loc, covariance = whole.mean, whole.covariance_matrix
    found: dict[Hashable, dist.Distribution] = {}
    ends = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)])
    for name, shape, begin, end in zip(names, shapes, ends[:-1], ends[1:], strict=True):
        own = covariance[begin:end, begin:end]
        found[name] = _block_marginal(trace[name]["fn"], loc[begin:end].reshape(shape), own)
    found[names] = whole
    return found


def _block_marginal(fn: Any, loc: Array, covariance: Float[Array, "E E"]) -> dist.Distribution:
    """One latent of a block; across batch axes its elements are dependent, which a marginal per batch entry leaves out."""
    rank = event_rank(fn)
    batch, size = loc.shape[: loc.ndim - rank], int(np.prod(loc.shape[loc.ndim - rank :]))
    count = int(np.prod(batch))
    blocks = covariance.reshape(count, size, count, size)
    own = jnp.stack([blocks[i, :, i] for i in range(count)]).reshape(*batch, size, size)
    sd = jnp.sqrt(jnp.diagonal(covariance)).reshape(loc.shape)
    return in_own_support(fn, loc, sd, own)


def with_events(member: Any, rank: int) -> dist.Distribution:
    """A distribution with so many axes in an event, whatever ``to_event`` has made of its batch axes."""
    bare, _ = _bare(member)
    normal, transforms = _before_transforms(bare)
    own = Marginal(normal, list(transforms)) if transforms else bare
    return own.to_event(rank - bare.event_dim)
