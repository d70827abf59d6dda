"""Float64 references: the exact ELBO of a Gaussian q by quadrature, and its optimum by L-BFGS.

Nothing here comes from the package under test. A problem is a Gaussian prior and blocks of rows; row n of a block
depends on the unconstrained latents theta through k affine predictors a_n = B_n theta, so that its expected
log-likelihood under q = N(m, V) is a k-dimensional Gaussian integral with mean B_n m and covariance B_n V B_n'.
Everything runs in float64 on the CPU, whatever precision and device the benchmark itself uses.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import scipy.optimize
from jaxtyping import Array, Float
from numpyro.infer.util import potential_energy

ROWS_AT_ONCE = 256
LOG_2PI = float(np.log(2.0 * np.pi))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("design", "target"),
    meta_fields=("log_density", "num_nodes", "expectation"),
)
@dataclasses.dataclass(frozen=True)
class Rows:
    """Log-likelihood terms that share a form; its arrays are arguments of compiled functions, not constants in them.

    Attributes:
        design: B, what maps theta to the k predictors of each row.
        target: one number per row.
        log_density: (predictors (k,), target) -> log-likelihood of one row, nats.
        num_nodes: Gauss-Hermite nodes per predictor.
        expectation: closed form or special rule (mean (n,), variance (n,), target (n,)) -> expected values, for k = 1.
    """

    design: np.ndarray
    target: np.ndarray
    log_density: Callable[[Array, Array], Array]
    num_nodes: int = 32
    expectation: Callable[[Array, Array, Array], Array] | None = None


@functools.partial(jax.tree_util.register_dataclass, data_fields=("prior_scale", "blocks"), meta_fields=("dim",))
@dataclasses.dataclass(frozen=True)
class Problem:
    """A posterior to approximate by a Gaussian in unconstrained space.

    Attributes:
        dim: number of unconstrained latents D.
        prior_scale: standard deviations of the independent zero-mean Gaussian priors; inf where a `Rows` block holds
            the prior instead.
        blocks: the row blocks.
    """

    dim: int
    prior_scale: np.ndarray
    blocks: tuple[Rows, ...]


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Double precision on the CPU inside the block, whatever holds outside."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        yield


@functools.lru_cache
def gauss_hermite(num_nodes: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Tensor nodes (J, dim) and weights (J,) for a standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    grids = np.meshgrid(*[nodes] * dim, indexing="ij")
    weight_grids = np.meshgrid(*[weights / weights.sum()] * dim, indexing="ij")
    product = functools.reduce(np.multiply, [g.ravel() for g in weight_grids])
    points = np.stack([g.ravel() for g in grids], axis=1)
    keep = product > 1e-14 * product.max()
    return points[keep], product[keep] / product[keep].sum()


def expected_rows(block: Rows, loc: Float[Array, " D"], tril: Float[Array, "D D"]) -> Float[Array, ""]:
    """Sum over the block's rows of E_q[log-likelihood], nats."""
    nodes, weights = gauss_hermite(block.num_nodes, block.design.shape[1])

    def one(row: tuple[Array, Array]) -> Array:
        design, target = row
        mean, root = design @ loc, design @ tril
        if block.expectation is not None:
            variance = jnp.sum(root**2, axis=1)
            return block.expectation(mean, variance, target[None])[0]
        chol = jnp.linalg.cholesky(root @ root.T) if root.shape[0] > 1 else jnp.sqrt(jnp.sum(root**2))[None, None]
        values = jax.vmap(lambda node: block.log_density(mean + chol @ node, target))(jnp.asarray(nodes))
        return jnp.asarray(weights) @ values

    rows = (jnp.asarray(block.design, jnp.float64), jnp.asarray(block.target))
    if block.design.shape[1] == 1:  # one predictor: all rows at once is one matrix product
        return jnp.sum(_expected_single(block, rows, loc, tril))
    return jnp.sum(jax.lax.map(jax.checkpoint(one), rows, batch_size=ROWS_AT_ONCE))


def _expected_single(block: Rows, rows: tuple[Array, Array], loc: Array, tril: Array) -> Array:
    design, target = rows[0][:, 0], rows[1]
    mean, variance = design @ loc, jnp.sum((design @ tril) ** 2, axis=1)
    if block.expectation is not None:
        return block.expectation(mean, variance, target)
    nodes, weights = gauss_hermite(block.num_nodes, 1)
    points = mean[:, None] + jnp.sqrt(variance)[:, None] * nodes[:, 0]
    values = jax.vmap(jax.vmap(lambda a, t: block.log_density(a[None], t), (0, None)))(points, target)
    return values @ weights


