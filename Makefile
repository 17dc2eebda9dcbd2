# `make book`, `make test`: each makes its own environment on a fresh machine (Python 3.11+ and make).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Empty: pip's own index. A reader who wants the CPU build of torch gives its index; README says which.
TORCH_INDEX ?=
export TORCH_INDEX
# torch is pip's, which knows where a CPU build is; the rest is uv's, or pip's where uv finds no index.
EVERYTHING := -c constraints.txt -e '.[book,test]'
PYTEST_ARGS ?=
# Test files of `make test` that run side by side; 0 runs them in one process.
WORKERS ?= 2
PORT ?= 8000

.PHONY: help env book test test-sglang serve lint clean
help:
	@sed -n 's/$$(PORT)/$(PORT)/; s/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile

env: $(VENV)/.ready ## the environment in .venv, pinned by constraints.txt

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"kvlab needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}: make PYTHON=python3.12")'
	rm -f $@
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-compile -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/pip install -q --no-compile -c constraints.txt pip uv
	$(BIN)/uv pip install -q --python $(BIN)/python $(EVERYTHING) || $(BIN)/pip install -q --no-compile $(EVERYTHING)
	touch $@

book: env ## the chapters, executed on this host, rendered into _build/html
	$(BIN)/python -m kvlab book build

test: env ## everything that needs neither a GPU nor SGLang
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m 'not gpu and not sglang' $(PYTEST_ARGS)

# For `make -j2 book-then-test test-sglang`, as .ci/run has it: what else is asked for begins beside the book.
.PHONY: book-then-test
book-then-test: env
	$(MAKE) book
	$(MAKE) test

.PHONY: test-gpu
test-gpu: env ## the kernels on this host's GPU: tests/cpu there, and tests/gpu
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile tests/cpu tests/gpu $(PYTEST_ARGS)

# The real SGLang on CPU, each release in an environment of its own (tests/sglang/requirements), and the source of
# all the others. Safe to run with -j.
SGLANG_RELEASES ?= 0.5.9 0.5.15.post1 0.5.23
SGLANG_TARGETS := $(SGLANG_RELEASES:%=test-sglang-%)
.PHONY: test-sglang-sources $(SGLANG_TARGETS)
test-sglang: $(SGLANG_TARGETS) test-sglang-sources ## the patch on real SGLang releases, on CPU

$(SGLANG_TARGETS): test-sglang-%:
	$(PYTHON) tests/sglang/make_env.py $*
	.venv-sglang-$*/bin/python -m pytest tests/sglang -m 'not sources' $(PYTEST_ARGS)

test-sglang-sources:
	$(PYTHON) tests/sglang/make_env.py 0.5.23
	.venv-sglang-0.5.23/bin/python tests/sglang/fetch_sources.py
	.venv-sglang-0.5.23/bin/python -m pytest tests/sglang -m sources $(PYTEST_ARGS)

# Rules and the releases that they were read from: wheels are downloaded once into .cache.
.PHONY: test-sources
test-sources: env ## the rules of kvlab.backends against the real flashinfer and SGLang sources
	$(BIN)/python -m pytest tests/sources $(PYTEST_ARGS)
test-sglang: test-sources

serve: book ## the built book on a loopback port, http://127.0.0.1:$(PORT)/
	$(BIN)/python -m kvlab book serve --port $(PORT)

lint: env ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean: ## what was built, not the environment
	rm -rf _build book/executed dist .pytest_cache .ruff_cache .hypothesis
