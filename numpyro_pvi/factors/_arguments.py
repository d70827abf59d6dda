"""A model's arguments: checked and converted before anything is traced, and what of them is traced and what is hashed.

Arrays are JAX's and traced. Those whose values a model reads in Python (``len(np.unique(idx))`` as a plate's size) have to
stay concrete: they are kept as NumPy arrays, which are part of a program like numbers and text, and compared by content.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .._compiling import content, on_device
from ..errors import DataError, StateError


@dataclasses.dataclass(frozen=True)
class ReadByValue:
    """An array that a model reads values of, as a leaf that can be hashed; equal to another of the same content."""

    array: np.ndarray = dataclasses.field(compare=False, repr=False)
    digest: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Take the digest."""
        object.__setattr__(self, "digest", digest_of(self.array))


def digest_of(array: np.ndarray) -> str:
    """SHA-256 of an array's dtype, shape and content."""
    found = hashlib.sha256(f"{array.dtype} {array.shape} ".encode())
    found.update(content(array))
    return found.hexdigest()


def is_dynamic(leaf: Any) -> bool:
    """Whether a leaf of converted arguments is an array that is traced."""
    return hasattr(leaf, "dtype") and not isinstance(leaf, np.ndarray)


def split_arguments(args: tuple, kwargs: dict) -> tuple[list, tuple]:
    """Separate the arrays of a model's arguments, which are traced, from the static leaves, which are hashed.

    ``args``: positional arguments; ``kwargs``: keyword arguments. Returns ``(arrays, static)``; ``static`` is hashable.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = [x for x in leaves if is_dynamic(x)]
    return arrays, (structure, tuple(None if is_dynamic(x) else (_hashable(x),) for x in leaves))


def join_arguments(arrays: list, static: tuple) -> tuple[tuple, dict]:
    """The inverse of :func:`split_arguments`."""
    structure, kept = static
    rest = iter(arrays)
    return structure.unflatten([next(rest) if leaf is None else _plain(leaf[0]) for leaf in kept])


def _hashable(leaf: Any) -> Any:
    return ReadByValue(leaf) if isinstance(leaf, np.ndarray) else leaf


def _plain(leaf: Any) -> Any:
    return leaf.array if isinstance(leaf, ReadByValue) else leaf


# ------------------------------------------------------------------------------------------------ checks and conversion
# Checks and conversion of a model's arguments, before anything is traced.
#
# What is an array and what is static: numeric arrays, lists of numbers and floats become JAX arrays (traced); None,
# str, bool, int and any other object are left as they are (static), so that a model may branch on them or size
# something by them. A list of ints is data and becomes an array; write static sizes as a tuple.

_SHOWN_ROWS = 10


@dataclass(frozen=True)
class LeafSignature:
    """What must not change in one leaf of the arguments.

    Attributes:
        name: Where it is, as messages say it: ``argument 0 ('X')`` or ``argument 'data'['x']``.
        shape: Shape of an array; None for a static leaf.
        dtype: Name of an array's dtype as JAX holds it; of a static leaf, its type's name.
        static: Value of a static leaf; None for an array.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    static: Hashable = None
    # Whether the model reads the values of this array: its content is then static, and `static` its digest.
    by_value: bool = False

    def __str__(self) -> str:
        if self.by_value:
            return f"{self.dtype} array read by value (digest {str(self.static)[:8]})"
        return f"{self.dtype} of shape {self.shape}" if self.shape is not None else f"{self.dtype} {self.static!r}"


@dataclass(frozen=True)
class ArgumentSignature:
    """Structure, shapes, dtypes and static values of a model's arguments; hashable.

    Attributes:
        structure: Tree structure of ``(args, kwargs)``.
        leaves: One signature per leaf, in tree order.
    """

    structure: Hashable
    leaves: tuple[LeafSignature, ...]

    @property
    def by_value(self) -> tuple[int, ...]:
        """Places of the arrays that the model reads values of."""
        return tuple(place for place, leaf in enumerate(self.leaves) if leaf.by_value)


def as_arrays(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str] = (), by_value: Collection[int] = ()
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert the numeric leaves of the arguments to JAX arrays, once.

    ``args``: Positional arguments: pytrees of arrays, pandas columns, lists of numbers, scalars; ``kwargs``: Keyword arguments,
    likewise; ``names``: Names of the positional arguments, for messages; ``by_value``: Places (in the order of leaves) of
    arrays that the model reads values of: they become NumPy's. Returns the arguments with the same structure; dtypes are JAX's
    (float64 becomes float32 unless x64 is enabled), static leaves are unchanged. Raises DataError for text, object or date
    arrays, ragged lists, sparse matrices, and integers that JAX's dtype cannot hold; StateError for an array to be read by
    value that is traced, and has none.
    """
    leaves, structure = _flatten(args, kwargs)
    converted = [
        (_concrete if place in by_value else _convert)(leaf, _name(path, names))
        for place, (path, leaf) in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, converted)


def _concrete(leaf: Any, name: str) -> Any:
    """One leaf as a NumPy array of JAX's dtype; as it is when it is static."""
    if isinstance(leaf, jax.core.Tracer):
        raise StateError(
            f"{name} is traced, but the model reads its values in Python (to size a plate, say): close over it instead of passing "
            "it through jit, jit(lambda state, X: pvi.update(state, X, idx))."
        )
    if isinstance(leaf, bool | int) or not (isinstance(leaf, list) or hasattr(leaf, "__array__")):
        return leaf
    # Not by way of JAX, which gives a constant no value while it traces.
    array = _to_numpy(leaf, name)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))


