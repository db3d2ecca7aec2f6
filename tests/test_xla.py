"""The chunked form in plain JAX, on every case of the battery and in what only it does."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import battery
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from thorough import rarely
from traced import equations

from jax_qla import vjp, xla
from jax_qla.dispatch import Settings
from jax_qla.implementations import Choice
from jax_qla.segments import segments_from_cu_seqlens

# Called with operands of many shapes and kinds, which a type checker cannot follow.
forward: Any = xla.forward
backward: Any = xla.backward
P: Any = jax.sharding.PartitionSpec
shape: Any = jax.ShapeDtypeStruct

FLOAT32 = battery.Limits(o=2e-5, final_state=2e-5, gradients=2e-5)
# K K^T of identical keys is one number, off by the same 2.4e-7 in every entry, and beta = 2 reflects the state at every
# token: the rounding adds up (2 T 2.4e-7 = 6e-5 at T = 129), and is gone (5e-7) with keys whose products float32 holds
# exactly. The float32 recurrence, which has no K K^T, is at 2e-6.
FLOAT32_REFLECTED = battery.Limits(o=1e-4, final_state=1e-4, gradients=1e-4)
LOW = battery.Limits(o=3e-3, final_state=3e-3, gradients=4e-3)
# q and k are normalised before, and rounded once more.
LOW_NORMALISED = battery.Limits(o=4e-3, final_state=4e-3, gradients=6e-3, head=2.5, position=20.0, of_terms=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def chunked(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, segments: Any, scale: float) -> Any:
    """xla.forward and xla.backward as one differentiable function."""
    operands = (q, k, v, g, beta, initial_state, segments)
    return forward(*operands, scale=scale, output_final_state=True, with_residuals=False)[:2]


def _chunked_forward(*x: Any) -> Any:
    *operands, scale = x
    o, final_state, residuals = forward(*operands, scale=scale, output_final_state=True, with_residuals=True)
    return (o, final_state), (operands, residuals)


def _chunked_backward(scale: float, saved: Any, cotangents: Any) -> Any:
    operands, residuals = saved
    return *backward(*operands, residuals, *cotangents, scale=scale), None


chunked.defvjp(_chunked_forward, _chunked_backward)


def chunked_or_normalised(*operands: Any, l2norm: bool = False) -> Any:
    """`chunked`, and with `l2norm` as a call reaches it that wants q and k normalised."""
    if not l2norm:
        return chunked(*operands)
    *rows, state, segments, scale = operands
    if segments is not None:  # of every row of a batch; the battery has one
        state, segments = None if state is None else state[None], segments[None]
    options = vjp.Options(Settings(Choice("xla", "xla", "", ""), scale, l2norm=True), output_final_state=True)
    rule: Any = vjp.gated_delta_rule
    results = rule(options, *rows, state, segments)
    return results if segments is None else (results[0], results[1][0])


def _operands(case: battery.Case) -> Any:
    return jax.tree.map(jnp.asarray, battery.inputs(case)[:7])


def _limits(case: battery.Case) -> battery.Limits:
    if case.dtype != "float32":
        return LOW_NORMALISED if case.l2norm else LOW
    return FLOAT32_REFLECTED if case.keys == "identical" and case.beta == 2 else FLOAT32


@pytest.fixture(scope="module")
def measured() -> Iterator[dict[str, dict[str, battery.Error]]]:
    """Errors of all cases, printed when the last has run (`pytest -s`)."""
    rows: dict[str, dict[str, battery.Error]] = {}
    yield rows
    print("\n" + battery.table(rows))


RARE = (
    *("packed, many sequences", "ratio 3, K and V 128, batch 3", "ratio 2, packed, K and V 128"),
    # Each is compiled for itself; others have as many chunks, ratios of heads (test_any_key_and_value_dimension), gaps
    # and absent states (test_several_groups_of_chunks).
    *("length 15", "length 127", "ratio 1, K 64, V 128, batch 2"),
    *("packed, long among short", "packed, no initial state"),
)
FEW = (
    *("length 65", "gates -70", "some beta faint"),
    *("normalised, some keys zero", "normalised, packed, gaps of NaN", "float16"),
)
"""Cases that are rare in every dtype, and those that are not in another than float32."""


def _rare(case: battery.Case) -> bool:
    return case.name in RARE or (case.dtype != "float32" and case.name not in FEW)


@pytest.mark.parametrize("case", [rarely(case) if _rare(case) else case for case in battery.CASES], ids=str)
def test_battery(case: battery.Case, measured: dict[str, dict[str, battery.Error]]) -> None:
    measured[str(case)] = battery.check(case, chunked_or_normalised, _limits(case))


def test_any_key_and_value_dimension() -> None:
    case = battery.Case("odd dimensions", batch=2, tokens=70, value_heads=3, key_dim=20, value_dim=36)
    battery.check(case, chunked, FLOAT32)


def test_one_value_column() -> None:
    """Its gradients are of no memory that happens to be free: that holds other numbers each time."""
    sizes: dict[str, Any] = {"key_heads": 2, "value_heads": 6, "key_dim": 4, "value_dim": 1}
    case = battery.Case("one value column", batch=3, tokens=64, initial_state=False, **sizes)
    for _ in range(6):
        battery.check(case, chunked, FLOAT32)
        used = [jnp.full((1000, n), 1e30) for n in range(1, 12)]
        jax.block_until_ready(used)
        del used


@pytest.mark.parametrize("name", ["length 1000", rarely("packed, gaps"), "packed, no initial state"])
def test_several_groups_of_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for at_once in ("_AT_ONCE", "_AT_ONCE_ON_CPU"):
        monkeypatch.setattr(xla, at_once, 1)
    (case,) = (case for case in battery.CASES if str(case) == f"{name}-float32")
    sizes, layouts = (case.batch, case.tokens, case.value_heads), list[xla._Layout]()
    # Traced: on values, the table of chunks would be computed one operation after the other.
    jax.eval_shape(lambda segments: layouts.append(xla._Layout(*sizes, segments)), _operands(case)[6])
    assert layouts[0].groups > 2

    def function(*operands: Any) -> Any:
        return chunked(*operands)

    battery.check(case, function, FLOAT32)


@pytest.mark.parametrize("name", [rarely("length 129"), "packed, gaps"])
def test_as_optimised_as_outside_of_tests(name: str) -> None:
    """conftest.py spares the compiler its optimisations; with them, the errors are within the same limits."""
    (case,) = (case for case in battery.CASES if str(case) == f"{name}-float32")
    disabled = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        battery.check(case, lambda *operands: chunked(*operands), FLOAT32)  # a function not compiled before
    finally:
        jax.config.update("jax_disable_most_optimizations", disabled)


PACKED = battery.Case("small, packed", tokens=70, key_dim=24, value_dim=40, segments=((0, 30), (30, 30), (35, 70)))
DENSE = battery.Case("small, dense", batch=2, tokens=70, key_dim=24, value_dim=40)


@pytest.mark.parametrize("case", [rarely(DENSE), PACKED], ids=str)
def test_an_absent_cotangent_is_zero(case: battery.Case) -> None:
    operands, x = _operands(case), battery.inputs(case)
    run = jax.jit(functools.partial(backward, scale=0.3))
    for do, d_final_state in ((x.do, None), (None, x.d_final_state)):
        absent = run(*operands, None, do, d_final_state)
        do = np.zeros_like(x.do) if do is None else do
        zero = run(*operands, None, do, np.zeros_like(x.d_final_state) if d_final_state is None else d_final_state)
        for a, b in zip(absent, zero, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("case", [DENSE, PACKED], ids=str)
def test_returns_what_was_asked_for(case: battery.Case) -> None:
    operands, x = _operands(case), battery.inputs(case)
    run = functools.partial(forward, *operands, scale=1.0)
    o, final_state, residuals = jax.eval_shape(lambda: run(output_final_state=False, with_residuals=False))
    assert final_state is None
    assert residuals is None
    _, final_state, residuals = jax.eval_shape(lambda: run(output_final_state=True, with_residuals=True))
    a, gamma, vd, between, h, lengths = residuals
    assert final_state.shape == operands[5].shape
    batch, tokens, heads, _ = x.v.shape
    assert (a.shape, a.dtype) == ((heads, batch, tokens, 64), f"int{8 * o.dtype.itemsize}")
    assert (gamma.shape, gamma.dtype) == (x.g.shape, jnp.float32)
    assert vd is between is h is lengths is None
    for keep in ("vd", "states"):
        _, _, residuals = jax.eval_shape(lambda keep=keep: run(output_final_state=True, with_residuals=True, keep=keep))
        assert (residuals.vd.shape, residuals.vd.dtype) == (x.v.shape, x.v.dtype)
        assert (residuals.h is not None) == (keep == "states")
    of_rows = {"output_final_state": False, "with_residuals": True, "with_lengths": True}
    _, _, residuals = jax.eval_shape(lambda: run(**of_rows))
    assert [(x.shape, x.dtype) for x in residuals.lengths] == [(x.q.shape[:3], jnp.float32)] * 2
    cotangents = (jnp.asarray(x.do), jnp.asarray(x.d_final_state))
    gradients = jax.eval_shape(lambda: backward(*operands[:5], None, operands[6], None, *cotangents, scale=1.0))
    assert gradients[5] is None


def test_lengths_that_lie_give_other_segments_only() -> None:
    """Whatever int32 the lengths hold, the result is that of the segments they are clipped to."""
    operands = _operands(PACKED)
    lying = jnp.array([-5, 2**31 - 1, 12, -(2**31)], jnp.int32)
    segments = segments_from_cu_seqlens(lying, 70)
    np.testing.assert_array_equal(segments, [[0, 70], [70, 70], [70, 70]])
    run = jax.jit(functools.partial(chunked, scale=0.2))
    o, final_state = run(*operands[:6], segments)
    expected, _ = run(*operands[:5], operands[5][:1], None)
    np.testing.assert_allclose(o, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(final_state[1:], operands[5][1:])


def test_never_holds_a_state_a_chunk() -> None:
    """No intermediate of the backward holds as many K x V states as the sequence has chunks."""
    chunks, k_dim, v_dim = 512, 24, 40
    q, v = shape((1, 64 * chunks, 1, k_dim), jnp.float32), shape((1, 64 * chunks, 2, v_dim), jnp.float32)
    g = shape((1, 64 * chunks, 2), jnp.float32)
    traced = equations(lambda *x: backward(*x[:5], None, None, None, x[5], None, scale=1.0), q, q, v, g, g, v)
    found = [value.aval for equation in traced for value in equation.outvars]
    states = [x.size // (k_dim * v_dim) for x in found if x.shape[-2:] == (k_dim, v_dim)]
    # 16 groups of 32 chunks, 2 heads.
    assert 0 < max(states) <= 2 * 32


def test_temporaries_do_not_grow_with_the_sequence() -> None:
    """Rows are taken out of the operands, and put into the results, by the group: no copy of any of them is made."""

    def temporaries(tokens: int) -> list[int]:
        q, v = shape((2, tokens, 1, 16), jnp.float32), shape((2, tokens, 2, 24), jnp.float32)
        g = shape((2, tokens, 2), jnp.float32)
        passes: list[Any] = [
            lambda *x: forward(*x[:5], None, None, scale=1.0, output_final_state=True, with_residuals=False)[:2],
            lambda *x: backward(*x[:5], None, None, None, x[5], None, scale=1.0)[:5],
        ]
        compiled: Any = (jax.jit(function).lower(q, q, v, g, g, v).compile() for function in passes)
        return [x.memory_analysis().temp_size_in_bytes for x in compiled]

    smallest_operand = 2 * 2048 * 2 * 4
    for few, many in zip(temporaries(2048), temporaries(4096), strict=True):
        assert many - few < smallest_operand


def test_small_products_have_few_axes() -> None:
    """Of batches of them, also under `jax.vmap`: on some CPUs JAX 0.10.0 cannot run others."""
    q, v = shape((3, 2, 200, 2, 16), jnp.float32), shape((3, 2, 200, 4, 16), jnp.float32)
    g = shape((3, 2, 200, 4), jnp.float32)
    traced = equations(jax.vmap(lambda *x: chunked(*x, None, None, 1.0)), q, q, v, g, g)
    products = [equation for equation in traced if equation.primitive.name == "dot_general"]
    small = [equation.invars for equation in products if max(equation.outvars[0].aval.shape[-2:]) <= 32]
    assert {x.aval.shape[-1] for operands in small for x in operands} >= {8, 16, 32}
    assert max(x.aval.ndim for operands in small for x in operands) == 4 + 2


@pytest.mark.parametrize(
    ("dtype", "asked", "expected"),
    [
        ("float32", None, "HIGHEST"),
        ("bfloat16", None, "HIGH"),
        ("float16", None, "HIGH"),
        ("float32", "high", "HIGH"),
    ],
)
def test_precision(dtype: str, asked: Any, expected: str) -> None:
    operands = _operands(dataclasses.replace(DENSE, dtype=dtype))
    run = functools.partial(
        forward, segments=None, scale=1.0, output_final_state=True, with_residuals=False, precision=asked
    )
    text = str(jax.make_jaxpr(run)(*operands[:6]))
    products = text.count("dot_general")
    # Gates are summed, and the inverse of a chunk is taken, in full float32, whatever the precision of the rest.
    full = 0 if expected == "HIGHEST" else text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
    assert products - full == text.count(f"precision=(Precision.{expected}, Precision.{expected})") > 0
    assert full <= 12 + 1


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
def test_lowers_for_other_platforms(platform: str) -> None:
    function = jax.jit(lambda *x: jax.grad(lambda *x: chunked(*x, 1.0)[0].sum(), argnums=(0, 1, 2, 3, 4, 5))(*x))
    function.trace(*_operands(PACKED)).lower(lowering_platforms=(platform,))


@pytest.mark.parametrize("case", [DENSE, PACKED], ids=str)
def test_inside_shard_map(case: battery.Case) -> None:
    """Carries and results vary over the manual axes as the operands do, also without states (checked by tracing)."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    operands, do = _operands(case), jnp.asarray(battery.inputs(case).do)
    spec = P("data") if case.segments is None else P(None, None, "data")

    def gradients(*x: Any) -> Any:
        o, _, residuals = forward(*x[:5], None, operands[6], scale=0.3, output_final_state=False, with_residuals=True)
        return o, residuals, backward(*x[:5], None, operands[6], residuals, x[5], None, scale=0.3)[:5]

    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=spec, out_specs=spec)
    jax.eval_shape(mapped, *operands[:5], do)


def test_vmap() -> None:
    operands = _operands(DENSE)[:6]
    many = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), operands)
    o, final_state = jax.jit(jax.vmap(lambda *x: chunked(*x, None, 0.3)))(*many)
    expected = jax.jit(functools.partial(chunked, scale=0.3))(*operands, None)
    for got, want in zip((o, final_state), expected, strict=True):
        np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got[1], want[::-1], rtol=1e-5, atol=1e-6)


def test_why_not() -> None:
    x = shape((1, 8, 1, 20), jnp.float32)
    assert xla.why_not(x, x, x) is None
    wide = shape((1, 8, 1, 20), jnp.float64)
    assert str(xla.why_not(x, x, wide)).endswith("v is float64; implementation='reference' takes it")
