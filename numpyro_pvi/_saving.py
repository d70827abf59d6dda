"""A state as the header and arrays of a checkpoint, and back, against the PVI that is to go on with it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import importlib.metadata
import secrets
import sys
import types
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._checkpoint import read_checkpoint, write_checkpoint
from ._closures import SiteDigest, first_difference, model_digest
from ._compiling import content, is_traced
from ._group_lifecycle import other_rows
from ._state import Plan, PVIState
from .errors import CheckpointError, StateError
from .factors import (
    ArgumentSignature,
    DerivedLeaf,
    Enumeration,
    GroupMasks,
    Layout,
    LeafSignature,
    LocalLayout,
    Packing,
    PartitionPlan,
    Predictor,
    Reading,
    TermSpec,
    abstract_trace,
    join_arguments,
    summed_out,
)
from .families import ConditionalNatural, GaussianNatural, MultivariateNormalFamily, NormalFamily, RowPrior
from .guides import NOT_SET_UP, setup_guide
from .handlers import GroupTable, RowAxes
from .runtime import solver_of_prior, with_chains
from .schedules import Points, RoundReport, Rule
from .sites import Held, LocalSites, OwnConditionals, RowSites, SiteStack
from .wire import Decoder, Encoder, is_record, storable

# ------------------------------------------------------------------------------------- latents of plan, guide and model
# The latents that a plan, a guide and a model have, and setting a guide up once there are arguments.

Latents = dict[str, tuple[int, ...]]


class _Stored(NamedTuple):
    """All that is asked of a latent's distribution once the fit is made."""

    support: Any


def abstract_arguments(plan: Plan) -> tuple[list, tuple]:
    """Arguments like those that a plan was made with, split into shapes of arrays and static leaves."""
    leaves = plan.signature.leaves
    arrays = [jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for x in leaves if x.shape is not None]
    return arrays, (plan.signature.structure, tuple(None if x.shape is not None else (x.static,) for x in leaves))


def model_latents(name: str, model: Any, plan: Plan) -> Latents:
    """Shapes of a model's latents, measured as a plan's are, for arguments like those that it was made with.

    Returns the shapes; nothing is computed. Raises CheckpointError when the model does not run with such arguments.
    """
    if plan.signature.by_value:
        # A file has no data, and the model asks for values: it is compared with the state once there are arguments.
        return plan.latent_shapes
    arrays, static = abstract_arguments(plan)
    found: Latents = {}

    def run(key, arrays):
        args, kwargs = join_arguments(arrays, static)
        found.update(plan.shapes_in(abstract_trace(plan.partition.model(model), key, args, kwargs)))
        return key

    try:
        jax.eval_shape(run, jax.random.key(0), arrays)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, AssertionError) as error:
        raise CheckpointError(
            f"the checkpoint {name!r} was written for another model than this PVI's, which does not run with arguments of the "
            f"file's shapes ({type(error).__name__}: {error})."
        ) from error
    return found


