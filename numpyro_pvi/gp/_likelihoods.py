"""What a row says of one predictor, f at its input: expectations under a Gaussian, and its predictive density."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float

from ..errors import PVIError
from ..expectations import FIXED_RULES, log_expectation_1d
from ..expectations.quadrature import expect_1d

_LOG_2PI = math.log(2 * math.pi)


class RowExpectations(NamedTuple):
    """``E log p(y_n | f_n)`` for ``f_n ~ N(mean_n, variance_n)``, and its derivatives by the mean."""

    value: Float[Array, "N"]  # nats
    grad: Float[Array, "N"]
    hess: Float[Array, "N"]


@runtime_checkable
class Likelihood(Protocol):
    """What :class:`SparseGP` asks of a likelihood; rows are independent given their predictors."""

    @property
    def exact(self) -> bool:
        """Whether log-densities are quadratic in the predictor, so that one natural-gradient step is the best there is."""
        ...

    def init_params(self) -> Any:
        """Where the parameters start: a tree of unconstrained floating arrays, or an empty one."""
        ...

    def expected(self, params: Any, y: Array, mean: Float[Array, "N"], variance: Float[Array, "N"]) -> RowExpectations:
        """Expectations under every row's Gaussian; differentiable in all that is floating."""
        ...

    def log_predictive(
        self, params: Any, y: Array, mean: Float[Array, "N"], variance: Float[Array, "N"]
    ) -> Float[Array, "N"]:
        """``log E p(y_n | f_n)`` in nats."""
        ...


@dataclasses.dataclass(frozen=True)
class GaussianNoise:
    """``y_n = f(x_n) + N(0, sd^2)``: sites in closed form, the collapsed bound of Titsias (2009).

    Args:
        sd: where the noise's standard deviation starts; its parameter is ``log_sd``.
    """

    sd: float = 1.0
    exact: bool = dataclasses.field(default=True, init=False)

    def init_params(self) -> dict[str, Array]:
        """``{"log_sd": ()}``, unconstrained."""
        return {"log_sd": jnp.asarray(math.log(self.sd))}

    def expected(
        self, params: Any, y: Float[Array, "N"], mean: Float[Array, "N"], variance: Float[Array, "N"]
    ) -> RowExpectations:
        """Closed form: ``-1/2 log 2 pi s^2 - ((y - mean)^2 + variance) / (2 s^2)``."""
        precision = jnp.exp(-2 * params["log_sd"])
        gap = y - mean
        value = -0.5 * (_LOG_2PI + precision * (gap**2 + variance)) - params["log_sd"]
        return RowExpectations(value, precision * gap, jnp.broadcast_to(-precision, mean.shape))

    def log_predictive(
        self, params: Any, y: Float[Array, "N"], mean: Float[Array, "N"], variance: Float[Array, "N"]
    ) -> Float[Array, "N"]:
        """Log density of ``N(mean, variance + s^2)``."""
        total = variance + jnp.exp(2 * params["log_sd"])
        return -0.5 * (_LOG_2PI + jnp.log(total) + (y - mean) ** 2 / total)


@dataclasses.dataclass(frozen=True)
class LogDensity:
    """Any log-density of one predictor, by the package's quadrature.

    Args:
        function: ``(f, y) -> nats`` for every row; ``(f, y, params) -> nats`` where there are parameters.
        params: a function of nothing that gives the parameters' start, unconstrained; None without parameters.
        rule: which fixed rule, of ``numpyro_pvi.expectations.FIXED_RULES``: "trapezoid" (the default) serves predictors up to four
            times as wide as the link's own scale, "gh20" costs a quarter and serves those about as wide.

    Raises:
        PVIError: for an unknown rule.
    """

    function: Callable[..., Array]
    params: Callable[[], Any] | None = None
    rule: str = "trapezoid"
    exact: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.rule not in FIXED_RULES:
            raise PVIError(f"LogDensity(rule={self.rule!r}): expected one of {', '.join(FIXED_RULES)}.")

    def init_params(self) -> Any:
        """What ``params`` gives, or an empty dict."""
        return {} if self.params is None else self.params()

    def _rows(self, params: Any, y: Array) -> Callable[[Array], Array]:
        return lambda f: self.function(f, y) if self.params is None else self.function(f, y, params)

    def expected(self, params: Any, y: Array, mean: Float[Array, "N"], variance: Float[Array, "N"]) -> RowExpectations:
        """By quadrature in every row."""
        found = expect_1d(self._rows(params, y), mean, jnp.sqrt(variance), rule=self.rule)
        return RowExpectations(found.value, found.grad, found.hess)

    def log_predictive(
        self, params: Any, y: Array, mean: Float[Array, "N"], variance: Float[Array, "N"]
    ) -> Float[Array, "N"]:
        """By quadrature about the most likely value of the predictor, given the row."""
        return log_expectation_1d(self._rows(params, y), mean, jnp.sqrt(variance))


def from_distribution(
    factory: Callable[..., dist.Distribution], params: Callable[[], Any] | None = None, rule: str = "trapezoid"
) -> LogDensity:
    """The likelihood of a NumPyro distribution whose parameter is the predictor.

    Args:
        factory: ``f -> distribution`` over all rows, such as ``lambda f: dist.Bernoulli(logits=f)``; with parameters
            ``(f, params) -> distribution``.
        params: a function of nothing that gives the parameters' start, unconstrained; None without parameters.
        rule: see :class:`LogDensity`.

    Returns:
        The likelihood.
    """
    return LogDensity(_FromFactory(factory), params, rule)


@dataclasses.dataclass(frozen=True)
class _FromFactory:
    factory: Callable[..., dist.Distribution]

    def __call__(self, f: Array, y: Array, *params: Any) -> Array:
        made = self.factory(f, *params)
        if not isinstance(made, dist.Distribution):
            raise PVIError(
                f"The likelihood's factory gave {type(made).__name__}, not a NumPyro distribution: write lambda f: "
                "dist.Bernoulli(logits=f), or gp.LogDensity(lambda f, y: ...) for a log-density."
            )
        return jnp.asarray(made.log_prob(y))


def as_likelihood(given: Any) -> Likelihood:
    """A likelihood as it is, or the one of a distribution factory.

    ``given``: an object with the verbs of :class:`Likelihood`, or a callable ``f -> distribution``. Raises PVIError for
    anything else.
    """
    if isinstance(given, Likelihood):
        return given
    if callable(given):
        return from_distribution(given)
    raise PVIError(
        f"likelihood={given!r}: expected gp.GaussianNoise(), gp.LogDensity(...), or a distribution of one predictor, such as "
        "lambda f: dist.Bernoulli(logits=f)."
    )
