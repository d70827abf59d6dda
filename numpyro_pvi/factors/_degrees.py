"""Prove what a traced function is of some of its inputs, for all values of all of them: an interpreter of its jaxpr.

Every array is given a :class:`Form`. Calls, branches and scans are followed; what is not followed is unknown.

References:
    Hoffman, Johnson and Tran, Autoconj: Recognizing and Exploiting Conjugacy Without a Domain-Specific Language (2018), whose
    idea of reading conjugacy off a trace this is, without rewriting.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from ._forms import (
    Form,
    Statistics,
    absolute,
    add,
    all_labels,
    aside,
    constant,
    contract,
    divided,
    elementwise,
    logarithm,
    plain_sign,
    power,
    summed,
    times,
    unknown,
)
from ._primitives import CALLS, ENTRYWISE, KINKLESS, KINKS, MIXED, MOVED, PLACED, SMOOTH, names

_LARGE, _TINY = 1e30, 1e-30
_SCAN_ROUNDS = 12
_NO_STATISTICS = Statistics()
_JAX = os.path.dirname(jax.__file__)


def forms_of(closed: Any, inputs: Sequence[Form], statistics: Statistics = _NO_STATISTICS) -> list[Form]:
    """The forms of a traced function's outputs.

    Args:
        closed: a closed jaxpr, as of ``jax.make_jaxpr``.
        inputs: one form per input.
        statistics: what the kind "statistics" means.

    Returns:
        One form per output, true of all values of all inputs and of what the function closes over.
    """
    return _Interpreter(statistics).walk(closed.jaxpr, list(inputs))


_NOTHING = Form()


class _Interpreter:
    def __init__(self, statistics: Statistics):
        self.statistics = statistics
        self.places = 0

    def walk(self, jaxpr: Any, inputs: list[Form]) -> list[Form]:
        """The forms of a jaxpr's outputs."""
        found: dict[Any, Form] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(var: Any) -> Form:
            return _literal(var) if isinstance(var, Literal) else found.get(var, _NOTHING)

        for eqn in jaxpr.eqns:
            for var, form in zip(eqn.outvars, self.equation(eqn, [read(v) for v in eqn.invars]), strict=True):
                found[var] = form
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, forms: list[Form]) -> list[Form]:
        """The forms of one equation's outputs."""
        name = eqn.primitive.name
        if name in CALLS:
            return self._called(_inner(eqn), forms)
        if name in _CONTROL:
            return _CONTROL[name](self, eqn, forms)
        if name == "optimization_barrier":
            return forms
        return [self._single(name, eqn, forms)] * len(eqn.outvars)

    def _single(self, name: str, eqn: Any, forms: list[Form]) -> Form:
        if all(f.constant for f in forms):
            return self._still(name, eqn, forms)
        checked = _check(eqn, forms)
        if checked is not None:
            return checked
        found = self._moving(name, eqn, forms)
        return found if found.constant else found._replace(value=None, place=self._place(name, eqn, forms))

    def _moving(self, name: str, eqn: Any, forms: list[Form]) -> Form:
        if any(f.link == _NDTR for f in forms):
            return _inside_ndtr(forms)
        if any(f.link == _TURNED for f in forms) and name not in PLACED | {"cos", "sin"}:
            return unknown(forms)
        if name in _RULES:
            return _RULES[name](eqn, forms, self.statistics)
        if name in PLACED:
            return forms[0]
        if name in MIXED:
            alone = name == "reduce_sum" and eqn.invars[0].aval.size == eqn.outvars[0].aval.size
            return forms[0] if alone else summed(forms[0])
        if name in KINKS:
            return _kink(eqn, forms)
        return unknown(forms, name) if name in SMOOTH else unknown(forms, opaque=name)

    def _place(self, name: str, eqn: Any, forms: list[Form]) -> int | None:
        """Where entries come from: moved ones from a new place, those of several places from none."""
        places = {f.place for f in forms if not f.constant}
        if name in MOVED and None not in places and (len(places) == 1 or name in ("concatenate", "stack")):
            self.places += 1
            return self.places
        alone = name == "reduce_sum" and eqn.invars[0].aval.size == eqn.outvars[0].aval.size
        return places.pop() if len(places) == 1 and (alone or name in ENTRYWISE) else None

    def _still(self, name: str, eqn: Any, forms: list[Form]) -> Form:
        """Of constants: their value and sign where they are known, which switches, shifts and bounds ask for."""
        if name == "stop_gradient":
            return forms[0]._replace(labels=frozenset())
        if name in PLACED or (name == "convert_element_type" and forms[0].value is not None):
            return forms[0]
        if name in _FOLDED:
            return _RULES[name](eqn, forms, self.statistics)
        return constant(forms)._replace(sign={"exp": "+", "logistic": "unit"}.get(name, ""))

    def _called(self, inner: Any, forms: list[Form]) -> list[Form]:
        """Of a function called in the jaxpr; JAX's softplus is known as a whole."""
        name = _jax_name(inner)
        if name == "logaddexp" and forms[1].value == 0.0 and forms[0].at_most(1) and not forms[0].constant:
            return [Form("link", link="softplus", sign="+", labels=all_labels(forms))]
        if name == "remainder" and _is_turn(forms[1].value) and forms[0].own is not None:
            # The sine and cosine of what is left are those of the angle; anything else has a kink.
            return [forms[0]._replace(kind="link", degree=0, link=_TURNED, kink="rem", sign="")]
        found = self.walk(inner, forms)
        if name in KINKLESS and not any(f.kink for f in forms):
            found = [f._replace(kink="", smooth=name) if f.kink else f for f in found]
        return found

    def _cond(self, eqn: Any, forms: list[Form]) -> list[Form]:
        branches = [self.walk(b.jaxpr, forms[1:]) for b in eqn.params["branches"]]
        joined = [aside(each, self.statistics, "branches") for each in zip(*branches, strict=True)]
        if forms[0].constant:
            return [f._replace(labels=f.labels | forms[0].labels) for f in joined]
        return [unknown([f, forms[0]], kink="cond") for f in joined]

    def _scan(self, eqn: Any, forms: list[Form]) -> list[Form]:
        body, fixed, carried = eqn.params["jaxpr"].jaxpr, eqn.params["num_consts"], eqn.params["num_carry"]
        consts, carry, xs = forms[:fixed], forms[fixed : fixed + carried], forms[fixed + carried :]
        for _ in range(_SCAN_ROUNDS):
            found = self.walk(body, [*consts, *carry, *xs])
            # The first round's carry may be a constant of known value, or an entry alone; later ones need not be.
            joined = [
                aside([_later(a), _later(b)], self.statistics, "scan") for a, b in zip(carry, found, strict=False)
            ]
            if joined == carry:
                return [*carry, *found[carried:]]
            carry = joined
        return [unknown(forms, opaque="scan")] * len(eqn.outvars)

    def _while(self, eqn: Any, forms: list[Form]) -> list[Form]:
        if all(f.constant for f in forms):
            return [constant(forms)] * len(eqn.outvars)
        return [unknown(forms, opaque="while")] * len(eqn.outvars)


