"""What a model is, as far as a trace of it tells: digests of every sample site's density, closed-over numbers included.

The model is traced with abstract arguments, every latent at a value that nothing else enters. A density's digest is that of the
graph of operations which leads to it: their kinds and settings, and the numbers that enter them from anywhere but the model's
arguments and latents. Two models with the same digests are the same function of arguments and latents.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import numpyro
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from numpyro import handlers
from numpyro.distributions.transforms import biject_to

from ._compiling import content
from .factors import is_latent, is_observed, join_arguments
from .handlers import FullPlates

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Settings of operations that say how a program runs, or how its derivatives are taken, and not what it computes.
_NO_MATTER = frozenset(
    (
        *(
            "jvp_jaxpr_fun",
            "jvp_jaxpr_thunk",
            "fwd_jaxpr_thunk",
            "bwd",
            "symbolic_zeros",
            "sharding",
            "ctx_mesh",
            "name",
        ),
        *("in_shardings", "out_shardings", "in_layouts", "out_layouts", "donated_invars", "inline", "keep_unused"),
        *("compiler_options_kvs", "split_transpose", "out_sharding", "num_consts"),
    )
)


@dataclasses.dataclass(frozen=True)
class SiteDigest:
    """One sample site of a traced model.

    Attributes:
        latent: whether it is a latent.
        words: its distribution's classes, shapes and plates.
        value: hexadecimal digits of what is observed; empty for a latent.
        density: the same of its log density.
    """

    latent: bool
    words: str
    value: str
    density: str


def model_digest(model: Callable, arrays: list, static: tuple, salt: str = "") -> dict[str, SiteDigest]:
    """Digests of a model's sample sites, in the order of the model.

    Args:
        model: the NumPyro model.
        arrays: the arrays among its arguments, or their shapes.
        static: the rest, as of ``split_arguments``.
        salt: text that enters every digest.

    Returns:
        By site. ``numpyro.param`` sites are there with their initial values.
    """
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    told: dict[str, tuple[bool, str]] = {}

    def densities(place: Any, arrays: list) -> list:
        args, kwargs = join_arguments(arrays, static)
        found = []
        for name, site in _trace(model, place, args, kwargs).items():
            if site["type"] == "param":
                told[name] = False, f"param with constraint {_plain(site['kwargs'].get('constraint'))}"
                found.append((site["value"], ()))
            elif site["type"] == "sample":
                told[name] = is_latent(site), _words(site)
                value = site["value"] if is_observed(site) else ()
                scale = () if site["scale"] is None else site["scale"]
                found.append((value, (site["fn"].log_prob(site["value"]), scale)))
        return found

    with numpyro.validation_enabled(False):
        closed, shape = jax.make_jaxpr(densities, return_shape=True)(jax.ShapeDtypeStruct((), float), shapes)
    graph = _Graph(closed, salt.encode())
    digests = iter(graph.outputs())
    by_site = jax.tree.map(lambda _: next(digests).hex(), shape)
    return {
        name: SiteDigest(latent, words, _join(value), _join(density))
        for (name, (latent, words)), (value, density) in zip(told.items(), by_site, strict=True)
    }


def _trace(model: Callable, place: Any, args: tuple, kwargs: dict) -> dict:
    """The model's trace, its latents at values that depend on their shapes and supports alone."""

    def given(site: dict) -> Any:
        if site["type"] != "sample" or site["is_observed"]:
            return None
        support, shape = site["fn"].support, site["fn"].shape()
        if support.is_discrete:
            return jnp.full(shape, place).astype(int)
        transform = biject_to(support)
        return transform(jnp.full(transform.inverse_shape(shape), place))

    # A substitution function is the one handler that also reaches the sample sites inside a scan's body.
    key = jax.random.key(0)
    return handlers.trace(handlers.seed(handlers.substitute(FullPlates(model), substitute_fn=given), key)).get_trace(
        *args, **kwargs
    )


def _words(site: dict) -> str:
    fn, kinds = site["fn"], []
    while fn is not None:
        kinds.append(type(fn).__name__)
        fn = getattr(fn, "base_dist", None)
    plates = ", ".join(f"{frame.name} ({frame.size})" for frame in site["cond_indep_stack"])
    shapes = f"of shape {tuple(site['fn'].batch_shape)} {tuple(site['fn'].event_shape)}"
    return f"{' of '.join(kinds)} {shapes}, {'in plate ' + plates if plates else 'in no plate'}"


