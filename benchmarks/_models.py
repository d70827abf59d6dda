"""The models of the benchmarks, written as a NumPyro user would, and the data that is simulated for them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions.transforms import OrderedTransform

NUM_CLASSES = 5
NUM_LEVELS = 4
UNEQUAL_SHARES = (0.50, 0.25, 0.15, 0.08, 0.02)


@dataclasses.dataclass(frozen=True)
class Data:
    """One data set: rows ``X``, targets ``y`` and a group label for every row."""

    X: np.ndarray
    y: np.ndarray
    labels: np.ndarray

    @property
    def num_groups(self) -> int:
        """Number of different labels."""
        return len(np.unique(self.labels))


def logistic(X: Any, y: Any = None, prior_scale: float = 1.0) -> None:
    """Logistic regression with independent normal priors."""
    w = numpyro.sample("w", dist.Normal(0.0, prior_scale).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=X @ w), obs=y)


def logistic_wide(X: Any, y: Any = None) -> None:
    """Logistic regression whose prior says next to nothing: standard deviation 100 whatever the column's scale."""
    logistic(X, y, prior_scale=100.0)


def linear(X: Any, y: Any = None) -> None:
    """Linear regression with unit noise."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Normal(X @ w, 1.0), obs=y)


def poisson(X: Any, y: Any = None) -> None:
    """Poisson regression with log link."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Poisson(jnp.exp(X @ w)), obs=y)


def negative_binomial(X: Any, y: Any = None) -> None:
    """Negative binomial regression (variance mean + mean**2 / concentration), concentration unknown."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    concentration = numpyro.sample("concentration", dist.Exponential(0.5))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.NegativeBinomial2(jnp.exp(X @ w), concentration), obs=y)


def student_t(X: Any, y: Any = None) -> None:
    """Robust linear regression, Student-t noise with 4 degrees of freedom and unknown scale."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.StudentT(4.0, X @ w, sigma), obs=y)


def ordinal(X: Any, y: Any = None) -> None:
    """Ordered logistic regression, 4 levels, unknown cutpoints."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    base = dist.Normal(0.0, 1.0).expand([NUM_LEVELS - 1]).to_event(1)
    cutpoints = numpyro.sample("cutpoints", dist.TransformedDistribution(base, OrderedTransform()))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.OrderedLogistic(X @ w, cutpoints), obs=y)


def multinomial(X: Any, y: Any = None) -> None:
    """Multinomial logistic regression, 5 classes, one weight vector per class."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1], NUM_CLASSES]).to_event(2))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Categorical(logits=X @ w), obs=y)