_CONTROL: dict[str, Callable] = {"cond": _Interpreter._cond, "scan": _Interpreter._scan, "while": _Interpreter._while}


def _is_turn(value: float | None) -> bool:
    return value is not None and abs(value - 2 * math.pi) < 1e-6


def _later(form: Form) -> Form:
    return form._replace(value=None, own=None, sign=plain_sign(form), place=None)


def _literal(literal: Any) -> Form:
    try:
        return constant((), float(literal.val))
    except (TypeError, ValueError):
        return Form()


def _is_float(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)


def _check(eqn: Any, forms: list[Form]) -> Form | None:
    """The answer to what distributions ask of values, and densities of numbers that may overflow: true of finite reals."""
    name = eqn.primitive.name
    if name == "is_finite":
        return constant(forms, 1.0)
    if name not in ("eq", "ne", "lt", "le", "gt", "ge"):
        return None
    a, b = forms
    if name in ("eq", "ne"):
        if eqn.invars[0] is eqn.invars[1]:
            return constant(forms, float(name == "eq"))
        if b.value is not None and math.isinf(b.value):
            return constant(forms, float(name == "ne"))
        # Two analytic functions are equal everywhere, or on a set that no density gives weight.
        analytic = _is_float(eqn.invars[0]) and not any(f.kink or f.opaque for f in forms)
        return constant(forms) if analytic else None
    if b.value is None or a.constant:
        return None
    if a.positive and b.value <= 0 and name in ("gt", "ge"):
        return constant(forms, 1.0)
    below = name in ("lt", "le")
    turn = a.sign == "angle" and (b.value if below else -b.value) >= math.pi - 1e-6
    return constant(forms, 1.0) if turn or (a.sign == "unit" and b.value >= 1 and below) else None


