"""The contract of a local solver: a cavity in, a site out; and settings that differ from group to group."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..errors import PVIError, not_under_families
from ..expectations import Expected, Tilted
from ..families import Moments


class Derivatives(NamedTuple):
    """A log-likelihood's value in nats, gradient and (where asked for) Hessian at S points, summed over the rows named."""

    value: Float[Array, "S"]
    gradient: Float[Array, "S D"]
    hessian: Float[Array, "S D D"] | Float[Array, "S D"] | None


class BatchStep(NamedTuple):
    """A site after a natural-gradient step by some of its group's rows."""

    site: Any
    # How often the step was halved to keep q normalisable.
    backoffs: Int[Array, ""]
    # Whether the rows' message was finite.
    moved: Bool[Array, ""]


class PrivacySpent(NamedTuple):
    """What a solver that is ``private`` has released of its groups."""

    # Epsilon of every group, in nats, at delta.
    epsilon: np.ndarray
    delta: float
    # Visits of every group that released something.
    releases: np.ndarray


@runtime_checkable
class LocalFactor(Protocol):
    """One group's exact factor, as a solver sees it."""

    # A Gaussian family, what stands for one where sites are kept by rows, or a product of families.
    family: Any
    # Whether rows are read at points of the flat unconstrained space, by ``derivatives``; else by ``message`` and ``step``.
    pointwise: bool
    # Whether the factor is quadratic in theta jointly, so that one full step is exact.
    quadratic: bool
    # Whether ``expected`` is by draws.
    noisy: bool
    # Rows of the group: a number known beforehand where all groups have as many, else an integer array; and of the
    # largest group.
    num_rows: int | Int[Array, ""]
    max_rows: int
    # Whether the rows of every step are drawn anew, and not dealt out so that all come once before any comes again.
    fresh_batches: bool

    def expected(self, moments: Any) -> Expected:
        """Expectations of the group's log-likelihood under a Gaussian q; a pass over the group's rows."""
        ...

    def derivatives(
        self,
        points: Float[Array, "S D"],
        rows: Int[Array, "B"] | None = None,
        hessian: bool = False,
        key: Any = None,
    ) -> Derivatives:
        """The log-likelihood of some of the group's rows, and its derivatives, at points of the flat unconstrained space.

        Only for solvers that are ``stochastic``.

        Args:
            points: where.
            rows: which rows, counted from 0 within the group; None for all. What comes back is their plain sum: times
                ``num_rows / B`` it estimates the group's without bias where every row is equally likely.
            hessian: whether second derivatives are wanted, D^2 numbers a point.
            key: of a step, no other's; for factors whose answers are noised or by draws of the rows' own latents, and nothing to
                others.

        Returns:
            Value, gradient and Hessian at every point.
        """
        ...

    def at_rows_draws(self, moments: Any, count: int, key: Any, rows: Int[Array, "B"] | None = None) -> Derivatives:
        """The same under a mean-field q, where every row takes a draw of its own of what it sees of q.

        Only for solvers that are ``stochastic`` and not ``private``.

        Args:
            moments: of q, with Float[D] sds.
            count: draws of every row, S.
            key: of the draws.
            rows: as of :meth:`derivatives`.

        Returns:
            By draw, unbiased estimates of the rows' expected value, gradient, and diagonal of the Hessian, Float[S D].
        """
        ...

    def message(self, cavity: Any, site: Any, key: Any, rows: Int[Array, "B"] | None = None) -> Expected:
        """What some of the group's rows say of a q that is a product of families, unbiased for the group.

        Only for solvers that are ``stochastic``, where rows are not ``pointwise``.

        Args:
            cavity: natural parameters of q without the site.
            site: the group's site, natural parameters; q is cavity * site. What it says of latents that are drawn is taken out
                on the draws and added in closed form.
            key: of the draws.
            rows: which rows, counted from 0 within the group; None for all.

        Returns:
            ``N_m / B`` times the rows' expected log-likelihood in nats, and its gradient in mean parameters as ``target``.
        """
        ...

    def step(self, cavity: Any, site: Any, share: Any, key: Any, rows: Int[Array, "B"] | None = None) -> BatchStep:
        """A natural-gradient step by such a message, each turn's components from the q that the last turn has left.

        Args:
            cavity: as of :meth:`message`.
            site: likewise.
            share: of the way to the message, in (0, 1]; 1 is the full step.
            key: of the draws.
            rows: as of :meth:`message`.

        Returns:
            The site after it; members of latents that are drawn go no further than two posterior sds.
        """
        ...


