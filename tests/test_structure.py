"""What the package still owes its contracts, counted: each number may fall and never rises.

Solvers, schedules, families and guides answer to a contract. Whoever asks what class one is, or whether it happens to have
an attribute, knows more than the contract says; so does a room that imports another room's private modules. Modules that
import each other in a circle cannot be read one after the other.
"""

import ast
import importlib
import inspect

import pytest

from .test_package import PACKAGE, imported_names, modules, room_of

# The most that there may be. A change that needs more belongs into a contract.
MOST = {"circles": 0, "reaches": 0, "isinstance": 0, "getattr": 5}

# Whose parts are asked by name: a variable or attribute that ends so.
PARTS = ("solver", "schedule", "family", "guide", "runtime", "program")


def name_of(path):
    """`numpyro_pvi/solvers/__init__.py` -> `numpyro_pvi.solvers`."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources():
    """Text and whether it is a package's own file, by module."""
    return {name_of(path): (path.read_text(), path.name == "__init__.py") for path in modules()}


def circles(graph):
    """Sets of modules that reach each other, by Tarjan's algorithm."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in graph:
        if node not in index:
            visit(node)
    return found


def import_graph(texts):
    """Modules that each module imports, lazily or not; names that a package hands on count as the package."""
    return {
        module: {
            name if name in texts else name.rpartition(".")[0]
            for _, name in imported_names(text, module, is_package)
            # Whoever imports a module runs the packages above it, which is no circle of their making.
            if name != module and not module.startswith(f"{name}.")
        }
        for module, (text, is_package) in texts.items()
    }


def reaches(texts):
    """Imports of a private module of another room."""
    return [
        f"{module}:{line} {name}"
        for module, (text, is_package) in texts.items()
        for line, name in imported_names(text, module, is_package)
        if name.count(".") == 2 and name.split(".")[2].startswith("_") and room_of(name) != room_of(module)
    ]


# A verb that every part of the room has, and nothing else.
VERBS = {"solvers": "solve", "schedules": "round", "families": "log_partition"}


def concrete_classes():
    """Names of the rooms' solvers, schedules and families by room, without the contracts themselves."""
    found = {}
    for room, verb in VERBS.items():
        module = importlib.import_module(f"numpyro_pvi.{room}")
        values = {name: getattr(module, name) for name in module.__all__}
        found[room] = {n for n, x in values.items() if inspect.isclass(x) and hasattr(x, verb) and not _is_contract(x)}
    return found


def _is_contract(value):
    return getattr(value, "_is_protocol", False) or inspect.isabstract(value)


def asked_class(texts, names):
    """Questions of whether something is of a concrete class of another room."""
    found = []
    for module, (text, _) in texts.items():
        others = set().union(*(of for room, of in names.items() if room != room_of(module)))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                asked = {x.id for x in ast.walk(node.args[1]) if isinstance(x, ast.Name)}
                found += [f"{module}:{node.lineno} {name}" for name in sorted(asked & others)]
    return found


def asked_attribute(texts):
    """``getattr`` with a default, or ``hasattr``, on a solver, schedule, family, guide, runtime or program."""
    found = []
    for module, (text, _) in texts.items():
        for node in ast.walk(ast.parse(text)):
            asks = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"
            asks = asks and len(node.args) == 3
            asks = asks or (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr"
            )
            if asks and ast.unparse(node.args[0]).endswith(PARTS):
                found.append(f"{module}:{node.lineno} {ast.unparse(node)}")
    return found


def counted(texts):
    """What there is of each kind."""
    return {
        "circles": circles(import_graph(texts)),
        "reaches": reaches(texts),
        "isinstance": asked_class(texts, concrete_classes()),
        "getattr": asked_attribute(texts),
    }


def test_there_are_no_more_than_there_were():
    found = counted(sources())
    assert {kind: len(of) for kind, of in found.items() if len(of) > MOST[kind]} == {}, found


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("circles", "from ._other import f"),
        ("reaches", "from .schedules._base import Rule"),
        ("isinstance", "def f(x):\n    return isinstance(x, (int, PowerEP))"),
        ("getattr", "def f(engine):\n    return getattr(engine.solver, 'tied', False)"),
    ],
)
def test_a_planted_one_is_counted(kind, text):
    """Of two modules, the second without any fault of its own."""
    clean = "from ._one import g\ndef f(solver):\n    return solver.tied and isinstance(solver, int) and getattr(solver, 'tied')"
    found = counted({"numpyro_pvi._one": (text, False), "numpyro_pvi._other": (clean, False)})
    assert {name: len(of) for name, of in found.items()} == {**dict.fromkeys(MOST, 0), kind: 1}
