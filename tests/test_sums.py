"""Clients that are heard in sums only: the fit is that of one process, and the server sees no single site."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from numpyro_pvi import PVI, Partition
from numpyro_pvi.clients import Exchange, InMemorySums, Summand, Summed, SummedClients, _sums
from numpyro_pvi.clients._sums import EVERYONE
from numpyro_pvi.errors import ClientError, PVIError
from numpyro_pvi.schedules import Asynchronous, Sequential, StochasticSubset, Synchronous
from numpyro_pvi.solvers import SNEP, AlphaDivergence, Conjugate, NaturalGradient, PowerEP
from numpyro_pvi.wire import Message, decode, encode
from tests.test_rowless import KEY, LABELS, Unread, X, Y, assert_same, linear, logistic

NAMES = ("east", "north", "south")
SHAPES = Unread(X), Unread(Y)
NOISE = (0.5,)


class Sums(InMemorySums):
    """Sums that some clients drop out of: by number of the visit, those who do not hear it, and whose answer is lost."""

    def __init__(self, clients, deaf=(), lost=(), **settings):
        super().__init__(clients, **settings)
        self.deaf, self.lost, self.asked, self.seen = dict(deaf), dict(lost), 0, []

    def sum(self, question):
        self.asked += decode(question).fields["how"]["ask"] == "visit"
        hear = [c for c in self.clients if c.label not in self.deaf.get(self.asked, ())]
        said = {c.label: c.contribute(question, self.capacity) for c in hear}
        there = [n for n in said if n not in self.lost.get(self.asked, ())]
        found = Summed(sum(said[n] for n in there), tuple(map(self.labels.index, there))) if there else None
        self.seen.append((decode(question).fields, found, said))
        return found


def clients_of(model, solver, *others, guide=AutoMultivariateNormal):
    order = ("south", "east", "north")
    return [Summand(model, guide(model), x, X[x == LABELS], Y[x == LABELS], *others, solver=solver) for x in order]


def server(model, sums, solver, guide=AutoMultivariateNormal, damping=0.5, **settings):
    runtime = SummedClients(sums=sums, **settings)
    return PVI(model, guide(model), solver=solver, schedule=Synchronous(damping=damping), runtime=runtime)


def summed_sites(state):
    return tuple(np.asarray(x, np.float64)[0] for x in jax.tree.leaves(state.sites.groups))


def total(clients):
    return tuple(np.sum([c.site[i] for c in clients], axis=0) for i in range(2))


def one_process(model, solver, rounds, *others, guide=AutoMultivariateNormal, damping=0.5):
    split = Partition(model, "data", LABELS)
    pvi = PVI(split, guide(model), solver=solver, schedule=Synchronous(damping=damping), init_sites="prior")
    return pvi, pvi.run(KEY, rounds, X, Y, *others, progress_bar=False)


@pytest.fixture(scope="module")
def fit():
    sums = Sums(clients_of(linear, Conjugate(), *NOISE))
    pvi = server(linear, sums, Conjugate())
    result = pvi.run(KEY, 3, *SHAPES, *NOISE, progress_bar=False)
    return pvi, result, sums


def test_rounds_that_only_add_are_those_of_one_process(fit, tolerance):
    pvi, result, _ = fit
    own, wanted = one_process(linear, Conjugate(), 3, *NOISE)
    assert result.state.groups == (EVERYONE,)
    assert_same(summed_sites(result.state), [x.sum(0) for x in jax.tree.leaves(wanted.state.sites.groups)], tolerance)
    assert_same(pvi.evaluate(result.state, *SHAPES, *NOISE), own.evaluate(wanted.state, X, Y, *NOISE), tolerance)
    assert np.isnan(result.losses).all() and pvi.runtime.report.rounds == 3 and pvi.runtime.report.unfit == 0


@pytest.mark.slow
@pytest.mark.parametrize("solver", [PowerEP(), SNEP(), AlphaDivergence(0.5)], ids=["ep", "snep", "alpha"])
def test_moments_are_matched_as_in_one_process(solver, tolerance):
    pvi = server(logistic, Sums(clients_of(logistic, solver)), solver)
    found = pvi.run(KEY, 3, progress_bar=False)
    _, wanted = one_process(logistic, solver, 3)
    assert_same(summed_sites(found.state), [x.sum(0) for x in jax.tree.leaves(wanted.state.sites.groups)], tolerance)


def test_prior_and_the_clients_own_sites_are_q(fit, tolerance):
    """Each client knows its site to the last bit of what was absorbed of it, and nobody else does."""
    pvi, result, sums = fit
    pvi.evaluate(result.state, *SHAPES, *NOISE)
    pvi.runtime.settle(result.state)
    assert_same(total(sums.clients), summed_sites(result.state), tolerance)
    assert all(np.abs(c.site[1]).max() > 1.0 for c in sums.clients)
    again = pvi.run(KEY, 1, *SHAPES, *NOISE, init_state=result.state, progress_bar=False)
    pvi.runtime.settle(again.state)
    assert_same(total(sums.clients), summed_sites(again.state), tolerance)


def test_a_client_that_sums_are_made_of_answers_nothing_alone(fit):
    _, _, sums = fit
    exchange = Exchange(sums.labels, sums.open(), 1.0, 1)
    number = jax.ShapeDtypeStruct((), np.float64)
    exchange.look({"ask": "values", "rules": 1, "clip": False}, (np.zeros((1, 2)),), (number,))
    assert isinstance(exchange.error, ClientError) and "heard in sums only" in str(exchange.error)
    facts = Exchange(sums.labels, sums.open(), 1.0, 1).describe(decode(question_of(sums)).fields["rest"][0])
    assert [float(np.abs(said["nearby"]).max()) for said in facts] == [0.0] * 3


def question_of(sums):
    """Of the first visit."""
    visit = next(fields for fields, _, _ in sums.seen if fields["how"]["ask"] == "visit")
    return encode(Message("sum?", visit))


DROPS = {
    "deaf": ({2: {"north"}}, {}, 2),
    "lost": ({}, {2: {"north"}}, 2),
    "deaf twice, lost once": ({2: {"north"}, 3: {"north"}}, {4: {"east"}}, 4),
}


@pytest.mark.parametrize("name", DROPS)
def test_a_client_that_drops_out_keeps_its_site_and_joins_in_the_next_round(fit, name, tolerance):
    pvi, _, sums = fit
    north = next(c for c in sums.clients if c.label == "north")
    sums.deaf, sums.lost, rounds = DROPS[name]
    sums.asked = 0
    state = pvi.run(KEY, 1, *SHAPES, *NOISE, progress_bar=False).state
    pvi.runtime.settle(state)
    before = north.site
    state = pvi.run(KEY, 1, *SHAPES, *NOISE, init_state=state, progress_bar=False).state
    assert pvi.runtime.report.absent == ("north",)
    pvi.runtime.settle(state)
    assert_same(north.site, before, 0.0)
    assert_same(total(sums.clients), summed_sites(state), tolerance)
    state = pvi.run(KEY, rounds + 30, *SHAPES, *NOISE, init_state=state, progress_bar=False).state
    pvi.runtime.settle(state)
    assert_same(total(sums.clients), summed_sites(state), tolerance)
    assert np.abs(north.site[1] - before[1]).max() > 1e-3
    _, wanted = one_process(linear, Conjugate(), 40, *NOISE)
    limit = [x.sum(0) for x in jax.tree.leaves(wanted.state.sites.groups)]
    assert_same(summed_sites(state), limit, max(tolerance, 1e-8))


class Torn(Sums):
    """Planted: says that a client was heard whose numbers are not in the sum."""

    def sum(self, question):
        found = super().sum(question)
        return found if found is None else found._replace(who=tuple(range(len(self.labels))))


def test_a_torn_sum_is_seen(fit):
    """The law has teeth: where who took part is told wrongly, prior and the clients' sites are q no more."""
    _, _, sums = fit
    pvi = server(linear, Torn(sums.clients, lost={1: {"north"}}), Conjugate())
    state = pvi.run(KEY, 1, *SHAPES, *NOISE, progress_bar=False).state
    pvi.runtime.settle(state)
    gap = [np.abs(a - b).max() for a, b in zip(total(sums.clients), summed_sites(state), strict=True)]
    assert max(gap) > 1.0


