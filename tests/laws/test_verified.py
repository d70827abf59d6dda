"""Structure that was guessed wrongly is seen at draws from q, given up, and the fit goes on: law 13 with kinks and switches.

Every wrong guess is planted: the plan is given the structure of a smooth twin of the model, as a probe would find it whose rays
miss the kink. The oracle is NumPyro's own ELBO of the untouched model under the guide at the params that come out.
"""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi import PVI, AutoExponentialFamily, Partition, _verified
from numpyro_pvi import _exponential_plan as product_plan
from numpyro_pvi import _fits as shell
from numpyro_pvi._driver import Progress
from numpyro_pvi._group_lifecycle import reduced, rows_of
from numpyro_pvi._verified import Fingerprint, Verifier, contradictions
from numpyro_pvi._verified import verify_arrays as look
from numpyro_pvi.errors import PVIError
from numpyro_pvi.factors import plan_factors
from numpyro_pvi.runtime import _verification as verification
from numpyro_pvi.solvers import Conjugate

pytestmark = pytest.mark.filterwarnings("ignore:.*full pass over all.*:UserWarning")

KEY, RNG = jax.random.key(0), np.random.default_rng(4)
N = 20
LABELS = ["north"] * 12 + ["south"] * 8
X = RNG.normal(size=N)
# Only rows of the second group see the slope at all.
SOUTH = np.where(np.arange(N) >= 12, X, 0.0)
NOISE = RNG.normal(size=N)


def elbo(pvi, params, *args, draws=2000):
    """Negative ELBO of the untouched model at params, and its standard error: NumPyro's, nothing of ours."""
    one = Trace_ELBO()
    found = jax.jit(jax.vmap(lambda k: one.loss(k, params, pvi.model, pvi.guide, *args)))(jax.random.split(KEY, draws))
    return float(jnp.mean(found)), float(jnp.std(found) / np.sqrt(draws))


def assert_true_loss(pvi, result, *args, noise=0.0):
    """Law 13: the last loss is that of the model itself, within its error (and that of the loss's own draws)."""
    value, error = elbo(pvi, result.params, *args)
    assert abs(float(result.losses[-1]) - value) < 4 * error + noise
    return value


def unproved(state):
    """The state as if nothing of its structure had been proved."""
    part = dataclasses.replace(state.plan.partition, proved=frozenset())
    return dataclasses.replace(state, plan=dataclasses.replace(state.plan, partition=part))


def plant(monkeypatch, twin, *names):
    """Have PVI plan with some of what is found of another model."""

    def planted(partition, args, kwargs, **how):
        own = plan_factors(partition, args, kwargs, **how)
        other = plan_factors(partition._copy(fn=twin), args, kwargs, **how)
        taken = {name: getattr(other.plan, name) for name in names}
        return dataclasses.replace(own, plan=dataclasses.replace(own.plan, proved=frozenset(), **taken))

    monkeypatch.setattr(shell, "plan_factors", planted)


LIKELIHOOD = ("likelihood", "terms")
PRIOR = ("exact", "prior_latents", "prior_terms", "prior_kind")


def hinge(x, y, smooth=False):
    w, b = (numpyro.sample(name, dist.Normal(0.0, 1.0)) for name in "wb")
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(b + (w if smooth else jnp.maximum(w, -0.5)) * x, 0.5), obs=y)


def smooth_hinge(x, y):
    hinge(x, y, smooth=True)


def hinge_fit(monkeypatch, solver=None):
    plant(monkeypatch, smooth_hinge, *LIKELIHOOD)
    return PVI(Partition(hinge, "data", LABELS), AutoMultivariateNormal(hinge), solver=solver)


# The slope that would fit is beyond the kink, where the model has none.
FALLING = -2.5 * SOUTH + 0.5 * NOISE