def _guard(name: str, a: Form, b: Form, eqn: Any) -> Form | None:
    """What a maximum or minimum leaves as it is: bounds at the ends of a format, and of what is positive or a probability."""
    if a.constant:
        a, b = b, a
    if not b.constant or b.value is None:
        return None
    positive = a.positive or a.link == "exp"
    eps = float(jnp.finfo(eqn.outvars[0].aval.dtype).eps) if _is_float(eqn.outvars[0]) else 0.0
    if name == "max":
        return a if b.value < -_LARGE or (positive and b.value < _TINY) else None
    return a if b.value > _LARGE or (a.sign == "unit" and b.value >= 1 - 2 * eps) else None


def _extreme(eqn: Any, forms: list[Form]) -> Form:
    found = _guard(eqn.primitive.name, *forms, eqn)
    return _kink(eqn, forms) if found is None else found._replace(labels=all_labels(forms))


def _kink(eqn: Any, forms: list[Form]) -> Form:
    name = eqn.primitive.name
    if name == "abs" and (found := absolute(forms[0])) is not None:
        return found
    functions = _functions(eqn)
    if any(f.startswith(_ALWAYS_TRUE) for f in functions.get(_CONSTRAINTS, ())):
        return constant(forms, 1.0)
    jax_functions = functions.get(_JAX, frozenset())
    if jax_functions & {"ndtr", "_ndtr"} and all(f.at_most(1) or f.link == _NDTR for f in forms):
        return Form("link", link=_NDTR, labels=all_labels(forms))
    return unknown(forms, name) if jax_functions & KINKLESS else unknown(forms, kink=name)


# NumPyro's constraints without bounds, which a latent's own value meets wherever it is.
_CONSTRAINTS = "numpyro/distributions/constraints.py"
_ALWAYS_TRUE = ("_Simplex", "_PositiveDefinite", "_PositiveOrderedVector", "_OrderedVector", "_CorrCholesky", "_CorrMatrix",
    "_LowerCholesky", "_ScaledUnitLowerCholesky", "_Circular", "_Sphere")  # fmt: skip
# What stands inside of JAX's ndtr, whose only input is affine, before its last product.
_NDTR = "of ndtr"
# An angle less whole turns.
_TURNED = "turned"


def _functions(eqn: Any) -> dict[str, frozenset[str]]:
    """Names of the library functions that wrote an equation: JAX's own, and those of NumPyro's constraints."""
    traceback = eqn.source_info.traceback
    frames = () if traceback is None else traceback.frames
    where = {_JAX: lambda f: f.startswith(_JAX), _CONSTRAINTS: lambda f: f.replace(os.sep, "/").endswith(_CONSTRAINTS)}
    return {k: frozenset(f.function_name for f in frames if test(f.file_name)) for k, test in where.items()}


def _jax_name(jaxpr: Any) -> str:
    """Name of the JAX function that a jaxpr is of; empty for a user's."""
    info = getattr(jaxpr.debug_info, "func_src_info", None) or ""
    name, _, where = info.partition(" at ")
    return name if where.startswith(_JAX) else ""


def _inner(eqn: Any) -> Any:
    found = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params)
    return getattr(found, "jaxpr", found)


def _inside_ndtr(forms: list[Form]) -> Form:
    inside = all(f.at_most(1) or f.link in (_NDTR, "erf", "1 + erf") for f in forms)
    if not inside:
        return unknown(forms, "ndtr")
    done = len(forms) == 2 and 0.5 in (forms[0].value, forms[1].value)
    return Form("link", link="probit" if done else _NDTR, sign="unit" if done else "", labels=all_labels(forms))


def _add_rule(eqn: Any, forms: list[Form], statistics: Statistics) -> Form:
    if eqn.primitive.name == "sub":
        forms = [forms[0], _negative(forms[1])]
    return add(forms, statistics, eqn.primitive.name)


def _negative(form: Form) -> Form:
    minus = constant((), -1.0)
    return times(form, minus, _NO_STATISTICS)


def _mul_rule(eqn: Any, forms: list[Form], statistics: Statistics) -> Form:
    return times(*forms, statistics, same=eqn.invars[0] is eqn.invars[1])


def _pow_rule(eqn: Any, forms: list[Form], statistics: Statistics) -> Form:
    base, exponent = forms
    if exponent.constant and exponent.value is not None:
        return power(base, exponent.value, statistics)
    if exponent.constant and base.link == "exp":
        return base._replace(labels=all_labels(forms))
    if base.constant and exponent.at_most(1):
        return Form("link", link="exp", sign=plain_sign(base), labels=all_labels(forms))
    return unknown(forms, "pow")


def _select_rule(eqn: Any, forms: list[Form], statistics: Statistics) -> Form:
    which, *cases = forms
    if not which.constant:
        return _kink(eqn, forms)
    if which.value is not None:
        return cases[int(which.value)]
    found = aside(cases, statistics, "where")
    return found._replace(labels=found.labels | which.labels)