def test_a_change_that_does_not_fit_stays_out_and_is_named_at_its_client(fit, tolerance):
    _, _, sums = fit
    quiet = Sums(sums.clients)
    pvi = server(linear, quiet, Conjugate(), reach=2.0**-3)
    for client in sums.clients:
        client.notes.clear()
    state = pvi.run(KEY, 1, *SHAPES, *NOISE, progress_bar=False).state
    report = pvi.runtime.report
    assert report.unfit == 3 and report.reach == 2.0**5 and not np.any(summed_sites(state)[1])
    assert all("the change of its site at w is" in client.notes[0] for client in sums.clients)
    state = pvi.run(KEY, 2, *SHAPES, *NOISE, init_state=state, progress_bar=False).state
    pvi.runtime.settle(state)
    assert pvi.runtime.report.unfit == 0
    assert_same(total(sums.clients), summed_sites(state), tolerance)


def test_a_client_of_sums_has_draws_for_its_owner(fit):
    """At the q of the last look, which was one of all; nobody else hears them."""
    pytest.importorskip("arviz")
    pvi, _, sums = fit
    sums.deaf, sums.lost, sums.asked = {}, {}, 0
    state = pvi.run(KEY, 1, *SHAPES, *NOISE, progress_bar=False).state
    pvi.evaluate(state, *SHAPES, *NOISE)
    draws = np.asarray(sums.clients[0].to_arviz(KEY, num_samples=500)["posterior"]["w"])[0]
    q = pvi.posterior(state)["w"]
    assert np.max(np.abs(draws.mean(0) - q.mean) / np.sqrt(np.asarray(q.variance) / 500)) < 5