def harmless(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments that hold nothing with ones for it: setting a guide up, NumPyro refuses distributions of what is no number."""
    return jax.tree.map(lambda x: jnp.nan_to_num(x, nan=1.0) if hasattr(x, "dtype") else x, (args, kwargs))


def prepare_guide(pvi: Any, state: PVIState, args: tuple, kwargs: dict) -> None:
    """Set a guide up that has not seen the model's arguments, as after ``load``. Under ``jit`` it is left alone."""
    if pvi.guide.prototype_trace is None and not is_traced((state, args, kwargs)):
        _set_up(pvi, pvi.guide, state, args, kwargs)


def guide_of_rows(pvi: Any, state: PVIState, args: tuple, kwargs: dict) -> Any:
    """The guide; a copy set up for the state's rows where it was set up for others, which had latents of their own."""
    if pvi._fit.guide_latents(pvi.guide) == state.plan.latent_shapes:
        return pvi.guide
    guide = copy.copy(pvi.guide)
    # What NumPyro's set-up writes into is the original's.
    guide.prototype_trace, guide._prototype_frame_full_sizes = None, {}
    _set_up(pvi, guide, state, args, kwargs)
    return guide


def _set_up(pvi: Any, guide: Any, state: PVIState, args: tuple, kwargs: dict) -> None:
    enumeration, hides = state.plan.partition.enumeration, None
    if pvi.runtime.elsewhere is not None:
        (split,) = pvi.runtime.elsewhere.partitions(pvi.model, None)
        hides, (args, kwargs) = split.without_rows, harmless(args, kwargs)
    elif enumeration:
        hides = partial(summed_out, enumeration=enumeration)
    # The key gives the guide starting values, which nothing reads.
    setup_guide(guide, jax.random.key(0), args, kwargs, hides)
    wanted, found = state.plan.latent_shapes, pvi._fit.guide_latents(guide)
    if found != wanted:
        raise StateError(
            f"the state has the latents {_listed(wanted)}, but the guide {_listed(found)} ({state.plan.measured}): it belongs to "
            "another model. Make the PVI from the model that the state was fitted with."
        )
    pvi._fit.check_guide(guide, state.plan)


def prototype(pvi: Any, state: PVIState) -> dict:
    """The guide's prototype trace; before it is set up, the supports that a loaded file has.

    Returns an entry with a distribution, or its support, for every latent. Raises StateError when neither is there.
    """
    found = pvi.guide.prototype_trace
    return stored_prototype(pvi._memory.supports, state) if found is None else found


def stored_prototype(supports: dict[str, Any], state: PVIState) -> dict[str, dict[str, Any]]:
    """What stands in for a guide's prototype trace where only supports are asked for.

    ``supports``: by latent, as a file has them. Returns an entry for every latent. Raises StateError when a latent's support is
    not known.
    """
    if not set(state.plan.latent_shapes) <= set(supports):
        raise StateError(NOT_SET_UP)
    return {name: {"fn": _Stored(support)} for name, support in supports.items()}


def _listed(latents: Latents) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in latents.items())


# --------------------------------------------------------------------------------------------------------------- saving

# Words of earlier versions for what is taken by draws.
_DRAWS = ("stein", "hessian")
# Everything that a plan and a state's own fields are made of. A type that is not here cannot be written, nor read.
_TYPES = (
    *(Plan, PartitionPlan, RowAxes, GroupTable, Layout, LocalLayout, Reading, TermSpec, Predictor, DerivedLeaf),
    *(Enumeration, ArgumentSignature, LeafSignature, MultivariateNormalFamily, NormalFamily),
    *(GaussianNatural, ConditionalNatural, SiteStack, LocalSites, OwnConditionals, Held, RowSites, RowPrior),
    *(Packing, GroupMasks, RoundReport, Rule, Points),
)
# Fields whose structure is not in the file but comes from the PVI's own solver and optimiser.
_OWN = ("solver_state", "prior_solver_state", "optim_state")


class Loaded(NamedTuple):
    """What was in a file: a state, the supports of its latents, (None from ``save``) what a run keeps beside it, and its salt."""

    state: PVIState
    supports: dict[str, Any]
    run: dict[str, Any] | None
    salt: str


def save_state(path: Any, pvi: Any, state: Any, run: dict[str, Any] | None = None, salt: str | None = None) -> None:
    """Write a state.

    ``run``: what a run keeps beside it: text, arrays, reports; ``salt``: text that enters every digest in the file; a fresh one
    by default. Raises CheckpointError naming the label, argument or field that cannot be stored; else as of
    ``write_checkpoint``; StateError for anything but a state.
    """
    if not isinstance(state, PVIState):
        raise StateError(f"expected a PVIState (from pvi.init or result.state), got {type(state).__name__}.")
    _check_names(state)
    encoder = Encoder(_types(pvi), CheckpointError)
    fields, own = {}, _own(pvi)
    for field in dataclasses.fields(state):
        encode = encoder.leaves if field.name in own else encoder.node
        fields[field.name] = encode(getattr(state, field.name), field.name)
    supports, salt = _supports(pvi), new_salt() if salt is None else salt
    header = {
        "format": "numpyro_pvi",
        "versions": {name: _version(name) for name in ("numpyro_pvi", "numpyro", "jax", "jaxlib")},
        "x64": jnp.result_type(float) == jnp.float64,
        "salt": salt,
        "settings": settings_of(pvi, salt),
        "model": {name: dataclasses.astuple(x) for name, x in digest_of(pvi, state.plan, salt).items()},
        "supports": {name: encoder.support(x, name) for name, x in supports.items()},
        "params": None if state.optim_state is None else _specs(pvi.optim.get_params(state.optim_state), encoder),
        "state": fields,
        "run": encoder.node(run, "run"),
    }
    write_checkpoint(path, header, encoder.arrays)


