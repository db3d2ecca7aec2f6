"""`chunk_gated_delta_rule` under JAX's transformations does what the untransformed calls do one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_policies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_api import assert_close, states, tokens
from thorough import every_value, only_thorough, rarely

import jax_qla

CU_SEQLENS = np.array([0, 3, 3, 9], np.int32)
LENGTH = 10


def loss(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array,
    cu_seqlens: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """A sum over both results that weighs every element differently."""
    o, final_state = jax_qla.chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        **options,
    )
    assert final_state is not None
    return jnp.sum(jnp.sin(o) * jnp.arange(1, o.size + 1).reshape(o.shape)) / o.size + jnp.sum(jnp.cos(final_state))


def operands(packed: bool, seed: int = 0) -> tuple[jax.Array, ...]:
    if packed:
        return jax.device_put((*tokens(1, LENGTH, seed), (1 + seed) * states(3), CU_SEQLENS))
    return jax.device_put((*tokens(2, LENGTH, seed), (1 + seed) * states(2)))


value_and_grad = jax.value_and_grad(loss, argnums=tuple(range(6)))
one = jax.jit(value_and_grad)


def stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def test_without_jit() -> None:
    x = operands(packed=False)
    assert_close(value_and_grad(*x), one(*x))


def test_gradients_with_nothing_compiled() -> None:
    """By tracing: on values, hundreds of small programs would be compiled."""
    x = operands(packed=True)
    with jax.disable_jit():
        found = jax.eval_shape(jax.grad(loss, argnums=(0, 5)), *x)
    assert [y.shape for y in found] == [x[0].shape, x[5].shape]


@pytest.mark.parametrize("strictness", [rarely("promotion of dtypes"), rarely("promotion of ranks"), "both"])
@pytest.mark.parametrize("dtype", ["bfloat16", rarely("float32")])
def test_where_jax_promotes_nothing(dtype: str, strictness: str) -> None:
    q, k, v, g, beta = (jnp.asarray(x) for x in tokens(1, LENGTH))
    rows = (*(x.astype(dtype) for x in (q, k, v)), g, beta)
    ids, cu_seqlens = jnp.ones((1, LENGTH), jnp.int32), jnp.asarray(CU_SEQLENS)
    x, weight, bias = (jnp.ones(shape, dtype) for shape in ((1, LENGTH, 6), (4, 6), (6,)))
    rule: Any = jax_qla.chunk_gated_delta_rule
    calls: list[tuple[Any, Any]] = [
        (partial(rule, use_qk_l2norm_in_kernel=True, output_final_state=True), rows),
        (partial(rule, cu_seqlens=cu_seqlens), rows),
        (partial(rule, segment_ids=ids), rows),
        (partial(rule, segment_ids=ids, max_segments=2, output_final_state=True), rows),
        (partial(rule, implementation="reference"), rows),
        (jax_qla.recurrent_gated_delta_rule, rows),
        (partial(jax_qla.recurrent_gated_delta_rule, cu_seqlens=cu_seqlens), rows),
        (jax_qla.causal_conv1d, (x, weight, bias)),
        (partial(jax_qla.causal_conv1d, activation="silu", segment_ids=ids), (x, weight, bias)),
        (partial(jax_qla.causal_conv1d, cu_seqlens=cu_seqlens), (x, weight, bias)),
    ]
    with contextlib.ExitStack() as strict:
        if strictness != "promotion of ranks":
            strict.enter_context(jax.numpy_dtype_promotion("strict"))
        if strictness != "promotion of dtypes":
            strict.enter_context(jax.numpy_rank_promotion("raise"))
        for call, given in calls:
            jax.eval_shape(
                jax.grad(lambda *x, call=call: jnp.sum(call(*x)[0].astype(jnp.float32)), argnums=(0, 2)), *given
            )


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "recurrent_gated_delta_rule", "chunk_gated_delta_rule_bwd"])
def test_packed_calls_that_are_not_compiled_move_nothing_to_the_device(name: str) -> None:
    *rows, initial = (jnp.asarray(x) for x in (*tokens(1, LENGTH), states(3)))
    do, ids, cu_seqlens = jnp.ones_like(rows[2]), jnp.ones((1, LENGTH), jnp.int32), jnp.asarray(CU_SEQLENS)
    packed: dict[str, Any] = {"initial_state": initial, "cu_seqlens": cu_seqlens}
    function: Any = getattr(jax_qla, name)
    with jax.transfer_guard("disallow"):
        if name == "chunk_gated_delta_rule_bwd":
            *_, gradient = function(*rows, None, do, initial, **packed)
            assert gradient.shape == initial.shape
            return
        _, final_state = function(*rows, **packed, output_final_state=True)
        assert final_state.shape == initial.shape
        if name == "chunk_gated_delta_rule":
            assert function(*rows, segment_ids=ids)[0].shape == rows[2].shape


def test_eval_shape() -> None:
    x = operands(packed=True)
    value, gradients = jax.eval_shape(value_and_grad, *x)
    assert value.shape == ()
    assert [(a.shape, a.dtype) for a in gradients] == [(a.shape, a.dtype) for a in x[:6]]


@every_value
@pytest.mark.parametrize(
    ("packed", "batched"),
    [
        (False, "all"),
        rarely(False, "q"),
        rarely(False, "beta"),
        (False, "initial_state"),
        (True, "k"),
        (True, "initial_state"),
        (True, "cu_seqlens"),
    ],
)
def test_vmap(packed: bool, batched: str) -> None:
    names = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")
    first, second = operands(packed), operands(packed, seed=1)
    if packed:
        second = (*second[:6], jnp.array([0, 4, 10, 10], jnp.int32))
    chosen = [batched in ("all", name) for name in names[: len(first)]]
    members = [first, tuple(b if is_batched else a for a, b, is_batched in zip(first, second, chosen, strict=True))]
    arguments = tuple(jnp.stack([a, b]) if is_batched else a for a, b, is_batched in zip(*members, chosen, strict=True))
    axes = tuple(0 if is_batched else None for is_batched in chosen)
    mapped = jax.jit(jax.vmap(value_and_grad, in_axes=axes))(*arguments)
    assert_close(mapped, stacked([one(*x) for x in members]))


@every_value
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_vmap_over_nothing(packed: bool, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients of no members are empty and shaped as those of some; also where the compiler may cut."""
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    member = operands(packed)

    def members(*sizes: int) -> list[jax.Array]:
        return [jnp.zeros((*sizes, *x.shape), x.dtype) for x in member]

    def results(*x: jax.Array) -> Any:
        where = {"cu_seqlens": x[6]} if packed else {}
        return jax_qla.chunk_gated_delta_rule(*x[:5], initial_state=x[5], output_final_state=True, **where)

    for function in (results, value_and_grad):
        like = jax.tree.leaves(jax.eval_shape(function, *member))

        def check(found: Any, *sizes: int, like: Any = like) -> None:
            described = [(x.shape, x.dtype) for x in jax.tree.leaves(found)]
            assert described == [((*sizes, *x.shape), x.dtype) for x in like]

        once: Any = jax.jit(jax.vmap(function))
        check(once(*members(0)), 0)
        for sizes in ((0, 2), (2, 0)):
            check(jax.jit(jax.vmap(once))(*members(*sizes)), *sizes)
        axes = [0 if i % 2 else None for i in range(len(member))]
        mixed = [x if axis is None else none for x, none, axis in zip(member, members(0), axes, strict=True)]
        check(jax.vmap(function, axes)(*mixed), 0)


