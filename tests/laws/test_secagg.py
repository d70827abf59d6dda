"""Sums by Flower's SecAgg+: what the server sees holds no single site, and whoever drops out when, no sum is torn."""

import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'numpyro_pvi[flower]'")

from flwr.common.secure_aggregation.secaggplus_constants import Stage
from flwr.server.workflow.secure_aggregation import secaggplus_workflow as workflow
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_pvi.clients._sums import lattice
from numpyro_pvi.errors import ClientError, PVIError
from numpyro_pvi.flower import PVIStrategy, SecAggSums, _app, _messages, client_app
from numpyro_pvi.schedules import Synchronous
from numpyro_pvi.solvers import Conjugate, DifferentialPrivacy
from tests.secagg_grid import Recorded
from tests.test_rowless import KEY, LABELS, X, Y, assert_same, linear
from tests.test_sums import NOISE, SCHEDULES, SHAPES, clients_of, one_process, summed_sites, total

pytestmark = pytest.mark.once
CLIP = SecAggSums.capacity


def app_of(client, least=2):
    """The app of one client, which writes down what it says before the mod masks it."""
    client.said, contribute = [], client.contribute

    def kept(question, capacity):
        client.said.append((contribute(question, capacity), client._open))
        return client.said[-1][0]

    client.contribute = kept
    return _app.app_of(_app.Owner(lambda label, context, kind: client, _app.label_of, secure=True, least=least))


def strategy(**settings):
    given = {"owners": 3, "patience": 5.0, "secure": True, "threshold": 2, "solver": Conjugate(), **settings}
    return PVIStrategy(linear, AutoMultivariateNormal(linear), **given)


@pytest.fixture(scope="module")
def federation():
    clients = clients_of(linear, Conjugate(), *NOISE)
    grid = Recorded({client.label: app_of(client) for client in clients})
    result = strategy().start(grid, num_rounds=1, key=KEY, args=(*SHAPES, *NOISE))
    return result.pvi, clients, grid, result.fit.state


def run(pvi, rounds, state=None):
    return pvi.run(KEY, rounds, *SHAPES, *NOISE, init_state=state, progress_bar=False).state


def shown(replies, clients):
    """Labels of clients with a number in the server's view: as it is, as the mod takes it, or what it stands for."""
    view, found = b"".join(data for _, data in replies), set()
    for client in clients:
        for numbers, change in client.said:
            whole = numbers[np.abs(numbers) > 1 << 12]
            forms = [whole, whole + CLIP, whole.astype(float), (whole + CLIP).astype(float)]
            forms += [] if change is None else [np.ravel(x)[np.ravel(x) != 0] for x in (*change.change, *client.site)]
            if any(x.tobytes() in view for form in forms for x in form):
                found.add(client.label)
    return found


def test_a_round_is_that_of_one_process_to_the_error_that_is_told(federation):
    pvi, clients, _, state = federation
    _, wanted = one_process(linear, Conjugate(), 1, *NOISE)
    exact = [x.sum(0) for x in jax.tree.leaves(wanted.state.sites.groups)]
    units = lattice(tuple(np.asarray(x) for x in jax.tree.leaves(state.prior)))
    # Half of every change is absorbed.
    for found, sum_, unit in zip(summed_sites(state), exact, units, strict=True):
        assert np.all(np.abs(found - sum_) <= 0.5 * (3 * 0.5 * 2.0**12 / CLIP) * unit + 1e-12)
    assert np.abs(summed_sites(state)[1] - exact[1]).max() > 1e-12


def test_the_limit_is_that_of_one_process_and_the_servers_view_holds_no_single_site(federation):
    _, clients, grid, _ = federation
    begun = len(clients[0].said)
    schedule = Synchronous(damping=0.9)
    found = strategy(schedule=schedule).start(grid, num_rounds=12, key=KEY, args=(*SHAPES, *NOISE))
    _, wanted = one_process(linear, Conjugate(), 12, *NOISE, damping=0.9)
    limit = [x.sum(0) for x in jax.tree.leaves(wanted.state.sites.groups)]
    assert_same(summed_sites(found.fit.state), limit, 1e-9)
    assert set(found.arrays) == set(wanted.params) and found.train_metrics_clientapp == {}
    masked = [data for stage, data in grid.replies if stage == Stage.COLLECT_MASKED_VECTORS]
    assert len(masked) >= 36 and all(len(client.said) >= begun + 12 for client in clients)
    assert shown(grid.replies, clients) == set()


