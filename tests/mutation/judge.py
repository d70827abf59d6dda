"""Runs the tests that reach the line which differs from the last commit: exit status 0 when none of them sees the change.

The quickest come first, until ``MUTATION_SECONDS`` are planned for. A program that is traced once is reached by the first
test that needs it alone, so that the files of these tests follow, as far as the same time allows.
"""

import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import coverage

ROOT = pathlib.Path(__file__).parents[2]


def changed():
    """The module and line of the working tree's first difference."""
    text = subprocess.run(
        ["git", "diff", "-U0", "--", "numpyro_pvi"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    module = re.search(r"^\+\+\+ b/(.*)$", text, re.MULTILINE).group(1)
    return module, int(re.search(r"^@@ -(\d+)", text, re.MULTILINE).group(1))


def seconds():
    """Seconds of every test by node id."""
    taken = {}
    for case in ElementTree.parse(os.environ["MUTATION_TIMES"]).getroot().iter("testcase"):
        parts = case.get("classname").split(".")
        # The module is the first part that pytest collects; classes follow.
        at = next((i for i, part in enumerate(parts) if part.startswith("test_")), None)
        if at is not None:
            file = "/".join(parts[: at + 1]) + ".py"
            taken["::".join([file, *parts[at + 1 :], case.get("name")])] = float(case.get("time"))
    return taken


def reached(module, line):
    """The tests that ran this line, and those that ran any line of its module."""
    data = coverage.CoverageData(os.environ["MUTATION_REACH"])
    data.read()
    (name,) = [name for name in data.measured_files() if name.endswith("/" + module)]
    lines = {
        at: {context.rpartition("|")[0] for context in contexts} - {""}
        for at, contexts in data.contexts_by_lineno(name).items()
    }
    return lines.get(line, set()), set().union(*lines.values())


def chosen(module, line, limit):
    """Node ids, those that reach the line first, the quick before the slow."""
    taken = seconds()
    here, anywhere = reached(module, line)
    files = {test.partition("::")[0] for test in here}
    beside = {test for test in taken if test.partition("::")[0] in files} - here
    order = [
        test
        for tests in (here, beside if here else anywhere)
        for test in sorted(tests & taken.keys(), key=lambda test: (taken[test], test))
    ]
    tests, planned = [], 0.0
    for test in order:
        planned += taken[test]
        if tests and planned > limit:
            break
        tests.append(test)
    return tests


def main():
    module, line = changed()
    tests = chosen(module, line, float(os.environ.get("MUTATION_SECONDS", "90")))
    print(f"{module}:{line}: {len(tests)} tests", flush=True)
    if tests:
        # In the place of this process, so that who ends it for taking too long ends the tests.
        os.chdir(ROOT)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--timeout=120", "-p", "no:cacheprovider", *tests]
        os.execve(sys.executable, command, {**os.environ, "NUMPYRO_PVI_TEST_TYPES": "0", "MPLBACKEND": "Agg"})


if __name__ == "__main__":
    main()