def test_vmap_of_vmap_over_other_axes() -> None:
    members = [[operands(True, seed=2 * i + j) for j in range(2)] for i in range(2)]
    nested = stacked([stacked(row) for row in members])
    nested = tuple(jnp.moveaxis(x, 0, -1) for x in nested[:6])
    function = jax.vmap(jax.vmap(value_and_grad, in_axes=(*(0,) * 6, None)), in_axes=(*(-1,) * 6, None))
    assert_close(jax.jit(function)(*nested, CU_SEQLENS), stacked([stacked([one(*x) for x in row]) for row in members]))


def layers(x: tuple[jax.Array, ...], policy: Any = None) -> jax.Array:
    """Three layers in a scan, each reading and writing v and the state, checkpointed unless `policy` is None."""

    def layer(carry: tuple[jax.Array, jax.Array], gate: jax.Array) -> Any:
        v, state = carry
        o, final_state = jax_qla.chunk_gated_delta_rule(
            *x[:2], v, gate * x[3], x[4], initial_state=state, output_final_state=True
        )
        assert final_state is not None
        return (v + jnp.sin(o), final_state), jnp.sum(jnp.cos(o))

    if policy is not None:
        layer = jax.checkpoint(layer, policy=policy)
    (v, state), sums = jax.lax.scan(layer, (x[2], x[5]), jnp.array([0.5, 1.0, 2.0]))
    return jnp.sum(v) + jnp.sum(state**2) + jnp.sum(sums)


def unrolled_layers(x: tuple[jax.Array, ...]) -> jax.Array:
    v, state, total = x[2], x[5], jnp.zeros(())
    for gate in (0.5, 1.0, 2.0):
        o, final_state = jax_qla.chunk_gated_delta_rule(
            *x[:2], v, gate * x[3], x[4], initial_state=state, output_final_state=True, implementation="reference"
        )
        assert final_state is not None
        v, state, total = v + jnp.sin(o), final_state, total + jnp.sum(jnp.cos(o))
    return jnp.sum(v) + jnp.sum(state**2) + total