@runtime_checkable
class TiltedFactor(Protocol):
    """One group's exact factor, as a solver that matches moments sees it."""

    family: Any
    # How far visits go, what collapsed weights are, and whether draws are common (:class:`numpyro_pvi.solvers.MatchRules`).
    rules: Any

    def tilted(self, q: Any, site: Any, power: float | Float[Array, ""], key: Any, memory: Any = None) -> Tilted:
        """What matching the moments of ``q (p / t)^power`` asks for.

        Args:
            q: natural parameters of q.
            site: the factor's site.
            power: alpha in (0, 1].
            key: a random key, for sampled moments; where ``rules.shared``, None for the draws that all groups of a round share,
                which are of the q that the visit starts from.
            memory: the ``memory`` of the factor's last visit, from which chains go on; None starts anew.

        Returns:
            The site's change at a full step, with what is known of its error.
        """
        ...


class LocalResult(NamedTuple):
    """A solver's answer for one group."""

    site: Any
    state: Any
    # How often a step was halved.
    backoffs: Int[Array, ""]
    # False when no step was acceptable and the site came back unchanged.
    moved: Bool[Array, ""]
    # Share of the change asked for that was taken, for what rows keep beside the site; None where nobody asks.
    step: Any = None
    # What groups hold beside their sites after all visits; None where the schedule asks elsewhere.
    local: Any = None


class _SolverVerbs(Protocol):
    """What a solver may say of itself beside its settings, and what is said where it does not."""

    @property
    def for_prior(self) -> Any:
        """Who refines the PRIOR factor's site, which has no rows and is tied to no other; the solver itself does."""
        return self

    def privacy(self, state: Any, sizes: tuple[int, ...]) -> PrivacySpent | None:
        """What the groups have spent, of a solver that is ``private``; else None.

        Args:
            state: the groups' stacked states.
            sizes: rows of each group.
        """

    def counter(self, state: Any) -> int | None:
        """Which of a memory's arrays counts the visits that have released something; None where none does.

        The next array is the fit's name, an int32 that is 0 until somebody gives it one: visits of clients that are heard in sums
        only are counted beside the rows as well.

        Args:
            state: a memory, of one group or stacked.
        """

    def check_sums(self) -> None:
        """Raise where what a visit has spent is not told by the number of visits, as it has to be of groups heard in sums only.

        Raises:
            PVIError: saying what to write.
        """

    def check_state(self, state: Any) -> None:
        """Raise where the groups' stacked states are of other settings, and mean something else under these."""

    def by_gradients(self, pointwise: bool) -> Any:
        """The solver as one whose visits hear rows by sums of gradients alone, each once: no values, no curvatures.

        Args:
            pointwise: whether rows are read at points (``factor.derivatives``), or give messages (``factor.message``).

        Raises:
            PVIError: where its visits need more, as they do unless a solver says otherwise.
        """
        raise PVIError(
            f"{type(self).__name__} hears more of single rows than sums of their gradients (expectations, curvatures, "
            "or a look whether a step was too long), so that clipping gradients would not bound what a row says: "
            "write DifferentialPrivacy(LocalELBO(...), level='row'), or protect groups, level='group'."
        )

    def vantage(self: Any, state: Any, q: Any) -> tuple[Any, Any]:
        """The q at which a group's tilted distribution is taken, and the power of the factor in it: q itself, and ``power``."""
        return q, self.power

    def check_families(self) -> None:
        """Raise when the solver, or a setting of it, is for Gaussian guides only, and not for AutoExponentialFamily.

        Raises:
            PVIError: naming what is not; always, unless a solver says otherwise.
        """
        wanted = (
            "NaturalGradient(), Conjugate(), StochasticNaturalGradient(), LocalELBO(), PowerEP(), SNEP(), StochasticEP() or "
            "AlphaDivergence(...)"
        )
        raise not_under_families("solver", self, wanted)

    def check_groups(self, sizes: dict[Hashable, int], mechanism: str) -> None:
        """Raise when the solver cannot treat groups of these sizes (by label), or rows read by this mechanism."""

    def init_among(self: Any, family: Any, dtype: Any, count: int) -> Any:
        """:meth:`LocalSolver.init` where the number of groups matters."""
        return self.init(family, dtype)

    def init_groups(self, groups: Any, state: Any) -> Any:
        """The stacked states of all groups from one that is the same for all, where settings differ by group."""
        return state