def test_a_missed_kink_is_seen_named_and_given_up(monkeypatch):
    pvi = hinge_fit(monkeypatch)
    result = pvi.run(KEY, 24, SOUTH, FALLING, tol=1e-3, progress_bar=False)
    (note,) = [n for n in result.info.notes if "draws from q" in n]
    assert note.startswith("group 'south': its likelihood was taken as quadratic, but differs from the model by ")
    assert result.info.structure == ("draws", "draws")
    # What was given up is not where the run ends, and the trace says in which round it happened.
    assert len(result.losses) > 2
    assert np.isinf(result.trace.total_move).sum() == 1
    value = assert_true_loss(pvi, result, SOUTH, FALLING, noise=0.5)
    # What had been claimed, and would have been said to have converged.
    assert result.losses[0] < value - 10
    again = pvi.run(KEY, 1, SOUTH, FALLING, init_state=result.state, progress_bar=False)
    assert again.info.notes == result.info.notes and "differs from the model" not in again.message
    # Who has no more rounds is told that the last ones were under what the model contradicts.
    short = pvi.run(KEY, 1, SOUTH, FALLING, progress_bar=False).message
    assert short.startswith("ran 1 rounds: group 'south': its likelihood was taken") and "init_state" in short


def test_what_holds_is_left_alone(monkeypatch):
    """Also the same model with a slope on the other side, where the missed kink is in nobody's way."""
    pvi = hinge_fit(monkeypatch)
    rising = 3.0 * X + 0.5 * NOISE
    state, _ = pvi.update(pvi.init(KEY, X, rising), X, rising)
    assert contradictions(pvi, state, *rows_of(state.plan, *pvi._arguments((X, rising), {}))) == []


def test_a_run_that_is_repeated_is_not_verified_again(monkeypatch):
    """The same model, data and q to rounding: nothing new could be seen. A q or data of another kind are verified."""
    pvi, looks = hinge_fit(monkeypatch), []
    monkeypatch.setattr(_verified, "verify_arrays", lambda *a, **k: looks.append(1) or look(*a, **k))
    rising = 3.0 * X + 0.5 * NOISE
    for key, y, count in ((0, rising, 1), (0, rising, 1), (1, rising, 1), (0, rising + 0.1, 2), (0, rising, 3)):
        pvi.run(jax.random.key(key), 1, X, y, progress_bar=False)
        assert len(looks) == count


def test_a_solver_that_needs_the_structure_says_so(monkeypatch):
    pvi = hinge_fit(monkeypatch, Conjugate())
    with pytest.raises(PVIError, match=r"group 'south': its likelihood was taken as quadratic.* But .*Conjugate"):
        pvi.run(KEY, 24, SOUTH, FALLING, tol=1e-3, progress_bar=False)


def verified_anew(pvi, state, *args):
    """What a verification finds when it is compiled now, with whatever is planted in it: names of groups by claim."""
    engine, small = pvi._engine, reduced(state, pvi._engine)
    checks = jax.jit(lambda s, a: engine.verify(s, a, {}))(small, tuple(map(jnp.asarray, args)))
    return {claim: set(np.flatnonzero(np.any(c.gap > c.allowed, axis=0))) for claim, c in checks.items()}


def test_planted_faults_of_the_verification_are_seen(monkeypatch):
    pvi = hinge_fit(monkeypatch)
    state, _ = pvi.update(pvi.init(KEY, SOUTH, FALLING), SOUTH, FALLING)
    data = state, SOUTH, FALLING
    assert verified_anew(pvi, *data) == {"likelihood": {1}, "prior": set()}
    by_group, rows = verification.by_group, verification.claimed_rows
    with monkeypatch.context() as planted:
        planted.setattr(verification, "by_group", lambda *a: by_group(*a).at[-1].set(0.0))
        assert verified_anew(pvi, *data)["likelihood"] == set()
    with monkeypatch.context() as planted:
        same = lambda *a: {k: c._replace(claimed=c.model) for k, c in rows(*a).items()}  # noqa: E731
        planted.setattr(verification, "claimed_rows", same)
        assert verified_anew(pvi, *data)["likelihood"] == set()
    # The prior that a state holds is compared too, not only what would be read off the model now.
    stale = dataclasses.replace(state, prior=state.prior * 1.5)
    assert verified_anew(pvi, stale, SOUTH, FALLING)["prior"] == {0}


