"""How JAX compiles for tests. Tests marked `gpu` run where JAX has a CUDA device, and are skipped with the reason
elsewhere."""

from __future__ import annotations

import os
import shutil
import tempfile

import jax
import pytest

# On a CPU nearly all of the tests' time is compilation. XLA's passes over the program stay as they are; how LLVM makes
# machine code of the result is what takes longest, and is shortened. In the environment, so that processes that
# pytest-xdist or tests start do the same.
QUICK = ["--xla_cpu_parallel_codegen_split_count=1"]
if jax.__version_info__ < (0, 11):  # later releases have one code generator, and no such flag
    QUICK.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*os.environ.get("XLA_FLAGS", "").split(), *QUICK]))

jax.config.update("jax_num_cpu_devices", 8)  # before anything is computed; test_sharding.py uses all

CACHE = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """On a CPU, no optimisation by LLVM, and what took long to compile is kept for all processes of the run."""
    if jax.default_backend() != "cpu" or hasattr(config, "workerinput"):
        return
    config.stash[CACHE] = tempfile.mkdtemp(prefix="jax_qla-tests-")
    options = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": config.stash[CACHE],
        "jax_persistent_cache_min_compile_time_secs": 0.3,
    }
    for name, value in options.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(CACHE, None):
        shutil.rmtree(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason=f"needs a CUDA device, and JAX runs on {jax.default_backend()} here")
    for item in marked:
        item.add_marker(skip)