def elbo(problem: Problem, loc: Float[Array, " D"], tril: Float[Array, "D D"]) -> Float[Array, ""]:
    """E_q[log p(y, theta)] + entropy of q = N(loc, tril tril'), nats; must be traced inside `float64`."""
    scale = jnp.asarray(problem.prior_scale)
    known = jnp.isfinite(scale)
    safe = jnp.where(known, scale, 1.0)
    second = loc**2 + jnp.sum(tril**2, axis=1)
    prior = jnp.sum(jnp.where(known, -0.5 * (second / safe**2 + LOG_2PI) - jnp.log(safe), 0.0))
    entropy = 0.5 * problem.dim * (1.0 + LOG_2PI) + jnp.sum(jnp.log(jnp.abs(jnp.diag(tril))))
    return prior + entropy + sum(expected_rows(block, loc, tril) for block in problem.blocks)


def log_joint(problem: Problem, theta: Float[Array, " D"]) -> Float[Array, ""]:
    """Log joint density at one point up to the Gaussian prior's constant, nats."""
    total = -0.5 * jnp.sum((theta / jnp.asarray(problem.prior_scale)) ** 2)
    for block in problem.blocks:
        predictors = jnp.einsum("nkd,d->nk", jnp.asarray(block.design, jnp.float64), theta)
        total += jnp.sum(jax.vmap(block.log_density)(predictors, jnp.asarray(block.target)))
    return total


@dataclasses.dataclass(frozen=True)
class Optimum:
    """The best Gaussian found and its ELBO, with a compiled float64 ELBO to hold others against it."""

    loc: np.ndarray
    tril: np.ndarray
    elbo: float
    evaluate: Callable[[np.ndarray, np.ndarray], float]

    def gap(self, loc: np.ndarray, tril: np.ndarray) -> float:
        """ELBO(optimum) - ELBO(q) in nats; negative means that q beats the reference; inf where q is not finite."""
        loc, tril = np.asarray(loc, np.float64), np.asarray(tril, np.float64)
        if not (np.all(np.isfinite(loc)) and np.all(np.isfinite(tril))):
            return float("inf")
        value = self.elbo - self.evaluate(loc, tril)
        return value if np.isfinite(value) else float("inf")


def solve(problem: Problem, diagonal: bool = False, restarts: int = 12) -> Optimum:
    """Maximises the ELBO over a full or diagonal Gaussian.

    Newton's method finds the mode, whose curvature whitens the search; L-BFGS then runs over the whitened mean and
    scale, whitening afresh with its own result until a restart gains less than 1e-9 nats.
    """
    with float64():
        problem = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), problem)
        value = functools.partial(jax.jit(elbo), problem)
        loc, tril = _laplace(problem)
        if diagonal:
            tril = np.diag(1.0 / np.sqrt(np.diag(_precision(tril))))
        loss = jax.value_and_grad(lambda u, problem, loc, tril: -_whitened_elbo(problem, u, loc, tril, diagonal))
        compiled = jax.jit(loss)

        def step(u: Array, loc: np.ndarray, tril: np.ndarray) -> tuple[Array, Array]:
            return compiled(u, problem, loc, tril)

        best = float(value(loc, tril))
        for _ in range(restarts):
            loc, tril = _lbfgs(step, loc, tril, diagonal)
            found = float(value(loc, tril))
            if found - best < 1e-9 * max(1.0, abs(best) * 1e-4):
                break
            best = found

    def evaluate(loc: np.ndarray, tril: np.ndarray) -> float:
        with float64():
            return float(value(jnp.asarray(loc, jnp.float64), jnp.asarray(tril, jnp.float64)))

    return Optimum(loc, tril, max(found, best), evaluate)


