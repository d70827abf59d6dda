"""Prove what a traced function is of some of its inputs, for all values of all of them: an interpreter of its jaxpr."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxpr_as_fun
from jaxtyping import Array
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to

from ._model import ModelCall

# ---------------------------------------------------------------------------------------------------------------- forms
# Forms: what is known of an array for all values of some inputs, and what arithmetic makes of them.
#
# A form is a polynomial of some degree in the marked inputs, a *link* (an elementwise exponential, logistic, ... of
# something affine in them), affine in given statistics of them, or unknown. An unknown says why: a *kink* (a maximum,
# an absolute value, a switch: pieces that values at a few points may miss), a smooth function that is none of these, or
# a primitive that is not followed. Degrees are bounds: w**2 - w**2 has degree 2 here.

_MAX_DEGREE = 8
# Sizes of known constants whose powers are followed.
_TINY = 1e-30
_NAN = math.nan


class Own(NamedTuple):
    """Elementwise ``shift + factor * x**power`` of a marked input x; NaN for some constant. Entries may also be constant.

    ``positive``: whether x is known to be positive.
    """

    shift: float = 0.0
    factor: float = 1.0
    power: float = 1.0
    positive: bool = False


_ANYWHERE = (-math.inf, math.inf)


class Form(NamedTuple):
    """What is known of one array.

    ``kind``: "poly", "link", "statistics" (affine in the statistics asked for), "own" (a power that is neither) or "unknown";
    ``degree``: of a polynomial, jointly in all marked inputs; 0 is no dependence on them; ``own``: the elementwise form, where
    it is one; ``sign``: "+" for positive entries, "unit" for entries in (0, 1), "-unit" for their negatives, "" where that is
    not known; ``kink``: the primitive, where a kink may have shaped it; ``jump``: the primitive, where values may jump, which
    no derivative says; ``opaque``: the primitive that was not followed; ``smooth``: the smooth primitive that took it out of
    all forms; ``labels``: of the inputs that it depends on; ``place``: not None where every entry depends on one marked entry
    at most; entries of two forms with the same place depend on the same ones; ``ends``: what the entries of a marked input lie
    between, while they are as they were.
    """

    kind: str = "poly"
    degree: int = 0
    link: str = ""
    own: Own | None = None
    value: float | None = None
    sign: str = ""
    kink: str = ""
    jump: str = ""
    opaque: str = ""
    smooth: str = ""
    labels: frozenset[str] = frozenset()
    place: int | None = None
    ends: tuple[float, float] = _ANYWHERE

    @property
    def constant(self) -> bool:
        """Whether it does not depend on the marked inputs, whatever the others are."""
        return self.kind == "poly" and self.degree == 0

    @property
    def positive(self) -> bool:
        """Whether all entries are known to be positive."""
        return self.sign in ("+", "unit")

    def at_most(self, degree: int) -> bool:
        """Whether it is proved to be a polynomial of at most this degree."""
        return self.kind == "poly" and self.degree <= degree

    @property
    def predictor_link(self) -> str:
        """Name of the link under which it is proved to be affine ("identity", "log", "logit", ...); "" where it is not."""
        return "identity" if self.at_most(1) else _PREDICTOR_LINKS.get(self.link, "")

    def forbids(self, single: bool, latents: str) -> bool:
        """Whether a structure that is not proved may not be guessed from values either.

        Kinks hide from points. What is known to be nonlinear is no structure where values cannot tell: in single precision, or
        where its size hangs on a parameter, which may begin where it vanishes. ``single``: whether values are float32;
        ``latents``: label of the marked inputs; all others move as well. Returns True where a guess must not stand.
        """
        if self.kink:
            return True
        return not self.opaque and (single or bool(self.labels - {latents}))


class Statistics(NamedTuple):
    """Which functions of a marked input count as "statistics": powers up to a degree, single powers, elementwise functions."""

    degree: int = 0
    powers: tuple[float, ...] = ()
    functions: frozenset[str] = frozenset()


_PREDICTOR_LINKS = {"exp": "log", "logistic": "logit", "softplus": "softplus", "probit": "probit"}


def marked(label: str, sign: str = "", ends: tuple[float, float] = _ANYWHERE) -> Form:
    """The form of an input whose structure is asked for, all of whose entries have a sign and lie as of :class:`Form`."""
    own = Own(positive=sign in ("+", "unit"))
    return Form(degree=1, own=own, sign=sign, labels=frozenset([label]), place=0, ends=ends)


def unmarked(*labels: str) -> Form:
    """The form of an input that may have any value, and counts as constant."""
    return Form(labels=frozenset(labels))


def is_affine(form: Form, statistics: Statistics) -> bool:
    """Whether a form is proved to be affine in the statistics."""
    return form.kind == "statistics" or form.at_most(statistics.degree)


def all_labels(forms: Sequence[Form]) -> frozenset[str]:
    """What any of some forms depends on."""
    return frozenset().union(*(f.labels for f in forms))


def unknown(forms: Sequence[Form], smooth: str = "", kink: str = "", opaque: str = "", jump: str = "") -> Form:
    """What is left of some forms after a primitive that leads out of all forms."""
    kinks = [n for n in (kink, *(f.kink for f in forms)) if n]
    kink = next((n for n in kinks if not is_guard(n)), kinks[0] if kinks else "")
    jump = next((n for n in (jump, *(f.jump for f in forms)) if n), "")
    opaque = next((n for n in (opaque, *(f.opaque for f in forms)) if n), "")
    smooth = next((n for n in (*(f.smooth for f in forms), smooth) if n), "")
    return Form("unknown", kink=kink, jump=jump, opaque=opaque, smooth=smooth, labels=all_labels(forms))


def constant(forms: Sequence[Form], value: float | None = None) -> Form:
    """The form of what is made of constants alone; its value where that is known."""
    sign = "" if value is None or not value > 0 else "unit" if value < 1 else "+"
    return Form(value=value, sign=sign, labels=all_labels(forms))


def _joint_sign(forms: Sequence[Form]) -> str:
    signs = {f.sign for f in forms}
    if len(signs) == 1:
        return signs.pop()
    return "+" if signs == {"+", "unit"} else ""


def _positive(forms: Sequence[Form]) -> str:
    return "+" if all(f.positive for f in forms) else ""


def aside(forms: Sequence[Form], statistics: Statistics, name: str) -> Form:
    """Of entries side by side: constants beside an elementwise form leave it what it is."""
    if all(f == forms[0] for f in forms):
        return forms[0]
    moving, rest = [f for f in forms if not f.constant], {"labels": all_labels(forms), "sign": _joint_sign(forms)}
    if not moving:
        return Form(**rest)
    if any(f.kind == "unknown" for f in moving):
        return unknown(forms)
    own = moving[0].own if all(f.own == moving[0].own for f in moving) else None
    if all(f.kind == "poly" for f in moving):
        return Form(degree=max(f.degree for f in moving), own=own, **rest)
    if all(f.kind == moving[0].kind and f.link == moving[0].link for f in moving) and own == moving[0].own:
        return moving[0]._replace(own=own, **rest)
    if all(is_affine(f, statistics) for f in moving):
        return Form("statistics", **rest)
    return unknown(forms, f"{name} of different functions")


def add(forms: Sequence[Form], statistics: Statistics, name: str) -> Form:
    """The form of a sum."""
    moving, still = [f for f in forms if not f.constant], [f for f in forms if f.constant]
    if not moving:
        known = [f.value for f in still if f.value is not None]
        return (
            constant(forms, sum(known))
            if len(known) == len(still)
            else Form(labels=all_labels(forms), sign=_positive(forms))
        )
    if any(f.kind == "unknown" for f in moving):
        return unknown(forms)
    rest = {"labels": all_labels(forms), "sign": _positive(forms)}
    if len(moving) == 1 and len(still) == 1:
        return _shifted(moving[0], still[0], rest)
    if all(f.kind == "poly" for f in moving):
        return Form(degree=max(f.degree for f in moving), **rest)
    if all(is_affine(f, statistics) for f in moving):
        return Form("statistics", **rest)
    return unknown(forms, name)


def _shifted(form: Form, by: Form, rest: dict) -> Form:
    """A form plus a constant."""
    shift = _NAN if by.value is None else by.value
    if form.sign == "-unit" and shift == 1.0:
        rest = rest | {"sign": "unit"}
    if form.kind in ("poly", "statistics") or (form.own is not None and form.own.power == -1.0):
        own = form.own if form.own is not None and form.own.power in (1.0, -1.0) else None
        return form._replace(own=own and own._replace(shift=own.shift + shift), **rest)
    if form.link in ("exp", "erf") and shift == 1.0:
        return form._replace(link="1 + " + form.link, **rest)
    if form.link == "-logistic" and shift == 1.0:
        return form._replace(link="logistic", **rest)
    return unknown([form, by], f"{form.link or 'power'} plus a constant")


def _scaled(form: Form, by: Form) -> Form:
    """A form times a constant."""
    if form.kind == "unknown":
        return unknown([form, by])
    factor = _NAN if by.value is None else by.value
    sign = "unit" if form.sign == by.sign == "unit" else _positive([form, by])
    sign = "-unit" if factor == -1.0 and form.sign == "unit" else sign
    rest = {"labels": form.labels | by.labels, "sign": sign}
    links = {("1 + erf", 0.5): "probit", ("logistic", -1.0): "-logistic"}
    if form.kind == "link" and form.link != "exp":
        if (form.link, factor) not in links:
            return unknown([form, by], f"{form.link} times a constant")
        link = links[form.link, factor]
        return form._replace(link=link, **rest | ({"sign": "unit"} if link == "probit" else {}))
    own = form.own
    if own is not None:
        own = own._replace(shift=own.shift * factor if own.shift else 0.0, factor=own.factor * factor)
    return form._replace(own=own, **rest)


def times(a: Form, b: Form, statistics: Statistics, same: bool = False) -> Form:
    """An elementwise product; ``same``: of an array with itself."""
    if a.constant and b.constant:
        value = None if a.value is None or b.value is None else a.value * b.value
        return constant([a, b], value) if value is not None else Form(labels=all_labels([a, b]), sign=_positive([a, b]))
    if a.constant or b.constant:
        return _scaled(b, a) if a.constant else _scaled(a, b)
    if same:
        return power(a, 2.0, statistics)
    one, other = a.own, b.own
    if one and other and a.place is not None and a.place == b.place and one.shift == other.shift == 0.0:
        product = one._replace(factor=one.factor * other.factor, power=one.power + other.power)
        return _of_own(product, a._replace(sign=_positive([a, b])), statistics)
    if a.kind == b.kind == "poly":
        return _poly(a.degree + b.degree, [a, b])
    return _both_exp(a, b) or unknown([a, b], "product")


def _both_exp(a: Form, b: Form) -> Form | None:
    """Products and quotients of exponentials of something affine are such exponentials."""
    if a.link == b.link == "exp":
        return a._replace(labels=a.labels | b.labels, sign=_positive([a, b]))
    return None


def _poly(degree: int, forms: Sequence[Form], own: Own | None = None) -> Form:
    if degree > _MAX_DEGREE:
        return unknown(forms, f"degree {degree}")
    return Form(degree=degree, own=own, sign=_positive(forms), labels=all_labels(forms))


def contract(a: Form, b: Form) -> Form:
    """A sum of products, whose entries are no function of single entries any more."""
    if a.constant and b.constant:
        return Form(labels=a.labels | b.labels, sign=_positive([a, b]))
    if a.kind == b.kind == "poly":
        return _poly(a.degree + b.degree, [a, b])
    return (
        summed(_scaled(b, a) if a.constant else _scaled(a, b))
        if a.constant or b.constant
        else unknown([a, b], "product")
    )


def summed(form: Form) -> Form:
    """A linear function that mixes entries."""
    if form.constant:
        return Form(sign=plain_sign(form), labels=form.labels)
    if form.kind in ("poly", "statistics"):
        return form._replace(own=None, sign=plain_sign(form))
    return unknown([form], f"sum of {form.link or 'powers'}")._replace(sign=plain_sign(form))


def plain_sign(form: Form) -> str:
    """The sign of what keeps a form's sign and not its bound."""
    return "+" if form.positive else ""


