# Everything a contributor runs. Each target installs what it needs first, once.
#
#   PYTHON=python3.12   the Python to make the virtual environment with (3.10 or later)
#   VENV=.venv          where to make it
#   V2=no               leave out the treetensor managers and their tests (and so PyTorch)
#   TORCH='torch==2.13.0 --index-url URL'
#                       any other way to get PyTorch, which treetensor needs
#   ARGS='-k lifecycle' further arguments for pytest (make test), or for the scripts behind make bench,
#                       make soak and make scoreboard
#   SUITES=DIR          where checkouts of trainers are, for make test-trainers; ARGS=gymnasium for one
#   JOBS=4              how many processes share the tests out (make test): some of them wait at any time;
#                       0: they run in pytest itself
#   BENCH_DING_PYTHON=python3.11
#                       the Python for DI-engine in the benchmarks: one with wheels for numpy below 2

PYTHON ?= python3
VENV ?= .venv
V2 ?= yes
TORCH ?= torch==2.13.0
ARGS ?=
JOBS ?= 4
# Further requirements for the environment of the tests, as in `make test WITH='numpy<2'`.
WITH ?=

# What make test-trainers cannot fetch by itself.
SUITES ?= .venv-suites

MATRIX = 3.10 3.11 3.12 3.13 3.14
# The oldest Python of the matrix runs with the oldest dependencies that setup.cfg allows.
OLDEST_PYTHON = 3.10
OLDEST = numpy==1.26.* gymnasium==1.1.* click==8.1.* cloudpickle==3.0.* easydict==1.10 msgspec==0.19.* \
  pygal==3.0.5 pyyaml==6.0.* rich==13.0.* tomli==2.0.*

RAY_VENV ?= .venv-ray
# OpenEnv and TRL, which bring a hundred packages.
AGENTS_VENV ?= .venv-agents
BENCH_VENV ?= .venv-bench
# Peers with an environment of their own: DI-engine needs numpy below 2, RLlib one certain gymnasium.
BENCH_DING_VENV = $(BENCH_VENV)-ding
BENCH_DING_PYTHON ?= $(PYTHON)
BENCH_RLLIB_VENV = $(BENCH_VENV)-rllib
SITE_VENV ?= .venv-site
SITE_OUT ?= build/site
DIST_VENV ?= .venv-dist
# The packages of the extra `envs` have an environment of their own as well.
ENVS_VENV ?= .venv-envs
BENCH_OUT ?= docs/benchmarks
SOAK_OUT ?= docs/reliability

PIP_INSTALL = $(VENV)/bin/python -m pip install --disable-pip-version-check -qq
# `pip install -e .` compiles envmgr/_hot.c, where there is a compiler.
REQUIREMENTS = setup.cfg pyproject.toml setup.py envmgr/_hot.c

.PHONY: help venv demo demo-cluster test test-pure asan test-ray test-agents test-trainers test-envs docs site dist bench soak scoreboard test-matrix lint typecheck format clean distclean

help:  ## print this list
	@echo 'usage: make TARGET'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' Makefile

venv: $(VENV)/.test-$(V2) $(VENV)/.dev  ## make .venv with everything that tests and linters need

demo: $(VENV)/.core  ## run CartPole-v1 on subprocesses, with progress and a summary
	@echo "==> envmgr run configs/cartpole.yaml"
	@$(VENV)/bin/envmgr run configs/cartpole.yaml

demo-cluster: $(RAY_VENV)/.ray  ## run CartPole-v1 on a Ray cluster of two nodes, one of which is killed
	@$(RAY_VENV)/bin/python examples/ray_cluster.py

# The tests start hundreds of interpreters: none compiles again what another one has compiled.
test: $(VENV)/.test-$(V2)  ## run all tests
	@echo "==> running the tests with $$($(VENV)/bin/python --version)"
	@PYTHONDONTWRITEBYTECODE= ENVMGR_TEST_V2=$(V2) $(VENV)/bin/python -m pytest --numprocesses $(JOBS) --dist load --maxschedchunk 10 $(ARGS)

