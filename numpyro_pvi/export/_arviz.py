"""Posterior draws as ArviZ data, for ArviZ 0.23 and 1.x alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
import numpyro
from numpyro import handlers

from .._compiling import owned_jit
from .._state import PVITrace
from ..diagnostics import map_draws
from ..errors import PVIError
from ..factors import join_arguments, split_arguments
from ..guides import setup_guide
from ._agents import agents_dataset
from ._dims import Dims, site_dims
from ._rounds import rounds_dataset

_SAMPLE_DIMS = ["chain", "draw"]


def to_arviz(
    rng_key: Any,
    model: Callable,
    guide: Any,
    params: dict[str, Any],
    args: tuple,
    kwargs: dict,
    *,
    num_samples: int = 1000,
    trace: PVITrace | None = None,
    agents: tuple[Sequence[Hashable], Callable[[Hashable], dict[str, Any]]] | None = None,
) -> Any:
    """Draw from q and arrange the draws, their log-likelihoods and the observed data as ArviZ data.

    Groups: ``posterior`` (latents in their own supports and deterministics), ``log_likelihood`` (one variable per
    observed site, in its batch shape, nats, without ``handlers.scale``), ``observed_data``; with a trace, ``rounds`` (see
    :func:`numpyro_pvi.export.rounds_dataset`); without a server, ``agents``: mean and sd of every agent's own marginals, with dims
    ``agent`` and ``moment`` before the latent's own. Draws are independent
    and come as one chain, so r-hat has no meaning and effective sample sizes say nothing about the fit. Axes of plates
    bear the plate's name; ``infer={"event_dims": [...]}`` of a sample site names its event axes.

    Args:
        rng_key: random key.
        model: the NumPyro model.
        guide: the guide; set up with these arguments if it is not yet.
        params: the guide's params and the constrained values of the model's ``numpyro.param`` sites. Deterministics and
            log-likelihoods are computed at these values and these arguments.
        args: the model's positional arguments.
        kwargs: the model's keyword arguments.
        trace: what happened in every round, of a run that has it.
        agents: labels of agents that each have a q of their own, and what gives one's marginals.
        num_samples: draws S. The result holds S numbers for every observed row (1000 draws of 100,000 rows: 800 MB in
            float64), and for every row of a deterministic; nothing else grows with S.

    Returns:
        ``arviz.InferenceData`` under ArviZ 0.23, ``xarray.DataTree`` under 1.x, with dims ``chain`` (1) and ``draw``
        (S).

    Raises:
        PVIError: for a number of draws below 1, params that lack a ``numpyro.param`` value, or a guide that lacks a
        latent.
    """
    if num_samples < 1:
        raise PVIError(f"to_arviz(num_samples={num_samples!r}): expected at least one draw.")
    setup_guide(guide, jax.random.key(0), args, kwargs)
    arrays, static = split_arguments(args, kwargs)
    drawn = _draw(model, guide, static, num_samples, rng_key, params, arrays)
    posterior, log_likelihood, observed = jax.device_get(drawn)
    sites: dict = {}
    jax.eval_shape(lambda key: sites.update(_trace_at(model, guide, key, params, args, kwargs)), jax.random.key(0))
    observed = {name: value for name, value in observed.items() if np.size(value)}
    dims = site_dims(sites, _SAMPLE_DIMS)
    groups = {
        "posterior": _one_chain(posterior),
        "log_likelihood": _one_chain(log_likelihood),
        "observed_data": {name: np.asarray(value) for name, value in observed.items()},
    }
    made = {} if trace is None else {"rounds": rounds_dataset(trace)}
    if agents is not None:
        made["agents"] = agents_dataset(*agents, dims)
    return _assemble({group: values for group, values in groups.items() if values}, dims, made)


@functools.partial(owned_jit, static_argnames=("model", "guide", "static", "num_samples"))
def _draw(model, guide, static, num_samples, rng_key, params, arrays):
    """Posterior values and log-likelihoods with a leading draw axis, and the observed values."""
    args, kwargs = join_arguments(arrays, static)

    def one(key):
        trace = _trace_at(model, guide, key, params, args, kwargs)
        values = {
            n: s["value"] for n, s in trace.items() if s["type"] == "deterministic" or _is_sample(s, observed=False)
        }
        return values, {n: s["fn"].log_prob(s["value"]) for n, s in trace.items() if _is_sample(s, observed=True)}

    posterior, log_likelihood = map_draws(one, jax.random.split(rng_key, num_samples), num_samples)
    trace = _trace_at(model, guide, rng_key, params, args, kwargs)
    return posterior, log_likelihood, {n: s["value"] for n, s in trace.items() if _is_sample(s, observed=True)}


def _trace_at(model: Callable, guide: Any, key: Any, params: dict, args: tuple, kwargs: dict) -> dict:
    """Trace of the model at one draw from the guide and at the fitted params."""
    # The guide's own deterministics are left out: they belong to the arguments it was set up with.
    drawn = guide.sample_posterior(key, params, *args, **kwargs)
    point = {n: drawn[n] for n, s in guide.prototype_trace.items() if n in drawn and _is_sample(s, observed=False)}
    seeded = handlers.seed(handlers.substitute(model, data={**params, **point}), key)
    trace = handlers.trace(seeded).get_trace(*args, **kwargs)
    for name, site in trace.items():
        if site["type"] == "param" and name not in params:
            raise PVIError(f"params lacks a value of the model's numpyro.param {name!r}; pass pvi.get_params(state).")
        if _is_sample(site, observed=False) and name not in point:
            raise PVIError(
                f"the guide {type(guide).__name__} has no latent {name!r} of the model; pass the fitted guide."
            )
    return trace


def _is_sample(site: dict, observed: bool) -> bool:
    return site["type"] == "sample" and site["is_observed"] == observed


def _one_chain(values: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value)[None] for name, value in values.items()}


def _assemble(groups: dict[str, dict[str, np.ndarray]], dims: Dims, made: dict[str, Any]) -> Any:
    """Make ArviZ's container from named arrays, and from data sets that are made already."""
    # Imported here: ArviZ takes seconds to import. 1.x still answers to hasattr(arviz, "InferenceData"), with a
    # warning.
    import arviz

    old = "InferenceData" in vars(arviz)
    library, sample_dims = ("library", "default_dims") if old else ("inference_library", "sample_dims")
    datasets = {}
    for group, values in groups.items():
        leading = [] if group == "observed_data" else _SAMPLE_DIMS
        names = {name: dims.of(name, value.shape[len(leading) :]) for name, value in values.items()}
        datasets[group] = arviz.dict_to_dataset(values, dims=names, **{library: numpyro, sample_dims: leading})
    datasets |= made
    if old:
        return arviz.InferenceData(**datasets)
    from xarray import DataTree

    return DataTree.from_dict(datasets)
