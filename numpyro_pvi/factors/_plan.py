"""The static result of planning, as a user reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ..handlers import BatchPlates, GroupTable, RowAxes
from ._enumerate import summed_out
from ._enumeration import Enumeration
from ._model import Layout, LocalLayout
from ._reading import Reading
from ._terms import TermSpec


@dataclasses.dataclass(frozen=True)
class PartitionPlan:
    """How a model is split into a prior part and one factor per group. Static and hashable; ``str()`` is a table.

    ``exact`` latents have a prior inside the Gaussian family; ``prior_latents`` and ``outside`` (observed sites in no
    partitioned plate) form the prior factor.
    """

    # What is partitioned, in words, and the batch axes that run over its rows.
    where: str
    rows: RowAxes
    table: GroupTable
    layout: Layout
    # How one group is evaluated, and why so.
    reading: Reading
    reason: str
    # Names of the arguments whose rows are taken ("args" only).
    sliced: tuple[str, ...]
    chunk_rows: int
    num_chunks: int
    observed: tuple[str, ...]
    outside: tuple[str, ...]
    # "quadratic", "affine", "draws", "reparameterised" or "local" (latents inside the plate), with the terms found (empty
    # when there are none).
    likelihood: str
    terms: tuple[TermSpec, ...]
    exact: tuple[str, ...]
    prior_latents: tuple[str, ...]
    prior_terms: tuple[TermSpec, ...]
    # "none", "affine", "draws" or "reparameterised".
    prior_kind: str
    params: tuple[str, ...]
    # Latents inside the partitioned plate, which belong to their groups and never enter a site.
    local: LocalLayout | None = None
    # Discrete latents that are summed out of every row, or None.
    enumeration: Enumeration | None = None
    # How factors without structure are evaluated: "auto" (sigma points while draws agree with them), "sigma_points",
    # "stein", "hessian", or "monte_carlo" while it is open which of the last two.
    unstructured: str = "auto"
    # Of "likelihood", "prior" (its exact part and its factor) and "additivity" (a sum over groups): what holds for all values
    # of latents and parameters; everything that is said of the others was found at points.
    proved: frozenset[str] = frozenset()
    # What was found and then contradicted at draws from q, one sentence each.
    remarks: tuple[str, ...] = ()
    # Why rows are split as they are (or not at all), in one sentence, where that was not the user's own choice.
    why: str = ""
    # Whether plates keep the mini-batches that they draw, the data being no more than that.
    batches: bool = False

    def model(self, model: Callable) -> Callable:
        """The model that factors are read off: the user's, with discrete latents summed out where it has local ones."""
        model = BatchPlates(model) if self.batches else model
        return model if self.enumeration is None else summed_out(model, self.enumeration)

    @property
    def mechanism(self) -> str:
        """Rows of the arguments ("args"), of the plate's indices ("index"), or all with the others masked ("mask")."""
        return self.reading.mechanism

    @property
    def has_prior_factor(self) -> bool:
        """Whether part of the prior is outside the family and gets a site of its own."""
        return self.prior_kind != "none"

    def __str__(self) -> str:
        padded = self.num_chunks * self.chunk_rows
        # Masking evaluates all rows for every group: the share beyond one pass is its price.
        sizes = self.table.sizes
        shown = ", ".join(f"{label!r}: {size}" for label, size in zip(self.table.labels[:8], sizes[:8], strict=True))
        more = f", ... ({len(sizes)} groups)" if len(sizes) > 8 else ""
        rows = [
            ("partitioned", "nothing" if self.rows.whole else f"{self.where}, size {self.table.num_rows}"),
            *([("because", self.why)] if self.why else []),
            ("groups (rows)", shown + more),
            ("mechanism", f"{self.mechanism}: {self.reason}"),
            *([("arguments sliced", ", ".join(self.sliced))] if self.sliced else []),
            ("chunks", f"{self.num_chunks} of {self.chunk_rows} rows, padding {padded / self.table.num_rows - 1:.0%}"),
            ("observed sites", ", ".join(self.observed)),
            *([("enumerated", str(self.enumeration))] if self.enumeration else []),
            (
                "likelihood",
                self._with_evidence(_describe(self.likelihood, self.terms, self.unstructured), "likelihood"),
            ),
            *([("local latents", ", ".join(self.local.names))] if self.local is not None else []),
            ("prior held exactly", self._with_evidence(", ".join(self.exact), "prior") if self.exact else "none"),
            ("prior factor", self._prior_line()),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)

    def evidence(self, factor: str) -> str:
        """How the structure of a factor is known: "proved", "found", or "" where none is claimed.

        Args:
            factor: "likelihood", or "prior" (what is held exactly, and the prior factor).

        Returns:
            "proved" where it holds for all values of latents and parameters, "found" where it was seen at points.
        """
        kinds = (
            (self.likelihood,) if factor == "likelihood" else (self.prior_kind, "quadratic" if self.exact else "none")
        )
        if not {"quadratic", "affine"} & set(kinds):
            return ""
        return "proved" if factor in self.proved else "found"

    def _with_evidence(self, text: str, factor: str) -> str:
        evidence = self.evidence(factor)
        return f"{text}; {evidence}" if evidence else text

    def _prior_line(self) -> str:
        if not self.has_prior_factor:
            return "none"
        parts = [", ".join(self.prior_latents)] if self.prior_latents else []
        if self.outside:
            parts.append("observed outside the plate: " + ", ".join(self.outside))
        text = "; ".join(parts) + f" ({_describe(self.prior_kind, self.prior_terms, self.unstructured)})"
        return self._with_evidence(text, "prior") if self.prior_kind == "affine" else text


_UNSTRUCTURED = {
    "auto": "sigma points while draws agree with them",
    "sigma_points": "sigma points",
    "stein": "random points, gradients only",
    "hessian": "antithetic draws with Hessians",
    "monte_carlo": "draws",
}


def _describe(kind: str, terms: tuple[TermSpec, ...], unstructured: str) -> str:
    if kind == "quadratic":
        return "quadratic in the latents (closed form)"
    if kind == "local":
        return "with local latents (antithetic draws)"
    if kind == "reparameterised":
        return "no structure found (reparameterised draws)"
    if kind == "draws":
        return f"no structure used ({_UNSTRUCTURED[unstructured]})"
    counts = ", ".join(f"{t.site}: {len(t.predictors)} affine predictor{'s' * (len(t.predictors) > 1)}" for t in terms)
    return f"{counts} (quadrature)"
