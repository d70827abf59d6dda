"""A server under families that has no row: clients tell what factors are conjugate in, and the fit is that of one process."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.optim import Adam

from numpyro_pvi import PVI, AutoExponentialFamily, Partition, PVIError
from numpyro_pvi.clients import Client, InMemorySums, InProcess, SummedClients
from numpyro_pvi.clients._holders import joined_structure
from numpyro_pvi.errors import ClientError
from numpyro_pvi.expectations import FactorStructure, LatentRole
from numpyro_pvi.families import GammaFamily, ProductFamily, ScalarNormalFamily
from numpyro_pvi.schedules import Synchronous
from numpyro_pvi.solvers import PowerEP
from tests.client_model import line
from tests.laws.test_product_clients import (
    CELLS,
    KEY,
    LABELS,
    ROWS,
    X,
    Y,
    assert_same,
    assert_same_fit,
    ridge,
)
from tests.test_rowless import Unread

ORDER = np.argsort(LABELS, kind="stable")
QUICK = ["conjugate-synchronous", "ep-synchronous"]
SLOW = [
    "params-synchronous",
    "drawn-synchronous",
    "odds-synchronous",
    "line-sequential",
    "line-subset",
    "plane-synchronous",
    "ep-drawn-sequential",
    "elbo-synchronous",
    "line-streaming",
]
names = QUICK + [pytest.param(n, marks=pytest.mark.slow) for n in SLOW]


def rows_of(name, label=None):
    mine = ORDER if label is None else label == LABELS
    return tuple(x[mine] if np.ndim(x) else x for x in ROWS.get(CELLS[name][0], (X, Y)))


def clients_of(name, model=None):
    own, solver, _ = CELLS[name]
    model = model or own
    return [Client(model, AutoExponentialFamily(model), x, *rows_of(name, x), solver=solver) for x in "abc"]


def optim(model):
    return Adam(0.1) if model is ridge else None


def server(name, clients=None):
    model, solver, schedule = CELLS[name]
    runtime = InProcess(clients=clients or clients_of(name))
    return PVI(model, AutoExponentialFamily(model), optim(model), solver=solver, schedule=schedule, runtime=runtime)


@functools.cache
def here(name):
    model, solver, schedule = CELLS[name]
    how = {"solver": solver, "schedule": schedule}
    pvi = PVI(Partition(model, "data", LABELS[ORDER]), AutoExponentialFamily(model), optim(model), **how)
    return pvi, pvi.run(KEY, 3, *rows_of(name), progress_bar=False)


def unread(name):
    return tuple(Unread(x) if np.ndim(x) else x for x in rows_of(name))


@pytest.mark.parametrize("name", names)
def test_a_server_without_rows_fits_what_one_process_fits(name):
    pvi, wanted = here(name)
    far = server(name)
    found = far.run(KEY, 3, *unread(name), progress_bar=False)
    assert found.state.groups == wanted.state.groups == ("a", "b", "c")
    assert_same_fit(found, wanted)
    assert str(found.info).splitlines()[:4] == str(wanted.info).splitlines()[:4]
    there = far.log_evidence(found.state, *unread(name))
    assert_same(there, pvi.log_evidence(wanted.state, *rows_of(name)))


def shifted(x, y):
    """:func:`line` under another prior of the slope."""
    a = numpyro.sample("a", dist.Normal(1.0, 3.0))
    tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Normal(a * x, 1 / jnp.sqrt(tau)), obs=y)


def effects(x, y):
    """With a latent of every row's own."""
    a = numpyro.sample("a", dist.Normal(0.0, 3.0))
    with numpyro.plate("data", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(a * x + b, 0.5), obs=y)


def test_clients_of_another_model_are_refused_by_name():
    one, *others = clients_of("line-sequential")
    odd = Client(shifted, AutoExponentialFamily(shifted), "a", *rows_of("line-sequential", "a"))
    pvi = server("line-sequential", [odd, *others])
    with pytest.raises(ClientError, match="client 'a' has another prior than the server") as caught:
        pvi.init(KEY)
    assert caught.value.label == "a"
    wrong = Client(line, AutoExponentialFamily(line), "a", *rows_of("line-sequential", "a"), solver=PowerEP())
    with pytest.raises(ClientError, match="another solver than the server|not of one model"):
        server("line-sequential", [wrong, *others]).init(KEY)


