"""GPJax's ``fit_natgrads`` on one classification problem; runs in an environment of its own, in which this package is not.

``python _gpjax_peer.py PROBLEM.npz`` prints one JSON line. The model is that of ``cvi-gp``: zero mean, squared-exponential
kernel with the same jitter, logistic link, and every point an inducing input, so that its family holds the optimum.
"""

import json
import statistics
import sys
import time

import gpjax
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax

jax.config.update("jax_enable_x64", True)
MOST, REPEATS = 60, 3


class Logistic(gpjax.likelihoods.Bernoulli):
    """Bernoulli with a logistic link; GPJax's own link is a clipped probit."""

    def link_function(self, f):
        """The law of a label given its function's value."""
        return dist.Bernoulli(logits=f)


def problem(path: str) -> tuple:
    """The variational family at its start, the data, and the negative ELBO to reach."""
    z = np.load(path)
    X, y = jnp.asarray(z["X"]), jnp.asarray(z["y"], float)[:, None]
    variance = float(np.exp(2 * z["log_sd"]))
    kernel = gpjax.kernels.RBF(lengthscale=float(np.exp(z["log_length"])), variance=variance)
    jitter = float(z["jitter"]) * variance
    prior = gpjax.gps.Prior(mean_function=gpjax.mean_functions.Zero(), kernel=kernel, jitter=jitter)
    model = prior * Logistic()
    family = gpjax.variational_families.DualVariationalGaussian(model=model, inducing_inputs=X)
    return family, gpjax.Dataset(X=X, y=y), float(z["limit"])


def main(path: str) -> dict:
    """Steps and warm seconds of the largest step size that gets there."""
    family, data, limit = problem(path)

    def fit(steps: int, rate: float):
        @jax.jit
        def run(family):
            return gpjax.fit_natgrads(
                model=family,
                objective=lambda q, d: -gpjax.objectives.elbo(q, d),
                train_data=data,
                optim=optax.set_to_zero(),
                natgrad_lr=rate,
                num_iters=steps,
                verbose=False,
                safe=False,
            )[1]

        return run

    for rate in (1.0, 0.5, 0.2):
        history = np.asarray(fit(MOST, rate)(family))
        reached = np.flatnonzero(history <= limit)
        if reached.size:
            break
    else:
        return {"rate": None, "best": float(np.nanmin(history)), "steps": MOST, "seconds": float("nan")}
    # history[t] is the loss before step t.
    steps = max(int(reached[0]), 1)
    run, seconds = fit(steps, rate), []
    jax.block_until_ready(run(family))
    for _ in range(REPEATS if data.n < 1_000 else 1):
        start = time.perf_counter()
        jax.block_until_ready(run(family))
        seconds.append(time.perf_counter() - start)
    return {"rate": rate, "best": float(np.nanmin(history)), "steps": steps, "seconds": statistics.median(seconds)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
