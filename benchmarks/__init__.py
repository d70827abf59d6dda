"""Benchmarks of numpyro_pvi: ``python -m benchmarks NAME [--data DIR] [--device gpu] [--quick]``.

Every benchmark prints Markdown tables whose figures come from one process, so that the two sides of a comparison met
the same machine in the same minutes. Times are medians. Gaps are in nats and computed in float64 by
`benchmarks._references`, which shares no code with the package.
"""
