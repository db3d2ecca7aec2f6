"""How JAX compiles for tests. Tests marked `gpu` run where JAX has a CUDA device, and are skipped with the reason
elsewhere."""

from __future__ import annotations

import atexit
import collections
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

# Where Python may not write bytecode beside its sources, each run, and each program that tests start, would compile
# those of JAX and PyTorch anew.
if sys.dont_write_bytecode and "PYTHONPYCACHEPREFIX" not in os.environ:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parents[1] / "build" / "bytecode")

# What TileLang and the C++ compiler make of kernels, once for all processes of a run (emulator.py).
if "JAX_QLA_EMULATOR_FILES" not in os.environ:
    os.environ["JAX_QLA_EMULATOR_FILES"] = tempfile.mkdtemp(prefix="jax_qla_emulator")
    atexit.register(shutil.rmtree, os.environ["JAX_QLA_EMULATOR_FILES"], ignore_errors=True)

# SciPy's OpenBLAS, which JAX calls for LAPACK on a CPU, has a thread for every core, and they turn while they wait for
# each other: of test_packed (test_kernels.py) a third of the CPU time. One thread a process is enough.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# glibc gives memory back to the system as soon as it can, to be given it anew, zeroed: by TileLang, which has a solver
# for every analysis, some 100,000 pages a kernel. The processes that begin from here on (pytest -n) keep theirs.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 32))
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 25))
os.environ.setdefault("MALLOC_TOP_PAD_", str(1 << 24))

import jax
import pytest
import thorough

# On a CPU nearly all of the tests' time is compilation. XLA's passes over the program stay as they are; how machine
# code is made of the result takes longest, and is shortened sixfold by these flags and by `pytest_configure`.
QUICK = ["--xla_cpu_parallel_codegen_split_count=1"]
if jax.__version_info__ < (0, 11):  # later releases have one code generator, and no such flag
    QUICK.append("--xla_cpu_use_fusion_emitters=false")
# On a card a call that has not been put on its stream by then, its kernels' loading included, ends the process, and XLA
# names the program. What stands still elsewhere pytest's faulthandler_timeout shows (pyproject.toml).
STUCK = ["--xla_gpu_execution_terminate_timeout=200s"]
os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*os.environ.get("XLA_FLAGS", "").split(), *QUICK, *STUCK]))

# Several processes may test on one card (`pytest -n`), of whose memory JAX would give the first three quarters.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

jax.config.update("jax_num_cpu_devices", 8)  # before anything is computed; test_sharding.py uses all


def pytest_configure() -> None:
    if jax.default_backend() == "cpu":
        jax.config.update("jax_disable_most_optimizations", True)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for the programs that tests start


def pytest_collection_finish() -> None:
    """Tracing makes much garbage beside what stays: to look through all of it as often as usual takes a twelfth of the
    time."""
    if jax.default_backend() == "cpu":
        gc.freeze()
        gc.set_threshold(100_000, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _leave_cases_to_thorough(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason=f"needs a CUDA device, and JAX runs on {jax.default_backend()} here")
    for item in marked:
        item.add_marker(skip)


def _leave_cases_to_thorough(items: list[pytest.Item]) -> None:
    """Skips those of tests marked `every_value` that are not needed for it (thorough.py)."""
    if thorough.THOROUGH:
        return
    tests = collections.defaultdict(list)
    for item in items:
        marks = list(item.iter_markers())
        if thorough.every_value.mark in marks and thorough.only_thorough.mark not in marks:
            assert isinstance(item, pytest.Function)
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        kept = thorough.few([case.callspec.params for case in cases])
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker(thorough.only_thorough)
