"""Calls of the short convolution by kernels, and what they are held to, whatever runs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_qla.convolution import Gradients, Rows, plain

ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Of one number, relative."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a call, and what it is given."""

    batch: int = 2
    tokens: int = 70
    parts: tuple[int, ...] = (64, 64, 128)
    dtype: str = "bfloat16"
    ids: bool = False
    """Sequences of 1 to 30 tokens, padding among them that holds NaN, and an id that comes back."""
    bias: bool = False
    before: bool = False
    silu: bool = True

    def __str__(self) -> str:
        return "-".join(str(value) for value in dataclasses.astuple(self))


SMALL = (
    Case(),
    Case(ids=True, before=True, bias=True),
    Case(batch=3, tokens=2, parts=(16, 24), dtype="float16", ids=True, before=True, silu=False),
    Case(batch=1, tokens=300, parts=(264,), bias=True, before=True),
)
"""Few tokens, and of what makes a difference to the kernels everything."""

LARGE = (
    *SMALL,
    Case(batch=1, tokens=1, parts=(8,), bias=True, before=True),
    *(Case(tokens=tokens, parts=(1032,), dtype="float16", ids=ids) for tokens in (63, 257) for ids in (False, True)),
    *(Case(batch=1, tokens=5000, parts=(2048, 2048, 4096), ids=ids) for ids in (False, True)),
    Case(batch=300, tokens=9, parts=(64, 64, 64), ids=True, before=True),
    Case(batch=1, tokens=70000, parts=(8, 8, 16), bias=True, before=True),
)


def given(case: Case) -> tuple[Rows, list[jax.Array]]:
    """What a call reads, and gradients of the parts of y."""
    random = np.random.default_rng(case.tokens + sum(case.parts))
    channels = sum(case.parts)

    def normal(*shape: int, dtype: str = case.dtype) -> Any:
        return jnp.asarray(random.standard_normal(shape), jnp.float32).astype(dtype)

    x, dys = normal(case.batch, case.tokens, channels), [normal(case.batch, case.tokens, part) for part in case.parts]
    ids = before_ids = None
    if case.ids:
        lengths = random.integers(1, 31, (case.batch, case.tokens + 3))
        of_rows = [np.repeat(np.arange(len(row)) % 4, row)[: case.tokens + 3] for row in lengths]
        all_ids = np.stack(of_rows).astype(np.int32)
        before_ids, ids = jnp.asarray(all_ids[:, :3]), jnp.asarray(all_ids[:, 3:])
        x = jnp.where(ids[..., None] == 0, jnp.nan, x)
    rows = Rows(
        x,
        normal(4, channels, dtype="float32"),
        normal(channels, dtype="float32") if case.bias else None,
        normal(case.batch, 3, channels) if case.before else None,
        ids,
        before_ids if case.before else None,
    )
    return rows, dys


@partial(jax.jit, static_argnames="silu")
def right(rows: Rows, dys: list[jax.Array], *, silu: bool) -> tuple[jax.Array, Gradients]:
    """y, and the gradients, those of the filter summed over the batch; in float32, by JAX."""

    def function(x: Any, weight: Any, bias: Any, before: Any) -> jax.Array:
        return plain(Rows(x, weight, bias, before, rows.ids, rows.ids_before), silu, False)

    wide = (None if x is None else x.astype(jnp.float32) for x in rows[:4])
    y, transpose = jax.vjp(function, *wide)
    return y, Gradients(*transpose(jnp.concatenate(dys, axis=-1).astype(jnp.float32)))


def check(case: Case, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """That forward(rows, parts=, silu=) and backward(rows, dys, silu=) are right to the rounding of their results."""
    rows, dys = given(case)
    expected, gradients = right(rows, dys, silu=case.silu)
    y = forward(rows, parts=case.parts, silu=case.silu)
    assert [part.shape[2] for part in y] == list(case.parts)
    assert all(part.dtype == case.dtype for part in y)
    found = backward(rows, dys, silu=case.silu)
    assert found.x.dtype == case.dtype
    found = found._replace(
        weight=jnp.sum(found.weight, axis=0), bias=None if found.bias is None else jnp.sum(found.bias, axis=0)
    )
    rounding = ROUNDING[case.dtype]
    _assert_close("y", jnp.concatenate(y, axis=-1), expected, rounding)
    for name, result, gradient in zip(Gradients._fields, found, gradients, strict=True):
        assert (result is None) == (gradient is None), name
        if result is not None:
            _assert_close(name, result, gradient, rounding if name in ("x", "before") else 2e-6)


def _assert_close(name: str, found: Any, expected: Any, rounding: float) -> None:
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    assert found.shape == expected.shape, name
    assert np.isfinite(found).all(), name
    error, size = np.linalg.norm(found - expected), np.linalg.norm(expected)
    assert error <= rounding / (2 if found.size > 1000 else 1) * size, (name, error / size)  # few may all be far off
    worst = np.abs(found - expected).max(initial=0)
    assert worst <= rounding * (np.abs(expected).max(initial=0) + 1), (name, worst)
