"""Sphinx configuration. Pages need no network, to build or to read; notebooks run, and their errors are fatal."""

import hashlib
import os
import pathlib
import platform
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version as installed_version

import jupytext
import nbformat
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from jupyter_cache.executors.utils import single_nb_execution
from myst_nb.core.read import create_nb_reader
from sphinx.util.logging import getLogger

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
import inventories

logger = getLogger(__name__)

project = "numpyro_pvi"
copyright = "the numpyro_pvi authors"
version = release = installed_version("numpyro_pvi")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx_copybutton"]
extensions += ["sphinx_design", "sphinx.ext.intersphinx"]
exclude_patterns = ["_build", "conf.py", "check_pages.py", "inventories.py", "pictures", "**/.ipynb_checkpoints"]
intersphinx_mapping = inventories.write(HERE / "_build" / "inventories")

html_theme = "furo"
html_title = "numpyro_pvi"
html_static_path = ["_static"] if (HERE / "_static").is_dir() else []
html_copy_source = False
# A local copy (`make docs` fetches it). Where it is missing, formulas stay TeX; nothing is ever loaded from elsewhere.
mathjax_path = "mathjax/tex-mml-chtml.js"

myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "colon_fence"]
myst_heading_anchors = 3

nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
# The notebooks' fits are small: compiling takes nearly all of their time, and halves with XLA's optimiser off; on
# one thread each, as two kernels run side by side. Kernels inherit the environment.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1")
# Where an operation came from is written into every program, for nobody to read.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# Python's collector looks through all that was traced again and again, for a twelfth of a kernel's time.
os.environ["IPYTHONDIR"] = str(HERE / "_build" / "ipython")
STARTUP = HERE / "_build" / "ipython" / "profile_default" / "startup"
STARTUP.mkdir(parents=True, exist_ok=True)
(STARTUP / "collector.py").write_text("import gc\n\ngc.set_threshold(100_000, 20, 100)\ndel gc\n")
# A kernel draws into the notebook only where no other backend is asked for.
os.environ.pop("MPLBACKEND", None)


def results_key():
    """Digest of what results depend on beside the notebooks' own code: the package, and the versions of what it runs on."""
    digest = hashlib.sha256()
    for path in sorted((HERE.parent / "numpyro_pvi").rglob("*.py")):
        digest.update(path.relative_to(HERE.parent).as_posix().encode() + b"\0" + path.read_bytes())
    names = ("arviz", "funsor", "jax", "jaxlib", "matplotlib", "numpy", "numpyro", "optax", "scikit-learn", "scipy")
    versions = [f"{name} {installed_version(name)}" for name in names]
    environment = [os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"], os.environ["XLA_FLAGS"]]
    digest.update("\n".join([platform.python_version(), *environment, *versions]).encode())
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


def execute_notebooks(app):
    """Runs what is not in the cache, two at a time: Sphinx deals whole runs of pages to its processes, and would run nearly all in one.

    What fails is run once more where its page is read, which says so.
    """
    cache, waiting = get_cache(nb_execution_cache_path), []
    for path in [*HERE.glob("notebooks/*.py"), *HERE.glob("*.md")]:
        text = path.read_text()
        reader = create_nb_reader(str(path), app.env.myst_config, app.env.mystnb_config, text)
        if reader is None:
            continue
        notebook = reader.read(text)
        try:
            cache.match_cache_notebook(notebook)
        except KeyError:
            waiting.append((len(text) if path.suffix == ".py" else 0, path, notebook))

    def execute(job):
        _, path, notebook = job
        return path, single_nb_execution(notebook, str(path.parent), nb_execution_timeout, allow_errors=False)

    with ThreadPoolExecutor(2) as pool:
        for path, done in pool.map(execute, sorted(waiting, key=lambda job: -job[0])):  # the longest first
            if done.err is None:
                bundle = CacheBundleIn(done.nb, str(path), data={"execution_seconds": done.time})
                cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
                logger.info("executed %s in %.0f seconds", path.stem, done.time)


def shorten_types(app, what, name, obj, options, signature, returned):
    """Writes `Array`, linked to JAX, for the module path that jaxtyping's annotations print."""
    short = [re.sub(r"~?\bjaxlib\._jax\.Array", "~jax.Array", text) if text else text for text in (signature, returned)]
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
    app.connect("builder-inited", execute_notebooks)
    app.connect("autodoc-process-signature", shorten_types)
    app.connect("html-page-context", offer_notebook)
    app.connect("build-finished", write_notebooks)
