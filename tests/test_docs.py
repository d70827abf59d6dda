"""The code that a new user copies runs: README.md and the pages that run, block after block."""

import functools
import importlib
import importlib.util
import pathlib
import re
import zlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
BLOCK = re.compile(r"^```(?:python|\{code-cell\} ipython3)\n(.*?)^```", re.DOTALL | re.MULTILINE)


PAGES = (
    "getting_started",
    "divergences",
    "snep",
    "no_server",
    "streaming",
    "forgetting",
    "gaussian_processes_streaming",
    "saving",
    "families",
    "several_devices",
    "privacy",
)


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{page}.md" for page in PAGES)])
def test_code_of_the_page_runs(page):
    run_page(page)


def test_parts_from_outside_are_taken():
    """A solver, a schedule and a runtime that the package does not know, each in fewer than sixty lines."""
    run_page("docs/extending.md")
    blocks = [block.group(1) for block in BLOCK.finditer((ROOT / "docs/extending.md").read_text())]
    assert len(blocks) == 4 and all(block.count("\n") < 60 for block in blocks)


def run_page(page):
    """Executes a page's blocks one after another; what they claim, they assert."""
    text = (ROOT / page).read_text()
    namespace = {"__name__": "page"}
    blocks = list(BLOCK.finditer(text))
    assert blocks
    for block in blocks:
        # Blank lines in front keep the page's own line numbers in a traceback.
        source = "\n" * text[: block.start(1)].count("\n") + block.group(1)
        exec(compile(source, page, "exec"), namespace)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_code_of_every_page_is_python(page):
    for block in BLOCK.finditer(page.read_text()):
        compile(block.group(1), page.name, "exec")


def test_pages_name_no_missing_page():
    """Relative links between Markdown pages, README included, point at files that are there."""
    missing = [
        f"{page.name}: {target}"
        for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert missing == []


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_asks_draws_and_leads_on(notebook):
    """Each is Python, draws, opens with its question, and ends with where to go; the front page has a card and a small picture."""
    text, front = notebook.read_text(), (ROOT / "docs" / "index.md").read_text()
    compile(text, notebook.name, "exec")
    cells = text.split("\n# %%")[1:]
    assert "plt." in text and "## What to try next" in cells[-1]
    assert f"\nnotebooks/{notebook.stem}\n" in front and f":link: notebooks/{notebook.stem}\n" in front
    assert f":img-top: pictures/{notebook.stem}.png" in front


def test_pictures_are_there_and_small():
    shown = [
        (page.parent / name).resolve()
        for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        for name in re.findall(r"[\w/]*pictures/\w+\.png", page.read_text())
    ]
    assert len(set(shown)) >= len(NOTEBOOKS) + 2
    assert [path for path in shown if not path.is_file() or path.stat().st_size > 300_000] == []


def test_names_that_pages_link_to_elsewhere_are_there(tmp_path):
    """Each is an object of the installed package, and the written lists have all of them."""
    spec = importlib.util.spec_from_file_location("inventories", ROOT / "docs" / "inventories.py")
    spec.loader.exec_module(inventories := importlib.util.module_from_spec(spec))
    for site, (address, file) in inventories.write(tmp_path).items():
        head, body = pathlib.Path(file).read_bytes().split(b"zlib.\n", 1)
        assert head.startswith(b"# Sphinx inventory version 2\n") and address.startswith("https://")
        lines = zlib.decompress(body).decode().splitlines()
        names = [name for page in inventories.SITES[site][1].values() for name in page]
        assert sorted(line.split()[0] for line in lines) == sorted(names)
        for name in names:
            package, *path = name.split(".")
            module = (
                importlib.import_module(".".join([package, *path[:-1]]))
                if path[:-1]
                else importlib.import_module(package)
            )
            assert functools.reduce(getattr, path[-1:], module) is not None
