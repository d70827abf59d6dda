"""A client that is made anew for every question, and goes on from what the last one has kept, is one that lives on: to the bit."""

from functools import partial

import jax
import numpy as np
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.optim import Adam

from numpyro_pvi import PVI, wire
from numpyro_pvi.clients import Client, InProcess
from numpyro_pvi.errors import PVIError, WireError
from numpyro_pvi.schedules import Sequential, Synchronous
from numpyro_pvi.solvers import LocalELBO, NaturalGradient
from tests.client_model import logistic
from tests.laws.models import rows

pytestmark = pytest.mark.once

X, _, Y = rows(12)
LABELS = np.array(["east", "north", "south"])[np.arange(12) % 3]
KEY = jax.random.key(0)
ELBO = LocalELBO(Adam(0.01), num_steps=3, optimiser_state="keep")
CELLS = {
    "elbo-sequential": (ELBO, Sequential()),
    "gradient-synchronous": (NaturalGradient(), Synchronous()),
}


def client_of(label, solver):
    mine = label == LABELS
    return Client(logistic, AutoMultivariateNormal(logistic), label, X[mine], Y[mine], solver=solver)


class Mortal:
    """A client that is there for one question, goes on from what the one before has kept, and is gone when it has answered.

    All of them are made beforehand, for one process makes none while it is at a compiled program; they share the programs, which
    processes have from a folder and not from what is kept.

    Args:
        make: makes the client of a label.
        label: the client's.
        keep: what becomes of what is kept.
    """

    def __init__(self, make, label, keep=lambda kept: kept):
        self.label, self.keep, self.kept, self.answers = label, keep, None, []
        self.spares = [make(label) for _ in range(80)]

    def compile_with(self, known):
        for client in self.spares:
            client.compile_with(known)

    def answer(self, data):
        client = self.spares.pop()
        if self.kept is not None:
            client.restore(self.kept)
        found = client.answer(data)
        self.kept = self.keep(client.save())
        self.answers.append((data, found))
        return found


def fit(clients, solver, schedule, rounds=2):
    runtime = InProcess(clients=clients)
    pvi = PVI(logistic, AutoMultivariateNormal(logistic), solver=solver, schedule=schedule, runtime=runtime)
    found = pvi.run(KEY, rounds, progress_bar=False)
    return jax.device_get((found.state.sites, found.losses)), runtime.traffic


def with_a_mortal(solver, **options):
    """Three clients, of which one is made for every question."""
    return [
        client_of("east", solver),
        Mortal(partial(client_of, solver=solver), "north", **options),
        client_of("south", solver),
    ]


def kinds(clients):
    return [wire.kind_of(found) for _, found in clients[1].answers]


@pytest.fixture(scope="module")
def living():
    made = {}

    def of(name):
        if name not in made:
            solver, schedule = CELLS[name]
            made[name] = fit([client_of(x, solver) for x in ("east", "north", "south")], solver, schedule)
        return made[name]

    return of


@pytest.fixture(scope="module")
def restored():
    made = {}

    def of(name):
        if name not in made:
            solver, schedule = CELLS[name]
            clients = with_a_mortal(solver)
            made[name] = clients, *fit(clients, solver, schedule)
        return made[name]

    return of


@pytest.mark.parametrize("name", ["elbo-sequential", pytest.param("gradient-synchronous", marks=pytest.mark.slow)])
def test_a_client_of_every_question_is_one_that_lives_on(name, living, restored):
    (clients, found, traffic), (wanted, before) = restored(name), living(name)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    # Nothing was asked for again, and nothing else was said.
    assert (traffic.trips, traffic.visits, traffic.repeats) == (before.trips, before.visits, 0)
    assert traffic.sent == before.sent and traffic.received == before.received
    assert "gap" not in kinds(clients)


def test_the_same_question_has_the_same_answer_in_another_process(restored):
    """Without its programs: what was said is what is kept."""
    one = restored("elbo-sequential")[0][1]
    question, answer = one.answers[-1]
    fresh = client_of(one.label, ELBO)
    fresh.restore(one.kept)
    assert fresh.answer(question) == answer
    assert fresh._answers is None and fresh._told and fresh.save() == one.kept
    # An older question has none.
    assert fresh.answer(one.answers[0][0]) is None


def forget_memory(kept):
    message = wire.decode(kept)
    fields = message.fields
    return wire.encode(wire.Message("client", fields | {"memory": tuple(np.zeros_like(x) for x in fields["memory"])}))


def test_a_client_that_forgets_its_memory_is_found_out(living):
    """The law has teeth: it is a gap, which the server fills, and more is said than by one that remembers."""
    solver, schedule = CELLS["elbo-sequential"]
    clients = with_a_mortal(solver, keep=forget_memory)
    (found, traffic), (wanted, before) = fit(clients, solver, schedule), living("elbo-sequential")
    assert kinds(clients).count("gap") >= 1 and traffic.trips > before.trips
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_what_belongs_to_another_client_is_not_taken():
    kept = client_of("east", None).save()
    with pytest.raises(PVIError, match="'north' is to be restored from what 'east' has said"):
        client_of("north", None).restore(kept)
    with pytest.raises(WireError):
        client_of("east", None).restore(kept[:-1])
    question = wire.encode(wire.Message("who?", {"run": "r"}))
    answer = wire.decode(client_of("east", None).answer(question))
    assert answer == wire.Message("who", {"run": "r", "label": "east"})
    with pytest.raises(PVIError, match="is to be restored from"):
        client_of("east", None).restore(question)