def _join(digests: Any) -> str:
    leaves = jax.tree.leaves(digests)
    return leaves[0] if len(leaves) == 1 else hashlib.sha256("".join(leaves).encode()).hexdigest() if leaves else ""


class _Graph:
    """Digests of a traced function's outputs, each of the operations that lead to it and of no others."""

    def __init__(self, closed: Any, salt: bytes, known: dict | None = None) -> None:
        self.salt, self.jaxpr = salt, closed.jaxpr
        self.known: dict[int, bytes] = {} if known is None else known
        inputs = {var: self.hash("in", str(i), str(var.aval)) for i, var in enumerate(self.jaxpr.invars)}
        constants = {v: self.hash(self.number(x)) for v, x in zip(self.jaxpr.constvars, closed.consts, strict=True)}
        self.found: dict[Any, bytes] = inputs | constants

    def hash(self, *parts: str | bytes) -> bytes:
        found = hashlib.blake2b(self.salt, digest_size=16)
        for part in parts:
            found.update(part.encode() if isinstance(part, str) else part)
            found.update(b"\0")
        return found.digest()

    def outputs(self) -> list[bytes]:
        for eqn in self.jaxpr.eqns:
            settings = [self.setting(eqn.params[k], k) for k in sorted(eqn.params) if k not in _NO_MATTER]
            own = self.hash(eqn.primitive.name, *settings, *map(self.of, eqn.invars))
            self.found.update((var, self.hash(own, str(i))) for i, var in enumerate(eqn.outvars))
        return [self.of(var) for var in self.jaxpr.outvars]

    def of(self, var: Any) -> bytes:
        if isinstance(var, Literal):
            return self.hash(self.number(var.val), str(var.aval))
        return self.found[var]

    def setting(self, value: Any, name: str = "") -> bytes:
        """Digest of one setting of an operation."""
        if isinstance(value, ClosedJaxpr | Jaxpr):
            return self.program(value)
        if isinstance(value, tuple | list):
            return self.hash(name, *(self.setting(x) for x in value))
        if isinstance(value, dict):
            return self.hash(name, *(self.setting(x, str(k)) for k, x in value.items()))
        if isinstance(value, jax.Array | np.ndarray):
            return self.hash(name, self.number(value))
        return self.hash(name, _plain(value))

    def program(self, value: Any) -> bytes:
        """Digest of a program within: a loop's body, a compiled function."""
        if id(value) not in self.known:
            closed = value if isinstance(value, ClosedJaxpr) else ClosedJaxpr(value, ())
            inner = _Graph(closed, self.salt, self.known)
            self.known[id(value)] = self.hash(*inner.outputs())
        return self.known[id(value)]

    def number(self, value: Any) -> bytes:
        """Digest of a number or array that is fixed in the program."""
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        if not isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            return self.hash(_plain(value))
        array = np.asarray(value)
        return self.hash(f"{array.dtype} {array.shape}", bytes(content(array)))


def _plain(value: Any) -> str:
    """A value in words that are the same in every process."""
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{type(value).__name__} {_ADDRESS.sub('', repr(value))}"


def first_difference(theirs: dict[str, SiteDigest], own: dict[str, SiteDigest]) -> str | None:
    """How one model differs from another, at the first sample site where it does.

    Args:
        theirs: a file's.
        own: what is here.

    Returns:
        One clause, or None where they are the same.
    """
    return next(_differences(theirs, own), None)


def _differences(theirs: dict[str, SiteDigest], own: dict[str, SiteDigest]) -> Iterator[str]:
    for name, site in theirs.items():
        here = own.get(name)
        what = f"the prior of {name!r}" if site.latent else f"the likelihood of {name!r}"
        if here is None:
            yield f"sample site {name!r} is in the file's model only"
        elif site.words != here.words or site.latent != here.latent:
            kinds = [f"{'a latent' if s.latent else 'no latent'}, {s.words}" for s in (site, here)]
            yield f"{what} differs: {kinds[0]}, in the file; {kinds[1]}, here"
        elif site.value != here.value:
            yield f"the observations of {name!r} that the model closes over, or how it makes them of its arguments, differ"
        elif site.density != here.density:
            yield f"{what} differs: a number in it, an array that it closes over, or its form"
    yield from (f"sample site {name!r} is in this PVI's model only" for name in own if name not in theirs)


__all__ = ["SiteDigest", "first_difference", "model_digest"]
