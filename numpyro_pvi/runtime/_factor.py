"""One group's exact factor, as a local solver sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ..expectations import Expected
from ..solvers import BatchStep, Derivatives


@dataclasses.dataclass(frozen=True)
class GroupFactor:
    """One factor as a solver sees it: implements :class:`numpyro_pvi.solvers.LocalFactor`."""

    family: Any
    quadratic: bool
    noisy: bool
    expected: Callable[[Any], Expected]
    # GroupRows, or ProductRows under a product of families; None where rows are not offered.
    group_rows: Any = None
    index: Any = None

    @property
    def num_rows(self) -> Any:
        """N_m; 0 where rows are not offered."""
        return 0 if self.group_rows is None else self.group_rows.num_rows(self.index)

    @property
    def max_rows(self) -> int:
        """Rows of the largest group; 0 where rows are not offered."""
        return 0 if self.group_rows is None else max(self.group_rows.sizes)

    @property
    def pointwise(self) -> bool:
        """Whether rows are read at points."""
        return self.group_rows is None or self.group_rows.pointwise

    def derivatives(self, points, rows=None, hessian=False) -> Derivatives:
        """See :meth:`numpyro_pvi.solvers.LocalFactor.derivatives`."""
        return self.group_rows.derivatives(self.index, points, rows, hessian)

    def message(self, cavity: Any, site: Any, key: Any, rows: Any = None) -> Expected:
        """See :meth:`numpyro_pvi.solvers.LocalFactor.message`."""
        return self.group_rows.message(self.index, cavity, site, key, rows)

    def step(self, cavity: Any, site: Any, share: Any, key: Any, rows: Any = None) -> BatchStep:
        """See :meth:`numpyro_pvi.solvers.LocalFactor.step`."""
        return self.group_rows.step(self.index, cavity, site, share, key, rows)
