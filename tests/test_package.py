"""What holds for the whole package: import does nothing, rooms import upwards only, public names are documented."""

import ast
import importlib
import inspect
import json
import pathlib
import re
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from tests.conftest import has_its_turn

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "numpyro_pvi"

# A module may import its own room and the rooms before it in this list.
ROOMS = (
    "errors",
    "wire",
    "_compiling",
    "_warnings",
    "_numerics",
    "families",
    "sites",
    "handlers",
    "factors",
    "expectations",
    "guides",
    "solvers",
    "schedules",
    "gp",
    "_state",
    "runtime",
    "diagnostics",
    "export",
    "pvi",
    "clients",
    "flower",
)
# Private modules beside pvi.py that are parts of the shell: same room, same rights.
_SHELL = (
    "_arriving_groups",
    "_checkpoint",
    "_closures",
    "_driver",
    "_exponential_plan",
    "_family_fit",
    "_fits",
    "_group_lifecycle",
    "_initial",
    "_posterior_views",
    "_saving",
    "_state_marginals",
    "_user_inputs",
    "_verified",
)
_GUIDES = ("_exponential_guide",)
PARTS = dict.fromkeys(_SHELL, "pvi") | dict.fromkeys(_GUIDES, "guides")
PUBLIC_MODULES = (
    "numpyro_pvi",
    "numpyro_pvi.errors",
    "numpyro_pvi.families",
    "numpyro_pvi.gp",
    "numpyro_pvi.solvers",
    "numpyro_pvi.schedules",
    "numpyro_pvi.runtime",
    "numpyro_pvi.clients",
    "numpyro_pvi.flower",
    "numpyro_pvi.wire",
)


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def relative(path):
    return str(path.relative_to(ROOT))


# ------------------------------------------------------------------------------------------------------------- import

IMPORT_PROBE = """
import json, logging, sys, warnings
import jax, numpyro  # what these two do at import is theirs
from jax._src import xla_bridge

def settings():
    return {name: repr(value) for name, value in jax.config.values.items()}

def log_handlers():
    loggers = {"root": logging.root, **logging.root.manager.loggerDict}
    return {name: [repr(h) for h in log.handlers] for name, log in loggers.items() if hasattr(log, "handlers")}

config, logs = settings(), log_handlers()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    filters = list(warnings.filters)
    import numpyro_pvi
    filters_changed = filters != list(warnings.filters)
initialised = xla_bridge.backends_are_initialized()  # before live_arrays, which would initialise them
print(json.dumps({
    "heavy": [name for name in ("arviz", "optax", "funsor", "matplotlib", "flax", "sklearn") if name in sys.modules],
    "initialised": initialised,
    "arrays": len(jax.live_arrays()),
    "config": [name for name, value in settings().items() if config.get(name) != value],
    "filters": filters_changed,
    "logging": [name for name, hs in log_handlers().items() if hs and logs.get(name) != hs],
    "warnings": [str(w.message) for w in caught],
}))
"""


@pytest.fixture(scope="module")
def imported():
    probe = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE], capture_output=True, text=True, cwd=ROOT, timeout=300, check=False
    )
    assert probe.returncode == 0, probe.stderr
    return json.loads(probe.stdout.splitlines()[-1])


def test_import_leaves_optional_packages_alone(imported):
    assert imported["heavy"] == []


def test_import_allocates_nothing(imported):
    assert imported["initialised"] is False
    assert imported["arrays"] == 0


def test_import_configures_nothing(imported):
    assert imported["config"] == []
    assert imported["filters"] is False
    assert imported["logging"] == []


def test_import_warns_of_nothing(imported):
    assert imported["warnings"] == []


# -------------------------------------------------------------------------------------------------------------- rooms


def room_of(dotted):
    """`numpyro_pvi.families.normal` -> `families`; None for the root and for other packages."""
    parts = dotted.split(".")
    return PARTS.get(parts[1], parts[1]) if parts[0] == "numpyro_pvi" and len(parts) > 1 else None