def power(form: Form, exponent: float, statistics: Statistics) -> Form:
    """The form of a power."""
    if form.constant:
        value = None
        if (
            form.value is not None
            and _TINY < abs(form.value) < 1 / _TINY
            and (form.value > 0 or exponent == int(exponent))
        ):
            value = form.value**exponent
        found = constant([form], value)
        return found if value is not None else found._replace(sign=plain_sign(form))
    if form.link == "exp":
        return form
    own, whole = form.own, exponent >= 0 and exponent == int(exponent)
    # The root of a square is an absolute value, but of what is positive.
    if own is not None and own.shift == 0.0 and (form.positive or exponent == int(exponent)):
        known = _TINY < abs(own.factor) < 1 / _TINY and (own.factor > 0 or exponent == int(exponent))
        factor = own.factor**exponent if known else _NAN
        return _of_own(own._replace(factor=factor, power=own.power * exponent), form, statistics)
    if form.kind == "poly" and whole:
        return _poly(form.degree * int(exponent), [form])
    return unknown([form], f"power {exponent:g}")


def _of_own(own: Own, form: Form, statistics: Statistics) -> Form:
    """The form of a multiple of a power of an input."""
    power, rest = own.power, {"own": own, "sign": plain_sign(form), "labels": form.labels}
    if power == 0:
        return Form(labels=form.labels)
    if power > 0 and power == int(power):
        return Form(degree=int(power), **rest) if power <= _MAX_DEGREE else unknown([form], f"power {power:g}")
    return Form("statistics" if power in statistics.powers else "own", **rest)


