"""Checks of what a user gives to PVI, and its compiled entry points."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from numpyro.infer import RenyiELBO

from ._state import Plan, PVIState
from .errors import PVIError
from .factors import join_arguments, split_arguments
from .runtime import Engine, gradient_jumps


def run_rounds(engine: Engine, state: PVIState, dynamic: list, static: tuple, count, tol, length: int, fine: bool):
    """Engine.rounds on split arguments, for ``jit``."""
    args, kwargs = join_arguments(dynamic, static)
    return engine.rounds(state, args, kwargs, count, tol, length, fine)


def evaluate_loss(engine: Engine, state: PVIState, dynamic: list, static: tuple, fine: bool):
    """Engine.loss on split arguments, for ``jit``."""
    args, kwargs = join_arguments(dynamic, static)
    return engine.loss(state, args, kwargs, fine)


def evaluate_evidence(engine: Engine, state: PVIState, dynamic: list, static: tuple, fine: bool):
    """Engine.evidence on split arguments, for ``jit``."""
    args, kwargs = join_arguments(dynamic, static)
    return engine.evidence(state, args, kwargs, fine)


def evidence_of(
    compiled: Callable, engine: Engine, state: PVIState, args: tuple, kwargs: dict, loss: Callable
) -> tuple:
    """Log evidence and its standard error in nats: of a solver that matches moments, or the ELBO from ``loss``.

    A finer quadrature rule is compiled in where the one at hand will not do.
    """
    if not getattr(engine.solver, "matches_moments", False):
        return -loss(state, *args, **kwargs), jnp.zeros((), float_dtype())
    dynamic, static = split_arguments(args, kwargs)
    fine = state.plan.fine or is_traced((state, dynamic))
    value, error, missed = compiled(engine, state, dynamic, static, fine=fine)
    if not fine and bool(missed):
        value, error, _ = compiled(engine, state, dynamic, static, fine=True)
    return value, error


def start_arrays(
    engine: Engine, plan: Plan, packing, dynamic: list, static: tuple, optim_state, loc, sd, local, mode: str
):
    """Engine.start on split arguments, for ``jit``."""
    args, kwargs = join_arguments(dynamic, static)
    return engine.start(plan, packing, args, kwargs, optim_state, loc, sd, local, mode)


def compare_forms(engine: Engine, plan: Plan, packing, dynamic: list, static: tuple, optim_state, loc, sd, key):
    """gradient_jumps on split arguments, for ``jit``."""
    args, kwargs = join_arguments(dynamic, static)
    params = engine.constrain(plan, args, kwargs, optim_state)
    dtype = float_dtype()
    return gradient_jumps(
        engine, plan, packing, args, kwargs, params, jnp.asarray(loc, dtype), jnp.asarray(sd, dtype), key
    )


def is_traced(tree: Any) -> bool:
    """Whether any leaf has no value yet."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def float_dtype():
    """The floating dtype that is switched on."""
    return jnp.result_type(float)


def positional_names(model: Callable) -> tuple[str, ...]:
    """Names of a model's positional parameters, for messages."""
    try:
        parameters = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def check_loss(loss: Any) -> None:
    """Refuse objectives that PVI cannot take, naming what to pass instead."""
    if isinstance(loss, RenyiELBO):
        raise PVIError("RenyiELBO is not a PVI objective; pass Trace_ELBO().")
    if getattr(loss, "sum_sites", True) is False:
        raise PVIError(f"{type(loss).__name__}(sum_sites=False) returns a dict of terms; pass it with sum_sites=True.")
    if getattr(loss, "multi_sample_guide", False):
        raise PVIError(f"{type(loss).__name__}(multi_sample_guide=True) is not supported: q is one Gaussian.")
    if not hasattr(loss, "loss"):
        raise PVIError(f"loss={loss!r} is not a NumPyro ELBO; pass Trace_ELBO().")


def check_keywords(model: Callable | None, static_kwargs: dict, init: Callable, run: Callable) -> None:
    """Refuse keywords that nothing would receive, and model parameters that ``run`` would intercept.

    Args:
        model: the NumPyro model.
        static_kwargs: keyword arguments given to the constructor.
        init: the constructor, whose options are known.
        run: the method whose keywords a model cannot have.

    Raises:
        PVIError: naming the keyword, and the nearest known one.
    """
    if model is None or not callable(model):
        raise PVIError(
            f"the model is {model!r}, which cannot be called: pass a NumPyro model or Partition(model, plate, labels)."
        )
    try:
        parameters = inspect.signature(model).parameters
    except (TypeError, ValueError):
        return
    own = set(inspect.signature(run).parameters) - {"self", "args", "kwargs"}
    clash = [name for name in parameters if name in own]
    if clash:
        raise PVIError(
            f"the model has a parameter {clash[0]!r}, which is also a keyword of PVI.run and would never reach "
            "the model: rename it."
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    known = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    options = [n for n in inspect.signature(init).parameters if n not in ("self", "static_kwargs")]
    for name in static_kwargs:
        if name not in known:
            near = difflib.get_close_matches(name, options + known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise PVIError(
                f"unknown keyword {name!r}: it is neither an option of PVI ({', '.join(options)}) nor a parameter of the model "
                f"({', '.join(known) or 'none'}).{hint}"
            )
