"""Moves of a product of families in its Fisher metric, against the derivative of its mean parameters and NumPyro's divergences."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import special, stats

from numpyro_pvi.families import ProductFamily, _base, _product, whitening

X64 = jnp.result_type(float).name == "float64"
TIGHT = 1e-8 if X64 else 2e-3
MEMBERS = {
    "w": dist.Normal(jnp.array([1.0, -2.0]), jnp.array([0.5, 2.0])).to_event(1),
    "b": dist.MultivariateNormal(jnp.array([0.3, -0.4]), jnp.array([[1.0, 0.6], [0.6, 2.0]])),
    "tau": dist.Gamma(jnp.array([2.5, 4.0]), jnp.array([1.5, 3.0])),
    "s": dist.Wishart(5.0, jnp.array([[1.0, 0.2], [0.2, 0.5]])),
    "p": dist.Dirichlet(jnp.array([1.5, 2.0, 3.0])),
}
# NumPyro has no divergence of these.
OTHERS = {
    "v": dist.GaussianStateSpace(3, 0.5 * jnp.array([[1.0, 0.4], [0.2, 1.0]]), jnp.array([[0.4, 0.1], [0.1, 0.3]])),
    "z": dist.Categorical(jnp.array([0.2, 0.3, 0.5])),
    "u": dist.VonMises(0.5, 2.0),
}
FAMILY = ProductFamily.for_distributions(MEMBERS)
Q = FAMILY.from_distribution(MEMBERS)


def symmetric(natural):
    """Matrices with their transposes' mean, but for blocks off the diagonal."""

    def even(path, x):
        square = x.ndim > 1 and x.shape[-1] == x.shape[-2] and "lower" not in jax.tree_util.keystr(path)
        return 0.5 * (x + jnp.swapaxes(x, -1, -2)) if square else x

    return jax.tree_util.tree_map_with_path(even, natural)


def metric_is_the_derivative(members):
    """Of the mean parameters in the natural ones; moves are lengths in it, and to first order changes of natural parameters."""
    family = ProductFamily.for_distributions(members)
    start = family.flat(family.from_distribution(members))

    @jax.jit
    def both(start):
        def means(vector):
            return family.flat(family.natural_to_mean(symmetric(family.unflat(vector))))

        q = family.unflat(start)
        fisher, moments = jax.jacfwd(means)(start), family.moments(q)
        change = family.flat(symmetric(family.unflat(jnp.cos(jnp.arange(family.dim, dtype=start.dtype)))))
        stack = jax.tree.map(lambda *x: jnp.stack(x), *(family.unflat(s * change) for s in (0.1, -0.2)))
        white = jax.vmap(lambda s: family.to_minimal(family.unflat(s)))(family.shift(stack, moments))
        small = family.moves(family.moments(q + family.unflat(1e-4 * change)), moments)
        sizes = jnp.array([0.1, -0.2], start.dtype)
        gram = jnp.outer(sizes, sizes) * (change @ fisher @ change)
        found = moments.scale**2, white @ white.T, small, family.inner_products(moments, stack)
        return found, (jnp.diagonal(fisher), gram, 1e-4 * family.shift(family.unflat(change), moments), gram)

    (variances, lengths, small, gram), wanted = both(start)
    np.testing.assert_allclose(variances, wanted[0], rtol=TIGHT)
    np.testing.assert_allclose(lengths, wanted[1], rtol=10 * TIGHT)
    np.testing.assert_allclose(small, wanted[2], rtol=0.05, atol=2e-6)
    np.testing.assert_allclose(gram, wanted[3], rtol=TIGHT)


@pytest.mark.parametrize("members", [MEMBERS, OTHERS], ids=["vectors and matrices", "chains and others"])
def test_moves_are_lengths_in_the_metric(members):
    metric_is_the_derivative(members)


def test_sds_that_are_variances_are_noticed(monkeypatch):
    own = ProductFamily.fisher_diagonal
    monkeypatch.setattr(ProductFamily, "fisher_diagonal", lambda self, q: jax.tree.map(jnp.square, own(self, q)))
    with pytest.raises(AssertionError):
        metric_is_the_derivative(MEMBERS)