def test_every_message_of_a_sum_is_counted(federation):
    """Of a sum there are four stages, and a number that is masked is eight bytes."""
    pvi, _, grid, _ = federation
    before, begun = pvi.runtime.traffic, len(grid.replies)
    run(pvi, 1)
    more = pvi.runtime.traffic
    stages = [stage for stage, _ in grid.replies[begun:] if stage is not None]
    asked = len(stages) // 3
    in_the_open = more.trips - before.trips - asked
    assert asked == 4 and in_the_open >= 2 and more.visits == before.visits + 1
    sent = sum(len(data) for stage, data in grid.replies[begun:] if stage is not None)
    # Flower's bytes hold names and frames beside what is counted, and our frames are counted in the open.
    assert 0.5 * sent < more.received - before.received < 10 * sent


def test_a_sum_without_masks_is_seen(federation, monkeypatch):
    """The law has teeth: the same protocol whose masks are zero shows what every client says, and adds up all the same."""
    pvi, clients, grid, state = federation
    begun, sites = len(grid.replies), summed_sites(state)

    def nothing(seed, num_range, shapes):
        return [np.zeros(shape, np.int64) for shape in shapes]

    # The package's attribute of this name is the mod's function.
    mod = sys.modules["flwr.client.mod.secure_aggregation.secaggplus_mod"]
    monkeypatch.setattr(mod, "pseudo_rand_gen", nothing)
    monkeypatch.setattr(workflow, "pseudo_rand_gen", nothing)
    again = run(pvi, 1)
    assert_same(summed_sites(again), sites, 1e-5)
    assert shown(grid.replies[begun:], clients) == {"east", "north", "south"}


@pytest.mark.slow
def test_private_owners_go_into_sums():
    """What is masked is noised already, by keys of the owner's own; the server counts what it has asked for."""
    pytest.importorskip("dp_accounting", reason="dp-accounting (the extra `privacy`) is not installed")
    solver, found = DifferentialPrivacy(Conjugate(), 1.0, 1.0), []
    public = np.array([[0.4, -1.0], [1.1, 0.3]]), np.array([0.5, -0.2]), *NOISE

    def load(context):
        mine = context.node_config["label"] == LABELS
        return X[mine], Y[mine], *NOISE

    for secret in (b"one", b"other"):
        how = {"secret": lambda context, word=secret: word * 8, "like": public, "secure": True, "least": 2}
        app = client_app(linear, AutoMultivariateNormal(linear), load, solver=solver, **how)
        grid = Recorded(dict.fromkeys(("east", "north", "south"), app))
        found.append(strategy(solver=solver).start(grid, num_rounds=2, key=KEY, args=(*SHAPES, *NOISE)).fit)
    assert [fit.epsilon for fit in found] == [solver.epsilon(2)] * 2
    one, other = (summed_sites(fit.state)[1] for fit in found)
    assert np.abs(one).max() > 0.1 and np.abs(one - other).min() > 1e-6


STAGES = (Stage.SETUP, Stage.SHARE_KEYS, Stage.COLLECT_MASKED_VECTORS)