def elbo_by_draws(
    model: Callable[..., None],
    X: np.ndarray,
    y: np.ndarray,
    optimum: Optimum,
    order: Mapping[str, tuple[int, ...]],
    num_draws: int = 8_192,
) -> tuple[float, float]:
    """The optimum's ELBO by antithetic draws through NumPyro's own density of the model, and its standard error, nats.

    A check on everything above: likelihoods, priors, Jacobians and the order of the latents.
    """
    sizes = [int(np.prod(shape)) for shape in order.values()]
    half = np.random.default_rng(0).standard_normal((num_draws // 2, len(optimum.loc)))
    with float64():
        args = (jnp.asarray(X, jnp.float64), jnp.asarray(y))

        def log_density(theta: Array) -> Array:
            parts = jnp.split(theta, np.cumsum(sizes)[:-1])
            latents = {name: part.reshape(shape) for (name, shape), part in zip(order.items(), parts, strict=True)}
            return -potential_energy(model, args, {}, latents)

        thetas = optimum.loc + np.stack([half, -half]) @ optimum.tril.T
        values = jax.lax.map(log_density, jnp.asarray(thetas.reshape(-1, len(optimum.loc))), batch_size=64)
    entropies = 0.5 * (half**2).sum(1) + 0.5 * half.shape[1] * LOG_2PI + np.sum(np.log(np.abs(np.diag(optimum.tril))))
    pairs = np.asarray(values).reshape(2, -1).mean(0) + entropies
    return float(pairs.mean()), float(pairs.std() / np.sqrt(len(pairs)))


def _precision(tril: np.ndarray) -> np.ndarray:
    root = scipy.linalg.solve_triangular(tril, np.eye(len(tril)), lower=True)
    return root.T @ root


def _unwhiten(u: Array, loc: Array, tril: Array, diagonal: bool) -> tuple[Array, Array]:
    dim = loc.shape[0]
    mean, log_scale = u[:dim], u[dim : 2 * dim]
    factor = jnp.diag(jnp.exp(log_scale))
    if not diagonal:
        factor = factor.at[jnp.tril_indices(dim, -1)].set(u[2 * dim :])
    return loc + tril @ mean, tril @ factor


def _whitened_elbo(problem: Problem, u: Array, loc: Array, tril: Array, diagonal: bool) -> Array:
    return elbo(problem, *_unwhiten(u, loc, tril, diagonal))


def _lbfgs(step: Callable, loc: np.ndarray, tril: np.ndarray, diagonal: bool) -> tuple[np.ndarray, np.ndarray]:
    dim = len(loc)
    size = 2 * dim + (0 if diagonal else dim * (dim - 1) // 2)

    def objective(u: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = step(jnp.asarray(u), loc, tril)
        value, gradient = float(value), np.asarray(gradient)
        if not (np.isfinite(value) and np.all(np.isfinite(gradient))):  # a line search that went too far
            return 1e300, np.zeros_like(u)
        return value, gradient

    options = {"maxiter": 500, "maxcor": 30, "ftol": 1e-15, "gtol": 1e-7}
    result = scipy.optimize.minimize(objective, np.zeros(size), jac=True, method="L-BFGS-B", options=options)
    loc, tril = _unwhiten(jnp.asarray(result.x), jnp.asarray(loc), jnp.asarray(tril), diagonal)
    return np.asarray(loc), np.asarray(tril)


def _laplace(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Mode by Newton's method (eigenvalues made positive, steps halved until they help) and root of its covariance."""
    function, gradient, hessian = (
        functools.partial(jax.jit(f), problem)
        for f in (log_joint, jax.grad(log_joint, argnums=1), jax.hessian(log_joint, argnums=1))
    )
    theta = np.zeros(problem.dim)
    value = float(function(theta))
    for _ in range(200):
        root = _inverse_root(-np.asarray(hessian(theta)))
        slope = root.T @ np.asarray(gradient(theta))
        move, size = root @ slope, 1.0
        while size > 1e-10 and not float(function(theta + size * move)) >= value:
            size *= 0.5
        theta = theta + size * move
        new = float(function(theta))
        if slope @ slope < 1e-16 or new - value < 1e-12 * abs(value):
            break
        value = new
    return theta, np.linalg.cholesky(root @ root.T)


def _inverse_root(precision: np.ndarray) -> np.ndarray:
    """R with R R' = |precision|^-1, computed on the unit-diagonal matrix because columns differ by decades."""
    scale = 1.0 / np.sqrt(np.abs(np.diag(precision)) + 1e-300)
    values, vectors = np.linalg.eigh(precision * scale[:, None] * scale)
    return scale[:, None] * vectors / np.sqrt(np.maximum(np.abs(values), 1e-12))