def load_state(path: Any, pvi: Any) -> Loaded:
    """Read a state for a PVI of the same settings.

    Returns the file's contents. Raises CheckpointError for a file that cannot be read, or that another kind of PVI has written;
    says which.
    """
    header, arrays = read_checkpoint(path)
    name = str(path)
    try:
        if header["format"] != "numpyro_pvi":
            raise ValueError("format")
        _check_precision(name, bool(header["x64"]))
        salt = header["salt"]
        if type(salt) is not str:
            raise TypeError("salt")
        _check_settings(name, header["settings"], settings_of(pvi, salt))
        versions = header["versions"]["numpyro_pvi"], _version("numpyro_pvi")
        decoder = Decoder(_types(pvi), arrays, CheckpointError, "{} (this is {})".format(*versions))
        state = _state(header, decoder, pvi)
        latents = state.plan.latent_shapes
        known = {n: decoder.value(x) for n, x in header["supports"].items() if x is not None}
        loaded = Loaded(state, known, _run_of(decoder.value(header["run"])), salt)
        wanted = {name: SiteDigest(*site) for name, site in header["model"].items()}
    except CheckpointError:
        raise
    # Whatever a header that somebody has made up leads to: a checksum is no proof of who has written it.
    except Exception as error:
        raise CheckpointError(
            f"the checkpoint {name!r} is corrupted: its header does not describe a state. Use an earlier copy, or start anew."
        ) from error
    _check_latents(name, pvi, state.plan, latents)
    differs = other_rows(pvi.partition, state)
    if differs:
        raise CheckpointError(
            f"the checkpoint {name!r} was written for other rows: {differs}. Make the Partition with the labels of the file's "
            "rows, in their order, and give the rows in that order."
        )
    try:
        own = digest_of(pvi, state.plan, salt)
    except Exception as error:
        raise CheckpointError(
            f"the checkpoint {name!r} is of another model, or damaged: this model does not run with arguments of its "
            "shapes. Load it with the model it was made with, or use an earlier copy."
        ) from error
    _check_model(name, wanted, own, header["versions"])
    return loaded


def _run_of(run: Any) -> Any:
    """What a run keeps beside a state, or None; raises where it is neither."""
    if run is None:
        return run
    if set(run) - {"again"} != {"start", "data", "losses", "reports"} or np.ndim(run["losses"]) != 1:
        raise ValueError("run")
    if not isinstance(run.get("again", ""), str):
        raise ValueError("run")
    return run


def new_salt() -> str:
    """Digits that make a file's digests different from those of any other file of the same things."""
    return secrets.token_hex(16)


def digest_of(pvi: Any, plan: Plan, salt: str) -> dict[str, SiteDigest]:
    """The PVI's model as traced with arguments like those that a plan was made with. By sample site."""
    if plan.signature.by_value:
        # The model reads values of arrays that a file does not have; their digests are part of the plan's signature.
        return {}
    return model_digest(pvi.model, *abstract_arguments(plan), salt)