@pytest.mark.parametrize("gone", ["north", ("lost", "north")], ids=["unheard", "lost"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_drops_out_at_any_stage_is_left_out_whole(federation, stage, gone):
    pvi, clients, grid, _ = federation
    north = next(client for client in clients if client.label == "north")
    state = run(pvi, 1)
    pvi.runtime.settle(state)
    before, grid.faults = north.site, [{stage: {gone}}]
    state = run(pvi, 1, state)
    assert pvi.runtime.report.absent == ("north",)
    pvi.runtime.settle(state)
    assert_same(north.site, before, 0.0)
    assert_same(total(clients), summed_sites(state), 1e-12)
    state = run(pvi, 1, state)
    assert pvi.runtime.report.absent == ()
    pvi.runtime.settle(state)
    assert_same(total(clients), summed_sites(state), 1e-12)
    assert np.abs(north.site[1] - before[1]).max() > 0.1


def test_a_client_that_is_gone_once_its_numbers_are_there_is_in_the_sum(federation):
    pvi, clients, grid, _ = federation
    grid.faults = [{Stage.UNMASK: {"north"}}]
    state = run(pvi, 1)
    assert pvi.runtime.report.absent == ()
    pvi.runtime.settle(state)
    assert_same(total(clients), summed_sites(state), 1e-12)


def test_too_few_clients_show_nothing_and_the_round_is_asked_again(federation):
    pvi, clients, grid, state = federation
    state = run(pvi, 1)
    grid.faults = [{Stage.COLLECT_MASKED_VECTORS: {"north", ("lost", "east")}}]
    state = run(pvi, 1, state)
    assert pvi.runtime.report.absent == ()
    pvi.runtime.settle(state)
    assert_same(total(clients), summed_sites(state), 1e-12)


def test_a_sum_with_a_mask_left_in_it_is_refused(federation, monkeypatch):
    """Planted: a server that takes other masks out than were put in."""
    pvi, clients, _, _ = federation
    state = run(pvi, 1)
    pvi.runtime.settle(state)
    before = [client.site for client in clients]
    real = workflow.pseudo_rand_gen
    monkeypatch.setattr(workflow, "pseudo_rand_gen", lambda seed, *rest: real(seed[::-1][1:] + b"\x01", *rest))
    with pytest.raises(ClientError, match="masks did not go out of the sum"):
        run(pvi, 1, state)
    assert_same([client.site for client in clients], before, 0.0)


def test_processes_that_end_after_every_message_fit_the_same(federation, monkeypatch):
    """Each message finds a client that remembers nothing, and what its node has kept; planted: a node that keeps nothing."""
    pvi, clients, grid, _ = federation
    wanted = run(pvi, 2)
    blank = {
        client.label: new.save() for client, new in zip(clients, clients_of(linear, Conjugate(), *NOISE), strict=True)
    }

    def forget():
        _app._LIVING.clear()
        for client in clients:
            client.restore(blank[client.label])

    def forgetful(app):
        return lambda message, context: (forget(), app(message, context))[1]

    for node in grid.nodes.values():
        monkeypatch.setattr(node, "app", forgetful(node.app))
    assert_same(summed_sites(run(pvi, 2)), summed_sites(wanted), 0.0)
    state = run(pvi, 2)
    monkeypatch.setattr(_app.Owner, "_keep", lambda *given: None)
    for node in grid.nodes.values():
        node.state.pop(_messages.RECORD)
    with pytest.raises(ClientError, match="no sum of the clients came about"):
        run(pvi, 1, state)
    forget()


def test_nodes_that_have_lost_their_state_go_on_from_the_owners_own_file(federation, monkeypatch, tmp_path):
    pvi, clients, grid, _ = federation
    wanted = run(pvi, 3)
    kept = {
        client.label: _app.app_of(
            _app.Owner(lambda label, context, kind, c=client: c, _app.label_of, keep=tmp_path, secure=True, least=2)
        )
        for client in clients
    }
    for node in grid.nodes.values():
        monkeypatch.setattr(node, "app", kept[node.config["label"]])
    state = run(pvi, 1)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3 and all(file.stat().st_mode & 0o077 == 0 for file in files)
    new = {client.label: client for client in clients_of(linear, Conjugate(), *NOISE)}
    for client in clients:
        client.restore(new[client.label].save())
    _app._LIVING.clear()
    for node in grid.nodes.values():
        node.state.clear()
    assert_same(summed_sites(run(pvi, 2, state)), summed_sites(wanted), 0.0)


def test_what_earlier_runs_have_released_is_taken_over_from_the_owners_folder(tmp_path):
    """Where every run has clients of its own: of the same label alone, of none without a folder, and of no more than is there."""
    private = DifferentialPrivacy(Conjugate(), 1.0, 1.0)

    def client(run, label, keep=tmp_path, solver=private):
        def make(label, context, kind):
            mine, like = label == LABELS, (np.zeros_like(X[:3]), np.zeros_like(Y[:3]), *NOISE)
            known = {"secret": b"a secret of 32 bytes, or of more", "like": like} if solver is private else {}
            return kind(linear, AutoMultivariateNormal(linear), label, X[mine], Y[mine], *NOISE, solver=solver, **known)

        context = SimpleNamespace(run_id=run, node_id=7, node_config={"label": label}, state={})
        owner = _app.Owner(make, _app.label_of, keep=keep, secure=True)
        return owner, context, owner._client(context)

    owner, context, first = client(1, "north")
    first._released[5] = 3
    owner._keep(first, context)
    assert client(2, "north")[2]._released == {5: 3}
    assert client(2, "south")[2]._released == client(2, "north", None)[2]._released == {}
    assert client(2, "north", solver=Conjugate())[2]._released == {}
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        PVIError, match=rf"{file.name}, in the folder .* holds counts of what was released .* cannot be read"
    ):
        client(2, "north")[2].contribute(b"", 1)


def test_a_client_that_comes_back_at_another_node_goes_on(federation):
    pvi, clients, grid, _ = federation
    state = run(pvi, 1)
    grid.come_back("north", keeps_state=True)
    state = run(pvi, 2, state)
    pvi.runtime.settle(state)
    assert pvi.runtime.report.absent == ()
    assert_same(total(clients), summed_sites(state), 1e-12)
    _, wanted = one_process(linear, Conjugate(), 3, *NOISE)
    assert_same(summed_sites(state), [x.sum(0) for x in jax.tree.leaves(wanted.state.sites.groups)], 1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_a_strategy_of_sums_refuses_what_needs_single_sites(schedule):
    with pytest.raises(PVIError, match=rf"do not go with {type(schedule).__name__}\(.*or secure=False, whose clients"):
        strategy(schedule=schedule)


def test_a_client_takes_part_in_no_sum_of_fewer_than_it_asks_for():
    with pytest.raises(PVIError, match="a sum of one client is what it says"):
        client_app(linear, None, lambda context: None, secure=True, least=1)
    with pytest.raises(PVIError, match=r"SecAggSums\(threshold=1\): expected an int of 2 or more, or a share"):
        SecAggSums(None, threshold=1)
    assert [SecAggSums(Recorded(dict.fromkeys(range(n))))._least_of(n) for n in (2, 3, 5, 10)] == [2, 3, 4, 8]
    owner = _app.Owner(lambda *given: None, _app.label_of, secure=True)
    constants = {
        "clipping_range": float(CLIP),
        "target_range": 2 * CLIP,
        "mod_range": _messages.MODULUS,
        "max_weight": 1.0,
    }
    asked = {"stage": Stage.SETUP, "threshold": 2, **constants}
    with pytest.raises(PVIError, match="a sum of 2 clients or more, and this one takes part in sums of 3"):
        owner.guard(message_of(asked), None, None)
    with pytest.raises(PVIError, match="settings that differ: .'clipping_range'."):
        owner.guard(message_of({**asked, "threshold": 3, "clipping_range": 1.0}), None, None)
    with pytest.raises(PVIError, match="both masks"):
        owner.guard(message_of({"stage": Stage.UNMASK, "active_nids": [1, 2], "dead_nids": [2]}), None, None)
    with pytest.raises(PVIError, match="within SecAgg"):
        owner.guard(message_of({}), None, None)
    alone = _app.Owner(lambda *given: None, _app.label_of, secure=lambda context: False)
    with pytest.raises(PVIError, match="answers one by one, and adds to no sum"):
        alone.guard(message_of(asked), None, None)


def message_of(fields):
    return SimpleNamespace(content=SimpleNamespace(config_records={workflow.RECORD_KEY_CONFIGS: fields}))
