# Two commands for everybody: `make demo` and `make test`. Everything happens in .venv; a second run reuses it.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help install system setup setup-test setup-bench model demo test test-fast test-arm system-test test-web screenshots stage setup-web chaos storm sanitize fuzz check format bench bench-ring bench-api bench-vllm man rpm clean

VENV ?= .venv
PYTHON ?=
JOBS ?= 2
# Where a CPU build of torch is had when the one that pip finds is not.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
MODEL ?= .demo/model
export VENV PYTHON JOBS TORCH_CPU_INDEX MODEL
unexport OPENBLAS_CORETYPE OPENBLAS_L2_SIZE

BOOTSTRAP := packaging/bootstrap.sh
PY := $(VENV)/bin/python

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup:
	@$(BOOTSTRAP) system
	@$(BOOTSTRAP) venv
	@$(BOOTSTRAP) core

setup-test:
	@$(BOOTSTRAP) system test
	@$(BOOTSTRAP) nginx
	@$(BOOTSTRAP) venv test
	@$(BOOTSTRAP) core

model: setup
	@$(BOOTSTRAP) model

demo: model  ## install what is missing, start everything, ask one question, print the answer and where the time went
	@$(PY) tests/demo/run.py --model $(MODEL)

test: setup-test  ## the whole test suite, real vLLM included
	@$(BOOTSTRAP) model
	@SYSHAX_DEMO_MODEL=$(MODEL) $(PY) -m pytest $(PYTEST_OPTIONS)

test-fast: setup-test  ## without vLLM and the demo model
	@$(PY) -m pytest -m "not vllm and not model" $(PYTEST_OPTIONS)

# CI sets NATIVE_TESTS=short.
test-arm: setup  ## the core and its native tests for aarch64, on emulated CPUs (Debian)
	@$(BOOTSTRAP) system arm
	@packaging/native_tests.sh arm $(NATIVE_TESTS)

# CI sets SYSTEM_TESTS=short.
SYSTEM_TESTS ?= all
system-test: setup-test  ## the installed services under a systemd booted in a container, as root (SYSTEM_TESTS=short: two minutes)
	@$(BOOTSTRAP) system systemd
	@$(if $(filter short,$(SYSTEM_TESTS)),,$(BOOTSTRAP) system rpm)
	@SYSHAX_SYSTEM_TESTS=1 $(PY) -m pytest tests/system $(if $(filter short,$(SYSTEM_TESTS)),-m "not long") $(PYTEST_OPTIONS)

# CI sets CHAOS=short.
CHAOS ?= full
chaos: setup-test  ## faults against a running daemon: 1,000 rounds and 100,000 requests (CHAOS=short: 50 and 5,000)
	@$(PY) tests/chaos/run.py $(if $(filter short,$(CHAOS)),--short) $(CHAOS_OPTIONS)

STORM_OPTIONS ?= --seconds 180
storm: setup-test  ## the front-end under load while its workers are killed, stopped and restarted: three minutes
	@PYTHONPATH=tests/frontend $(PY) tests/frontend/storm.py $(STORM_OPTIONS)

# tests/web uses the helpers of tests/frontend and tests/daemon.
WEB := PYTHONPATH=tests/frontend:tests/daemon SYSHAX_WEB_TESTS=1 $(PY)

setup-web: setup-test
	@$(BOOTSTRAP) system web
	@$(BOOTSTRAP) venv web

# CI sets WEB_TESTS=short.
test-web: setup-web  ## the console in Chromium (Debian's, which this installs)
	@$(WEB) -m pytest tests/web $(if $(filter short,$(WEB_TESTS)),-k "shows_everything or hostile or phone") $(PYTEST_OPTIONS)

screenshots: setup-web  ## docs/console-*.png, of a front-end with a real daemon and workers that use it
	@$(WEB) tests/web/screenshots.py docs

stage: setup-web  ## the same to look at: prints the console's address and goes on until it is interrupted
	@$(WEB) tests/web/stage.py

install: setup  ## as a system service, below DESTDIR (packaging/install.sh says what goes where)
	@packaging/install.sh

sanitize: setup  ## the native tests under the address, undefined-behaviour and thread sanitizers
	@packaging/native_tests.sh sanitize $(NATIVE_TESTS)

# CI sets FUZZ=short.
FUZZ ?= long
fuzz: setup-test  ## hostile input for ring, sockets and control API: ten million inputs (FUZZ=short: a quarter of a minute)
	@$(PY) tests/fuzz/run.py $(FUZZ) $(FUZZ_OPTIONS)

check: setup-test  ## formatting, lint, types, documentation that must match the code
	@$(VENV)/bin/ruff format --check client daemon tests packaging setup.py
	@$(VENV)/bin/ruff check client daemon tests packaging setup.py
	@$(VENV)/bin/clang-format --dry-run -Werror $$(git ls-files 'csrc/*.h' 'csrc/*.cc' 'csrc/*.c' 'csrc/*.inc' 'tests/native/*' 'tests/fuzz/*.cc' 'tests/fuzz/*.h')
	@cd / && $(abspath $(PY)) -m mypy --config-file $(abspath pyproject.toml) --cache-dir $(abspath build/mypy)
	@$(PY) packaging/check_tree.py
	@$(PY) packaging/check_objects.py build/core

format:
	@$(VENV)/bin/ruff format client daemon tests packaging setup.py
	@$(VENV)/bin/ruff check --fix client daemon tests packaging setup.py
	@$(VENV)/bin/clang-format -i $$(git ls-files 'csrc/*.h' 'csrc/*.cc' 'csrc/*.c' 'csrc/*.inc' 'tests/native/*' 'tests/fuzz/*.cc' 'tests/fuzz/*.h')

setup-bench: setup
	@$(BOOTSTRAP) venv bench
	@$(VENV)/bin/cmake -S csrc/examples/int8row -B build/int8row -DSYSHAX_INCLUDE=$(CURDIR)/csrc/include >/dev/null
	@$(VENV)/bin/cmake --build build/int8row >/dev/null

bench: setup-bench  ## everything measured and held against what it must reach (QUICK=1: minutes); plot in bench-results/
	@$(VENV)/bin/syshaxd bench all $(if $(QUICK),--quick) --operators build/int8row/libint8row.so \
		--formats bf16,fp16,q8_0,q4_0,int8row $(BENCH_OPTIONS)

# Every command runs, and any of them that falls short fails the whole.
bench-ring: setup  ## the ring and the data plane under load, held against what they must reach
	@status=0; for words in ring sessions; do $(VENV)/bin/syshaxd bench $$words || status=1; done; exit $$status

bench-api: setup-bench  ## syshax-api beside a bare pass-through, held against what it must reach (QUICK=1: four minutes); plot in bench-results/
	@$(VENV)/bin/syshaxd bench api $(if $(QUICK),--quick) $(BENCH_OPTIONS)

bench-vllm: setup-test  ## vLLM with its experts in syshaxd against vLLM alone: 3 layers of Qwen3-30B-A3B, minutes
	@mkdir -p bench-results
	@$(PY) tests/e2e/compare_vllm.py --output bench-results/vllm.json

man: setup  ## the man pages and the shell completions, in build/manual/
	@$(PY) packaging/manual build/manual

# RPM_OPTIONS="--core build/core --no-check": minutes less, for what was built and tested already.
rpm: setup-test  ## the RPMs, in build/rpm/RPMS
	@rm -rf build/rpm/SOURCES
	@$(PY) packaging/rpm.py build/rpm $(RPM_OPTIONS)

clean:  ## remove everything that was built, the virtual environment too
	rm -rf $(VENV) build .demo bench-results *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