def check_finite_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str] = ()) -> None:
    """Refuse NaN and infinity in the arguments. Traced arrays have no values yet and pass.

    ``args``: Positional arguments; ``kwargs``: Keyword arguments; ``names``: Names of the positional arguments, for messages.
    Raises DataError Names the argument, the number of non-finite entries and the first rows they are in, never a value; and
    whatever `as_arrays` refuses.
    """
    for path, leaf in _flatten(args, kwargs)[0]:
        name = _name(path, names)
        array = _convert(leaf, name)
        if not _is_array(array) or isinstance(array, jax.core.Tracer) or not _can_be_nonfinite(array.dtype):
            continue
        # On another device one number crosses back; rows are looked for only when something is wrong.
        finite = np.isfinite(np.asarray(array)) if _on_host(array) else jnp.isfinite(array)
        if bool(finite.all()):
            continue
        raise DataError(_nonfinite_message(name, np.asarray(~finite)))


def _on_host(array: Any) -> bool:
    """Whether NumPy reads the array in place: no copy, and nothing to compile."""
    return isinstance(array, np.ndarray) or all(device.platform == "cpu" for device in array.devices())


def signature_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str] = (), by_value: Collection[int] = ()
) -> ArgumentSignature:
    """Take down what must stay the same between ``init`` and ``update``.

    ``args``: Positional arguments, converted by `as_arrays` or not: both give the same signature; ``kwargs``: Keyword
    arguments; ``names``: Names of the positional arguments, for messages; ``by_value``: Places of the arrays that the model
    reads values of, whose content is part of the signature. Returns a hashable record, equal for calls that compile to the same
    program. Raises DataError for a static leaf that is not hashable, and whatever `as_arrays` refuses.
    """
    leaves, structure = _flatten(args, kwargs)
    return ArgumentSignature(
        structure,
        tuple(_leaf_signature(leaf, _name(path, names), i in by_value) for i, (path, leaf) in enumerate(leaves)),
    )


def check_same_signature(expected: ArgumentSignature, got: ArgumentSignature) -> None:
    """Refuse arguments that do not fit the state they come with.

    ``expected``: Signature of the arguments given to ``init``; ``got``: Signature of the arguments given now. Raises StateError
    Names the first argument that changed, with what is expected and what was given.
    """
    if expected == got:
        return
    if expected.structure != got.structure:
        raise StateError(_structure_message(expected, got))
    before, now = next(pair for pair in zip(expected.leaves, got.leaves, strict=True) if pair[0] != pair[1])
    raise StateError(
        f"{now.name} is {now}, but the state was made with {before}. Groups, packed rows and compiled steps are fixed "
        "by "
        "`init`: pass the same kind of data, or call `init` again with the new arguments."
    )


def _flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[tuple[Any, Any]], Any]:
    return jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=_is_number_list)


def _is_number_list(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, Number | np.generic) or _is_number_list(item) for item in value)


def _name(path: tuple[Any, ...], names: Sequence[str]) -> str:
    """``argument 0 ('X')['inner']`` from a key path into ``(args, kwargs)``."""
    place, first, rest = path[0].idx, path[1], path[2:]
    if place == 1:
        name = f"argument {first.key!r}"
    else:
        name = f"argument {first.idx}" + (f" ({names[first.idx]!r})" if first.idx < len(names) else "")
    return name + jax.tree_util.keystr(rest)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)