def settings_of(pvi: Any, salt: str = "") -> dict[str, Any]:
    """Guide, solver, schedule and start in words: what must be the same where a state goes on.

    ``salt``: text that enters digests of arrays. By part, its class and its fields. Objects that are neither numbers
    nor text are known by their class only.
    """
    words = functools.partial(_in_words, salt=salt)
    guide = {"type": type(pvi.guide).__name__, "fields": {"prefix": repr(pvi.guide.prefix)}}
    guide["fields"] |= {"init_loc_fn": words(pvi.guide.init_loc_fn)} | pvi._fit.guide_settings(pvi.guide, words)
    optim = {"type": "None" if pvi.optim is None else type(pvi.optim).__name__, "fields": {}}
    own = {"solver": _describe(pvi.solver, salt), "schedule": _describe(pvi.schedule, salt), "optim": optim}
    return {"guide": guide, **own, "init_sites": {"type": repr(pvi.init_sites), "fields": {}}}


def fingerprint(tree: Any, salt: str = "") -> str:
    """SHA-256 of a tree: paths, types, shapes and numbers of its leaves. Objects that are no arrays count by class.

    ``tree``: arrays, random keys, numbers and text in containers. Returns hexadecimal digits.
    """
    found = hashlib.sha256(salt.encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if hasattr(leaf, "dtype"):
            text, numbers = f"{leaf.dtype} {np.shape(leaf)}", content(leaf)
        else:
            text, numbers = repr(leaf) if storable(leaf) else type(leaf).__name__, b""
        found.update(f"{jax.tree_util.keystr(path)} {text}\n".encode())
        found.update(numbers)
    return found.hexdigest()


def _types(pvi: Any) -> dict[str, type]:
    """Types by name: the package's own, and the records that are loaded where the schedule comes from, which make up its state.

    Where solvers' memories are stored with their structure, the solver's as well; and those that the guide knows.
    """
    found, kinds = {}, type(pvi.schedule).__mro__
    for kind in reversed((*kinds, *type(pvi.solver).__mro__) if pvi._fit.stores_memories else kinds):
        package = kind.__module__.rpartition(".")[0]
        for name, module in list(sys.modules.items()):
            if name == kind.__module__ or (package and name.startswith(package + ".")):
                found |= {n: x for n, x in vars(module).items() if is_record(x) and x.__name__ == n}
    return found | pvi._fit.types(pvi.guide) | {kind.__name__: kind for kind in _TYPES}


def _own(pvi: Any) -> tuple[str, ...]:
    """Fields whose structure is not in the file; where memories are stored, those that optimisers have made."""
    if not pvi._fit.stores_memories:
        return _OWN
    return ("solver_state", "optim_state") if pvi.solver.carries_optimiser else ("optim_state",)


def _state(header: dict, decoder: Decoder, pvi: Any) -> PVIState:
    fields = header["state"]
    names = [field.name for field in dataclasses.fields(PVIState)]
    if set(fields) != set(names):
        more = [f"lacks {x!r}" for x in names if x not in fields] + [
            f"has {x!r} more" for x in fields if x not in names
        ]
        raise CheckpointError(
            f"the file was written by another version of numpyro_pvi: its state {', '.join(more)}. Install "
            f"{decoder.written_by}, or start anew."
        )
    plan = decoder.value(fields["plan"])
    if type(plan) is not pvi._fit.plan_type or not isinstance(plan.signature, ArgumentSignature):
        raise TypeError("plan")
    if plan.partition.unstructured in _DRAWS:
        plan = dataclasses.replace(plan, partition=dataclasses.replace(plan.partition, unstructured="monte_carlo"))
    if plan.signature.structure.num_leaves != len(plan.signature.leaves):  # type: ignore[attr-defined]
        raise ValueError("signature")
    values = {name: decoder.value(fields[name], True) for name in names if name not in (*_own(pvi), "plan")}
    if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(values)):
        raise TypeError("a leaf of the state")
    values["plan"] = plan
    structures = {"optim_state": _optim_structure(header, decoder, pvi)}
    if not pvi._fit.stores_memories:
        _check_sizes(values, plan)
        structures |= _structures(pvi, plan, values["sites"].groups.precision_mean.dtype)
    elif pvi.solver.carries_optimiser:
        dtype = jax.tree.leaves(values["prior"])[0].dtype
        structures["solver_state"] = jax.eval_shape(lambda: pvi.solver.init(plan.family, dtype))
    for name, like in structures.items():
        values[name] = decoder.leaves(fields[name], like, f"{name} ({type(pvi.solver).__name__})")
    return PVIState(**values)