def divided(a: Form, b: Form, statistics: Statistics) -> Form:
    """The form of a quotient."""
    if b.constant:
        return times(a, power(b, -1.0, statistics), statistics)
    if b.link == "1 + exp" and a.value == 1.0:
        return b._replace(link="logistic", sign="unit", labels=a.labels | b.labels)
    if b.link == "exp" or (b.own is not None and b.own.shift == 0.0):
        inverse = power(b, -1.0, statistics)._replace(place=b.place)
        return times(a, inverse, statistics)
    return unknown([a, b], "quotient")


def absolute(form: Form) -> Form | None:
    """The absolute value of what is known to be positive, or a multiple of a power of what is; None elsewhere."""
    if form.positive:
        return form
    if form.own is not None and form.own.shift == 0.0 and form.own.positive:
        return form._replace(own=form.own._replace(factor=abs(form.own.factor)), sign="+")
    return None


def logarithm(form: Form, shift: float, statistics: Statistics) -> Form:
    """The logarithm of a form plus ``shift``, 0 or 1."""
    rest = {"labels": form.labels}
    if form.kind == "unknown":
        return unknown([form])
    if form.link == ("1 + exp" if shift == 0 else "exp"):
        return Form("link", link="softplus", sign="+", **rest)
    if form.link == "exp" and shift == 0:
        return Form(degree=1, **rest)
    own = form.own
    if own is not None:
        at = own.shift + shift
        if at == 0.0 and "log" in statistics.functions:
            return Form("statistics", **rest)
        # log(1 - x), and log((1 - x) / x).
        if at == -own.factor and abs(own.power) == 1.0 and {"log", "log1m"} <= statistics.functions:
            return Form("statistics", **rest)
    return unknown([form], "log")


