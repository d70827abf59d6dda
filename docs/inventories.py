"""Which names of NumPyro's and JAX's documentation these pages link to, and where they are there.

Sphinx reads such lists from the other site (objects.inv). Pages are built without a network, so `conf.py` writes them from the
table below; a name that is missing here stays plain text.
"""

import pathlib
import zlib

# By site: its address, and for every page of it the names that have an anchor there, with what they are.
SITES = {
    "numpyro": (
        "https://num.pyro.ai/en/stable/",
        {
            "svi.html": {"numpyro.infer.svi.SVI": "class", "numpyro.infer.elbo.Trace_ELBO": "class"},
            "autoguide.html": {
                f"numpyro.infer.autoguide.{name}": "class"
                for name in (
                    "AutoGuide",
                    "AutoContinuous",
                    "AutoMultivariateNormal",
                    "AutoDiagonalNormal",
                    "AutoNormal",
                )
            },
            "distributions.html": {"numpyro.distributions.distribution.Distribution": "class"},
            "mcmc.html": {"numpyro.infer.mcmc.MCMC": "class", "numpyro.infer.hmc.NUTS": "class"},
            "utilities.html": {"numpyro.infer.util.Predictive": "class"},
            "optimizers.html": {"numpyro.optim.Adam": "class"},
        },
    ),
    "jax": (
        "https://docs.jax.dev/en/latest/",
        {
            "_autosummary/jax.Array.html": {"jax.Array": "class"},
            "_autosummary/jax.jit.html": {"jax.jit": "function"},
            "_autosummary/jax.vmap.html": {"jax.vmap": "function"},
        },
    ),
}


def write(folder):
    """One objects.inv per site, as Sphinx's own format has it; what `intersphinx_mapping` is to be."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for site, (address, pages) in SITES.items():
        lines = [
            f"{name} py:{kind} 1 {page}#$ -\n"
            for page, names in sorted(pages.items())
            for name, kind in sorted(names.items())
        ]
        head = f"# Sphinx inventory version 2\n# Project: {site}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        path = folder / f"{site}.inv"
        path.write_bytes(head.encode() + zlib.compress("".join(lines).encode()))
        mapping[site] = (address, str(path))
    return mapping