def equal_labels(num_rows: int, num_groups: int) -> np.ndarray:
    """Contiguous groups whose sizes differ by one row at most."""
    return (np.arange(num_rows) * num_groups // num_rows).astype(np.int32)


def unequal_labels(num_rows: int, shares: tuple[float, ...] = UNEQUAL_SHARES) -> np.ndarray:
    """Contiguous groups with the given shares of the rows."""
    bounds = np.round(np.cumsum(shares) * num_rows).astype(int)
    return np.searchsorted(bounds, np.arange(num_rows), side="right").astype(np.int32)


def skewed_labels(num_rows: int, num_groups: int) -> np.ndarray:
    """Group 0 holds half the rows, the others share the rest equally."""
    half = num_rows // 2
    rest = 1 + equal_labels(num_rows - half, num_groups - 1)
    return np.concatenate([np.zeros(half, np.int32), rest]).astype(np.int32)


def simulate_logistic(num_rows: int, dim: int, num_groups: int, seed: int = 0) -> Data:
    """Standard normal rows and coefficients: a strong signal, about a quarter of a nat per row left."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((num_rows, dim)).astype(np.float32)
    logits = X @ rng.standard_normal(dim)
    y = (rng.random(num_rows) < 1.0 / (1.0 + np.exp(-logits))).astype(np.float32)
    return Data(X, y, equal_labels(num_rows, num_groups))


def simulate_wide(num_rows: int, dim: int, num_groups: int, seed: int) -> Data:
    """Nearly separable labels, column scales from 1e-3 to 1e3.

    Two rows next to the border are on its wrong side. The columns of scale 0.05 and more decide the label: with a prior
    standard deviation of 100, smaller ones could not carry it whatever their coefficients.
    """
    rng = np.random.default_rng(seed)
    Z = rng.standard_normal((num_rows, dim))
    scales = rng.permutation(np.logspace(-3.0, 3.0, dim))
    score = Z @ np.where(scales >= 0.05, rng.standard_normal(dim), 0.0)
    y = score > 0
    wrong = np.argsort(np.abs(score))[:2]
    y[wrong] = ~y[wrong]
    labels = unequal_labels(num_rows)[rng.permutation(num_rows)] % num_groups
    return Data((Z * scales).astype(np.float32), y.astype(np.float32), labels)


def simulate_correlated(kind: str, num_rows: int, dim: int, num_groups: int, correlation: float = 0.9) -> Data:
    """Columns with one common correlation; ``kind`` is "linear" or "logistic"."""
    rng = np.random.default_rng(3)
    common = rng.standard_normal((num_rows, 1))
    X = np.sqrt(correlation) * common + np.sqrt(1.0 - correlation) * rng.standard_normal((num_rows, dim))
    predictor = X @ rng.standard_normal(dim)
    if kind == "linear":
        y = predictor + rng.standard_normal(num_rows)
    else:
        y = rng.random(num_rows) < 1.0 / (1.0 + np.exp(-predictor))
    return Data(X.astype(np.float32), y.astype(np.float32), equal_labels(num_rows, num_groups))


def simulate_regression(name: str, num_rows: int, dim: int, seed: int = 1) -> Data:
    """Data for one of `REGRESSIONS`: an intercept, groups of 50/25/15/8/2 % with shifted covariates."""
    rng = np.random.default_rng(seed)
    labels = unequal_labels(num_rows)
    X = rng.standard_normal((num_rows, dim)) + 0.5 * rng.standard_normal((len(UNEQUAL_SHARES), dim))[labels]
    if name != "ordinal":  # its cutpoints are the intercepts
        X[:, 0] = 1.0
    w = 0.3 * rng.standard_normal(dim)
    y = _SIMULATORS[name](rng, X, w)
    return Data(X.astype(np.float32), y, labels)


def _simulate_poisson(rng: np.random.Generator, X: np.ndarray, w: np.ndarray) -> np.ndarray:
    return rng.poisson(np.exp(X @ w)).astype(np.int32)


def _simulate_negative_binomial(rng: np.random.Generator, X: np.ndarray, w: np.ndarray) -> np.ndarray:
    return rng.poisson(np.exp(X @ w) * rng.gamma(2.0, 0.5, X.shape[0])).astype(np.int32)


def _simulate_student_t(rng: np.random.Generator, X: np.ndarray, w: np.ndarray) -> np.ndarray:
    outlier = rng.random(X.shape[0]) < 0.05
    noise = np.where(outlier, 10.0 * rng.standard_normal(X.shape[0]), 0.5 * rng.standard_normal(X.shape[0]))
    return (X @ w + noise).astype(np.float32)


def _simulate_ordinal(rng: np.random.Generator, X: np.ndarray, w: np.ndarray) -> np.ndarray:
    latent = X @ (2.0 * w) + rng.logistic(size=X.shape[0])
    return np.searchsorted(np.array([-1.0, 0.3, 1.5]), latent).astype(np.int32)


def _simulate_multinomial(rng: np.random.Generator, X: np.ndarray, w: np.ndarray) -> np.ndarray:
    del w
    logits = X @ (0.5 * rng.standard_normal((X.shape[1], NUM_CLASSES)))
    return np.argmax(logits + rng.gumbel(size=logits.shape), axis=1).astype(np.int32)


_SIMULATORS: dict[str, Callable[..., np.ndarray]] = {
    "poisson": _simulate_poisson,
    "negative_binomial": _simulate_negative_binomial,
    "student_t": _simulate_student_t,
    "ordinal": _simulate_ordinal,
    "multinomial": _simulate_multinomial,
}
REGRESSIONS: dict[str, Callable[..., None]] = {
    "poisson": poisson,
    "negative_binomial": negative_binomial,
    "student_t": student_t,
    "ordinal": ordinal,
    "multinomial": multinomial,
}