def test_what_does_not_go_is_refused_by_name():
    own = [Client(effects, AutoExponentialFamily(effects), x, *rows_of("line-sequential", x)) for x in "abc"]
    pvi = PVI(effects, AutoExponentialFamily(effects), runtime=InProcess(clients=own))
    with pytest.raises(PVIError, match=r"latents inside the partitioned plate \(b\) under AutoExponentialFamily"):
        pvi.init(KEY)
    sums = SummedClients(sums=InMemorySums([]))
    with pytest.raises(PVIError, match="heard in sums only do not go with AutoExponentialFamily"):
        PVI(line, AutoExponentialFamily(line), schedule=Synchronous(damping=0.5), runtime=sums)


def test_a_client_that_joins_is_a_group_of_the_exact_posterior():
    """And draws of what all share are told without a row; clients judge their own sites at the same draws as one process."""
    counts = {"a": [3, 1], "b": [4], "c": [2, 6]}

    def rated(y):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
        with numpyro.plate("data", y.shape[0]):
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    def with_clients(labels):
        own = [Client(rated, AutoExponentialFamily(rated), x, np.array(counts[x])) for x in labels]
        return PVI(rated, AutoExponentialFamily(rated), runtime=InProcess(clients=own))

    pair = with_clients("ab")
    state = pair.run(KEY, 2, progress_bar=False).state
    with pytest.raises(PVIError, match="client 'a' has no latents of its own under AutoExponentialFamily"):
        pair.runtime.clients[0].posterior()
    all_three = with_clients("abc")
    joined = all_three.add_group(state, "c", num_steps=2)
    q = all_three.posterior(joined)["rate"]
    np.testing.assert_allclose((q.concentration, q.rate), (2 + 16, 1 + 5), rtol=1e-5)
    draws = all_three.to_arviz(KEY, joined, num_samples=400)
    assert np.abs(float(draws.posterior["rate"].mean()) - 3.0) < 5 * np.sqrt(18 / 36 / 400)
    # A site that says half of what its rows do is told by its own client, as where all rows are in one process.
    off = jax.tree.map(
        lambda x: x * jnp.array([1.0, 0.5, 1.0])[:, None].reshape(3, *(1,) * (x.ndim - 1)), joined.sites.groups
    )
    joined = dataclasses.replace(joined, sites=dataclasses.replace(joined.sites, groups=off))
    labels = np.repeat(list("abc"), [len(counts[x]) for x in "abc"])
    here = PVI(Partition(rated, "data", labels), AutoExponentialFamily(rated))
    rows = np.concatenate([counts[x] for x in "abc"])
    state = here.init(KEY, rows)
    state = dataclasses.replace(state, sites=dataclasses.replace(state.sites, groups=off))
    how = {"rng_key": KEY, "by_group": True, "num_samples": 200}
    found, wanted = all_three.khat(joined, **how), here.khat(state, rows, **how)
    assert list(found) == list(wanted) == ["a", "b", "c"]
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-6, atol=1e-9)
    # Single precision leaves rounding in the weights of exact sites, of which it makes a tail.
    assert found["b"] != 0.0 and (not jax.config.jax_enable_x64 or found["a"] == found["c"] == 0.0)


def test_what_clients_have_found_differently_is_drawn():
    """And what some rows do not see is taken as the others find it; a proof is one where all have it."""
    family = ProductFamily({"a": ScalarNormalFamily(), "tau": GammaFamily()})
    both = FactorStructure((LatentRole("a", "exact", 0, 1, proved=True), LatentRole("tau", "exact", 1, 1, proved=True)))
    bent = FactorStructure((LatentRole("a", "draws"), LatentRole("tau", "exact", 0, 1, proved=True)))
    blind = FactorStructure((LatentRole("a", "absent"), LatentRole("tau", "exact", 0, 1, proved=True)))
    assert joined_structure([both, both], family, "auto") == both
    assert joined_structure([bent, both], family, "auto").drawn == ("a",)
    seen = [dataclasses.replace(both, cells=(("a", terms),)) for terms in (("y",), ("y", "z"))]
    assert joined_structure(seen, family, "auto").cells == (("a", ("y", "z")),)
    found = joined_structure([blind, both], family, "auto")
    assert found.conjugate == ("a", "tau") and found.evidence == "found" and not found.drawn
