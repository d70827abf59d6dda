"""Owners at Flower's nodes: the fit is that of one process, whoever forgets, leaves, comes back or is not heard."""

import jax
import numpy as np
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'numpyro_pvi[flower]'")

from flwr.app import Context, Error, Message, RecordDict
from numpyro.optim import Adam

from numpyro_pvi import PVI, AutoExponentialFamily, Partition, wire
from numpyro_pvi.clients import Client
from numpyro_pvi.errors import ClientError, PVIError
from numpyro_pvi.flower import Flower, PVIStrategy, _app, _messages, client_app
from numpyro_pvi.schedules import Sequential, Synchronous
from numpyro_pvi.solvers import Conjugate, DifferentialPrivacy, LocalELBO, NaturalGradient, PowerEP
from tests.client_model import line, logistic
from tests.flower_grid import CRASHED, Fake
from tests.laws.models import rows
from tests.test_rowless import linear

pytestmark = pytest.mark.once

X, _, Y = rows(12)
NAMES = "east", "north", "south"
LABELS = np.array(NAMES)[np.arange(12) % 3]
KEY = jax.random.key(0)
ELBO = LocalELBO(Adam(0.01), num_steps=3, optimiser_state="keep")
QUICK = {"patience": 5.0, "wait": 0.2, "tries": 30}


def load(context):
    mine = context.node_config["label"] == LABELS
    return X[mine], Y[mine]


def load_noisy(context):
    return (*load(context), 0.5)


def federation(model=logistic, solver=None, **options):
    app = client_app(model, AutoMultivariateNormal(model), load_noisy if model is linear else load, solver=solver)
    return Fake(dict.fromkeys(("south", "east", "north"), app), **options)


def strategy(model=logistic, solver=None, schedule=None, owners=3):
    return PVIStrategy(model, AutoMultivariateNormal(model), solver=solver, schedule=schedule, owners=owners, **QUICK)


CELLS = {
    "gradient-synchronous": (logistic, NaturalGradient(), Synchronous()),
    "elbo-sequential": (logistic, ELBO, Sequential()),
    "conjugate-synchronous": (linear, Conjugate(), Synchronous()),
    "gradient-sequential": (logistic, NaturalGradient(), Sequential()),
    "elbo-synchronous": (logistic, ELBO, Synchronous()),
    "conjugate-sequential": (linear, Conjugate(), Sequential()),
}
LONG = list(CELLS)[3:]


@pytest.fixture(scope="module")
def here():
    """The same fits in one process, each made once."""
    made = {}

    def of(name):
        if name not in made:
            model, solver, schedule = CELLS[name]
            pvi = PVI(Partition(model, "data", LABELS), AutoMultivariateNormal(model), solver=solver, schedule=schedule)
            others = (0.5,) if model is linear else ()
            made[name] = pvi.run(KEY, 3, X, Y, *others, progress_bar=False)
        return made[name]

    return of


def start(grid, name="gradient-synchronous", rounds=3, **options):
    model, solver, schedule = CELLS[name]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (X, Y)]
    args = (*shapes, 0.5) if model is linear else ()
    return strategy(model, solver, schedule, **options).start(grid, num_rounds=rounds, key=KEY, args=args)


def assert_same(found, wanted, tolerance):
    found, wanted = ((x.state.sites, x.losses) for x in (found, wanted))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, float(np.abs(b).max())))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in CELLS])
def test_owners_fit_what_one_process_fits(name, here, tolerance):
    model, solver, _ = CELLS[name]
    grid = federation(model, solver)
    # A process that crashes is asked again.
    crash = lambda grid, message: Message(Error(CRASHED, "killed"), reply_to=message)  # noqa: E731
    grid.events["east", "look?", 3] = crash
    found, wanted = start(grid, name), here(name)
    assert not grid.events and found.fit.info.traffic.repeats == 0
    assert found.fit.state.groups == NAMES
    assert_same(found.fit, wanted, tolerance)
    assert set(found.arrays) == set(wanted.params)
    np.testing.assert_allclose(found.arrays["auto_loc"].numpy(), wanted.params["auto_loc"], rtol=1e-8)
    elbos = [found.train_metrics_clientapp[i]["elbo"] for i in (1, 2, 3)]
    np.testing.assert_allclose(elbos, -np.asarray(wanted.losses), rtol=1e-8)
    assert_no_row_travels(grid)