def imported_names(source, module, is_package):
    """Dotted names of the package that `source`, the text of `module`, imports anywhere, lazily or not."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "numpyro_pvi":
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".")
                here = here[: len(here) - node.level + (1 if is_package else 0)]
                base = ".".join(here + ([node.module] if node.module else []))
            if base == "numpyro_pvi":
                for alias in node.names:
                    yield node.lineno, f"numpyro_pvi.{alias.name}"
            elif base.startswith("numpyro_pvi."):
                yield node.lineno, base


def room_faults(source, module, is_package=False):
    """Sentences, one for each import of `module` that its room forbids."""
    own = room_of(module)
    if own is None:
        return []  # the root joins all rooms
    if own not in ROOMS:
        return [f"{module}: the room {own!r} is not in the list of rooms"]
    faults = []
    for line, name in imported_names(source, module, is_package):
        room = room_of(name)
        if room not in ROOMS:
            faults.append(f"{module}:{line} imports {name}, which is in no room")
        elif ROOMS.index(room) > ROOMS.index(own):
            faults.append(f"{module}:{line} imports {name}: {room} is below {own}")
    return faults


def dotted(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_rooms_import_upwards_only(path):
    assert room_faults(path.read_text(), dotted(path), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("source", "module", "is_package", "fault"),
    [
        ("from numpyro_pvi.families import Family", "numpyro_pvi.sites.algebra", False, None),
        ("from ..families import Family", "numpyro_pvi.sites.algebra", False, None),
        ("from .algebra import cavity", "numpyro_pvi.sites", True, None),
        ("from . import algebra", "numpyro_pvi.sites", True, None),
        ("import jax.numpy as jnp", "numpyro_pvi._numerics", False, None),
        ("from numpyro_pvi import errors", "numpyro_pvi.sites.algebra", False, None),
        ("from numpyro_pvi.solvers import Conjugate", "numpyro_pvi.pvi", False, None),
        ("from numpyro_pvi.pvi import PVI", "numpyro_pvi.solvers.conjugate", False, "pvi is below solvers"),
        ("from ..runtime import Vmap", "numpyro_pvi.schedules.sequential", False, "runtime is below schedules"),
        ("def f():\n    import numpyro_pvi.export as e", "numpyro_pvi.sites.algebra", False, "export is below sites"),
        ("from .. import schedules", "numpyro_pvi.sites.algebra", False, "schedules is below sites"),
        ("from .families import Family", "numpyro_pvi._numerics", False, "families is below _numerics"),
        ("from numpyro_pvi import PVI", "numpyro_pvi.solvers.conjugate", False, "in no room"),
        ("", "numpyro_pvi.helpers", False, "not in the list of rooms"),
    ],
)
def test_room_parser_finds_planted_faults(source, module, is_package, fault):
    faults = room_faults(source, module, is_package)
    assert (faults == []) if fault is None else (len(faults) == 1 and fault in faults[0])


# ---------------------------------------------------------------------------------------------------------- the surface


def undocumented(thing, name):
    """Dotted names of a public object, and of the public methods it defines, that have no docstring."""
    if inspect.ismodule(thing) or not callable(thing):
        return []  # a room has its own test; a constant such as PRIOR is described where it is defined
    bare = [] if inspect.getdoc(thing) else [name]
    if inspect.isclass(thing):
        bare += [
            f"{name}.{key}"
            for key, member in vars(thing).items()
            if not key.startswith("_")
            and (inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod))
            and not inspect.getdoc(getattr(thing, key))
        ]
    return bare


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_public_modules_list_what_they_have(module):
    loaded = importlib.import_module(module)
    assert loaded.__doc__
    assert len(set(loaded.__all__)) == len(loaded.__all__)
    assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_public_names_are_documented(module):
    loaded = importlib.import_module(module)
    assert [bare for name in loaded.__all__ for bare in undocumented(getattr(loaded, name), name)] == []


def test_undocumented_names_are_found():
    class Bare:
        def method(self):
            pass

        @property
        def value(self):
            pass

        def documented(self):
            """Says what it does."""

    assert undocumented(Bare, "Bare") == ["Bare", "Bare.method", "Bare.value"]


# ----------------------------------------------------------------------------------------------------------------- size


def docstring_lines(node):
    text = ast.get_docstring(node, clean=False)
    return len(text.splitlines()) if text is not None else 0


def sizes(source):
    """Lines of each function of a module, docstrings not counted."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    functions = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = sum(docstring_lines(n) for n in ast.walk(node) if isinstance(n, documented))
            functions[f"{node.name}:{node.lineno}"] = node.end_lineno - node.lineno + 1 - inner
    return functions


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_functions_stay_readable(path):
    """At most sixty lines each; how long a module is, its idea decides."""
    assert {name: lines for name, lines in sizes(path.read_text()).items() if lines > 60} == {}


def test_size_counts_code_only():
    source = textwrap.dedent('''
        """One.

        Three."""


        def f():
            """Doc."""
            return 1
    ''').lstrip()
    assert sizes(source) == {"f:6": 2}


# ------------------------------------------------------------------------------------------------ tests that do not run


def test_every_test_is_collected():
    """A function that asserts, has no `test` prefix and is used nowhere would never run."""
    texts = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))}
    everything = "\n".join(texts.values())
    lost = []
    for path, text in texts.items():
        for node in ast.parse(text).body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith(("test", "pytest_")):
                continue
            asserts = any(isinstance(inner, ast.Assert) for inner in ast.walk(node))
            if asserts and everything.count(node.name) == 1:
                lost.append(f"{relative(path)}:{node.lineno} {node.name}")
        has_tests = "def test" in text
        if has_tests and not path.name.startswith("test_"):
            lost.append(f"{relative(path)}: the file's name does not begin with test_")
    assert lost == []


def test_what_is_imported_is_declared():
    """Packages of the standard library and our own aside; an optional one under the name of its extra."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(
            x
            for extra in ("enum", "flower", "plots", "privacy", "ray")
            for x in project["optional-dependencies"][extra]
        ),
    ]
    declared = {re.match(r"[A-Za-z0-9_.-]+", requirement)[0].replace("-", "_") for requirement in wanted}
    found = set()
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(node.module.partition(".")[0])
    assert "tqdm" in found
    # ArviZ 1.x is made of packages, of which one is asked for by its own name.
    assert found - set(sys.stdlib_module_names) - {"numpyro_pvi", "arviz_stats"} <= declared


def test_what_is_left_out_of_make_test_exists():
    """A test that was renamed would come back unseen, or its name would hide nothing."""
    for line in (ROOT / "tests/whole.txt").read_text().splitlines():
        if "::" in line:
            path, *_, name = line.partition("[")[0].split("::")
            assert re.search(rf"^ *def {name}\(", (ROOT / path).read_text(), re.MULTILINE), line


def test_heavy_tests_of_every_file_have_one_turn_of_all():
    files = [f"tests/laws/test_{name}.py::test_a" for name in ("cells", "groups", "chains", "golden")]
    for node in files:
        turns = [has_its_turn(SimpleNamespace(nodeid=node), f"{1700000000 + k}/6") for k in range(6)]
        assert sum(turns) == 1
    assert has_its_turn(SimpleNamespace(nodeid=files[0]), None)
