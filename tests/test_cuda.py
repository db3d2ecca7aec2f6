"""The Hopper kernels on the battery, with poisoned memory, repeated, and against values that lie. Needs an H100 or H200."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import battery
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_qla
from jax_qla import implementations, vjp

pytestmark = pytest.mark.gpu

LIMITS = battery.Limits(o=4e-3, final_state=4e-3, gradients=6e-3, head=1.5, position=8.0, dg_floor=1e-3)
# The inverse of a matrix of ones has alternating signs, and bf16 operands cancel there (so they do in every library).
IDENTICAL = battery.Limits(o=9e-3, final_state=9e-3, gradients=1.5e-2, head=1.5, position=8.0, dg_floor=1e-3)


def cuda(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, segments: Any, scale: float) -> Any:
    """The kernels as a function of the battery's signature."""
    choice = implementations.choose(q, k, v, implementation="cuda", precision=None)
    return vjp.gated_delta_rule(
        vjp.Options(choice, scale, output_final_state=True), q, k, v, g, beta, initial_state, segments
    )


def _cases() -> Iterator[battery.Case]:
    for case in battery.CASES:
        if case.dtype != "float32":
            yield case
        if case.dtype == "bfloat16" and (case.key_dim, case.value_dim) == (64, 64):
            yield dataclasses.replace(case, name=f"{case.name}, K and V 128", key_dim=128, value_dim=128)


CASES = tuple(_cases())


@pytest.fixture(scope="module")
def measured() -> Iterator[dict[str, dict[str, battery.Error]]]:
    """Errors of all cases, printed when the last has run (`pytest -s`)."""
    rows: dict[str, dict[str, battery.Error]] = {}
    yield rows
    print("\n" + battery.table(rows))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_battery(case: battery.Case, measured: dict[str, dict[str, battery.Error]]) -> None:
    limits = IDENTICAL if case.keys.startswith("identical") else LIMITS
    measured[str(case)] = battery.check(case, cuda, limits)