@runtime_checkable
class LocalSolver(_SolverVerbs, Protocol):
    """Refine one site; what every implementor owes.

    Frozen and hashable (settings only). ``solve`` is pure and traceable under ``vmap``, ``scan`` and ``while_loop``; it
    uses the cavity as natural parameters only, so the cavity may be improper; it never returns a non-finite site (the
    old one comes back with ``moved`` False instead). Leading parameters in this order, under these names.

    :class:`SolverDefaults` declares the rest of what an engine reads; ``init``, ``check`` and ``solve`` are every solver's own.
    """

    @property
    def num_draws(self) -> int:
        """Antithetic pairs per round where expectations are by draws."""
        ...

    @property
    def stochastic(self) -> bool:
        """Whether visits take noisy gradient steps of their own: factors then offer rows, and rounds are tested by values only."""
        ...

    @property
    def exact_sites(self) -> bool:
        """Whether a visit gives a factor that is quadratic its own natural parameters, whatever the cavity (up to damping).

        Where it nears them by steps, or from draws, a site carries traces of the groups beside which it was fitted.
        """
        ...

    @property
    def immediate(self) -> bool:
        """Whether a visit's target is the message of the look at q that the schedule has taken already: no pass of its own.

        An engine may then take the step itself, ``step_size`` of the way, and leave ``solve`` out.
        """
        ...

    @property
    def rereads(self) -> bool:
        """Whether a visit asks ``factor.expected`` or ``factor.tilted`` more than once, each a pass over the group's rows."""
        ...

    @property
    def closed_form(self) -> bool:
        """Whether expectations are in closed form or refused."""
        ...

    @property
    def step_size(self) -> Any:
        """Share of the way to its target that a step of a visit goes; what groups hold beside their sites goes as far."""
        ...

    @property
    def num_steps(self) -> int | None:
        """Steps of a visit; None where their number is one of passes over the rows."""
        ...

    @property
    def expectation(self) -> str:
        """How expectations are taken, "auto" by the structure that was found."""
        ...

    @property
    def sites(self) -> str:
        """How sites are kept: "dense", "rows" (two numbers a row) or "auto", by size."""
        ...

    @property
    def blocks(self) -> Any:
        """Under a product of families, what moves from one q: "auto", "parallel" or latents in order."""
        ...

    @property
    def matches_moments(self) -> bool:
        """Whether visits match moments of tilted distributions: factors are :class:`TiltedFactor`, rounds pass where q is valid."""
        ...

    @property
    def keeps_conditionals(self) -> bool:
        """Whether a group's own latents are no part of its site: Gaussians of them given the shared ones stand beside it."""
        ...

    @property
    def moments(self) -> Any:
        """How tilted moments are taken; None where none are matched."""
        ...

    @property
    def moments_batch(self) -> int | None:
        """Rows of a mini-batch by which chains read a group; None where they read all of it."""
        ...

    @property
    def power(self) -> float:
        """Power of the factor in its tilted distribution, in (0, 1]; above 1, how many groups a ``stochastic`` visit allows for."""
        ...

    @property
    def factors(self) -> str:
        """Whose tilted distributions are matched: of every "group" or of every "row"."""
        ...

    @property
    def anchored(self) -> bool:
        """Whether tilted distributions are taken at a q of the solver's own, its ``vantage``."""
        ...

    @property
    def curvature(self) -> str:
        """Where second derivatives come from, of a solver that is ``stochastic``; "auto" by the structure."""
        ...

    @property
    def looks_once(self) -> bool:
        """Whether a visit takes moments once, of the q that it starts from."""
        ...

    @property
    def private(self) -> bool:
        """Whether visits release no more of the rows than is counted, and nothing else may look at these.

        Engines then make no pass over the rows beside visits, and give no loss; schedules accept what is normalisable; what a
        model's structure is, is taken from proofs alone. See :class:`numpyro_pvi.solvers.DifferentialPrivacy`.
        """
        ...

    @property
    def whole_sites(self) -> bool:
        """Whether a visit takes a group's site as one, so that its rows can have none of their own."""
        ...

    @property
    def tied(self) -> bool:
        """Whether all groups share one site."""
        ...

    @property
    def moves_alone(self) -> bool:
        """Whether a visit goes as far as if the others stood still, so that M of them at once go M times too far."""
        ...

    @property
    def by_label(self) -> bool:
        """Whether settings name groups."""
        ...

    @property
    def carries_optimiser(self) -> bool:
        """Whether groups keep an optimiser's state from visit to visit, whose types are those of its own package."""
        ...

    @property
    def fused_families(self) -> bool:
        """Whether groups of a product of families may be visited by turns of its components, and not only each for itself."""
        ...

    def init(self, family: Any, dtype: Any) -> Any:
        """The solver's state for one group, a pytree of arrays."""
        ...

    def check(self, structure: str, full: bool, where: str) -> None:
        """Raise when the solver cannot treat factors of this structure ("quadratic", "affine", "draws", "reparameterised")."""
        ...

    def solve(
        self, factor: LocalFactor, cavity: Any, site: Any, state: Any, key: Any, start: Expected | None, guarded: bool
    ) -> LocalResult:
        """One visit.

        Args:
            factor: the group's exact factor.
            cavity: natural parameters of q without the site.
            site: the current site, natural parameters.
            state: this group's solver state.
            key: a random key.
            start: expectations at q = cavity * site when they are known already.
            guarded: True when the schedule tests the joint step itself, so that the solver need not.

        Returns:
            The refined site.
        """
        ...


