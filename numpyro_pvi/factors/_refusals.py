"""What a model cannot be fitted with, found by running it: observations of another shape, randomness, no finite density."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer import init_to_uniform
from numpyro.primitives import Messenger

from ..errors import DataError, GuideError, PartitionError, PVIError
from ..handlers import FullPlates, RowAxes
from ._model import DrawImproper, is_latent, is_observed, site_log_prob

__all__ = ["KeyWatch", "check_observed_shapes", "explained", "refuse_randomness"]

# What NumPyro says where it has looked for a start in vain, and where a distribution's parameters are checked.
_NO_START = ("valid initial parameters", "invalid")


def check_observed_shapes(trace: dict, rows: RowAxes) -> None:
    """Refuse observations that broadcast every row against every other: a column of shape (N, 1) in a plate of N.

    Args:
        trace: an abstract trace of the model.
        rows: which axis of which sample site runs over the partitioned rows.

    Raises:
        PartitionError: naming the sample site, its shape and its distribution's.
    """
    for name, site in trace.items():
        axis = rows.of(site) if is_observed(site) else None
        if axis is None:
            continue
        fn, value = site["fn"], tuple(jnp.shape(site["value"]))
        own = tuple(fn.shape())
        place = axis.dim - fn.event_dim
        if len(value) < -place or len(own) < -place or value[place] == own[place]:
            continue
        # One number for all rows is no column of them; sizes that do not go together at all are refused where they meet.
        if value[place] != 1 or all(size == 1 for size in value[:place]):
            continue
        column = ", such as y[:, 0]" if value[-1] == 1 else ""
        raise PartitionError(
            f"sample site {name!r} is observed with shape {value}, but its distribution, in plate {axis.key!r}, has "
            f"shape {own}: every row would be compared with every other. Pass observations of shape {own}{column}; columns of "
            "one row belong to the event: numpyro.sample(name, fn.to_event(1), obs=y)."
        )


class KeyWatch(Messenger):
    """Watches a model ask for random keys with ``numpyro.prng_key()``, and answers with its own where it has one."""

    def __init__(self, fn: Callable, key: Any = None) -> None:
        self.key, self.asked = key, 0
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        """Count, and answer."""
        if msg["type"] == "prng_key":
            self.asked += 1
            if self.key is not None and msg["value"] is None:
                msg["value"] = jax.random.fold_in(self.key, self.asked)


def refuse_randomness(watch: KeyWatch, key: Any, args: tuple, kwargs: dict) -> None:
    """Refuse a model whose log density changes with keys that it asks for: it is no function of its latents.

    Keys that leave the density alone pass: first values of a network's params, simulations beside the observations.

    Args:
        watch: the model, watched while it was traced.
        key: a random key.
        args: the model's positional arguments.
        kwargs: its keyword arguments.

    Raises:
        PVIError: saying what to write instead.
    """
    if not watch.asked:
        return
    model = FullPlates(watch.fn)

    def values(key: Any) -> dict:
        trace = handlers.trace(handlers.seed(DrawImproper(KeyWatch(model, key), key), key)).get_trace(*args, **kwargs)
        return {n: s["value"] for n, s in trace.items() if s["type"] == "param" or is_latent(s)}

    def density(point: dict, asked: Any) -> Any:
        held = handlers.substitute(KeyWatch(model, asked), data=point)
        trace = handlers.trace(handlers.seed(held, key)).get_trace(*args, **kwargs)
        return sum(jnp.sum(site_log_prob(s)) for s in trace.values() if s["type"] == "sample")

    with numpyro.validation_enabled(False):
        point, both = jax.jit(values)(key), jax.jit(density)
        one, other = (np.asarray(both(point, k)) for k in jax.random.split(key))
    if not np.array_equal(one, other, equal_nan=True):
        raise PVIError(
            "the model draws random numbers with numpyro.prng_key(), and its log density changes with them: it is another "
            "function of the latents at every key, which no posterior belongs to. Pass the random numbers as an argument of the "
            "model, so that they stay the same, or make them a latent with numpyro.sample; a network's dropout (apply_rng) has to "
            "be switched off."
        )


@contextlib.contextmanager
def explained(guide: Any, key: Any, args: tuple, kwargs: dict) -> Iterator[None]:
    """Around a guide's set-up: say which sample site is not finite where NumPyro finds no start, and what to write.

    Args:
        guide: the guide.
        key: a random key.
        args: the model's positional arguments.
        kwargs: its keyword arguments.

    Raises:
        DataError: naming the sample site, where observations are outside of its support.
        GuideError: naming the sample site.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, PVIError) or not any(words in str(error) for words in _NO_START):
            raise
        name, (outside, where) = type(guide).__name__, _not_finite(guide, key, args, kwargs)
        if outside:
            raise DataError(
                f"the observations of sample site {', '.join(outside)} are outside of the distribution's support, so that there is "
                f"no finite log density to start from: {where}. Look for negative counts, for labels that begin at 1, for shares "
                "of 0 or 1, or choose a distribution that has them."
            ) from error
        raise GuideError(
            f"the guide {name} found no point with a finite log density to start from ({str(error).split('. ')[0].rstrip('.')}): "
            f"{where}. Check the observations against the distribution's support and its "
            f"parameters against their ranges, or start elsewhere: {name}(model, init_loc_fn=numpyro.infer.init_to_median()), or "
            "init_to_value(values={...}) from there."
        ) from error


def _not_finite(guide: Any, key: Any, args: tuple, kwargs: dict) -> tuple[list[str], str]:
    """Observed sites outside of their supports, and which are not finite at a draw of the guide's strategy; no values of theirs."""
    with warnings.catch_warnings(), numpyro.validation_enabled(False):
        warnings.simplefilter("ignore")
        # Seeded inside: strategies draw with the keys that sample sites have been given.
        seeded, strategy = handlers.seed(guide.model, key), getattr(guide, "init_loc_fn", init_to_uniform)
        trace = handlers.trace(handlers.substitute(seeded, substitute_fn=strategy)).get_trace(*args, **kwargs)
        found, off = [], []
        for name, site in trace.items():
            if site["type"] != "sample":
                continue
            terms = np.asarray(site_log_prob(site))
            bad = int((~np.isfinite(terms)).sum())
            if bad:
                outside = is_observed(site) and not bool(jnp.all(site["fn"].support(site["value"])))
                off += [repr(name)] * outside
                why = ", whose observations are outside of its support" if outside else ""
                found.append(f"{name!r} ({_kind(site['fn'])}{why}) in {bad} of {terms.size} entries")
    if not found:
        return off, "every sample site is finite at a draw of its init strategy, but a gradient is not"
    return off, f"at a draw of its init strategy the log density is not finite at sample site {', '.join(found)}"


def _kind(fn: Any) -> str:
    """A distribution's name as the model has it, without what plates and handlers have put around it."""
    while isinstance(fn, dist.ExpandedDistribution | dist.MaskedDistribution | dist.Independent):
        fn = fn.base_dist
    return type(fn).__name__