def _can_be_nonfinite(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def positional_names(model: Callable) -> tuple[str, ...]:
    """Names of a model's positional parameters, for messages."""
    # Every update asks for them: of a plain function, which nothing wraps, its code has them at a hundredth of the time.
    if isinstance(model, types.FunctionType) and not vars(model):
        return model.__code__.co_varnames[: model.__code__.co_argcount]
    try:
        parameters = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def _convert(leaf: Any, name: str) -> Any:
    """One leaf as a JAX array, or as it is when it is static."""
    if isinstance(leaf, np.integer | np.bool_):
        return leaf.item()
    if _is_array(leaf) or leaf is None or isinstance(leaf, str | bytes | bool | int):
        return leaf
    if isinstance(leaf, float | complex):
        return jnp.asarray(leaf)
    if isinstance(leaf, np.ma.MaskedArray):
        raise DataError(
            f"{name} is a masked array, whose mask would be lost: pass `{_called(name)}.filled(0.0)`, any finite number in place "
            f"of what is masked, and `~np.ma.getmaskarray({_called(name)})` as an argument of its own for `obs_mask` or "
            "`numpyro.handlers.mask`."
        )
    if hasattr(leaf, "toarray"):
        raise DataError(f"{name} is a {type(leaf).__name__}, a sparse matrix: pass a dense array, `.toarray()`.")
    if not (isinstance(leaf, list) or hasattr(leaf, "__array__")):
        return leaf
    return _to_jax(_to_numpy(leaf, name), name)


def _to_numpy(leaf: Any, name: str) -> np.ndarray:
    try:
        array = np.asarray(leaf)
    except ValueError as error:
        raise DataError(f"{name} is a list whose rows have different lengths: pass a rectangular array.") from error
    if array.dtype.kind in "OUSMmV":
        columns = f" {_by_name(name)}" if is_frame(leaf) else ""
        raise DataError(
            f"{name} holds {_kind(array.dtype)} (dtype {array.dtype}), which cannot enter a density: encode it as "
            f"numbers before, for example categories as ints from 0.{columns}"
        )
    # JAX takes numbers in the machine's own order of bytes only.
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def is_frame(leaf: Any) -> bool:
    """Whether something is a table whose columns have names."""
    return hasattr(leaf, "columns") and hasattr(leaf, "to_numpy")


def _by_name(name: str) -> str:
    called = _called(name)
    return (
        f"Models see a table as one array, without its columns' names: pass what the model takes by name as a dict, "
        f"{{c: {called}[c].to_numpy() for c in {called}.columns}}, whose length is that of a column, len({called}['x'])."
    )


@contextlib.contextmanager
def frames_named(args: tuple, kwargs: dict, names: Sequence[str]) -> Iterator[None]:
    """Around a first look at a model: say what to pass where it takes a table's columns by name.

    ``args``: positional arguments as they were given; ``kwargs``: keyword arguments; ``names``: of the positional ones. Raises
    DataError naming the table.
    """
    try:
        yield
    except TypeError as error:
        paths = jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=is_frame)
        found = [_name(path, names) for path, leaf in paths if is_frame(leaf)]
        if not found or "string indexing" not in str(error):
            raise
        raise DataError(f"{found[0]} is a table, and the model asks it for a column. {_by_name(found[0])}") from error


def _called(name: str) -> str:
    """The argument as code has it: what stands between quotes first, ``X`` in ``argument 0 ('X')``."""
    return name.split("'")[1] if name.count("'") > 1 else "data"


def _to_jax(array: np.ndarray, name: str) -> jax.Array:
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if array.dtype.kind in "iu" and array.size and dtype != array.dtype:
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise DataError(
                f"{name} has integers that do not fit {dtype}, JAX's default: pass small codes instead, or enable x64 "
                "(jax.config.update('jax_enable_x64', True))."
            )
    # Floats beyond the narrower dtype become infinite, which the check for finite values reports by row.
    with np.errstate(over="ignore"):
        return on_device(array, dtype)


def _kind(dtype: np.dtype) -> str:
    return {"O": "objects", "U": "text", "S": "text", "V": "records"}.get(dtype.kind, "dates or time spans")


def _nonfinite_message(name: str, bad: np.ndarray) -> str:
    count = int(bad.sum())
    if bad.ndim == 0:
        return f"{name} is not finite (NaN or infinity): pass a finite number."
    rows = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1))
    shown = ", ".join(str(row) for row in rows[:_SHOWN_ROWS]) + (", ..." if len(rows) > _SHOWN_ROWS else "")
    return (
        f"{name} has {count} non-finite (NaN or infinite) entr{'y' if count == 1 else 'ies'} in {len(rows)} row(s), "
        f"first at row(s) {shown}: drop those rows or impute them. Under `obs_mask`, or a mask of your own, fill "
        "masked entries "
        "with any finite number: the mask keeps them out of the likelihood."
    )


def _leaf_signature(leaf: Any, name: str, by_value: bool) -> LeafSignature:
    if by_value and isinstance(leaf, np.ndarray):
        return LeafSignature(name, None, f"{leaf.dtype}{leaf.shape}", digest_of(leaf), True)
    leaf = _convert(leaf, name)
    if _is_array(leaf):
        return LeafSignature(name, tuple(leaf.shape), str(leaf.dtype))
    try:
        hash(leaf)
    except TypeError as error:
        raise DataError(
            f"{name} is a {type(leaf).__name__}, neither an array nor hashable: pass arrays, or build it inside the "
            "model."
        ) from error
    return LeafSignature(name, None, type(leaf).__name__, leaf)


def _structure_message(expected: ArgumentSignature, got: ArgumentSignature) -> str:
    before, now = [leaf.name for leaf in expected.leaves], [leaf.name for leaf in got.leaves]
    missing = [name for name in before if name not in now]
    added = [name for name in now if name not in before]
    parts = [f"missing: {', '.join(missing)}"] * bool(missing) + [f"not there before: {', '.join(added)}"] * bool(added)
    what = "; ".join(parts) or f"containers differ, expected {expected.structure}, got {got.structure}"
    return (
        f"the arguments are not those the state was made with ({what}). Pass what `init` was given, positional and by "
        "keyword alike, or call `init` again."
    )