def elementwise(name: str, form: Form, statistics: Statistics) -> Form:
    """A smooth function of every entry."""
    if form.kind == "unknown":
        return unknown([form])
    signs = {"exp": "+", "exp2": "+", "logistic": "unit", "erf": ""}
    if form.at_most(1) and name in signs:
        return Form("link", link="exp" if name == "exp2" else name, sign=signs[name], labels=form.labels)
    own = form.own
    turned = own is not None and own.power == 1.0 and abs(own.factor) == 1.0 and form.link in ("", "turned")
    if turned and name in statistics.functions:
        return Form("statistics", labels=form.labels)
    return unknown([form], name)._replace(sign=signs.get(name, ""))


# -------------------------------------------------------------------------------------------------- names of primitives
# Names of JAX's primitives, and of functions written in them, by what they make of forms.


def names(text: str) -> frozenset[str]:
    """A set of names from one line of them."""
    return frozenset(text.split())


# Every entry of the output is an entry of the input, or a constant.
PLACED = names(
    "broadcast_in_dim reshape transpose squeeze expand_dims slice rev copy copy_p reduce_precision device_put "
    "sharding_constraint split stop_gradient tile pvary pcast real"
)
MOVED = PLACED | names("gather dynamic_slice concatenate stack pad")
# Entries of the first operand alone, as they are.
_KEPT = PLACED | names("gather dynamic_slice convert_element_type")
# Every entry of the output is a function of the operands' entries at its own place.
ENTRYWISE = names(
    "add sub add_any mul div neg integer_pow square sqrt rsqrt cbrt pow exp exp2 log log1p expm1 logistic tanh erf erfc "
    "erf_inv sin cos tan asin acos atan sinh cosh asinh acosh atanh atan2 lgamma digamma abs sign max min clamp floor ceil "
    "round rem select_n convert_element_type eq ne lt le gt ge and or not xor is_finite nextafter"
)
MIXED = names("reduce_sum cumsum reduce_window_sum fft imag")
SMOOTH = names(
    "exp exp2 log log1p expm1 logistic tanh erf erfc erf_inv sin cos tan asin acos atan sinh cosh asinh acosh atanh atan2 "
    "sqrt rsqrt cbrt pow lgamma digamma polygamma igamma igammac regularized_incomplete_beta_integral bessel_i0e bessel_i1e "
    "reduce_prod cumprod cumlogsumexp div integer_pow square mul dot_general reduce_logsumexp zeta"
)
KINKS = names(
    "abs sign max min clamp floor ceil round rem eq ne lt le gt ge eq_to le_to lt_to reduce_max reduce_min cummax cummin "
    "argmax argmin sort top_k approx_top_k reduce_and reduce_or reduce_xor and or not xor nextafter select_and_scatter_add "
    "select_and_gather_add reduce_window_max reduce_window_min is_finite population_count shift_left "
    "shift_right_logical shift_right_arithmetic clz"
)
# Of these, the ones whose values jump, and JAX's own functions of them whose values do not.
JUMPS = KINKS - names(
    "abs max min clamp reduce_max reduce_min cummax cummin sort reduce_window_max reduce_window_min"
) | {"convert_element_type"}
JUMPLESS = names(
    "leaky_relu elu celu selu relu relu6 hard_tanh hard_sigmoid hard_silu hard_swish squareplus hypot "
    "slogdet _slogdet_lu _slogdet_qr"
)
# Of JAX's own functions whose jaxprs have kinks and whose values have none.
CALLS = names(
    "jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr remat remat2 checkpoint"
)
KINKLESS = names(
    "softplus logaddexp logaddexp2 log_sigmoid log_softmax softmax _softmax logsumexp ndtr _ndtr log_ndtr ndtri silu gelu "
    "xlogy xlog1py entr rel_entr gammaln betaln"
)


