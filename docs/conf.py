"""Sphinx configuration. Pages need no network, to build or to read; notebooks run, and their errors are fatal."""

import os
import pathlib
from importlib.metadata import version as installed_version

HERE = pathlib.Path(__file__).parent

project = "numpyro_pvi"
copyright = "the numpyro_pvi authors"
version = release = installed_version("numpyro_pvi")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx_copybutton"]
exclude_patterns = ["_build", "conf.py", "**/.ipynb_checkpoints"]

html_theme = "furo"
html_title = "numpyro_pvi"
html_static_path = ["_static"] if (HERE / "_static").is_dir() else []
html_copy_source = False
# A local copy (`make docs` fetches it). Where it is missing, formulas stay TeX; nothing is ever loaded from elsewhere.
mathjax_path = "mathjax/tex-mml-chtml.js"

myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 3

nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
# The notebooks' fits are small: compiling takes nearly all of their time, and halves with XLA's optimiser off. Kernels
# inherit the environment.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
nb_execution_mode = "force"  # a cache would keep the results of an older package
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True
nb_ipywidgets_js = {}  # no notebook shows a widget, and the default loads scripts from the network

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False


def shorten_types(app, what, name, obj, options, signature, returned):
    """Writes `Array` for the module path that jaxtyping's annotations print."""
    short = [text.replace("jaxlib._jax.Array", "Array") if text else text for text in (signature, returned)]
    return tuple(short)


def setup(app):
    app.connect("autodoc-process-signature", shorten_types)