def _check_sizes(values: dict[str, Any], plan: Plan) -> None:
    """Raise where sites or the prior are not of the plan's family, or as many as its groups."""
    dim, sites = plan.family.dim, values["sites"]
    if values["exact"].shape != (dim,) or not isinstance(sites, SiteStack):
        raise ValueError("the prior")
    if plan.rows is not None:
        prior = values["prior"]
        if not isinstance(prior, RowPrior) or plan.rows != ("latents" if prior.diagonal else "rows"):
            raise ValueError("the prior as rows see it")
        numbers = {x.shape for x in jax.tree.leaves(sites.groups)}
        if prior.loc.shape != (dim,) or numbers != {(1, *prior.group.shape)}:
            raise ValueError("numbers of rows")
        return
    counts = {(): values["prior"], (1 if plan.tied else plan.partition.table.num_groups,): sites.groups}
    for batch, found in counts.items():
        wanted = jax.eval_shape(lambda batch=batch: plan.family.zeros(batch))
        shapes = [jax.tree.map(jnp.shape, x) for x in (found, wanted)]
        if type(found) is not type(wanted) or shapes[0] != shapes[1]:
            raise ValueError("sites")


def _structures(pvi: Any, plan: Plan, dtype: Any) -> dict[str, Any]:
    """What the solver itself starts from, in shapes."""

    def start() -> Any:
        one = pvi.solver.init_among(plan.family, dtype, len(plan.partition.table.labels))
        return with_chains(pvi.solver, one, plan.family.dim, dtype) if plan.chained else one

    solver = jax.eval_shape(start)
    of_prior = None
    if plan.partition.has_prior_factor:
        of_prior = jax.eval_shape(lambda: solver_of_prior(pvi.solver).init(plan.family, dtype))
    return {"solver_state": solver, "prior_solver_state": of_prior}


def _optim_structure(header: dict, decoder: Decoder, pvi: Any) -> Any:
    """What the optimiser starts from, in shapes."""
    return None if pvi.optim is None else jax.eval_shape(pvi.optim.init, _shapes(header["params"], decoder))


def _specs(params: Any, encoder: Encoder) -> Any:
    """Shapes and dtypes of the optimised values, in their containers."""
    return encoder.node(jax.tree.map(lambda x: (tuple(x.shape), str(x.dtype)), params), "params")


def _shapes(node: Any, decoder: Decoder) -> Any:
    def is_spec(x: Any) -> bool:
        return type(x) is tuple and len(x) == 2 and type(x[1]) is str

    specs = decoder.value(node)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x[0], jnp.dtype(x[1])), specs, is_leaf=is_spec)


def _supports(pvi: Any) -> dict[str, Any]:
    if pvi.guide.prototype_trace is None:
        return dict(pvi._memory.supports)
    sites = pvi.guide.prototype_trace.items()
    return {n: site["fn"].support for n, site in sites if site["type"] == "sample" and not site["is_observed"]}


# -------------------------------------------------------------------------------------------------------------- checks


def _check_names(state: PVIState) -> None:
    for label in state.groups:
        if not storable(label):
            raise CheckpointError(
                f"the label of group {label!r} is a {type(label).__name__}, which a checkpoint cannot hold: it holds str, int, "
                "float, bool, bytes, None and tuples of them. Relabel the groups, for example by str(label)."
            )
    for leaf in state.plan.signature.leaves:
        if not storable(leaf.static):
            raise CheckpointError(
                f"{leaf.name} is a {leaf.dtype}, which a checkpoint cannot hold: bind it before, for example "
                "functools.partial(model, ...), so that only data are arguments."
            )