# ------------------------------------------------------------------------------------------------------ the interpreter
# Prove what a traced function is of some of its inputs, for all values of all of them: an interpreter of its jaxpr.
#
# Every array is given a :class:`Form`. Calls, branches and scans are followed; what is not followed is unknown.
#
# References:
#     Hoffman, Johnson and Tran, Autoconj: Recognizing and Exploiting Conjugacy Without a Domain-Specific Language (2018), whose
#     idea of reading conjugacy off a trace this is, without rewriting.

_LARGE, _TINY_SCALE = 1e30, 1e-30
_SCAN_ROUNDS = 12
_NO_STATISTICS = Statistics()
_JAX = os.path.dirname(jax.__file__)


def forms_of(closed: Any, inputs: Sequence[Form], statistics: Statistics = _NO_STATISTICS) -> list[Form]:
    """The forms of a traced function's outputs.

    ``closed``: a closed jaxpr, as of ``jax.make_jaxpr``; ``inputs``: one form per input; ``statistics``: what the kind
    "statistics" means. Returns one form per output, true of all values of all inputs and of what the function closes over.
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
            return self._called(called_jaxpr(eqn)[0], forms)
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
        if found.constant:
            return found
        # What is rounded to integers lies elsewhere.
        ends = found.ends if name in _KEPT and _is_float(eqn.outvars[0]) else _ANYWHERE
        return found._replace(value=None, place=self._place(name, eqn, forms), ends=ends)

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
            return [
                forms[0]._replace(kind="link", degree=0, link=_TURNED, kink="rem", jump="rem", sign="", ends=_ANYWHERE)
            ]
        found = self.walk(inner, forms)
        if name in KINKLESS and not any(f.kink for f in forms):
            found = [f._replace(kink="", jump="", smooth=name) if f.kink else f for f in found]
        if name in JUMPLESS and not any(f.jump for f in forms):
            found = [f._replace(jump="") for f in found]
        return found

    def _cond(self, eqn: Any, forms: list[Form]) -> list[Form]:
        branches = [self.walk(b.jaxpr, forms[1:]) for b in eqn.params["branches"]]
        joined = [aside(each, self.statistics, "branches") for each in zip(*branches, strict=True)]
        if forms[0].constant:
            return [f._replace(labels=f.labels | forms[0].labels) for f in joined]
        return [unknown([f, forms[0]], kink="cond", jump="cond") for f in joined]

    def _scan(self, eqn: Any, forms: list[Form]) -> list[Form]:
        body, (fixed, carried) = eqn.params["jaxpr"].jaxpr, _fixed_and_carried(eqn.params)
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


def _fixed_and_carried(params: dict[str, Any]) -> tuple[int, int]:
    """How many of a scan's inputs every step reads, and how many it hands on; JAX says so in lists from 0.12 on."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    fixed, carried, _ = (len(list(part)) for part in params["ft_in"].unpack())
    return fixed, carried


