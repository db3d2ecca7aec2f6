# Two commands work on a fresh machine that has python3 (3.11 or newer; its headers, if apt has them apart), pip, make, git
# and a C++ compiler:
#
#   make demo      sets up .venv and trains a language model on the Python standard library (a large one on a Hopper GPU)
#   make test      sets up .venv and passes the checks and the tests; what .ci/run calls
#
# Beside them: make lint, make docs (into build/docs), make checks (both), make pytest (some tests), make gpu-test and
# make gpu-sanitize (need a Hopper GPU), make kernels (compiles the TileLang programs that jax_qla/cubins lacks; needs no
# GPU), make wheel (of those, into dist), make wheel-check (the wheels in empty environments), make sdist, make thorough
# (all tests, the random ones longer), make versions, make clean. Everything is installed from PyPI into .venv.

PYTHON ?= python3
VENV ?= .venv
# More arguments for what is run, as in: make demo ARGS="--steps 50", make pytest ARGS="-k segments".
ARGS ?=
# Test processes. Each one compiles with as many threads as it likes, so more than the cores do not help.
TEST_JOBS ?= 2
# And on one card, of whose memory eight take 51 GB at the most. (One test takes 108 GB, after all others.)
GPU_TEST_JOBS ?= 8

BIN := $(VENV)/bin
# A wheel is built by each; 3.12 stands for all that come after it (stable ABI).
WHEEL_PYTHONS ?= python3.11 python3.12
# What the wheels are tried with: the oldest JAX that is supported, and the newest that PyPI has.
WHEEL_JAX ?= 0.10.0 newest
# The extra for the newest CUDA that the driver of an NVIDIA card supports; empty without one.
CUDA ?= $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA.* Version: *\(1[23]\)\..*/cuda\1/p')
HOPPER := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -m 1 -x '9\.0')
# TileLang needs PyTorch, to build kernels only. Pinned to the release that is tested with the pinned TileLang.
TORCH := torch==2.13.0

comma := ,
# $(call install,EXTRAS,MORE): the package with these extras, editable. A change of what the extension is made of
# (EXTENSION) compiles it anew; other sources take effect as they are. Python's bytecode is compiled where it is first
# imported: of all of PyTorch and transformers that would take longer than the rest.
install = $(BIN)/python -m pip install --no-compile $(2) --editable '.[$(1)$(if $(CUDA),$(comma)$(CUDA))]'
EXTENSION := pyproject.toml $(wildcard ffi/*)

# One installation at a time into an environment; what takes long has jobs of its own.
.NOTPARALLEL:
.PHONY: demo test checks pytest gpu-test gpu-sanitize thorough lint docs kernels wheel wheel-check sdist versions clean

demo: $(VENV)/demo.stamp $(if $(HOPPER),kernels)
	$(BIN)/python examples/train_lm.py $(if $(HOPPER),--size large) --output runs/demo-$$(date +%Y%m%d-%H%M%S) $(ARGS)

test: versions checks pytest

pytest: $(VENV)/test.stamp
	$(BIN)/python -m pytest --numprocesses $(TEST_JOBS) --dist worksteal $(ARGS)

gpu-test: $(VENV)/test.stamp kernels
	$(BIN)/python -m pytest -m gpu --numprocesses $(GPU_TEST_JOBS) --dist worksteal --ignore tests/test_large_cuda.py $(ARGS)
	$(BIN)/python -m pytest -m gpu tests/test_large_cuda.py

# Small calls of both passes under compute-sanitizer, which comes with CUDA: ARGS is one of its tools, racecheck without.
gpu-sanitize: $(VENV)/test.stamp kernels
	$(BIN)/python tests/sanitize.py $(ARGS)

# All tests: with minutes instead of seconds of what is random in them, and with the cases that `make test` leaves out for its
# time (tests/thorough.py), the battery on the kernels' CUDA, run on the CPU, among them.
thorough: export JAX_QLA_THOROUGH := 1
thorough: export JAX_QLA_FUZZ_CALLS := 500000
thorough: export JAX_QLA_EXAMPLES := 400
thorough: pytest

lint: $(VENV)/test.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Side by side, and beside them what would take the first seconds of the tests in each of their processes: Python's bytecode
# of what they import is compiled.
checks: $(VENV)/test.stamp
	@$(BIN)/python -m pytest --collect-only --quiet >/dev/null 2>&1 & \
	$(MAKE) --no-print-directory docs & docs=$$!; \
	$(MAKE) --no-print-directory lint; lint=$$?; \
	wait $$docs; docs=$$?; wait; exit $$((lint + docs))

docs: $(VENV)/test.stamp
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs

kernels: $(VENV)/kernels.stamp
	$(BIN)/python -m jax_qla.kernels.build

# Of the kernels that `make kernels` has built; contents.py refuses what is missing or stale.
wheel: $(VENV)/release.stamp
	rm -rf build/wheels dist
	for python in $(WHEEL_PYTHONS); do $$python -m pip wheel --no-deps --wheel-dir build/wheels . || exit 1; done
	for wheel in build/wheels/*.whl; do \
	  PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist $$wheel || exit 1; done
	$(BIN)/python tests/wheel/contents.py dist/*.whl

wheel-check: $(VENV)/release.stamp sdist
	$(BIN)/python tests/wheel/contents.py dist/*.whl
	$(BIN)/python tests/wheel/environments.py --pythons $(WHEEL_PYTHONS) --jax $(WHEEL_JAX) -- dist/*.whl
	$(BIN)/python tests/wheel/sdist.py --python $(firstword $(WHEEL_PYTHONS)) dist/*.tar.gz

sdist: $(VENV)/release.stamp
	$(BIN)/python -m build --sdist --outdir dist

versions: $(VENV)/test.stamp
	@$(BIN)/python --version
	@$(BIN)/python -m pip freeze --exclude-editable

$(VENV)/demo.stamp: $(VENV)/venv.stamp $(EXTENSION)
	$(call install,examples)
	touch $@

$(VENV)/kernels.stamp: $(VENV)/venv.stamp $(EXTENSION)
	$(call install,kernels,$(TORCH))
	touch $@

# One installation serves all three purposes, so the other two need none of their own after it.
$(VENV)/test.stamp: $(VENV)/venv.stamp $(EXTENSION)
	$(call install,examples$(comma)kernels$(comma)docs$(comma)test,$(TORCH))
	touch $@ $(VENV)/demo.stamp $(VENV)/kernels.stamp

$(VENV)/release.stamp: $(VENV)/venv.stamp $(EXTENSION)
	$(call install,release)
	touch $@

# Without ensurepip (Debian without python3-venv), the environment is made empty and pip put into it from outside.
$(VENV)/venv.stamp:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, not " + sys.version)'
	$(PYTHON) -m venv --clear $(VENV) || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install pip; }
	touch $@

clean:
	rm -rf $(VENV) build dist jax_qla/cubins .mypy_cache .pytest_cache .ruff_cache
	find jax_qla tests examples -name __pycache__ -prune -exec rm -rf {} +
