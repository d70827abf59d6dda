"""Every public solver, schedule, runtime and family keeps its room's contract: frozen, hashable, right names."""

import dataclasses
import inspect

import jax
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoNormal

from numpyro_pvi import PVI, PVIError, families, runtime, schedules, solvers
from tests.families.cases import CASES

# What a class cannot do without.
REQUIRED = {
    "AlphaDivergence": {"alpha": 0.5},
    "DifferentialPrivacy": {"solver": solvers.NaturalGradient(), "noise_multiplier": 0.0, "clip": 1.0},
    "Decentralized": {"adjacency": ((0, 1), (1, 2))},
    "StochasticSubset": {"k": 2},
}

ROOMS = {
    "solver": (solvers, solvers.LocalSolver, "solve", {}),
    "schedule": (schedules, schedules.Schedule, "round", {}),
    "runtime": (runtime, runtime.Runtime, "sum_chunks", {}),
    "family": (families, families.Family, "natural_to_mean", {}),
}
# Families have settings without a default: one example of each.
SETTINGS = {
    type(case.family): {
        field.name: getattr(case.family, field.name) for field in dataclasses.fields(case.family) if field.init
    }
    for case in CASES
}


def implementations():
    for room, (module, protocol, method, options) in ROOMS.items():
        for name in module.__all__:
            found = getattr(module, name)
            own = (
                inspect.isclass(found)
                and callable(getattr(found, method, None))
                and not getattr(found, "_is_protocol", False)
            )
            if own:
                settings = SETTINGS.get(found, options) | REQUIRED.get(name, {})
                yield pytest.param(found, protocol, settings, id=f"{room}-{name}")


each_implementation = pytest.mark.parametrize(("cls", "protocol", "options"), list(implementations()))


def contract(protocol):
    """Methods that the Protocol itself, or one that it extends, declares."""
    return {n: f for n, f in inspect.getmembers(protocol, inspect.isfunction) if not n.startswith("_")}


def test_every_room_has_implementations():
    found = [param.id for param in implementations()]
    assert {"solver-Conjugate", "schedule-Sequential", "runtime-LaxMap", "family-NormalFamily"} <= set(found)
    assert all(any(i.startswith(room) for i in found) for room in ROOMS)


@each_implementation
def test_leading_parameters_are_the_protocols(cls, protocol, options):
    for name, function in contract(protocol).items():
        wanted = list(inspect.signature(function).parameters)
        own = inspect.signature(getattr(cls, name)).parameters
        assert list(own)[: len(wanted)] == wanted, f"{cls.__name__}.{name}"
        extra = list(own.values())[len(wanted) :]
        assert all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in extra)


@each_implementation
def test_instances_satisfy_the_protocol(cls, protocol, options):
    assert isinstance(cls(**options), protocol)


@each_implementation
def test_settings_are_frozen_hashable_and_equal_by_value(cls, protocol, options):
    first, second = cls(**options), cls(**options)
    assert first == second and hash(first) == hash(second)
    assert dataclasses.is_dataclass(cls)
    # Settings only: an array in them would be lost from, or would break, the key of a compiled program.
    values = [getattr(first, field.name) for field in dataclasses.fields(first)]
    assert not any(isinstance(value, jax.Array) for value in values)
    name = dataclasses.fields(first)[0].name if dataclasses.fields(first) else "anything"
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(first, name, 1)


@each_implementation
def test_public_things_are_documented(cls, protocol, options):
    assert cls.__doc__ and len(cls.__doc__) > 40
    for name in contract(protocol):
        assert getattr(cls, name).__doc__, f"{cls.__name__}.{name}"


@pytest.mark.parametrize("room", ROOMS)
def test_protocols_say_what_an_implementor_owes(room):
    protocol = ROOMS[room][1]
    assert "owes" in protocol.__doc__
    assert all(function.__doc__ for function in contract(protocol).values())


@dataclasses.dataclass(frozen=True)
class _Underived:
    """A solver that writes its contract down by hand, and forgets most of it."""

    num_draws: int = 1

    def solve(self, factor, cavity, site, state, key, start, guarded):
        del factor, cavity, key, start, guarded
        return site, state


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (_Underived(), "It lacks .*matches_moments.* Derive it from numpyro_pvi.solvers.SolverDefaults"),
        (object(), r"such as NaturalGradient\(\)\.$"),
        (solvers.NaturalGradient, r"such as NaturalGradient\(\)\.$"),
    ],
)
def test_what_an_object_lacks_of_its_contract_is_named(value, said):
    def model(y):
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", dist.Normal(numpyro.sample("w", dist.Normal(0.0, 1.0)), 1.0), obs=y)

    with pytest.raises(PVIError, match=said):
        PVI(model, AutoNormal(model), solver=value)
