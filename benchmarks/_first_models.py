"""The models of `benchmarks.first_fit`: as PVI gets them, and as SVI does."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import AutoMultivariateNormal

from benchmarks import _gallery, _models, hierarchical
from numpyro_pvi import PVI, AutoExponentialFamily, Partition
from numpyro_pvi.families import CategoricalFamily


@dataclasses.dataclass(frozen=True)
class Subject:
    """One model with its data.

    Attributes:
        model: the model as SVI gets it.
        args: its arguments.
        partitioned: as PVI gets it.
        rounds: most rounds of PVI.
        steps: of SVI: Adam from .03 down a cosine.
        guide: the guide of both, or of PVI alone.
        svi_guide: SVI's where it is another: NumPyro's SVI has no gradient through draws of a Wishart.
        start: constrained values of the latents to start SVI from, or None.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...]
    partitioned: Partition
    rounds: int = 30
    steps: int = 3_000
    guide: Callable[..., Any] = AutoMultivariateNormal
    start: Any = None
    svi_guide: Callable[..., Any] | None = None

    def pvi(self) -> PVI:
        """With every default."""
        return PVI(self.partitioned, self.guide(self.partitioned.fn))

    def svi(self) -> SVI:
        """With the same guide."""
        count = self.steps
        optim = numpyro.optim.Adam(lambda i: 0.015 * (1 + jnp.cos(jnp.pi * jnp.minimum(i / count, 1.0))))
        options = {} if self.start is None else {"init_loc_fn": init_to_value(values=self.start)}
        return SVI(self.model, (self.svi_guide or self.guide)(self.model, **options), optim, Trace_ELBO())


def centred_schools(error: Any, y: Any = None) -> None:
    """Eight schools, centred."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("school", error.shape[0]):
        numpyro.sample("obs", dist.Normal(numpyro.sample("theta", dist.Normal(mu, tau)), error), obs=y)


def counts(y: Any) -> None:
    """Poisson counts with a gamma rate."""
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("obs", dist.Poisson(rate), obs=y)


def _components() -> tuple[Any, Any, Any]:
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("components", 3):
        # Apart under the prior, so that no side has to choose which is which.
        mean = numpyro.sample("mean", dist.MultivariateNormal(4.0 * (jnp.arange(3.0)[:, None] - 1), 25.0 * jnp.eye(2)))
        precision = numpyro.sample("precision", dist.Wishart(4.0, jnp.eye(2)))
    return weights, mean, precision


def wishart_mixture(x: Any) -> None:
    """Three Gaussian components with full precisions; every row's component is a latent."""
    weights, mean, precision = _components()
    with numpyro.plate("data", x.shape[0]):
        z = numpyro.sample("z", dist.Categorical(weights))
        numpyro.sample("x", dist.MultivariateNormal(mean[z], precision_matrix=precision[z]), obs=x)


def wishart_mixture_summed(x: Any) -> None:
    """The same density with the components summed out."""
    weights, mean, precision = _components()
    parts = dist.MultivariateNormal(mean, precision_matrix=precision)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", dist.MixtureSameFamily(dist.Categorical(weights), parts), obs=x)


def _wishart_mixture() -> Subject:
    rng = np.random.default_rng(0)
    x = rng.choice([-4.0, 0.0, 4.0], (300, 1)) * [1.0, 0.5] + rng.normal(size=(300, 2))
    split = Partition(wishart_mixture, "data", rng.integers(0, 4, 300))
    start = {"mean": 4.0 * (np.arange(3.0)[:, None] - 1) * np.ones((1, 2)), "precision": np.tile(np.eye(2), (3, 1, 1))}
    guide = functools.partial(AutoExponentialFamily, families={"z": CategoricalFamily(3)})
    return Subject(wishart_mixture_summed, (x,), split, 40, guide=guide, start=start, svi_guide=AutoMultivariateNormal)


def _regression(num_rows: int, dim: int, num_groups: int) -> Subject:
    data = _models.simulate_logistic(num_rows, dim, num_groups)
    return Subject(_models.logistic, (data.X, data.y), Partition(_models.logistic, "data", data.labels))


def _schools(model: Callable[..., Any]) -> Subject:
    _, effect, error = _gallery.EXAMPLES["eight schools"]().args
    args = tuple(np.asarray(x, np.float32) for x in (error, effect))
    return Subject(model, args, Partition(model, "school", list(range(8))), 60, 5_000)


def _radon(folder: pathlib.Path) -> Subject:
    found = hierarchical.load(folder)["radon"]
    return Subject(found.model, found.args, Partition(found.model, groups=found.groups), 60, 5_000)


def _example(name: str) -> Subject:
    found = _gallery.EXAMPLES[name]()
    partitioned = Partition(found.model, found.plate, found.groups)
    return Subject(found.reference, found.args, partitioned, found.rounds, 5_000, start=found.start)


def _gamma_poisson() -> Subject:
    rng = np.random.default_rng(0)
    args = (rng.poisson(3.0, 200),)
    return Subject(counts, args, Partition(counts, "data", rng.integers(0, 4, 200)), 20, guide=AutoExponentialFamily)


# What the first run of PVI may take of SVI's, and how many programs it may compile.
CASES: dict[str, tuple[Callable[[pathlib.Path | None], Subject], float, int]] = {
    "logistic 569 x 31": (lambda _: _regression(569, 31, 5), 0.6, 20),
    "glm 20,000 x 50": (lambda _: _regression(20_000, 50, 10), 0.6, 20),
    "eight schools": (lambda _: _schools(hierarchical.eight_schools), 1.0, 40),
    "eight schools, centred": (lambda _: _schools(centred_schools), 1.0, 40),
    "radon": (lambda folder: _radon(folder or pathlib.Path()), 1.0, 40),
    "gamma-Poisson": (lambda _: _gamma_poisson(), 1.5, 40),
    "mixture with Wishart": (lambda _: _wishart_mixture(), 1.5, 40),
} | {
    f"gallery: {name}": (lambda _, name=name: _example(name), 1.2 if name == "mixture" else 1.0, 40)
    for name in _gallery.EXAMPLES
}


def elbo(subject: Subject, guide: Any, params: Any, args: tuple[Any, ...], discrete: bool) -> float:
    """ELBO in nats by 1,000 draws, of either side by the same function; NaN where latents are enumerated on one side only."""
    if discrete:
        return float("nan")
    loss = Trace_ELBO(num_particles=1_000).loss
    return -float(loss(jax.random.key(1), params, subject.model, guide, *args))