def _is_turn(value: float | None) -> bool:
    return value is not None and abs(value - 2 * math.pi) < 1e-6


def _later(form: Form) -> Form:
    return form._replace(value=None, own=None, sign=plain_sign(form), place=None, ends=_ANYWHERE)


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
    # Ends are told as the format of the values holds them.
    least, most = (end - b.value for end in a.ends)
    slack = 1e-6 * abs(b.value)
    if (least >= -slack and name in ("gt", "ge")) or (most <= slack and below):
        return constant(forms, 1.0)
    return constant(forms, 1.0) if a.sign == "unit" and b.value >= 1 and below else None


def _guard(name: str, a: Form, b: Form, eqn: Any) -> Form | None:
    """What a maximum or minimum leaves as it is: bounds at the ends of a format, and of what is positive or a probability."""
    if a.constant:
        a, b = b, a
    if not b.constant or b.value is None:
        return None
    positive = a.positive or a.link == "exp"
    eps = float(jnp.finfo(eqn.outvars[0].aval.dtype).eps) if _is_float(eqn.outvars[0]) else 0.0
    if name == "max":
        return a if b.value < -_LARGE or (positive and b.value < _TINY_SCALE) else None
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
    if jax_functions & KINKLESS:
        return unknown(forms, name)
    # Sorted beside something else, which then moves in steps.
    jumps = name in JUMPS or (name == "sort" and len(eqn.invars) > 1)
    author = _author(eqn)
    jumps = jumps and not jax_functions & JUMPLESS and _DISTRIBUTIONS not in author
    # What they compare guards against overflow, but for distances.
    guards = name != "abs" and any(library in author for library in (_DISTRIBUTIONS, _SUMS))
    return unknown(forms, kink=name + _GUARD if guards else name, jump=name if jumps else "")


def is_guard(kink: str) -> bool:
    """Whether a kink is a library's guard against overflow, which of the function that it belongs to makes no kink."""
    return kink.endswith(_GUARD)


def _author(eqn: Any) -> str:
    """The file that wrote an equation, by JAX's functions or not."""
    traceback = eqn.source_info.traceback
    frames = () if traceback is None else traceback.frames
    author = next((f.file_name for f in frames if not f.file_name.startswith(_JAX)), "")
    return author.replace(os.sep, "/")


# NumPyro's constraints without bounds, which a latent's own value meets wherever it is.
_CONSTRAINTS, _DISTRIBUTIONS = "numpyro/distributions/constraints.py", "numpyro/distributions/"
# Where discrete latents are summed out, and what is written beside the name of an operation that guards.
_SUMS, _GUARD = "/funsor/", ", a guard"
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


def called_jaxpr(eqn: Any) -> tuple[Any, list]:
    """The jaxpr that an equation of :data:`CALLS` calls, and its constants."""
    found = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params)
    return getattr(found, "jaxpr", found), list(getattr(found, "consts", ()))


def _inside_ndtr(forms: list[Form]) -> Form:
    inside = all(f.at_most(1) or f.link in (_NDTR, "erf", "1 + erf") for f in forms)
    if not inside:
        return unknown(forms, "ndtr")
    done = len(forms) == 2 and 0.5 in (forms[0].value, forms[1].value)
    return Form("link", link="probit" if done else _NDTR, sign="unit" if done else "", labels=all_labels(forms))


def _add_rule(eqn: Any, forms: list[Form], statistics: Statistics) -> Form:
    if eqn.primitive.name == "sub":
        forms = [forms[0], _negative(forms[1])]
    # A support that begins at 0 is reached by adding it.
    moving = [form for form in forms if not (form.constant and form.value == 0.0)]
    if len(moving) == 1:
        return moving[0]._replace(labels=all_labels(forms))
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
        where = f"{eqn.primitive.name} at moving places"
        return unknown(forms, kink=where, jump=where)
    # What lies outside may be filled up with constants.
    return forms[0]._replace(labels=all_labels(forms), value=None)