def test_scan_over_layers_and_checkpoint() -> None:
    x = operands(packed=False)
    expected = jax.jit(jax.value_and_grad(unrolled_layers))(x)
    for policy in (
        None,
        checkpoint_policies.nothing_saveable,
        checkpoint_policies.save_only_these_names(*jax_qla.CHECKPOINT_NAMES),
    ):
        assert_close(jax.jit(jax.value_and_grad(partial(layers, policy=policy)))(x), expected, 5e-6)


def test_donated_buffers() -> None:
    expected = one(*operands(packed=False))
    x = operands(packed=False)
    actual = jax.jit(value_and_grad, donate_argnums=tuple(range(6)))(*x)
    assert_close(actual, expected)
    assert all(a.is_deleted() for a in x)


def test_export_round_trip() -> None:
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    x = operands(packed=True)
    exported = jax.export.export(jax.jit(loss))(*x)
    loaded = jax.export.deserialize(exported.serialize(vjp_order=1))
    assert_close((loaded.call(*x), jax.grad(loaded.call, argnums=tuple(range(6)))(*x)), one(*x))


def test_two_devices() -> None:
    """Programs that run at the same time on several devices of one process."""
    first, second = jax.devices()[:2]
    x = operands(packed=True)
    function = jax.jit(loss)
    results = [function(*jax.device_put(x, device)) for device in (first, second, first)]
    for result, device in zip(results, (first, second, first), strict=True):
        assert result.devices() == {device}
        assert_close(result, results[0], 0)


def mesh() -> Mesh:
    return jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


@only_thorough  # test_sharding.py has an Auto mesh that cuts the batch of layers
def test_sharded_batch() -> None:
    x = operands(packed=False)
    expected = one(*x)
    assert_close(one(*jax.device_put(x, NamedSharding(mesh(), P("x")))), expected)


@pytest.mark.parametrize(("over", "check_vma"), [rarely("batch", True), ("batch", False), ("heads", True)])
def test_shard_map(over: str, check_vma: bool) -> None:
    """Layers in a scan on a shard of the batch or of the heads; the gates' base is the same on all shards."""
    x = operands(packed=False)
    base, x = x[3][:1], (*x[:3], *x[4:])
    rows, state = (P("x"), P("x")) if over == "batch" else (P(None, None, "x"), P(None, "x"))
    gates = P() if over == "batch" else rows

    def local(base: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, h: jax.Array) -> jax.Array:
        g = jnp.broadcast_to(base, beta.shape)
        return jax.lax.psum(layers((q, k, v, g, beta, h)), "x")

    sharded = jax.shard_map(
        local, mesh=mesh(), in_specs=(gates, rows, rows, rows, rows, state), out_specs=P(), check_vma=check_vma
    )

    def whole(base: jax.Array, *x: jax.Array) -> jax.Array:
        return layers((*x[:3], jnp.broadcast_to(base, x[3].shape), *x[3:]))

    def both(function: Callable[..., jax.Array]) -> Any:
        return jax.jit(jax.value_and_grad(function, argnums=tuple(range(6))))(base, *x)

    assert_close(both(sharded), both(whole), 5e-6)


def test_shard_map_of_packed_rows_and_vmap() -> None:
    """A row of sequences and its cu_seqlens on each device; inside, vmap over two sets of initial states."""
    shards = [operands(packed=True, seed=seed) for seed in range(2)]
    rows = [jnp.concatenate(x) for x in zip(*(shard[:5] for shard in shards), strict=True)]
    cu_seqlens = jnp.stack([CU_SEQLENS, jnp.array([0, 4, 10, 10], jnp.int32)])
    initial = jnp.stack([states(3), -states(3)])

    def local(q: Any, k: Any, v: Any, g: Any, beta: Any, initial: jax.Array, cu_seqlens: jax.Array) -> jax.Array:
        values = jax.vmap(lambda h: loss(q, k, v, g, beta, h, cu_seqlens[0]))(initial)
        return jax.lax.psum(jnp.sum(values), "x")

    sharded = jax.shard_map(local, mesh=mesh(), in_specs=(*(P("x"),) * 5, P(), P("x")), out_specs=P())
    value, gradients = jax.jit(jax.value_and_grad(sharded, argnums=tuple(range(6))))(*rows, initial, cu_seqlens)

    expected = [[one(*shard[:5], h, cu) for h in initial] for shard, cu in zip(shards, cu_seqlens, strict=True)]
    np.testing.assert_allclose(value, sum(v for row in expected for v, _ in row), rtol=1e-5)
    for i in range(5):
        assert_close(gradients[i], jnp.concatenate([row[0][1][i] + row[1][1][i] for row in expected]), 5e-6)
    assert_close(gradients[5], jnp.stack([sum(row[j][1][5] for row in expected) for j in range(2)]), 5e-6)