def test_a_look_without_a_client_is_no_loss(fit):
    pvi, _, sums = fit
    sums.deaf, sums.lost, sums.asked = {}, {}, 0
    state = pvi.run(KEY, 1, *SHAPES, *NOISE, progress_bar=False).state
    assert np.isfinite(pvi.evaluate(state, *SHAPES, *NOISE))
    sums.deaf = {1: {"east"}}
    assert np.isnan(pvi.evaluate(state, *SHAPES, *NOISE))
    sums.deaf = {}


def test_clients_go_on_from_the_last_state_only_and_say_so_when_they_have_forgotten(fit):
    pvi, _, sums = fit
    sums.deaf, sums.lost, sums.asked = {}, {}, 0
    first = pvi.run(KEY, 1, *SHAPES, *NOISE, progress_bar=False).state
    last = pvi.run(KEY, 2, *SHAPES, *NOISE, init_state=first, progress_bar=False).state
    with pytest.raises(ClientError, match="not the one that the clients were left at"):
        pvi.runtime.settle(first)
    pvi.runtime.settle(last)
    north = next(client for client in sums.clients if client.label == "north")
    before, north._run = north._run, ""
    with pytest.raises(PVIError, match="client 'north' knows what was absorbed .* nobody else knows its site"):
        pvi.run(KEY, 1, *SHAPES, *NOISE, init_state=last, progress_bar=False)
    north._run = before


def test_a_client_goes_on_from_what_it_has_saved(fit):
    """In another process: the same site, and the same answer to a question that is heard again."""
    pvi, _, sums = fit
    sums.deaf, sums.lost, sums.asked = {}, {}, 0
    pvi.run(KEY, 2, *SHAPES, *NOISE, progress_bar=False)
    old = sums.clients[1]
    new = next(c for c in clients_of(linear, Conjugate(), *NOISE) if c.label == old.label)
    new.restore(old.save())
    assert new.save() == old.save() and np.abs(new.site[1]).max() > 1.0
    question = encode(Message("sum?", sums.seen[-1][0]))
    np.testing.assert_array_equal(new.contribute(question, sums.capacity), sums.seen[-1][2][old.label])
    new._said = (0, new._said[1])
    new._open = None
    np.testing.assert_array_equal(new.contribute(question, sums.capacity), sums.seen[-1][2][old.label])
    with pytest.raises(PVIError, match="client 'east' is to be restored from what 'north' has saved"):
        sums.clients[0].restore(old.save())
    fields = sums.seen[-1][0]
    other = encode(
        Message("sum?", fields | {"how": fields["how"] | {"ask": "slope"}, "sequence": fields["sequence"] + 1})
    )
    before = new.save()
    with pytest.raises(PVIError, match="is asked for 'slope', which is no sum that it adds to"):
        new.contribute(other, sums.capacity)
    assert new.save() == before


