"""Forms: what is known of an array for all values of some inputs, and what arithmetic makes of them.

A form is a polynomial of some degree in the marked inputs, a *link* (an elementwise exponential, logistic, ... of something
affine in them), affine in given statistics of them, or unknown. An unknown says why: a *kink* (a maximum, an absolute value, a
switch: pieces that values at a few points may miss), a smooth function that is none of these, or a primitive that is not
followed. Degrees are bounds: w**2 - w**2 has degree 2 here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_MAX_DEGREE = 8
# Sizes of known constants whose powers are followed.
_TINY = 1e-30
_NAN = math.nan


class Own(NamedTuple):
    """Elementwise ``shift + factor * x**power`` of a marked input x; NaN for some constant. Entries may also be constant.

    Attributes:
        shift: a constant.
        factor: a constant.
        power: of x.
        positive: whether x is known to be positive.
    """

    shift: float = 0.0
    factor: float = 1.0
    power: float = 1.0
    positive: bool = False


class Form(NamedTuple):
    """What is known of one array.

    Attributes:
        kind: "poly", "link", "statistics" (affine in the statistics asked for), "own" (a power that is neither) or "unknown".
        degree: of a polynomial, jointly in all marked inputs; 0 is no dependence on them.
        link: name of a link.
        own: the elementwise form, where it is one.
        value: of a known constant.
        sign: "+" for positive entries, "unit" for entries in (0, 1), "-unit" for their negatives, "angle" for entries in
            (-pi, pi), "" where that is not known.
        kink: the primitive, where a kink may have shaped it.
        opaque: the primitive that was not followed.
        smooth: the smooth primitive that took it out of all forms.
        labels: of the inputs that it depends on.
        place: not None where every entry depends on one marked entry at most; entries of two forms with the same place depend
            on the same ones.
    """

    kind: str = "poly"
    degree: int = 0
    link: str = ""
    own: Own | None = None
    value: float | None = None
    sign: str = ""
    kink: str = ""
    opaque: str = ""
    smooth: str = ""
    labels: frozenset[str] = frozenset()
    place: int | None = None

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
        where its size hangs on a parameter, which may begin where it vanishes.

        Args:
            single: whether values are float32.
            latents: label of the marked inputs; all others move as well.

        Returns:
            True where a guess must not stand.
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


def marked(label: str, sign: str = "") -> Form:
    """The form of an input whose structure is asked for, all of whose entries have a sign as of :class:`Form`."""
    return Form(degree=1, own=Own(positive=sign in ("+", "unit")), sign=sign, labels=frozenset([label]), place=0)


def unmarked(*labels: str) -> Form:
    """The form of an input that may have any value, and counts as constant."""
    return Form(labels=frozenset(labels))


def is_affine(form: Form, statistics: Statistics) -> bool:
    """Whether a form is proved to be affine in the statistics."""
    return form.kind == "statistics" or form.at_most(statistics.degree)


def all_labels(forms: Sequence[Form]) -> frozenset[str]:
    """What any of some forms depends on."""
    return frozenset().union(*(f.labels for f in forms))


def unknown(forms: Sequence[Form], smooth: str = "", kink: str = "", opaque: str = "") -> Form:
    """What is left of some forms after a primitive that leads out of all forms."""
    kink = next((n for n in (kink, *(f.kink for f in forms)) if n), "")
    opaque = next((n for n in (opaque, *(f.opaque for f in forms)) if n), "")
    smooth = next((n for n in (*(f.smooth for f in forms), smooth) if n), "")
    return Form("unknown", kink=kink, opaque=opaque, smooth=smooth, labels=all_labels(forms))


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
