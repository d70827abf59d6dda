"""Occupancy maps and other kernel classifiers on streams: the model, its agents, and what their fits are judged by."""

import argparse
import dataclasses
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

from numpyro_pvi import PVI, Partition
from numpyro_pvi.schedules import Decentralized


@dataclasses.dataclass(frozen=True)
class MapData:
    """Points with labels, an owner for each of the training points, and the kernels."""

    X: np.ndarray
    y: np.ndarray
    owner: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    centers: np.ndarray
    # One over the squared width of every kernel.
    rates: np.ndarray
    prior_sd: float = 10.0

    @property
    def arrays(self) -> tuple:
        """The model's arguments."""
        sd = np.float32(self.prior_sd)
        return tuple(jnp.asarray(x) for x in (self.X, self.centers, self.rates, sd, self.y))


def first_of_each(owner: np.ndarray, most: int) -> np.ndarray:
    """Positions of every owner's first rows: a fit that takes no more of them need not plan for the others."""
    return np.sort(np.concatenate([np.flatnonzero(owner == k)[:most] for k in np.unique(owner)]))


def features(X: Any, centers: Any, rates: Any) -> Any:
    """A constant and ``exp(-rate |x - center|^2)``."""
    square = jnp.sum((X[:, None, :] - centers) ** 2, axis=-1)
    return jnp.concatenate([jnp.ones((X.shape[0], 1)), jnp.exp(-rates * square)], axis=1)


def kernel_classifier(X: Any, centers: Any, rates: Any, sd: Any, y: Any = None) -> None:
    """Logistic regression on kernels around fixed centres; a row's features are computed where the row is used."""
    w = numpyro.sample("w", dist.Normal(0.0, sd).expand([centers.shape[0] + 1]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=features(X, centers, rates) @ w), obs=y)


def build(data: MapData, graph: Any, full: bool, **settings: Any) -> PVI:
    """DELBO by single rows, in the order of the data."""
    settings = {"batch_size": 1, "expectation": "probit", "exhausted": "again"} | settings
    schedule = Decentralized(graph, mixing="consensus", **settings)
    guide = (AutoMultivariateNormal if full else AutoDiagonalNormal)(kernel_classifier)
    return PVI(Partition(kernel_classifier, "data", data.owner, check=False), guide, schedule=schedule)


def probabilities(loc: np.ndarray, variance: np.ndarray, data: MapData, points: np.ndarray) -> np.ndarray:
    """Probability of class 1 under a mean-field reading of q, by the probit that takes the logistic function's place."""
    look = jax.jit(lambda X: _look(X, data.centers, data.rates, loc, variance))
    return np.concatenate(
        [np.asarray(look(jnp.asarray(part))) for part in np.array_split(points, len(points) // 4096 + 1)]
    )


def _look(X, centers, rates, loc, variance):
    design = features(X, centers, rates)
    mean, spread = design @ loc, design**2 @ variance
    return jax.scipy.stats.norm.cdf(0.61 * mean / jnp.sqrt(1 + 0.61**2 * spread))


def accuracies(pvi: PVI, state: Any, data: MapData, agents: tuple) -> np.ndarray:
    """Share of the test points whose likelier class is right, by agent; None is the network's mean."""
    laws = [pvi.posterior(state, agent=agent)["w"] for agent in agents]
    locs, variances = (jnp.stack([getattr(q, name) for q in laws]) for name in ("mean", "variance"))
    looks = jax.jit(
        lambda X, loc, variance: jax.vmap(lambda m, v: _look(X, data.centers, data.rates, m, v))(loc, variance) > 0.5
    )
    parts = np.array_split(np.arange(len(data.X_test)), len(data.X_test) // 4096 + 1)
    found = np.concatenate([np.asarray(looks(data.X_test[p], locs, variances)) for p in parts], axis=1)
    return np.mean(found == (data.y_test == 1), axis=1)


def follow(pvi: PVI, data: MapData, rounds: int, agents: tuple = (None,)) -> tuple[Any, list[tuple], float]:
    """Fit round by round.

    Args:
        pvi: the fit.
        data: its data.
        rounds: how many.
        agents: whose accuracy is followed; None is the network's mean.

    Returns:
        The last state; per round the iterations (rows taken by every agent), the lowest accuracy of the agents, and the
        consensus error in sds; and the rows a second, all agents together (the rounds' median).
    """
    state, path, speeds = pvi.init(jax.random.key(0), *data.arrays), [], []
    for _ in range(rounds):
        start = time.perf_counter()
        state = pvi.run(None, 1, *data.arrays, init_state=state, progress_bar=False).state
        taken = np.asarray(jax.block_until_ready(state.schedule_state.taken))
        seconds = time.perf_counter() - start
        last = path[-1][0] if path else 0
        speeds.append((taken[0] - last) * len(taken) / seconds)
        lowest = float(accuracies(pvi, state, data, agents).min())
        path.append((int(taken[0]), lowest, float(state.report.consensus)))
    return state, path, float(np.median(speeds))


def first_reached(path: list[tuple], limit: float) -> float:
    """Iterations after which the accuracy first is at the limit; infinity if it never is."""
    return next((float(count) for count, found, _ in path if found >= limit), float("inf"))


def draw(pvi: PVI, state: Any, data: MapData, options: argparse.Namespace, name: str) -> None:
    """The map beside the test points, as a picture in the folder that was named."""
    if options.out is None:
        return
    from matplotlib import pyplot

    low, high = data.X_test.min(0), data.X_test.max(0)
    xs, ys = (np.linspace(low[k], high[k], 300) for k in (0, 1))
    grid = np.stack(np.meshgrid(xs, ys), -1).reshape(-1, 2).astype(np.float32)
    q = pvi.posterior(state)["w"]
    found = probabilities(np.asarray(q.mean), np.asarray(q.variance), data, grid).reshape(300, 300)
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 5), layout="constrained", sharex=True, sharey=True)
    axes[0].scatter(*data.X_test.T, c=data.y_test, s=0.3, cmap="coolwarm", rasterized=True)
    axes[0].set_title("test points")
    image = axes[1].imshow(
        found, origin="lower", extent=(low[0], high[0], low[1], high[1]), cmap="coolwarm", vmin=0, vmax=1
    )
    axes[1].set_title("probability of class 1")
    figure.colorbar(image, ax=axes[1])
    for axis in axes:
        axis.set_aspect("equal")
    folder = pathlib.Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=110)
    pyplot.close(figure)
