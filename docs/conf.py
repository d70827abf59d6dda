"""Sphinx configuration. Pages need no network, to build or to read; notebooks run, and their errors are fatal."""

import hashlib
import os
import pathlib
import platform
import re
import shutil
from importlib.metadata import version as installed_version

import jupytext
import nbformat
from jupyter_cache import get_cache

HERE = pathlib.Path(__file__).parent

project = "numpyro_pvi"
copyright = "the numpyro_pvi authors"
version = release = installed_version("numpyro_pvi")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx_copybutton"]
extensions += ["sphinx_design"]
exclude_patterns = ["_build", "conf.py", "check_pages.py", "pictures", "**/.ipynb_checkpoints"]

html_theme = "furo"
html_title = "numpyro_pvi"
html_static_path = ["_static"] if (HERE / "_static").is_dir() else []
html_copy_source = False
# A local copy (`make docs` fetches it). Where it is missing, formulas stay TeX; nothing is ever loaded from elsewhere.
mathjax_path = "mathjax/tex-mml-chtml.js"

myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "colon_fence"]
myst_heading_anchors = 3

nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
# The notebooks' fits are small: compiling takes nearly all of their time, and halves with XLA's optimiser off. Kernels
# inherit the environment.
# A kernel draws into the notebook only where no other backend is asked for.
os.environ.pop("MPLBACKEND", None)
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")


def results_key():
    """Digest of what results depend on beside the notebooks' own code: the package, and the versions of what it runs on."""
    digest = hashlib.sha256()
    for path in sorted((HERE.parent / "numpyro_pvi").rglob("*.py")):
        digest.update(path.relative_to(HERE.parent).as_posix().encode() + b"\0" + path.read_bytes())
    names = ("arviz", "funsor", "jax", "jaxlib", "matplotlib", "numpy", "numpyro", "optax", "scikit-learn", "scipy")
    versions = [f"{name} {installed_version(name)}" for name in names]
    digest.update("\n".join([platform.python_version(), os.environ["XLA_FLAGS"], *versions]).encode())
    return digest.hexdigest()[:16]


# A notebook whose code cells are in the cache is not run again. The folder is named after everything else that results
# depend on, so that a change of the package runs all of them; folders of other packages are removed.
CACHES = HERE / "_build" / "executed"
nb_execution_mode = "cache"
nb_execution_cache_path = str(CACHES / results_key())
for stale in CACHES.glob("*") if CACHES.is_dir() else ():
    if str(stale) != nb_execution_cache_path:
        shutil.rmtree(stale)
# Made here, before processes that read pages side by side could each make it.
get_cache(nb_execution_cache_path).list_cache_records()
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


def offer_notebook(app, pagename, templatename, context, doctree):
    """Puts a link to the executed notebook under the title of every page that is made of one."""
    if pagename.startswith("notebooks/"):
        name = pagename.split("/")[1] + ".ipynb"
        link = f'<p><a class="reference download internal" download="" href="{name}">Download this page as a notebook</a></p>'
        context["body"] = context["body"].replace("</h1>", "</h1>\n" + link, 1)


def write_notebooks(app, exception):
    """Writes the notebooks with their results beside their pages; references to other pages become plain words there."""
    if exception is not None or app.builder.name != "html":
        return
    cache = get_cache(nb_execution_cache_path)
    for path in sorted((HERE / "notebooks").glob("*.py")):
        _, notebook = cache.merge_match_into_notebook(jupytext.read(path, fmt="py:percent"))
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = re.sub(r"\{doc}`(?:[^<`]*/)?([^/<`]+)`", r"*\1*", cell.source)
        nbformat.write(notebook, pathlib.Path(app.outdir) / "notebooks" / f"{path.stem}.ipynb")


def setup(app):
    app.connect("autodoc-process-signature", shorten_types)
    app.connect("html-page-context", offer_notebook)
    app.connect("build-finished", write_notebooks)