def _put(eqn: Any, forms: list[Form], statistics: Statistics) -> Form:
    """Entries written, or added, at places that other operands say."""
    name = eqn.primitive.name
    values, places = ([forms[0], forms[2]], forms[1:2]) if name.startswith("scatter") else (forms[:2], forms[2:])
    if not all(f.constant for f in places):
        return unknown(forms, kink=f"{name} at moving places", jump=f"{name} at moving places")
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


# ------------------------------------------------------------------------------------------------------------ one trace

# Label of the flat vector of latents; parameters have their own names.
LATENTS = "the latents"
# How far parameters are moved, in units of their own size and one, where they are unconstrained.
_MOVE = 0.1


@dataclasses.dataclass(frozen=True, eq=False)
class TracedLook:
    """A traced function of (data, parameters, rows' own latents, flat point), and the form of each of its outputs.

    ``forms``: of its outputs, in their structure, where rows' own latents stand still; ``with_own``: where they move as well, or
    None without any.
    """

    closed: Any
    structure: Any
    forms: Any
    with_own: Any = None

    def __call__(self, arrays: list, params: dict, local: Any, point: Array) -> Any:
        """The outputs."""
        flat = jax.tree.leaves((arrays, params, local, point))
        return jax.tree.unflatten(self.structure, jaxpr_as_fun(self.closed)(*flat))

    @property
    def labels(self) -> frozenset[str]:
        """Everything that the outputs depend on: names of parameters, and ``LATENTS``."""
        found = jax.tree.leaves(self.forms, is_leaf=lambda x: isinstance(x, Form))
        return frozenset().union(*(form.labels for form in found))


def trace_look(look: Callable, arrays: list, params: dict, call: ModelCall) -> TracedLook:
    """Trace a look once, and interpret the trace.

    ``look``: a function of data, parameters, rows' own latents and a flat point; ``params``: shapes and dtypes of the
    parameters; ``call``: says how many latents there are. Returns the look. Forms hold for all latents, parameters and data of
    these shapes; polynomials are in the latents jointly.
    """
    dtype, own = jnp.result_type(float), call.local_layout
    local = None if own is None else jax.ShapeDtypeStruct((own.size, own.width), dtype)
    point = jax.ShapeDtypeStruct((call.layout.dim,), dtype)
    closed, shapes = jax.make_jaxpr(look, return_shape=True)(arrays, params, local, point)
    labels = [unmarked(n) for n in sorted(params) for _ in jax.tree.leaves(params[n])]
    structure, still = jax.tree.structure(shapes), [unmarked()] * len(arrays)

    def forms(own: list[Form]) -> Any:
        return jax.tree.unflatten(structure, forms_of(closed, [*still, *labels, *own, marked(LATENTS)]))

    if local is None:
        return TracedLook(closed, structure, forms([]))
    return TracedLook(closed, structure, forms([unmarked()]), forms([marked(LATENTS)]))


def moved_values(params: dict, sites: dict, key: Any) -> dict:
    """Other values of the parameters, inside their constraints.

    ``params``: constrained values by name; trees of arrays where a module's parameters are one site; ``sites``: the
    ``numpyro.param`` sites. Returns values about a tenth of their size, or of one, away in unconstrained space. Where a start
    makes a term vanish, as zeros in a last layer do, these do not.
    """
    found = {}
    for i, (name, value) in enumerate(params.items()):
        constraint = sites[name]["kwargs"].get("constraint", constraints.real) if name in sites else constraints.real
        leaves, structure = jax.tree.flatten(value)
        keys = jax.random.split(jax.random.fold_in(key, 1000 + i), len(leaves))
        moved = [_moved(x, biject_to(constraint), k) for x, k in zip(leaves, keys, strict=True)]
        found[name] = jax.tree.unflatten(structure, moved)
    return found


def _moved(value: Any, transform: Any, key: Any) -> Array:
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return value
    free = transform.inv(value)
    noise = jax.random.normal(key, jnp.shape(free), value.dtype)
    return transform(free + _MOVE * (1 + jnp.abs(free)) * noise).astype(value.dtype)