SCHEDULES = [Synchronous(), Sequential(), StochasticSubset(2), Asynchronous()]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_what_needs_more_than_sums_is_refused(fit, schedule):
    _, _, sums = fit
    runtime = SummedClients(sums=sums)
    with pytest.raises(
        PVIError, match=r"heard in sums only do not go with .*Write schedule=Synchronous\(damping=0.5\)"
    ):
        PVI(linear, AutoMultivariateNormal(linear), schedule=schedule, runtime=runtime)


def test_what_is_made_of_single_sites_is_refused(fit):
    pvi, result, sums = fit
    with pytest.raises(PVIError, match="pass sums="):
        SummedClients()
    with pytest.raises(PVIError, match="expected a positive number, of units of q"):
        SummedClients(sums=sums, reach=0.0)
    with pytest.raises(PVIError, match="log_evidence needs every client's own site"):
        pvi._engine.evidence(result.state, (), {}, False)
    with pytest.raises(PVIError):
        pvi.khat(result.state, *SHAPES, *NOISE, rng_key=KEY)
    with pytest.raises(PVIError, match=r"khat\(by_group=True\) needs what single clients say"):
        pvi.khat(result.state, *SHAPES, *NOISE, rng_key=KEY, by_group=True)
    with pytest.raises(PVIError, match="add_group needs what single clients say"):
        pvi.add_group(result.state, "west", *SHAPES, *NOISE)
    with pytest.raises(PVIError):
        pvi.site(result.state, "north")
    curved = SummedClients(sums=sums)
    starts = PVI(
        linear,
        AutoMultivariateNormal(linear),
        solver=Conjugate(),
        schedule=Synchronous(damping=0.5),
        runtime=curved,
        init_sites="curvature",
    )
    with pytest.raises(PVIError, match="clients that are heard in sums tell no such thing"):
        starts.init(KEY, *SHAPES, *NOISE)


@pytest.mark.slow
@pytest.mark.parametrize("guide", [AutoMultivariateNormal, AutoNormal], ids=["full", "mean-field"])
def test_the_limit_is_that_of_one_process(guide, tolerance):
    """Not conjugate: clients refine their quadrature on their own, and rounds say less and less."""
    solver = NaturalGradient()
    sums = Sums(clients_of(logistic, solver, guide=guide), deaf={3: {"south"}})
    pvi = server(logistic, sums, solver, guide=guide)
    state = pvi.run(KEY, 45, *SHAPES, progress_bar=False).state
    own, wanted = one_process(logistic, solver, 45, guide=guide)
    limit = [x.sum(0) for x in jax.tree.leaves(wanted.state.sites.groups)]
    assert_same(summed_sites(state), limit, max(tolerance, 1e-8))
    assert_same(pvi.evaluate(state, *SHAPES), own.evaluate(wanted.state, X, Y), tolerance)
    pvi.runtime.settle(state)
    assert_same(total(sums.clients), summed_sites(state), tolerance)


def settled_gap(pvi, clients, state):
    """Relative distance of the clients' own sites from the state's, once they have been told."""
    pvi.runtime.settle(state)
    own, wanted = total(clients)[1], summed_sites(state)[1]
    return np.abs(own - wanted).max() / np.abs(wanted).max()