def _join_rule(eqn: Any, forms: list[Form], statistics: Statistics) -> Form:
    return aside(forms, statistics, eqn.primitive.name)


def _taken(eqn: Any, forms: list[Form], statistics: Statistics) -> Form:
    """Entries at places that other operands say."""
    if not all(f.constant for f in forms[1:]):
        return unknown(forms, kink=f"{eqn.primitive.name} at moving places")
    # What lies outside may be filled up with constants.
    return forms[0]._replace(labels=all_labels(forms), value=None)


def _put(eqn: Any, forms: list[Form], statistics: Statistics) -> Form:
    """Entries written, or added, at places that other operands say."""
    name = eqn.primitive.name
    values, places = ([forms[0], forms[2]], forms[1:2]) if name.startswith("scatter") else (forms[:2], forms[2:])
    if not all(f.constant for f in places):
        return unknown(forms, kink=f"{name} at moving places")
    if name in ("scatter", "dynamic_update_slice"):
        found = aside(values, statistics, name)
    elif name in ("scatter-add", "scatter_add"):
        found = summed(add([summed(v) for v in values], statistics, name))
    else:
        found = unknown(forms, opaque=name)
    return found._replace(labels=all_labels(forms))


def _solve_rule(eqn: Any, forms: list[Form], statistics: Statistics) -> Form:
    """Of linear systems: linear in the right-hand side, where nothing else moves."""
    name = eqn.primitive.name
    count = 1 if name == "triangular_solve" else len(eqn.outvars)
    if not all(f.constant for f in forms[:-count]):
        return unknown(forms, opaque=name)
    right = aside([summed(f) for f in forms[-count:]], statistics, name)
    return right._replace(labels=all_labels(forms), sign="")


def _convert_rule(eqn: Any, forms: list[Form], statistics: Statistics) -> Form:
    return forms[0] if _is_float(eqn.outvars[0]) else _kink(eqn, forms)


def _logic_rule(eqn: Any, forms: list[Form], statistics: Statistics) -> Form:
    """Of constants, some of which are known."""
    name, values = eqn.primitive.name, [f.value for f in forms]
    if not all(f.constant for f in forms):
        return _kink(eqn, forms)
    if eqn.outvars[0].aval.dtype != bool:
        return constant(forms)
    if name == "not":
        return constant(forms, None if values[0] is None else 1.0 - values[0])
    end = float(name == "or")
    return constant(forms, end if end in values else None if None in values else 1.0 - end)


_RULES: dict[str, Callable[[Any, list[Form], Statistics], Form]] = {
    **dict.fromkeys(("add", "sub", "add_any"), _add_rule),
    **dict.fromkeys(("concatenate", "stack", "pad"), _join_rule),
    **dict.fromkeys(("dot_general", "conv_general_dilated"), lambda eqn, forms, _: contract(*forms)),
    **dict.fromkeys(("gather", "dynamic_slice"), _taken),
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "dynamic_update_slice"), _put
    ),
    **dict.fromkeys(("triangular_solve", "custom_linear_solve"), _solve_rule),
    **dict.fromkeys(
        ("exp", "exp2", "logistic", "erf", "cos", "sin"), lambda eqn, f, s: elementwise(eqn.primitive.name, f[0], s)
    ),
    **dict.fromkeys(("and", "or", "not"), _logic_rule),
    **dict.fromkeys(("max", "min"), lambda eqn, forms, _: _extreme(eqn, forms)),
    "neg": lambda eqn, forms, _: _negative(forms[0]),
    "mul": _mul_rule,
    "div": lambda eqn, forms, statistics: divided(*forms, statistics),
    "integer_pow": lambda eqn, forms, statistics: power(forms[0], float(eqn.params["y"]), statistics),
    "square": lambda eqn, forms, statistics: power(forms[0], 2.0, statistics),
    "sqrt": lambda eqn, forms, statistics: power(forms[0], 0.5, statistics),
    "rsqrt": lambda eqn, forms, statistics: power(forms[0], -0.5, statistics),
    "cbrt": lambda eqn, forms, statistics: power(forms[0], 1 / 3, statistics),
    "pow": _pow_rule,
    "log": lambda eqn, forms, statistics: logarithm(forms[0], 0.0, statistics),
    "log1p": lambda eqn, forms, statistics: logarithm(forms[0], 1.0, statistics),
    "select_n": _select_rule,
    "convert_element_type": _convert_rule,
}
# Rules that know what becomes of known constants.
_FOLDED = names("add sub add_any mul div neg integer_pow square select_n and or not")