def switch(x, y, smooth=False):
    """A clamp in the likelihood, and a prior whose scale is switched by another latent."""
    t, z = (numpyro.sample(name, dist.Normal(0.0, 1.0)) for name in "tz")
    w = numpyro.sample("w", dist.Normal(0.0, 3.0 if smooth else jnp.where(z > 0, 3.0, 0.1)))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=w * x + (t if smooth else jnp.maximum(t, 0.5))), obs=y)


def smooth_switch(x, y):
    switch(x, y, smooth=True)


def test_a_missed_clamp_and_a_missed_switch_of_the_prior(monkeypatch, tmp_path):
    plant(monkeypatch, smooth_switch, *LIKELIHOOD, *PRIOR)
    y = (RNG.random(N) < 0.4).astype(float)
    pvi = PVI(Partition(switch, "data", LABELS), AutoMultivariateNormal(switch))
    state = pvi.init(KEY, X, y)
    assert (state.plan.partition.likelihood, set(state.plan.partition.exact)) == ("affine", {"t", "z", "w"})
    arguments = rows_of(state.plan, *pvi._arguments((X, y), {}))
    found = contradictions(pvi, state, *arguments)
    assert {one.claim for one in found} == {"likelihood", "prior"}
    after = pvi._fit.demoted(pvi, state, found, *arguments)
    notes = " ".join(pvi.info(after).notes)
    assert "its likelihood was taken by quadrature, but differs" in notes
    assert "the prior of t, z, w was taken as Gaussian, but differs" in notes
    assert after.plan.partition.has_prior_factor
    # The prior has a jump besides, which shows once it is a factor.
    (jump,) = contradictions(pvi, after, *arguments)
    assert jump.claim == "slopes of prior factor"
    after = pvi._fit.demoted(pvi, after, [jump], *arguments)
    assert contradictions(pvi, after, *arguments) == []
    # q stays where it was, and its loss is the model's own.
    for name, own in pvi.get_params(state).items():
        np.testing.assert_allclose(pvi.get_params(after)[name], own, rtol=1e-8, atol=1e-10)
    value, error = elbo(pvi, pvi.get_params(after), X, y)
    assert abs(float(pvi.evaluate(after, X, y)) - value) < 4 * error + 1.0
    assert abs(float(pvi.evaluate(state, X, y)) - value) > 4 * error + 1.0
    # A run's record gets a place for the prior factor, the loss of what is used now, and a last round that is not settled.
    reports = jax.tree.map(lambda x: np.stack([np.asarray(x)] * 2), state.report)
    monkeypatch.setattr(_verified, "verified", lambda *_: after)
    now = _verified.Verifier(pvi, *arguments)(Progress(state).after(state, np.zeros(2), reports), True)
    assert now.state is after
    assert now.all_reports.move.shape == (2, 3)
    assert np.isinf(now.all_reports.total_move[-1])
    assert now.all_losses[-1] == float(pvi.evaluate(after, X, y))
    # What was given up stays so in a file.
    pvi.save(tmp_path / "state", after)
    assert pvi.load(tmp_path / "state").plan == after.plan


def drifting(x, y, z, smooth=False):
    """A parameter that starts at 0, where it changes no structure."""
    a = numpyro.param("a", 0.0)
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(w * x + (0.0 * a if smooth else a * w**2 * z), 0.3), obs=y)


def smooth_drifting(x, y, z):
    drifting(x, y, z, smooth=True)


def test_a_parameter_that_starts_at_zero_moves(monkeypatch):
    plant(monkeypatch, smooth_drifting, *LIKELIHOOD)
    z = RNG.normal(size=N)
    data = X, 1.5 * X + 2.0 * z + 0.3 * NOISE, z
    pvi = PVI(Partition(drifting, "data", LABELS), AutoMultivariateNormal(drifting), numpyro.optim.Adam(0.1))
    state = pvi.init(KEY, *data)
    arguments = rows_of(state.plan, *pvi._arguments(data, {}))
    found = contradictions(pvi, state, *arguments)
    # At 0 every value is as claimed: only the slope tells.
    assert {one.claim for one in found} == {"likelihood"}
    state = pvi._fit.demoted(pvi, state, found, *arguments)
    result = pvi.run(KEY, 20, *data, init_state=state, progress_bar=False)
    assert any("taken as quadratic" in note for note in result.info.notes)
    assert 0.3 < float(result.params["a"]) < 2.5
    assert_true_loss(pvi, result, *data, noise=2.0)