def test_a_value_that_is_asked_for_first_takes_no_site_away(fit, tolerance):
    """In a new conversation, and of a state that a fit began with, between two of its rounds."""
    pvi, _, sums = fit
    sums.deaf, sums.lost, sums.asked = {}, {}, 0
    how = {"progress_bar": False}
    first = pvi.init(KEY, *SHAPES, *NOISE)
    state = pvi.run(KEY, 2, *SHAPES, *NOISE, init_state=first, **how).state
    pvi.runtime.close()
    wanted = pvi.evaluate(state, *SHAPES, *NOISE)
    state = pvi.run(KEY, 1, *SHAPES, *NOISE, init_state=state, **how).state
    assert settled_gap(pvi, sums.clients, state) < tolerance
    before = [c.site for c in sums.clients]
    assert float(pvi.evaluate(first, *SHAPES, *NOISE)) > float(wanted)
    assert all(np.array_equal(a[1], c.site[1]) for a, c in zip(before, sums.clients, strict=True))
    state = pvi.run(KEY, 1, *SHAPES, *NOISE, init_state=state, **how).state
    assert settled_gap(pvi, sums.clients, state) < tolerance


def test_a_state_before_the_last_is_refused_whether_or_not_clients_were_told(fit, tolerance):
    pvi, _, sums = fit
    sums.deaf, sums.lost, sums.asked = {}, {}, 0
    how = {"progress_bar": False}
    old = pvi.run(KEY, 1, *SHAPES, *NOISE, **how).state
    last = pvi.run(KEY, 1, *SHAPES, *NOISE, init_state=old, **how).state
    pvi.runtime.settle(last)
    with pytest.raises(ClientError, match="not the one that the clients were left at"):
        pvi.run(KEY, 1, *SHAPES, *NOISE, init_state=old, **how)
    # The error ends the conversation; the last one goes on in another.
    last = pvi.run(KEY, 1, *SHAPES, *NOISE, init_state=last, **how).state
    assert settled_gap(pvi, sums.clients, last) < tolerance


def test_a_value_that_is_too_large_for_a_sum_is_asked_for_again(fit, tolerance, monkeypatch, caplog):
    """As visits are, wider; planted: a server that asks once, and has no number."""
    pvi, result, sums = fit
    sums.deaf, sums.lost, sums.asked = {}, {}, 0
    wanted = pvi.evaluate(result.state, *SHAPES, *NOISE)
    monkeypatch.setattr(_sums, "_NATS", 2.0**-10)
    assert_same(pvi.evaluate(result.state, *SHAPES, *NOISE), wanted, tolerance)
    monkeypatch.setattr(_sums, "_WIDER", 0)
    assert np.isnan(pvi.evaluate(result.state, *SHAPES, *NOISE)) and "the loss is NaN" in caplog.text


def unproved(X, y):
    """One predictor a row, of a form that no proof sees through."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    seen = X @ w + 9.0
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=seen**2 / seen - 9.0), obs=y)


@pytest.fixture(scope="module")
def guessed():
    pvi = server(unproved, Sums(clients_of(unproved, NaturalGradient())), NaturalGradient())
    real, asked = Summand._verified, []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Summand, "_verified", lambda self, *of: asked.append(self.label) or real(self, *of))
        state = pvi.run(KEY, 2, progress_bar=False).state
    return pvi, state, asked


def test_structure_that_is_found_and_not_proved_is_verified_in_sums(guessed):
    """Each client looks at its own rows; the next test plants one that finds a difference."""
    _, found, asked = guessed
    assert set(asked) == set(LABELS)
    assert found.plan.partition.likelihood == "affine" and "likelihood" not in found.plan.partition.proved
    assert np.abs(summed_sites(found)[1]).max() > 0.1


@pytest.mark.slow
def test_structure_that_one_client_sees_contradicted_is_given_up_in_sums(guessed, tolerance, monkeypatch):
    pvi, *_ = guessed
    real = Summand._verified

    def contradicted(self, fields, capacity):
        return real(self, fields, capacity) + np.array([0, 1, 1 << 40]) * (self.label == "north")

    monkeypatch.setattr(Summand, "_verified", contradicted)
    state = pvi.run(KEY, 3, progress_bar=False).state
    assert state.plan.partition.likelihood == "draws" and "differs from the model by" in state.plan.partition.remarks[0]
    before = summed_sites(state)
    state = pvi.run(KEY, 1, init_state=state, progress_bar=False).state
    assert settled_gap(pvi, pvi.runtime.sums.clients, state) < tolerance
    assert np.abs(summed_sites(state)[1] - before[1]).max() > 1e-3
