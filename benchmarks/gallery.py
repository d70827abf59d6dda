"""``gallery``: eight models after NumPyro's examples, PVI against the best of several SVI settings with the same guide.

Warm times are those of a compiled loop of `update` on both sides. A time to an ELBO is that of the first checkpoint (every
round of PVI, every hundredth of an SVI run) at or above it.
"""

import argparse
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import init_to_uniform, init_to_value
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.infer.util import potential_energy

from benchmarks import _opponent, _report, _subjects
from benchmarks._gallery import EXAMPLES, Example
from benchmarks._opponent import Setting

SETTINGS = (
    Setting(0.1, 2_000, num_particles=8),
    Setting(0.03, 2_000),
    Setting(0.03, 4_000, num_particles=8),
    Setting(0.01, 8_000, num_particles=8),
)
QUICK_SETTINGS = (Setting(0.03, 500, num_particles=4),)
# Nats that PVI may stay below SVI's best, and how near SVI's final ELBO counts as reached, besides standard errors.
DEFICIT = 0.1
CHECKPOINTS = 100


class Judge:
    """ELBO of a full-covariance Gaussian from many draws, by the same estimator for both sides.

    ``log p(y, theta) - log q(theta)`` is averaged over draws of q: near the posterior it hardly varies.

    Args:
        example: the model and its data.
        args: its arguments on the device.
        num_draws: draws of a final ELBO; checkpoints get a tenth.
    """

    def __init__(self, example: Example, args: tuple[Any, ...], num_draws: int) -> None:
        self.example, self.args, self.num_draws = example, args, num_draws
        self._values = jax.jit(self._log_ratios, static_argnames=("guide",))

    def final(self, guide: AutoMultivariateNormal, params: Any) -> tuple[float, float]:
        """ELBO and its standard error, nats."""
        values = self._draw(guide, params, self.num_draws)
        return float(values.mean()), float(values.std() / np.sqrt(len(values)))

    def many(self, guide: AutoMultivariateNormal, params: Any) -> np.ndarray:
        """ELBOs of parameters with a leading axis, nats."""
        count = params["auto_loc"].shape[0]
        each = [jax.tree.map(lambda x, i=i: x[i], params) for i in range(count)]
        return np.array([self._draw(guide, one, self.num_draws // 10).mean() for one in each])

    def _draw(self, guide: AutoMultivariateNormal, params: Any, num_draws: int) -> np.ndarray:
        loc, root = jnp.asarray(params["auto_loc"]), jnp.asarray(params["auto_scale_tril"])
        eps = jax.random.normal(jax.random.key(99), (num_draws, loc.shape[0]))
        return np.asarray(self._values(guide, loc, root, eps, self.args), np.float64)

    def _log_ratios(self, guide: Any, loc: Any, root: Any, eps: Any, args: Any) -> Any:
        def one(e: Any) -> Any:
            point = guide._unpack_latent(loc + root @ e)
            return -potential_energy(self.example.reference, args, {}, point) + e @ e / 2

        constant = jnp.log(jnp.diagonal(root)).sum() + loc.shape[0] / 2 * jnp.log(2 * jnp.pi)
        return jax.vmap(one)(eps) + constant


def run(options: argparse.Namespace) -> _report.Report:
    """Fits every example by both, and compares ELBOs and times."""
    # Cold times would otherwise be those of an earlier run's compilation.
    jax.config.update("jax_enable_compilation_cache", False)
    report = _report.Report("gallery")
    names = options.only or list(EXAMPLES)
    results = {name: _compare(name, EXAMPLES[name](), options) for name in names}
    header = ("model", "SVI's best ELBO", "se", "PVI's ELBO", "se", "PVI above SVI, nats", "setting of SVI's best")
    rows = [
        (n, f"{r['svi']:.3f}", r["svi_se"], f"{r['pvi']:.3f}", r["pvi_se"], r["above"], r["setting"])
        for n, r in results.items()
    ]
    report.add_table("ELBO of the final q, the same many-draw estimator for both", header, rows)
    for tolerance, word in ((0.0, "SVI's final ELBO"), (DEFICIT, f"{DEFICIT} nat below it")):
        header = (
            "model",
            "PVI rounds",
            "PVI warm s",
            "SVI steps",
            "SVI warm s",
            "times faster",
            "SVI's best, whole run s",
            "PVI cold s",
            "SVI cold s",
        )
        rows = [(name, *r[tolerance], r["svi_whole"], r["pvi_cold"], r["svi_cold"]) for name, r in results.items()]
        report.add_table(f"time to {word}; SVI's fastest setting that gets there", header, rows)
    if not options.quick:
        for name, r in results.items():
            report.add_target(f"{name}: PVI's ELBO above SVI's best, nats", r["above"], -DEFICIT, at_least=True)
            report.add_target(f"{name}: warm, times faster to SVI's final ELBO", r[0.0][4], 1.0, at_least=True)
    return report


def _compare(name: str, example: Example, options: argparse.Namespace) -> dict[Any, Any]:
    args = tuple(jnp.asarray(x) for x in example.args)
    judge = Judge(example, args, 2_000 if options.quick else 40_000)
    pvi, pvi_cold, state, params = _fit_pvi(example, args)
    fits = {s: _fit_svi(example, args, s) for s in (QUICK_SETTINGS if options.quick else SETTINGS)}
    finals = {s: judge.final(svi.guide, _last(stored)) for s, (svi, stored, *_) in fits.items()}
    best = max(finals, key=lambda s: finals[s][0])
    (top, top_se), (own, own_se) = finals[best], judge.final(pvi.guide, params)
    found = {
        "svi": top, "svi_se": top_se, "pvi": own, "pvi_se": own_se, "above": own - top, "setting": best.name,
        "pvi_cold": pvi_cold, "svi_cold": fits[best][2], "svi_whole": fits[best][3],
    }  # fmt: skip
    by_round = judge.many(pvi.guide, _params_by_round(pvi, state, args, example.rounds))
    by_step = {s: judge.many(svi.guide, stored) for s, (svi, stored, *_) in fits.items()}
    repeats = 2 if options.quick else 5
    for tolerance in (0.0, DEFICIT):
        # Both sides' ELBOs are estimates: two standard errors are no shortfall.
        target = top - max(tolerance, 2 * (top_se + own_se))
        found[tolerance] = _times(example, args, pvi, state, by_round, by_step, target, repeats)
    print(f"{name}: {found}", flush=True)
    return found


def _times(example, args, pvi, state, by_round, by_step, target: float, repeats: int) -> tuple[Any, ...]:
    """Rounds and steps to the target, their warm medians, and the ratio."""
    rounds = _first(by_round, target)
    steps = {s: (_first(values, target) or 0) * (s.num_steps // CHECKPOINTS) for s, values in by_step.items()}
    functions: dict[Any, Any] = {}
    if rounds is not None:
        # As users run it: one compiled loop from a state, as SVI's scan is.
        functions["pvi"] = lambda: (
            pvi.run(jax.random.key(0), rounds, *args, init_state=state, progress_bar=False).params
        )
    for setting, count in steps.items():
        if count:
            svi, start = _build_svi(example, args, setting)
            scan = _opponent.scan_steps(svi, count)
            functions[setting] = lambda scan=scan, start=start: scan(start, *args)
    times = _report.paired_medians(functions, repeats)
    own = times.pop("pvi", float("inf"))
    fastest = min(times, key=times.get, default=None)
    other = times[fastest] if fastest is not None else float("nan")
    return (rounds or "not reached", own, steps.get(fastest, "not reached"), other, other / own)


def _first(values: np.ndarray, target: float) -> int | None:
    reached = np.flatnonzero(values >= target)
    return int(reached[0]) + 1 if len(reached) else None


def _init_fn(example: Example) -> Any:
    if example.start is None:
        return init_to_uniform
    return init_to_value(values={name: jnp.asarray(value) for name, value in example.start.items()})


def _fit_pvi(example: Example, args: tuple[Any, ...]) -> tuple[Any, float, Any, Any]:
    """The fit from scratch: the PVI, seconds of everything, its first state, and the final params."""
    begin = time.perf_counter()
    guide = AutoMultivariateNormal(example.model, init_loc_fn=_init_fn(example))
    pvi = _subjects.build_gallery(example, guide)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = pvi.init(jax.random.key(0), *args)
        if example.exchangeable:
            # The guide params that SVI starts from, in the guide's own flat order.
            loc = jnp.concatenate([jnp.ravel(value) for value in guide._init_locs.values()])
            params = {"auto_loc": loc, "auto_scale_tril": SETTINGS[0].init_scale * jnp.eye(len(loc))}
            state = pvi.init(jax.random.key(0), *args, init_params=params)
    result = pvi.run(jax.random.key(0), example.rounds, *args, init_state=state, progress_bar=False)
    jax.block_until_ready(result.params)
    return pvi, time.perf_counter() - begin, state, result.params


def _params_by_round(pvi: Any, state: Any, args: tuple[Any, ...], rounds: int) -> Any:
    found = []
    for _ in range(rounds):
        state, _ = pvi.update(state, *args)
        found.append(jax.device_get(pvi.get_params(state)))
    return jax.tree.map(lambda *xs: np.stack(xs), *found)


def _build_svi(example: Example, args: tuple[Any, ...], setting: Setting) -> tuple[Any, Any]:
    svi = setting.build(example.reference, _init_fn(example))
    return svi, svi.init(jax.random.key(0), *args)


def _fit_svi(example: Example, args: tuple[Any, ...], setting: Setting) -> tuple[Any, Any, float, float]:
    """A whole run: the SVI, its params at the checkpoints, and seconds of a fit from scratch and of one compiled."""
    begin = time.perf_counter()
    svi, state = _build_svi(example, args, setting)
    scan = _opponent.scan_steps(svi, setting.num_steps)
    jax.block_until_ready(scan(state, *args))
    seconds = time.perf_counter() - begin
    whole = _report.paired_medians({"scan": lambda: scan(state, *args)}, 3)["scan"]
    every = max(setting.num_steps // CHECKPOINTS, 1)
    return svi, jax.device_get(_opponent.scan_steps(svi, setting.num_steps, every)(state, *args)), seconds, whole


def _last(stored: Any) -> Any:
    return jax.tree.map(lambda x: x[-1], stored)