def coupled(x, y):
    """Rows that see each other through a mean, once a parameter has left 0."""
    a = numpyro.param("a", 0.0)
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(w * (x - a * jnp.mean(x)), 0.3), obs=y)


def test_rows_that_a_parameter_couples_are_masked_instead():
    x = X + 3.0
    y = 1.5 * (x - x.mean()) + 0.3 * NOISE
    split = Partition(coupled, "data", LABELS, mode="args", check=False)
    pvi = PVI(split, AutoMultivariateNormal(coupled), numpyro.optim.Adam(0.1))
    state = unproved(pvi.init(KEY, x, y))
    arguments = rows_of(state.plan, *pvi._arguments((x, y), {}))
    found = contradictions(pvi, state, *arguments)
    assert "additivity" in {one.claim for one in found}
    state = pvi._fit.demoted(pvi, state, found, *arguments)
    assert state.plan.partition.mechanism == "mask"
    assert contradictions(pvi, state, *arguments) == []


def bent(x, y, z, smooth=False):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("obs", dist.Normal(w * x + (0.0 if smooth else w**2) * z, 0.5), obs=y)


def smooth_bent(x, y, z):
    bent(x, y, z, smooth=True)


def test_other_data_under_update_are_verified(monkeypatch):
    plant(monkeypatch, smooth_bent, *LIKELIHOOD)
    zero, z = np.zeros(N), RNG.normal(size=N)
    old, new = (X, X + 0.5 * NOISE, zero), (X, X + z + 0.5 * NOISE, z)
    pvi = PVI(Partition(bent, "data", LABELS), AutoMultivariateNormal(bent))
    state = pvi.init(KEY, *old)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        state, _ = pvi.update(state, *old)
    with pytest.warns(UserWarning, match="its likelihood was taken as quadratic, but differs"):
        state, loss = pvi.update(state, *new)
    assert pvi.info(state).structure == ("draws", "draws")
    assert float(loss) == pytest.approx(float(pvi.evaluate(state, *new)))
    value, error = elbo(pvi, pvi.get_params(state), *new)
    assert abs(float(loss) - value) < 4 * error + 2.0


def test_fingerprints_tell_data_apart():
    x = jnp.asarray(X)
    seen = Fingerprint([x, jnp.arange(3)])
    assert seen.fits([x, jnp.arange(3)])
    assert seen.fits([jnp.asarray(X.copy()), jnp.arange(3)])
    assert not seen.fits([x.at[3].add(1e-3), jnp.arange(3)])
    assert not seen.fits([x[::-1], jnp.arange(3)])
    assert not seen.fits([x])


# -------------------------------------------------------------------------------------------- latents in their own supports


def families(x, counts, y, smooth=False):
    """A rate under a clamp, a slope under a hinge, and a prior whose scale is switched."""
    r = numpyro.sample("r", dist.Gamma(2.0, 1.0))
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    s = numpyro.sample("s", dist.Normal(0.0, 3.0 if smooth else jnp.where(w > 0.3, 3.0, 0.3)))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("n", dist.Poisson(r if smooth else jnp.minimum(r, 2.0)), obs=counts)
        numpyro.sample("obs", dist.Normal((w if smooth else jnp.maximum(w, 0.0)) * x + s, 0.5), obs=y)