class SolverDefaults(_SolverVerbs):
    """A base class to derive a solver from: one step to the factor's target, by one pass over the rows of the group.

    See :class:`LocalSolver` for what each says. A subclass writes down where it differs, and ``init``, ``check``, ``solve``.
    """

    num_draws: Any = 16
    stochastic: bool = False
    exact_sites: Any = False
    immediate: Any = False
    rereads: Any = False
    closed_form: bool = False
    step_size: Any = 1.0
    num_steps: Any = 1
    expectation: Any = "auto"
    sites: Any = "dense"
    blocks: Any = "auto"
    matches_moments: bool = False
    keeps_conditionals: bool = False
    moments: Any = None
    moments_batch: Any = None
    power: Any = 1.0
    factors: Any = "group"
    anchored: bool = False
    curvature: Any = "auto"
    looks_once: bool = False
    private: bool = False
    whole_sites: bool = False
    tied: bool = False
    moves_alone: Any = False
    by_label: Any = False
    fused_families: bool = False
    carries_optimiser: Any = False


def local_free_energy(
    family: Any, expected: Expected, site: Any, q: Any, moments: Moments
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Local free energy of one group up to a constant in q (PVI eq. 2), to be raised.

    ``F_m(q) = E_q[f_m] - KL(q || cavity) = E_q[f_m] - <eta_m, mu_q> + A(eta_q) + const``. ``family``: the family of q;
    ``expected``: expectations at q; ``site``: the group's site, natural parameters; ``q``: natural parameters of q;
    ``moments``: q as moments. Returns ``(F, size)`` in nats: the value, and the size of its largest parts for rounding
    tolerances.
    """
    pairing = family.expect_quadratic(site, moments)
    square, rest = family.log_partition_parts(q, moments)
    value = expected.value - pairing + square + rest
    return value, jnp.abs(expected.value) + jnp.abs(pairing) + jnp.abs(square)


# ---------------------------------------------------------------------------------------------------- settings by group
# Settings that differ from group to group: one number for all, one per group in their order, or by label.


@runtime_checkable
class Labelled(Protocol):
    """What settings by label read of the factors."""

    @property
    def num_groups(self) -> int:
        """M, without the prior factor."""
        ...

    @property
    def labels(self) -> tuple:
        """The groups' labels, in the order of every stacked array."""
        ...

    @property
    def continued(self) -> bool:
        """Whether there are groups whose rows are not at hand."""
        ...

    @property
    def known(self) -> Any:
        """Bool[M], which groups had a site before their rows came back; None when none had."""
        ...


class ByLabel(NamedTuple):
    """A hashable dict: pairs of label and value."""

    items: tuple


def by_label(value: Any) -> bool:
    """Whether a setting that :func:`freeze` made names groups."""
    return isinstance(value, ByLabel)


def freeze(value: Any, argument: str, legal: Callable[[float], bool], wanted: str) -> Any:
    """Make a per-group setting hashable, and refuse values out of range.

    ``value``: a number, a sequence of numbers in the order of ``pvi.groups``, or a dict of them by label; ``argument``: how the
    setting is written, for messages; ``legal``: whether one number is in range; ``wanted``: what one number must be, for
    messages. Returns a float, a tuple of floats, or :class:`ByLabel`. Raises PVIError naming the argument, the value and, by
    label, the group.
    """

    def number(x: Any, where: str) -> float:
        try:
            found = float(x)
        except (TypeError, ValueError):
            found = float("nan")
        if isinstance(x, (str, bool)) or not legal(found):
            raise PVIError(f"{argument}={value!r}: {where}expected {wanted}, got {x!r}.")
        return found

    if isinstance(value, ByLabel):
        value = dict(value.items)
    if isinstance(value, Mapping):
        if not value:
            raise PVIError(
                f"{argument}={value!r}: the dict is empty; write {{label: number}}, a number, or one per group."
            )
        return ByLabel(tuple((label, number(x, f"for group {label!r} ")) for label, x in value.items()))
    if np.ndim(value) == 0:
        return number(value, "")
    if np.ndim(value) != 1 or len(value) == 0:
        raise PVIError(f"{argument}={value!r}: expected a number, one number per group, or a dict by label.")
    return tuple(number(x, f"for group number {i} ") for i, x in enumerate(value))


def resolve(value: Any, argument: str, problem: Labelled, default: float) -> np.ndarray:
    """One number per group.

    ``value``: what :func:`freeze` made; ``argument``: how the setting is written, for messages; ``problem``: the factors;
    ``default``: for groups that a dict does not name; labels that no group has are left to :func:`check_labels`. Returns
    Float[M]. Raises PVIError for a wrong number of values.
    """
    count = problem.num_groups
    if isinstance(value, float):
        return np.full(count, value)
    if isinstance(value, ByLabel):
        own = dict(value.items)
        return np.asarray([own.get(label, default) for label in problem.labels], float)
    if len(value) != count:
        raise PVIError(
            f"{argument} has {len(value)} numbers for {count} groups; give one per group in the order of pvi.groups, "
            "one for all, or a dict by label."
        )
    return np.asarray(value)


def check_labels(value: Any, argument: str, problem: Labelled) -> None:
    """Refuse a setting by label that names a group which is not there, where a fit begins.

    Later it may be one whose rows are not at hand, or that was forgotten. ``value``: what :func:`freeze` made; ``argument``: how
    the setting is written; ``problem``: the factors. Raises PVIError naming the group, and those that there are.
    """
    if not isinstance(value, ByLabel) or problem.continued or problem.known is not None:
        return
    labels = list(problem.labels)
    for label, _ in value.items:
        if label not in labels:
            known = ", ".join(repr(known) for known in labels[:10]) + (", ..." if len(labels) > 10 else "")
            raise PVIError(f"{argument} names group {label!r}, which is not there; the groups are {known}.")