# What these tests are about is Python's way alone: nothing with PyTorch, no processes but those of F25.
test-pure: $(VENV)/.test-$(V2)  ## run unit and property tests, and interrupts, without envmgr/_hot.c
	@echo "==> running unit and property tests, and interrupts, with ENVMGR_PURE=1"
	@ENVMGR_PURE=1 PYTHONDONTWRITEBYTECODE= ENVMGR_TEST_V2=no $(VENV)/bin/python -m pytest \
	  --numprocesses $(JOBS) --dist load --maxschedchunk 10 \
	  tests/unit tests/property tests/faults/test_f25_interrupts.py tests/faults/test_f25_adapters.py $(ARGS)

asan: $(VENV)/.test-$(V2)  ## run the tests of envmgr/_hot.c under sanitizers of addresses and undefined behaviour
	@echo "==> envmgr/_hot.c under sanitizers"
	@$(VENV)/bin/python -m tests.fuzz.sanitized $(or $(ARGS),20000)

test-ray: $(RAY_VENV)/.ray  ## run the tests that need a Ray cluster, which they start on this machine
	@echo "==> running the tests over Ray with $$($(RAY_VENV)/bin/python --version)"
	@$(RAY_VENV)/bin/python -m pytest tests/contract/test_ray.py $(ARGS)

test-agents: $(AGENTS_VENV)/.agents  ## run the tests of the adapters for OpenEnv and TRL, with both
	@echo "==> running the tests with OpenEnv and TRL with $$($(AGENTS_VENV)/bin/python --version)"
	@$(AGENTS_VENV)/bin/python -m pytest -W default tests/frameworks $(ARGS)
	@$(AGENTS_VENV)/bin/python -m pytest -W default tests/docs -k rollouts

test-trainers: $(VENV)/.core  ## run trainers' own tests on envmgr; SUITES=DIR has checkouts (DIR/gymnasium ...)
	@$(VENV)/bin/python tests/trainers/run.py --suites $(SUITES) --venvs .venv-trainers --torch '$(TORCH)' $(ARGS)

test-envs: $(ENVS_VENV)/.envs  ## run Atari, MuJoCo, MiniGrid and Procgen under every kind that fits
	@echo "==> running envs of other packages with $$($(ENVS_VENV)/bin/python --version)"
	@$(ENVS_VENV)/bin/python -m pytest tests/contract/test_real_envs.py $(ARGS)

docs: $(VENV)/.dev  ## write the generated pages of docs/reference anew
	@echo "==> generating docs/reference"
	@$(VENV)/bin/python docs/generate.py

site: $(SITE_VENV)/.site  ## make the site of the docs, with a gallery of reports, in build/site/html
	@echo "==> the site of the docs, into $(SITE_OUT)"
	@$(SITE_VENV)/bin/python docs/site/build.py --out $(SITE_OUT) $(ARGS)

bench: $(BENCH_VENV)/.bench $(BENCH_DING_VENV)/.bench  ## measure envmgr beside its peers; ARGS=--quick for a short look
	@echo "==> benchmarks, into $(BENCH_OUT)"
	@$(BENCH_VENV)/bin/python benchmarks/run.py --ding-python $(BENCH_DING_VENV)/bin/python \
	  --out $(BENCH_OUT) $(ARGS)

soak: $(VENV)/.test-$(V2)  ## measure reliability at length; ARGS=--quick for a look, '--only NAME,...' for parts
	@echo "==> reliability, into $(SOAK_OUT)"
	@ENVMGR_TEST_V2=$(V2) $(VENV)/bin/python soak/run.py --out $(SOAK_OUT) $(ARGS)

scoreboard: $(BENCH_VENV)/.bench $(BENCH_DING_VENV)/.bench $(BENCH_RLLIB_VENV)/.bench  ## put the same faults to envmgr and to its peers
	@echo "==> scoreboard of faults, into $(SOAK_OUT)"
	@$(BENCH_VENV)/bin/python soak/scoreboard.py --out $(SOAK_OUT) $(ARGS)

test-matrix:  ## run all tests with each Python of 3.10 to 3.14 that is installed, in .venv-3.x
	@failed= ; ran= ; missing= ; \
	for version in $(MATRIX); do \
	  if ! python$$version --version >/dev/null 2>&1; then missing="$$missing $$version"; continue; fi; \
	  with="$(WITH)"; \
	  if [ $$version = $(OLDEST_PYTHON) ]; then with="$$with $(OLDEST)"; fi; \
	  echo "==> Python $$version $$with"; \
	  if $(MAKE) --no-print-directory test PYTHON=python$$version VENV=.venv-$$version WITH="$$with"; \
	  then ran="$$ran $$version"; else failed="$$failed $$version"; fi; \
	done; \
	echo "==> passed:$${ran:- none}; failed:$${failed:- none}; not installed:$${missing:- none}"; \
	[ -z "$$failed" ] && [ -n "$$ran" ]