def test_families_are_verified_alike(monkeypatch):
    """ "Conjugate", "constant" and an exact prior, each planted where the model has none of it."""
    exact, find = product_plan._exact_prior, product_plan.find_structure

    def exact_of_twin(components, call, key):
        twin = lambda *args: families(*args, smooth=True)  # noqa: E731
        return exact(components, dataclasses.replace(call, model=twin), key)

    def found(family, natural, terms, key, expectation, where, *rest):
        own = find(family, natural, terms, key, expectation, where, *rest)
        kinds = {"r": ("exact", 0, 1), "w": ("absent", 0, 0), "s": ("exact", 1, 1)}
        roles = tuple(
            dataclasses.replace(role, kind=kinds[role.name][0], first=kinds[role.name][1], signs=kinds[role.name][2])
            for role in own.roles
        )
        return dataclasses.replace(own, roles=roles, design="all") if where == "groups' likelihood" else own

    monkeypatch.setattr(product_plan, "_exact_prior", exact_of_twin)
    monkeypatch.setattr(product_plan, "find_structure", found)
    data = X, RNG.poisson(7.0, N).astype(float), 0.8 * X + 0.5 * NOISE
    pvi = PVI(Partition(families, "data", LABELS), AutoExponentialFamily(families))
    state = unproved(pvi.init(KEY, *data))
    arguments = rows_of(state.plan, *pvi._arguments(data, {}))
    found = contradictions(pvi, state, *arguments)
    assert {one.claim for one in found} == {"likelihood/r", "likelihood/w", "prior/s"}
    after = pvi._fit.demoted(pvi, state, found, *arguments)
    notes = " ".join(pvi.info(after).notes)
    assert "its likelihood was taken as conjugate in 'r', but differs" in notes
    assert "its likelihood was taken as constant in 'w', but differs" in notes
    assert "the prior of 's' was held exactly, but differs" in notes
    # What holds stays: the likelihood is conjugate in s. And so does q.
    assert "conjugate in s" in pvi.info(after).structure[-1]
    for name, own in pvi.get_params(state).items():
        np.testing.assert_allclose(pvi.get_params(after)[name], own, rtol=1e-8, atol=1e-10)
    result = pvi.run(KEY, 8, *data, init_state=after, progress_bar=False)
    assert result.trace.move.shape == (8, 3)
    assert result.losses[-1] < result.losses[0]
    assert_true_loss(pvi, result, *data, noise=3.0)


def spreads(y, apart=True):
    """Scales of which no entry of a row sees two, or else some do."""
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("pair", 2):
        t = numpyro.sample("t", dist.HalfNormal(1.0))
    with numpyro.plate("data", y.shape[0]):
        scales = jnp.stack([s, t[0], t[1]]) if apart else jnp.stack([s, t[0] * t[1], s * t[1]])
        numpyro.sample("obs", dist.Normal(0.0, scales).to_event(1), obs=y)


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "met"])
def test_that_no_term_sees_two_of_what_is_by_nodes_is_verified(monkeypatch, apart):
    """Of components beside one another, and of one's own members."""
    find = product_plan.find_structure

    def found(*args):
        own = find(*args)
        by_nodes = [dataclasses.replace(role, kind="quadrature", proved=False) for role in own.roles]
        return dataclasses.replace(own, roles=tuple(by_nodes))

    monkeypatch.setattr(product_plan, "find_structure", found)
    model = lambda y: spreads(y, apart)  # noqa: E731
    y = np.stack([0.5 * NOISE, X, NOISE], axis=1)
    # What is claimed falsely starts sites that are too narrow to tell it from rounding in single precision.
    pvi = PVI(Partition(model, "data", LABELS), AutoExponentialFamily(model), init_sites="prior")
    state = unproved(pvi.init(KEY, y))
    assert pvi.info(state).expectation == ("quadrature in s, t",) * 3
    arguments = rows_of(state.plan, *pvi._arguments((y,), {}))
    seen = contradictions(pvi, state, *arguments)
    assert {one.claim for one in seen} == (set() if apart else {"likelihood/s", "likelihood/t"})
    if apart:
        return
    after = pvi._fit.demoted(pvi, state, seen, *arguments)
    notes = " ".join(pvi.info(after).notes)
    assert "its likelihood was taken as a sum of functions of one member each of 's', but differs" in notes
    assert pvi.info(after).expectation[-1] == "draws of s, t"
    result = pvi.run(KEY, 8, y, init_state=after, progress_bar=False)
    assert_true_loss(pvi, result, y, noise=3.0)


