# `make demo` and `make test` need Python 3.11 to 3.13 and nothing else; they build their own environment in $(VENV).

# The newest suitable interpreter that can also make an environment; `make demo PYTHON=/path/to/python` overrides it.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1 \
	&& echo "$$p" && break; done)
VENV ?= .venv
PY := $(VENV)/bin/python
INSTALL ?= $(PY) -m pip install --quiet
PYTEST_ARGS ?= -n 2 --dist loadfile
# From Python 3.12 on, the interpreter itself says which lines ran, at almost no cost. With 3.11 counting takes a fifth of
# the time, and has to be asked for: make test COVERAGE=--cov=numpyro_pvi
COVERAGE ?= $(shell $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo --cov=numpyro_pvi --cov-report=term:skip-covered)
COVERAGE_CORE ?= $(shell $(PY) -c 'import sys; print("sysmon" if sys.version_info >= (3, 12) else "ctrace")' 2>/dev/null)
BRIEF ?= --brief
DEMO_ARGS ?=

.PHONY: demo test test-all test-float32 lint docs bench papers clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-examples  ## the hospitals example; writes hospitals.png
	MPLBACKEND=Agg $(PY) examples/hospitals.py --out hospitals.png $(DEMO_ARGS)

# Annotations are checked by test-all and test-float32; files stay on one worker, whose fits their tests share.
test: $(VENV)/.installed-test  ## one of every kind of test, with the lines that they reach
	NUMPYRO_PVI_TEST_TYPES=0 MPLBACKEND=Agg $(if $(COVERAGE),COVERAGE_CORE=$(COVERAGE_CORE)) $(PY) -m pytest $(BRIEF) $(COVERAGE) $(PYTEST_ARGS)

test-all: $(VENV)/.installed-test  ## the test suite
	MPLBACKEND=Agg $(PY) -m pytest $(PYTEST_ARGS)

# Resuming is bit for bit, seeds of bad links are many, faults are planted and compilations counted in either precision: once
# is enough. What a model closes over is followed in float64: in float32 JAX keeps its copy of a NumPy array by the array's
# identity while an older program lives, so that it does not see one that has changed in place.
ONCE := closures resume product_resume asynchronous mutants compiles applicability restored flower secagg
test-float32: $(VENV)/.installed-test  ## the laws in float32, NumPyro's default precision
	MPLBACKEND=Agg NUMPYRO_PVI_TEST_X64=0 $(PY) -m pytest tests/laws $(PYTEST_ARGS) \
	  $(ONCE:%=--ignore=tests/laws/test_%.py)

lint: $(VENV)/.installed-lint $(VENV)/.installed-test  ## one linter, one type checker
	$(PY) -m ruff check .
	$(PY) -m pyright --pythonpath $(PY)

docs: $(VENV)/.installed-docs docs/_static/mathjax/tex-mml-chtml.js  ## HTML in docs/_build/html, warnings are errors
	MPLBACKEND=Agg $(PY) -m sphinx -j 2 -W --keep-going -b html docs docs/_build/html

# Formulas are set by MathJax from a local copy, so that the pages work without a network. Without npm the pages are built
# all the same and show their formulas as TeX.
docs/_static/mathjax/tex-mml-chtml.js:
	@mkdir -p docs/_build/mathjax docs/_static
	@if command -v npm >/dev/null 2>&1 \
	  && (cd docs/_build/mathjax && npm pack --silent mathjax@3 >/dev/null && tar -xzf mathjax-3*.tgz); then \
	  rm -rf docs/_static/mathjax && mkdir -p docs/_static/mathjax/output/chtml/fonts \
	  && cp docs/_build/mathjax/package/es5/tex-mml-chtml.js docs/_static/mathjax/ \
	  && cp -r docs/_build/mathjax/package/es5/output/chtml/fonts/woff-v2 docs/_static/mathjax/output/chtml/fonts/; \
	else echo "MathJax could not be fetched with npm: formulas will be shown as TeX"; fi

bench: $(VENV)/.installed-test  ## make bench NAME=glm DATA=folder
	@test -n "$(NAME)" -a -n "$(DATA)" || { echo "write: make bench NAME=glm DATA=folder"; exit 2; }
	$(PY) -m benchmarks $(NAME) --data $(DATA) $(BENCH_ARGS)

papers: $(VENV)/.installed-test  ## the papers' experiments: make papers DATA=folder [NAME="cvi pvi-streams"] [OUT=papers]
	@test -n "$(DATA)" || { echo "write: make papers DATA=folder"; exit 2; }
	MPLBACKEND=Agg $(PY) -m benchmarks papers --data $(DATA) --out $(or $(OUT),papers) $(if $(NAME),--only $(NAME)) $(BENCH_ARGS)

# One stamp per extra: installed again only when pyproject.toml has changed.
$(VENV)/.installed-%: pyproject.toml | $(PY)
	$(INSTALL) -e ".[$*]"
	@touch $@

$(PY):
	@test -n "$(PYTHON)" || { echo "no Python from 3.11 to 3.13 with the venv module was found; \
	install one or write: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

clean:  ## everything that was built here, the environments included
	rm -rf .venv .venv-* build dist docs/_build docs/_static/mathjax .jax_cache .pytest_cache .ruff_cache hospitals.png
