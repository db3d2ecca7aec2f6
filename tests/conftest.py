"""Tests marked `gpu` run where JAX has a CUDA device, and are skipped with the reason elsewhere."""

from __future__ import annotations

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)  # before anything is computed; test_sharding.py uses all


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason=f"needs a CUDA device, and JAX runs on {jax.default_backend()} here")
    for item in marked:
        item.add_marker(skip)