def load_line(context):
    X, Y = load(context)
    return X[:, 0], Y


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "schedule", "kind"),
    [(NaturalGradient(), Sequential(), "look?"), (PowerEP(), Synchronous(), "visit?")],
    ids=["gradient", "ep"],
)
def test_owners_fit_what_one_process_fits_under_families(solver, schedule, kind):
    """A question in every turn over components, one of which crashes, and a node that comes back without its state."""
    how, guide = {"solver": solver, "schedule": schedule}, AutoExponentialFamily
    wanted = PVI(Partition(line, "data", LABELS), guide(line), **how).run(KEY, 3, X[:, 0], Y, progress_bar=False)
    grid = Fake(dict.fromkeys(NAMES, client_app(line, guide(line), load_line, solver=solver)))
    crash = lambda grid, message: Message(Error(CRASHED, "killed"), reply_to=message)  # noqa: E731

    def leave(grid, message):
        grid.come_back("north")
        return grid.answer(message)

    grid.prepare("north")
    grid.events["east", kind, 1], grid.events["north", kind, 2] = crash, leave
    found = PVIStrategy(line, guide(line), owners=3, **how, **QUICK).start(grid, num_rounds=3, key=KEY)
    assert not grid.events and found.pvi.runtime.moves == {"north": 1}
    assert_same(found.fit, wanted, 1e-8)
    assert set(found.arrays) == set(wanted.params)
    assert_no_row_travels(grid)


def frames(grid):
    """The bytes of every message of ours, and all that Flower's hold."""
    found = []
    for message in grid.seen:
        if message.has_content():
            for record in message.content.values():
                found += [value for value in record.values() if type(value) is bytes]
    return found


def holds_row(data, numbers):
    return any(np.asarray(x).tobytes() in data for x in numbers)


def assert_no_row_travels(grid):
    """No number of any row is in any message, in neither precision."""
    numbers = [x for x in X.ravel() if x not in (0.0, 1.0)]
    numbers += [np.float32(x) for x in numbers]
    sent = frames(grid)
    assert len(sent) > 20
    assert not any(holds_row(data, numbers) for data in sent)


def test_a_row_in_a_message_is_seen():
    facts = {"run": "", "sequence": 1, "label": "east", "facts": {"rows": X[:2]}}
    grid = federation()
    grid.seen.append(Message(_messages.pack(wire.encode(wire.Message("hello", facts))), 1, "query.pvi"))
    assert any(holds_row(data, [X[1, 0]]) for data in frames(grid))


@pytest.mark.slow
def test_a_process_of_every_message_is_one_that_lives_on(here, tolerance):
    """Flower's processes end after every message; with solver memory, and losing every third answer on the way."""
    known = {}

    def spare(label):
        mine = label == LABELS
        client = Client(logistic, AutoMultivariateNormal(logistic), label, X[mine], Y[mine], solver=ELBO)
        client._known = known
        return client

    grid = federation(solver=ELBO, spares=spare, loses=0.3)
    found = start(grid, "elbo-sequential")
    assert_same(found.fit, here("elbo-sequential"), tolerance)
    assert found.fit.info.traffic.repeats > 0
    kinds = [wire.kind_of(data) for data in frames(grid)]
    assert "gap" not in kinds


