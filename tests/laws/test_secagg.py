"""Sums by Flower's SecAgg+: what the server sees holds no single site, and whoever drops out when, no sum is torn."""

import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'numpyro_pvi[flower]'")

from flwr.common.secure_aggregation.secaggplus_constants import Stage
from flwr.server.workflow.secure_aggregation import secaggplus_workflow as workflow

from numpyro_pvi.clients._sums import lattice
from numpyro_pvi.errors import ClientError, PVIError
from numpyro_pvi.flower import SecAggSums, _secure, summed_client_app
from numpyro_pvi.solvers import Conjugate
from tests.secagg_grid import Recorded
from tests.test_rowless import KEY, assert_same, linear
from tests.test_sums import NOISE, SHAPES, clients_of, one_process, server, summed_sites, total

pytestmark = pytest.mark.once
CLIP = SecAggSums.capacity


def app_of(client, least=2):
    """The app of one client, which writes down what it says before the mod masks it."""
    client.said, contribute = [], client.contribute

    def kept(question, capacity):
        client.said.append((contribute(question, capacity), client._open))
        return client.said[-1][0]

    client.contribute = kept
    return summed_client_app(lambda context: client, least=least)


@pytest.fixture(scope="module")
def federation():
    clients = clients_of(linear, Conjugate(), *NOISE)
    grid = Recorded({client.label: app_of(client) for client in clients})
    pvi = server(linear, SecAggSums(grid, threshold=2), Conjugate())
    return pvi, clients, grid, run(pvi, 1)


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


def test_the_servers_view_holds_no_single_site(federation):
    _, clients, grid, _ = federation
    masked = [data for stage, data in grid.seen if stage == Stage.COLLECT_MASKED_VECTORS]
    assert len(masked) >= 3 and all(len(client.said) >= 1 for client in clients)
    assert shown(grid.seen, clients) == set()


def test_a_sum_without_masks_is_seen(federation, monkeypatch):
    """The law has teeth: the same protocol whose masks are zero shows what every client says, and adds up all the same."""
    pvi, clients, grid, state = federation
    begun, sites = len(grid.seen), summed_sites(state)

    def nothing(seed, num_range, shapes):
        return [np.zeros(shape, np.int64) for shape in shapes]

    # The package's attribute of this name is the mod's function.
    mod = sys.modules["flwr.client.mod.secure_aggregation.secaggplus_mod"]
    monkeypatch.setattr(mod, "pseudo_rand_gen", nothing)
    monkeypatch.setattr(workflow, "pseudo_rand_gen", nothing)
    again = run(pvi, 1)
    assert_same(summed_sites(again), sites, 1e-5)
    assert shown(grid.seen[begun:], clients) == {"east", "north", "south"}


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
        _secure._LIVING.clear()
        for client in clients:
            client.restore(blank[client.label])

    def forgetful(app):
        return lambda message, context: (forget(), app(message, context))[1]

    monkeypatch.setattr(grid, "nodes", {i: (n, forgetful(app), c) for i, (n, app, c) in grid.nodes.items()})
    assert_same(summed_sites(run(pvi, 2)), summed_sites(wanted), 0.0)
    state = run(pvi, 2)
    monkeypatch.setattr(_secure._Owner, "keep", lambda *given: None)
    for _, _, context in grid.nodes.values():
        context.state.config_records.pop(_secure.RECORD)
    with pytest.raises(ClientError, match="no sum of the clients came about"):
        run(pvi, 1, state)
    forget()


def test_a_client_takes_part_in_no_sum_of_fewer_than_it_asks_for():
    with pytest.raises(PVIError, match="a sum of one client is what it says"):
        summed_client_app(lambda context: None, least=1)
    owner = _secure._Owner(lambda context: None, 3, "", {})
    constants = {
        "clipping_range": float(CLIP),
        "target_range": 2 * CLIP,
        "mod_range": _secure._MODULUS,
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


def message_of(fields):
    return SimpleNamespace(content=SimpleNamespace(config_records={workflow.RECORD_KEY_CONFIGS: fields}))