def test_what_single_precision_has_to_a_tenth_contradicts_nothing(monkeypatch, x64):
    """Of counts of a hundred thousand, whose terms are what numbers of a million leave; in double precision they are exact."""

    def many(y):
        r = numpyro.sample("r", dist.Gamma(1.0, 1e-5))
        z = numpyro.sample("z", dist.Gamma(1.0, 1.0))
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", dist.Poisson(r + z), obs=y)

    y = jnp.asarray(100_000 + np.array([3, -200, 400, 100, -50, 7]))
    pvi = PVI(Partition(many, "data", 2), AutoExponentialFamily(many))
    state = unproved(pvi.init(KEY, y))
    arguments = rows_of(state.plan, *pvi._arguments((y,), {}))
    assert not contradictions(pvi, state, *arguments)
    if not x64:
        assert set(pvi._engine.claims(state.plan)) >= {"likelihood/r", "likelihood/z"}
        monkeypatch.setattr(verification, "_ROUNDINGS", 0.0)
        assert contradictions(PVI(Partition(many, "data", 2), pvi.guide), state, *arguments)


def test_when_is_a_matter_of_the_number_of_rounds_alone():
    verifier, rounds, done = Verifier(None, [], ()), [], 0
    while done < 300:
        done += min(7, verifier.room(done))
        rounds.append(done)
    assert [n for n in rounds if n & (n - 1) == 0 and n >= 32] == [32, 64, 128, 256]


def table(y, pairs=False, all_meet=False):
    """Loadings of columns, of which a cell sees one column's; or the next one's as well; or a product of seven of all eight."""
    load = numpyro.sample("load", dist.Normal(jnp.zeros((2, 4)), 1.0).to_event(2))
    tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
    mean = load[0] + load[1]
    mean = mean + jnp.roll(load[1], 1) if pairs else mean
    mean = mean + jnp.prod(load[0]) if all_meet else mean
    with numpyro.plate("data", y.shape[0], dim=-2), numpyro.plate("columns", 4, dim=-1):
        numpyro.sample("obs", dist.Normal(mean, 1 / jnp.sqrt(tau)), obs=y)


@pytest.mark.parametrize("kind", ["holds", "pairs", "all_meet"])
def test_that_members_share_signs_and_few_of_them_meet_is_verified(monkeypatch, kind):
    """A false guess of each is planted: signs shared by columns that meet, and an array of strength 3 for products of five."""
    find = product_plan.find_structure

    def found(family, natural, terms, key, expectation, where, *rest):
        own = find(family, natural, terms, key, expectation, where, *rest)
        if where != "groups' likelihood":
            return own
        apart, signs = ((), 8) if kind == "all_meet" else ((1,), 2)
        how = {"load": {"first": 0, "signs": signs, "apart": apart}, "tau": {"first": signs, "signs": 1}}
        roles = [dataclasses.replace(r, kind="exact", single=r.name == "tau", **how[r.name]) for r in own.roles]
        return dataclasses.replace(own, roles=tuple(roles), design="strength 3" if kind == "all_meet" else "all")

    monkeypatch.setattr(product_plan, "find_structure", found)
    model = lambda y: table(y, **{kind: True} if kind != "holds" else {})  # noqa: E731
    y = np.random.default_rng(8).normal(size=(N, 4)) + np.array([0.5, -0.5, 1.0, 0.0])
    pvi = PVI(Partition(model, "data", LABELS), AutoExponentialFamily(model))
    state = unproved(pvi.init(KEY, y))
    claimed = {"holds": "shared signs of load", "pairs": "shared signs of load", "all_meet": "a design of signs"}[kind]
    assert f"likelihood/{claimed}" in pvi._engine.claims(state.plan)
    arguments = rows_of(state.plan, *pvi._arguments((y,), {}))
    seen = contradictions(pvi, state, *arguments)
    assert {one.claim for one in seen} == (set() if kind == "holds" else {f"likelihood/{claimed}"})
    if kind == "holds":
        return
    after = pvi._fit.demoted(pvi, state, seen, *arguments)
    told = {
        "pairs": "one of which no term sees two entries along an axis of 'load', but differs",
        "all_meet": "averaged over signs of which at most 3 meet in a product, but differs",
    }
    assert told[kind] in " ".join(pvi.info(after).notes)
    assert pvi.info(after).expectation[-1] == "closed form"
    result = pvi.run(KEY, 8, y, init_state=after, progress_bar=False)
    assert_true_loss(pvi, result, y)
