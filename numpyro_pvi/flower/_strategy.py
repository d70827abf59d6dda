"""PVI in Flower's own words: a Strategy whose start fits q."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from .._state import PVIRunResult
from ..clients import SummedClients
from ..errors import PVIError
from ..pvi import PVI
from ..schedules import Synchronous
from ._messages import flwr
from ._runtime import Flower
from ._secure import SecAggSums

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Result, Strategy  # pyright: ignore[reportMissingImports]
else:
    try:
        from flwr.serverapp.strategy import Result, Strategy
    except ImportError:
        # Whoever makes one is told what to install.
        Result = Strategy = object


@dataclasses.dataclass(repr=False)
class FlowerResult(Result):
    """What :meth:`PVIStrategy.start` returns: a ``Result`` of Flower's with the fit beside it.

    Flower's own fields hold what goes into them: ``arrays`` the guide's parameters by name, ``train_metrics_clientapp`` every
    round's ELBO in nats (nothing where clients are heard in sums only, whose rounds look at no ELBO).

    Attributes:
        fit: what ``PVI.run`` has returned: parameters, state, losses, report.
        pvi: the fit's PVI, for ``pvi.posterior(result.fit.state)`` and the like.
    """

    fit: PVIRunResult | None = None
    pvi: PVI | None = None


class PVIStrategy(Strategy):
    """Partitioned variational inference as a strategy of Flower: ``PVIStrategy(model, guide).start(grid, num_rounds=30, key=key)``.

    Every owner that answers is a group. What the nodes' apps are made of (:func:`client_app`: model, guide, solver, loss) is what
    this is made of; clients of anything else are refused by label. ``start`` is ``PVI(..., runtime=Flower(grid=grid)).run``, so
    that solvers, schedules, stopping and checkpoints are those of every other fit. Needs the extra:
    ``pip install 'numpyro_pvi[flower]'``.

    With ``secure=True`` the server learns the sum of what owners change of their sites, and no single change: ``start`` is
    ``PVI(..., runtime=SummedClients(sums=SecAggSums(grid))).run``, over nodes of ``client_app(..., secure=True)``. Rounds are those
    of ``Synchronous(damping=0.5)`` or another number; every other schedule needs single sites, and is refused.

    Args:
        model: the NumPyro model.
        guide: a Gaussian guide of it.
        solver: local solver; :class:`numpyro_pvi.solvers.NaturalGradient` by default.
        schedule: of rounds; :class:`numpyro_pvi.schedules.Synchronous` by default, with ``damping=0.5`` where ``secure``.
        loss: see :class:`numpyro_pvi.PVI`.
        optim: likewise, where the model has ``numpyro.param`` sites.
        owners: see :class:`Flower`.
        patience: likewise.
        wait: likewise.
        tries: likewise.
        secure: whether owners are heard in sums only, by Flower's SecAgg+.
        threshold: of :class:`SecAggSums`, where ``secure``.

    Raises:
        PVIError: where flwr is not installed; where ``secure``, for a schedule that needs more than sums.
    """

    def __init__(
        self,
        model: Callable,
        guide: Any,
        *,
        solver: Any = None,
        schedule: Any = None,
        loss: Any = None,
        optim: Any = None,
        owners: int | Sequence[Hashable] = 2,
        patience: float = 600.0,
        wait: float = 300.0,
        tries: int = 3,
        secure: bool = False,
        threshold: int | float = 0.75,
    ):
        flwr("flwr.serverapp.strategy")
        if secure:
            schedule = Synchronous(damping=0.5) if schedule is None else schedule
            SummedClients.expect_sums_suffice(schedule, "secure=False")
        self._secure, self._threshold = secure, threshold
        self._made = {
            "model": model,
            "guide": guide,
            "solver": solver,
            "schedule": schedule,
            "loss": loss,
            "optim": optim,
        }
        self._found = {"owners": owners, "patience": patience}
        self._asked: dict[str, Any] = {"wait": wait, "tries": tries}

    def _runtime(self, grid: Any) -> tuple[Any, tuple[Hashable, ...]]:
        """Who carries the questions, and whose rows there are."""
        if not self._secure:
            runtime = Flower(grid=grid, **self._asked, **self._found)
            return runtime, runtime.labels
        sums = SecAggSums(grid, threshold=self._threshold, timeout=self._asked["wait"], **self._found)
        return SummedClients(sums=sums, **self._asked), sums.labels

    def start(  # type: ignore[override]
        self,
        grid: Any,
        num_rounds: int = 30,
        *,
        key: Any = None,
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
        progress_bar: bool = False,
        callback: Callable[[int, Any, Any], bool | None] | None = None,
        **options: Any,
    ) -> FlowerResult:
        """Fit q to the rows of all owners.

        Args:
            grid: Flower's, as the main function of a ``ServerApp`` is given it.
            num_rounds: rounds of the schedule, at most.
            key: random key; ``jax.random.key(0)`` by default, but under a solver that is ``private``, whose noise it makes.
            args: the model's positional arguments where some are no rows (a noise, a number of classes), with
                ``jax.ShapeDtypeStruct`` in place of the owners' rows; by default they are known from the owners.
            kwargs: likewise, keyword arguments.
            progress_bar: see :meth:`numpyro_pvi.PVI.run`.
            callback: likewise.
            options: others of :meth:`numpyro_pvi.PVI.run`: ``tol``, ``checkpoint``, ``init_state``, ``loss_every``.

        Returns:
            A :class:`FlowerResult`.

        Raises:
            PVIError: without a key under a solver that is ``private``, where owners are not there in time, and what
                :meth:`numpyro_pvi.PVI.run` raises.
            ClientError: naming the owner whose answer is refused, or who does not answer.
        """
        solver = self._made["solver"]
        if key is None and solver is not None and solver.private:
            raise PVIError(
                f"PVIStrategy.start() without a key, under {type(solver).__name__}: the noise would be that of "
                "jax.random.key(0), which everybody can make again and take off. Pass key=jax.random.key(secrets.randbits(63))."
            )
        model, guide = self._made["model"], self._made["guide"]
        rest = {name: self._made[name] for name in ("solver", "schedule", "loss", "optim")}
        self.summary()
        runtime, owners = self._runtime(grid)
        _log("%d owners: %s", len(owners), ", ".join(map(str, owners)))
        pvi = PVI(model, guide, runtime=runtime, **rest)

        def told(done: int, state: Any, info: Any) -> bool | None:
            _log("[ROUND %d/%d] q moved by %.2g posterior sds; %s", done, num_rounds, info.total_move, runtime.workers)
            if self._secure and (gone := runtime.report.absent):
                _log("the last sum is without %s, whose sites stay what they were", ", ".join(map(str, gone)))
            return None if callback is None else callback(done, state, info)

        key = jax.random.key(0) if key is None else key
        how = {"progress_bar": progress_bar, "callback": told, **options}
        fit = pvi.run(key, num_rounds, *args, **how, **(kwargs or {}))
        runtime.close()
        _log("%s", fit.message)
        return self._result(fit, pvi)

    def _result(self, fit: PVIRunResult, pvi: PVI) -> FlowerResult:
        app = flwr("flwr.app")
        arrays = app.ArrayRecord({name: app.Array(np.asarray(value)) for name, value in fit.params.items()})
        losses = np.asarray(fit.losses)
        told = {i + 1: app.MetricRecord({"elbo": -float(x)}) for i, x in enumerate(losses) if np.isfinite(x)}
        return FlowerResult(arrays=arrays, train_metrics_clientapp=told, fit=fit, pvi=pvi)

    def summary(self) -> None:
        """Log what is fitted, and how."""
        for name in ("guide", "solver", "schedule", "loss"):
            value = self._made[name]
            _log("\t%s: %s", name, "default" if value is None else type(value).__name__)
        _log("\towners are heard %s", "in sums only" if self._secure else "one by one")

    def _refuse(self, name: str) -> PVIError:
        return PVIError(
            f"PVIStrategy.{name}: its rounds are those of its schedule, in which a client is asked as often as it takes, and not "
            "one message out and one back. Call start, which runs them."
        )

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        """Not of this strategy: see :meth:`start`.

        Raises:
            PVIError: always; Flower's own loop of one message out and one back is not that of a schedule.
        """
        raise self._refuse("configure_train")

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        """Likewise.

        Raises:
            PVIError: always.
        """
        raise self._refuse("aggregate_train")

    def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        """Likewise.

        Raises:
            PVIError: always.
        """
        raise self._refuse("configure_evaluate")

    def aggregate_evaluate(self, server_round: int, replies: Any) -> Any:
        """Likewise.

        Raises:
            PVIError: always.
        """
        raise self._refuse("aggregate_evaluate")


def _log(text: str, *values: Any) -> None:
    # Flower's own logger, whose lines its commands show.
    logging.getLogger("flwr").info(text, *values)