def _check_precision(name: str, x64: bool) -> None:
    here = jnp.result_type(float) == jnp.float64
    if x64 and not here:
        raise CheckpointError(
            f"the checkpoint {name!r} was written in 64 bits: call jax.config.update('jax_enable_x64', True) before it is loaded."
        )
    if here and not x64:
        raise CheckpointError(
            f"the checkpoint {name!r} was written in 32 bits, and x64 is enabled here: call "
            "jax.config.update('jax_enable_x64', False) before it is loaded."
        )


def _check_settings(name: str, saved: dict, here: dict) -> None:
    for part, own in here.items():
        theirs = saved[part]
        differing = [f for f in own["fields"] if theirs["fields"].get(f) != own["fields"][f]]
        if theirs["type"] == own["type"] and not differing and set(theirs["fields"]) == set(own["fields"]):
            continue
        fields = differing or sorted(set(theirs["fields"]) - set(own["fields"]))
        same = theirs["type"] == own["type"]
        was, now = (_shown(x, fields if same else []) for x in (theirs, own))
        raise CheckpointError(
            f"the checkpoint {name!r} was written with {part} {was}, but this PVI has {now}: make the PVI with the {part} of the "
            "file, or start anew."
        )


def _shown(part: dict, fields: list[str]) -> str:
    inside = ", ".join(f"{f}={part['fields'].get(f, '(none)')}" for f in fields)
    return f"{part['type']}({inside})" if fields else part["type"]


def _check_latents(name: str, pvi: Any, plan: Plan, wanted: dict[str, tuple[int, ...]]) -> None:
    set_up = pvi.guide.prototype_trace is not None
    found = pvi._fit.guide_latents(pvi.guide) if set_up else model_latents(name, pvi.model, plan)
    # Latents of rows' own come and go with their rows; what they are at the file's arguments is compared with the model.
    own = dict.fromkeys(plan.own_latents, ())
    wanted, found = wanted | own, found | {n: () for n in own if n in found}
    if found == wanted:
        return
    parts = [f"it lacks {n}" for n in wanted if n not in found] + [f"it has {n} more" for n in found if n not in wanted]
    parts += [f"{n} has shape {found[n]}, not {wanted[n]}" for n in wanted if n in found and found[n] != wanted[n]]
    raise CheckpointError(
        f"the checkpoint {name!r} was written for another model than this PVI's: of the file's latents "
        f"{', '.join(wanted)}, {'; '.join(parts)} ({plan.measured})."
    )


def _check_model(name: str, theirs: dict, own: dict, versions: dict) -> None:
    if any(_version(package) != versions[package] for package in ("jax", "numpyro")):
        # Another version may write the same density in other operations: what is left is what distributions it is made of.
        theirs, own = ({n: dataclasses.replace(s, value="", density="") for n, s in x.items()} for x in (theirs, own))
    difference = first_difference(theirs, own)
    if difference is not None:
        raise CheckpointError(
            f"the checkpoint {name!r} was written for another model than this PVI's, or for other data that it closes over: "
            f"{difference}. Make the PVI from the model that the file was written with, or start anew."
        )


def _describe(thing: Any, salt: str) -> dict[str, Any]:
    if not dataclasses.is_dataclass(thing):
        return {"type": type(thing).__name__, "fields": {}}
    fields = {f.name: _in_words(getattr(thing, f.name), salt) for f in dataclasses.fields(thing)}
    return {"type": type(thing).__name__, "fields": fields}


def _in_words(value: Any, salt: str) -> str:
    if storable(value):
        return repr(value)
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return f"{value.dtype}{list(value.shape)} {fingerprint(value, salt)[:16]}"
    if isinstance(value, dict) and all(map(storable, value)):
        return "{" + ", ".join(f"{k!r}: {_in_words(v, salt)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(_in_words(x, salt) for x in value)})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _shown(described := _describe(value, salt), list(described["fields"]))
    if isinstance(value, functools.partial):
        return f"partial({', '.join(_in_words(x, salt) for x in (value.func, value.args, value.keywords))})"
    return value.__qualname__ if isinstance(value, types.FunctionType) else type(value).__name__


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