@pytest.mark.parametrize("keeps_state", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_node_that_comes_back_under_another_id_is_found_again(keeps_state, here, tolerance):
    grid = federation(solver=ELBO)
    grid.prepare("north")

    def leave(grid, message):
        grid.come_back("north", keeps_state)
        return grid.answer(message)

    # In the middle of the second round; a client that has forgotten what it was told is told again.
    grid.events["north", "visit?", 1] = leave
    pvi = PVI(
        logistic,
        AutoMultivariateNormal(logistic),
        solver=ELBO,
        schedule=Sequential(),
        runtime=Flower(grid=grid, owners=NAMES, **QUICK),
    )
    found = pvi.run(KEY, 3, progress_bar=False)
    assert pvi.runtime.moves == {"north": 1} and found.info.traffic.restarts == 1
    assert_same(found, here("elbo-sequential"), tolerance)
    kinds = [wire.kind_of(data) for data in frames(grid)]
    assert ("gap" in kinds) is not keeps_state


def test_what_fails_is_named():
    def broken(context):
        raise OSError("row 3 is 0.25")

    app = client_app(logistic, AutoMultivariateNormal(logistic), broken)
    sound = client_app(logistic, AutoMultivariateNormal(logistic), load)
    grid = Fake({"east": sound, "north": app, "south": sound})
    with pytest.raises(ClientError, match=r"could not be loaded \(OSError\)") as caught:
        start(grid)
    assert caught.value.label == "north" and "0.25" not in str(caught.value)
    # What it may have remembered would not have been written over.
    assert grid.nodes[grid.node_of("north")].state == {}
    grid = federation()
    grid.events["south", "describe?", 1] = lambda grid, message: Message(Error(2, "it raised"), reply_to=message)
    with pytest.raises(ClientError, match="failed at its node .Flower's error 2.: it raised"):
        start(grid)


def test_who_is_waited_for():
    grid = federation()
    with pytest.raises(PVIError, match="4 owners were waited for, and after 0 s there are"):
        assert Flower(grid=grid, owners=4, patience=0.0).labels
    assert Flower(grid=grid, owners=("south", "east")).labels == ("east", "south")
    assert Flower(grid=grid, owners=1).labels == NAMES
    grid.nodes[77] = grid.nodes[grid.node_of("east")]
    with pytest.raises(PVIError, match="have the label 'east'"):
        assert Flower(grid=grid, owners=3).labels
    with pytest.raises(PVIError, match="expected the Grid"):
        Flower()
    with pytest.raises(PVIError, match="expected a positive int, or labels"):
        Flower(grid=grid, owners=0)
    with pytest.raises(PVIError, match="each once"):
        Flower(grid=grid, owners=("east", "east"))
    with pytest.raises(PVIError, match="expected a function of Flower's context"):
        client_app(logistic, AutoMultivariateNormal(logistic), (X, Y))
    with pytest.raises(PVIError, match="the node has no label"):
        _app.label_of(Context(1, 1, {"data": "rows.csv"}, RecordDict(), {}))
    assert _app.label_of(Context(1, 1, {"partition-id": 3}, RecordDict(), {})) == 3
    with pytest.raises(PVIError, match="Call start"):
        strategy().configure_train(1, None, None, grid)


def test_without_flower_the_line_to_install_is_named(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(_messages.importlib, "import_module", missing)
    for make in (lambda: strategy(), lambda: Flower(grid=object()), lambda: client_app(logistic, None, load)):
        with pytest.raises(PVIError, match=r"pip install 'numpyro_pvi\[flower\]'"):
            make()


def test_a_private_fit_begins_with_a_key_of_its_own():
    """The noise of a key that everybody knows is none; planted: a solver that is not private, whose grid is asked."""
    solver = DifferentialPrivacy(NaturalGradient(), 1.0, 1.0)
    with pytest.raises(PVIError, match="without a key, under DifferentialPrivacy.*Pass key="):
        strategy(logistic, solver, Synchronous()).start(None)
    with pytest.raises(PVIError, match="expected the Grid"):
        strategy(logistic, NaturalGradient(), Synchronous()).start(None)