def whitened_coordinates_are_isometric(members):
    """Lengths and angles of changes are those of the metric, and slopes those of its image."""
    family = ProductFamily.for_distributions(members)
    q, numbers = family.from_distribution(members), jnp.arange(1.0, family.dim + 1)

    @jax.jit
    def both():
        one, other = (symmetric(family.unflat(f(numbers))) for f in (jnp.cos, jnp.sin))
        white, image = whitening(family, q), family.fisher_product(q, other)
        x, y = white.coordinates(one), white.coordinates(other)
        back = family.to_minimal(white.change(x))
        return (x @ y, back, white.slope(image)), (family.inner(one, image), family.to_minimal(one), y)

    found, wanted = both()
    for each, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(each, want, rtol=TIGHT, atol=TIGHT)
    assert found[1].shape == (family.degrees,)


@pytest.mark.parametrize("members", [MEMBERS, OTHERS], ids=["vectors and matrices", "chains and others"])
def test_whitened_coordinates_are_isometric(members):
    whitened_coordinates_are_isometric(members)


@pytest.mark.once
def test_a_root_that_is_none_is_noticed(monkeypatch):
    own = _base.scaled_cholesky
    monkeypatch.setattr(_base, "scaled_cholesky", lambda x: (own(x)[0] * 1.1, True))
    with pytest.raises(AssertionError):
        whitened_coordinates_are_isometric(MEMBERS)


@pytest.mark.once
def test_of_large_members_the_diagonal_stands_for_the_metric(monkeypatch):
    """Coordinates and slopes are then still those of one linear map, of axes of unit length where nothing is symmetrised."""
    for room in (_base, _product):
        monkeypatch.setattr(room, "FACTORISED", 0)
    # Normals and gammas have roots in closed form, whatever their number.
    members = {name: MEMBERS[name] for name in "bsp"}
    family = ProductFamily.for_distributions(members)
    q = family.from_distribution(members)
    change = jax.tree.map(jnp.cos, family.symmetrise(q))
    white, image = whitening(family, q), family.fisher_product(q, change)
    x = white.coordinates(change)
    np.testing.assert_allclose(family.to_minimal(white.change(x)), family.to_minimal(change), rtol=TIGHT)
    np.testing.assert_allclose(white.slope(image) @ x, family.inner(change, image), rtol=TIGHT)
    axis = jax.tree.map(jnp.zeros_like, q)
    axis.parts["p"] = jax.tree.map(lambda leaf: leaf.at[0].set(1.0), axis.parts["p"])
    length = family.inner(axis, family.fisher_product(q, axis))
    np.testing.assert_allclose(jnp.sum(white.coordinates(axis) ** 2), length, rtol=TIGHT)


def wishart_divergence(q, p):
    """``E_q[log q - log p]``: scipy's entropy, and the cross-entropy with ``E log det = psi_2(nu / 2) + D log 2 + log det V``."""
    (nu, scale), (mu, other) = ((float(n), np.asarray(v, np.float64)) for n, v in (q, p))
    log_det = sum(special.psi((nu - i) / 2) for i in range(2)) + 2 * np.log(2) + np.linalg.slogdet(scale)[1]
    normaliser = mu * np.log(2) + mu / 2 * np.linalg.slogdet(other)[1] + special.multigammaln(mu / 2, 2)
    cross = normaliser - (mu - 3) / 2 * log_det + 0.5 * nu * np.trace(np.linalg.solve(other, scale))
    return cross - stats.wishart(nu, scale).entropy()


def test_pairings_and_log_partitions_give_numpyros_divergence():
    """``KL(q || p) = <eta_q - eta_p, mu_q> - A(eta_q) + A(eta_p)``."""
    others = {
        "w": dist.Normal(jnp.array([0.5, -1.0]), jnp.array([0.7, 1.0])).to_event(1),
        "b": dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)),
        "tau": dist.Gamma(jnp.array([2.0, 3.0]), jnp.array([2.0, 2.0])),
        "s": dist.Wishart(4.0, jnp.eye(2)),
        "p": dist.Dirichlet(jnp.ones(3)),
    }
    other = FAMILY.from_distribution(others)
    moments = FAMILY.moments(Q)
    parts = [sum(FAMILY.log_partition_parts(eta, FAMILY.moments(eta))) for eta in (Q, other)]
    found = FAMILY.expect_quadratic(Q - other, moments) - parts[0] + parts[1]
    wanted = sum(jnp.sum(dist.kl_divergence(MEMBERS[n], others[n])) for n in MEMBERS if n != "s")
    # NumPyro has none for Wishart laws: that of scipy's entropies, with its own E[log det].
    wanted = wanted + wishart_divergence((5.0, MEMBERS["s"].scale_matrix), (4.0, jnp.eye(2)))
    np.testing.assert_allclose(found, wanted, rtol=TIGHT)