lint: $(VENV)/.dev  ## check style, formatting, types (of the docs' examples, too) and the layers of imports
	@failed= ; \
	for command in 'ruff check .' 'ruff format --check .' mypy 'python -m tests.docs.typed' lint-imports; do \
	  echo "==> $$command"; \
	  $(VENV)/bin/$$command || failed="$$failed $$command;"; \
	done; \
	if [ -n "$$failed" ]; then echo "==> failed:$$failed see above" >&2; exit 1; fi

typecheck: $(VENV)/.dev  ## check types only, those of the examples of the pages as well
	@echo "==> mypy"
	@$(VENV)/bin/mypy
	@echo "==> mypy and basedpyright, of the examples"
	@$(VENV)/bin/python -m tests.docs.typed

format: $(VENV)/.dev  ## format the code and mend what ruff can mend
	@echo "==> ruff check --fix, ruff format"
	@$(VENV)/bin/ruff check --fix . ; $(VENV)/bin/ruff format .

dist: $(DIST_VENV)/.dist  ## build the sdist, the wheel with C and the one without; install and run each
	@echo "==> building into dist/"
	@rm -rf dist build
	@$(DIST_VENV)/bin/python -m build --outdir dist . > build-dist.log 2>&1 || { cat build-dist.log; exit 1; }
	@ENVMGR_PURE=1 $(DIST_VENV)/bin/python -m build --wheel --outdir dist . > build-dist.log 2>&1 || { cat build-dist.log; exit 1; }
	@rm -rf build build-dist.log
	@$(DIST_VENV)/bin/python -m twine check --strict dist/*
	@for file in dist/*; do \
	  echo "==> installing $$file into a fresh environment, and running configs/cartpole.yaml" && \
	  rm -rf $(DIST_VENV)/fresh && $(PYTHON) -m venv $(DIST_VENV)/fresh && \
	  $(DIST_VENV)/fresh/bin/python -m pip install --disable-pip-version-check -qq $$file && \
	  config=$$PWD/configs/cartpole.yaml && python=$$PWD/$(DIST_VENV)/fresh/bin/python && \
	  (cd $(DIST_VENV)/fresh && $$python -c 'import envmgr.hot; print("the ordinary step in C:", envmgr.hot.WHY)' && \
	    $$python -m envmgr run $$config) || exit 1; \
	done

clean:  ## remove caches and build outputs
	@echo "==> removing caches and build outputs"
	@rm -rf build dist rl_env_manager.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean  ## remove the virtual environments as well
	@echo "==> removing virtual environments"
	@rm -rf .venv .venv-3.* $(SITE_VENV) $(ENVS_VENV) $(RAY_VENV) $(AGENTS_VENV) $(BENCH_VENV) $(BENCH_DING_VENV) $(BENCH_RLLIB_VENV) $(DIST_VENV) .venv-trainers .venv-suites

# The stamp files below say what is installed; a newer setup.cfg or pyproject.toml installs again.

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "envmgr needs Python 3.10 or later, and '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo 'not there')." \
	       "Name another one: make PYTHON=python3.12 TARGET" >&2; exit 1; }
	@echo "==> making a virtual environment in $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.core: $(VENV)/.made $(REQUIREMENTS)
	@echo "==> installing envmgr into $(VENV)"
	@$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.torch: $(VENV)/.made
	@if $(VENV)/bin/python -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then \
	  echo "==> installing PyTorch into $(VENV), for treetensor; this may take some minutes" \
	       "(make test V2=no goes without)"; \
	  $(PIP_INSTALL) $(TORCH); \
	else \
	  echo "==> treetensor has no wheels for $$($(VENV)/bin/python --version): going without"; \
	fi
	@touch $@

# PyTorch comes first, on its own: treetensor takes any version, and what is there is kept.
$(VENV)/.test-yes: $(VENV)/.torch $(REQUIREMENTS)
	@echo "==> installing envmgr with the extras test and treetensor into $(VENV)"
	@$(PIP_INSTALL) --editable '.[test,treetensor]' $(foreach requirement,$(WITH),'$(requirement)')
	@touch $@ $(VENV)/.core

$(VENV)/.test-no: $(VENV)/.made $(REQUIREMENTS)
	@echo "==> installing envmgr with the extra test into $(VENV)"
	@$(PIP_INSTALL) --editable '.[test]' $(foreach requirement,$(WITH),'$(requirement)')
	@touch $@ $(VENV)/.core

$(ENVS_VENV)/.envs: $(REQUIREMENTS)
	@$(MAKE) --no-print-directory VENV=$(ENVS_VENV) $(ENVS_VENV)/.made
	@echo "==> installing envmgr with the extras test and envs into $(ENVS_VENV)"
	@$(ENVS_VENV)/bin/python -m pip install --disable-pip-version-check -qq --editable '.[test,envs]'
	@touch $@

$(RAY_VENV)/.ray: $(REQUIREMENTS)
	@$(MAKE) --no-print-directory VENV=$(RAY_VENV) $(RAY_VENV)/.made
	@echo "==> installing envmgr with the extras test and ray into $(RAY_VENV)"
	@$(RAY_VENV)/bin/python -m pip install --disable-pip-version-check -qq --editable '.[test,ray]'
	@touch $@

# PyTorch comes first, on its own, as above.
$(AGENTS_VENV)/.agents: $(REQUIREMENTS)
	@$(MAKE) --no-print-directory VENV=$(AGENTS_VENV) $(AGENTS_VENV)/.made
	@echo "==> installing envmgr with the extras test, openenv and trl into $(AGENTS_VENV)"
	@$(AGENTS_VENV)/bin/python -m pip install --disable-pip-version-check -qq $(TORCH)
	@$(AGENTS_VENV)/bin/python -m pip install --disable-pip-version-check -qq --editable '.[test,openenv,trl]'
	@touch $@

$(SITE_VENV)/.site: $(REQUIREMENTS)
	@$(MAKE) --no-print-directory VENV=$(SITE_VENV) $(SITE_VENV)/.made
	@echo "==> installing envmgr with the extra site into $(SITE_VENV)"
	@$(SITE_VENV)/bin/python -m pip install --disable-pip-version-check -qq --editable '.[site]'
	@touch $@

$(DIST_VENV)/.dist: $(REQUIREMENTS)
	@$(MAKE) --no-print-directory VENV=$(DIST_VENV) $(DIST_VENV)/.made
	@$(DIST_VENV)/bin/python -m pip install --disable-pip-version-check -qq build twine
	@touch $@

$(VENV)/.dev: $(VENV)/.made $(REQUIREMENTS)
	@echo "==> installing envmgr with the extra dev into $(VENV)"
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.core

# A peer that cannot be installed is named and left out.
$(BENCH_VENV)/.bench: $(REQUIREMENTS) benchmarks/install.py
	@$(MAKE) --no-print-directory VENV=$(BENCH_VENV) $(BENCH_VENV)/.core
	@$(BENCH_VENV)/bin/python -m pip install --disable-pip-version-check -qq matplotlib
	@$(BENCH_VENV)/bin/python benchmarks/install.py $(BENCH_VENV) --torch '$(TORCH)'
	@touch $@

$(BENCH_DING_VENV)/.bench: benchmarks/install.py benchmarks/requirements-ding.txt
	@$(MAKE) --no-print-directory VENV=$(BENCH_DING_VENV) PYTHON=$(BENCH_DING_PYTHON) $(BENCH_DING_VENV)/.made
	@$(BENCH_DING_VENV)/bin/python benchmarks/install.py $(BENCH_DING_VENV) --only ding --torch '$(TORCH)'
	@touch $@

$(BENCH_RLLIB_VENV)/.bench: benchmarks/install.py
	@$(MAKE) --no-print-directory VENV=$(BENCH_RLLIB_VENV) $(BENCH_RLLIB_VENV)/.made
	@$(BENCH_RLLIB_VENV)/bin/python benchmarks/install.py $(BENCH_RLLIB_VENV) --only rllib --torch '$(TORCH)'
	@touch $@
