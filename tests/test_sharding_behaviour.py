"""What a mesh changes besides results: eager calls, halves, policies, messages, export, caches, processes, the docs."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import multi_process
import numpy as np
import pytest
import stand_in
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding import (
    CUTS,
    FAST,
    HV,
    MAX_SEGMENTS,
    PROGRAMS,
    ROWS,
    SEGMENT_IDS,
    B,
    Cut,
    K,
    T,
    V,
    assert_close,
    assert_nothing_gathered,
    collectives,
    expected,
    mesh_of,
    packed,
    put,
    rows,
    spread,
    states,
    value_and_grad,
    weights,
)
from thorough import rarely

import jax_qla
from jax_qla import MeshAxes
from jax_qla.mesh import Layout, segments_of_rows
from jax_qla.nn import projections


def test_segment_ids_without_states() -> None:
    """Documents kept apart by resets: the id before a shard's first token comes from the device before."""
    arrays = [*rows(0), SEGMENT_IDS]

    def apply(axes: MeshAxes | None, *x: jax.Array) -> tuple[jax.Array]:
        options = {"segment_ids": x[5], "use_qk_l2norm_in_kernel": True, "mesh_axes": axes}
        return (jax_qla.chunk_gated_delta_rule(*x[:5], **options)[0],)

    cut = CUTS["dp x cp"]
    wanted = jax.jit(lambda *x: apply(None, *x))(*arrays)
    for mode in ("auto", "explicit", "manual", "partly manual"):
        mesh = mesh_of(mode)
        with jax.set_mesh(mesh):
            x = put(mesh, cut, arrays, (*ROWS, "bt"))
            o = jax.jit(spread(mode, cut, apply, (*ROWS, "bt"), ("bth",)))(*x)
        assert_close(o, wanted)


@pytest.mark.parametrize("mode", ["auto", "explicit", "manual"])
def test_no_sequence_over_devices(mode: str) -> None:
    """Whose number is that of cu_seqlens less one: all tokens are padding, and there is no state."""
    arrays = [x[:1] for x in rows(0)]

    def both(axes: MeshAxes | None, *x: jax.Array) -> Any:
        options: dict[str, Any] = {"cu_seqlens": jnp.array([0], jnp.int32), "output_final_state": True}
        rule = functools.partial(jax_qla.chunk_gated_delta_rule, **options, mesh_axes=axes)
        (o, final_state), transpose = jax.vjp(rule, *x)
        assert final_state is not None
        assert final_state.shape == (0, HV, K, V)
        return o, *transpose((jnp.ones_like(o), final_state))

    mesh, cut = mesh_of(mode), Cut(sequence="y")
    with jax.set_mesh(mesh):
        found = jax.jit(spread(mode, cut, both, ROWS, ("bth", *ROWS)))(*put(mesh, cut, arrays, ROWS))
    for x, of in zip(found, (arrays[2], *arrays), strict=True):
        assert x.shape == of.shape
        assert not np.any(x)


@pytest.mark.parametrize(("mode", "batch", "tokens"), [("explicit", B, 0), ("named", B, 0), ("explicit", 0, T)])
def test_no_token_over_devices(mode: str, batch: int, tokens: int) -> None:
    """Where XLA would find no operand in what is mapped over the mesh."""
    arrays = [x[:batch, :tokens] for x in rows(0)]
    ids = {"segment_ids": SEGMENT_IDS[:batch, :tokens], "max_segments": 2}
    mesh, cut = mesh_of(mode), CUTS["dp x cp"]

    def gradients(rule: Any) -> Any:
        def both(axes: MeshAxes | None, *x: jax.Array) -> Any:
            options = {} if rule is jax_qla.recurrent_gated_delta_rule else {"mesh_axes": axes}
            o, transpose = jax.vjp(lambda *x: rule(*x, **options)[0], *x)
            return o, *transpose(jnp.ones_like(o))

        return both

    rules = [jax_qla.chunk_gated_delta_rule, functools.partial(jax_qla.chunk_gated_delta_rule, **ids)]
    with jax.set_mesh(mesh):
        for rule in rules if tokens == 0 else [*rules[1:], jax_qla.recurrent_gated_delta_rule]:
            by = Cut(batch=cut.batch) if rule is jax_qla.recurrent_gated_delta_rule else cut
            found = jax.jit(spread(mode, by, gradients(rule), ROWS, ("bth", *ROWS)))(*put(mesh, by, arrays, ROWS))
            for x, of in zip(found, (arrays[2], *arrays), strict=True):
                assert x.shape == of.shape


def test_states_after_no_token_in_an_explicit_mesh() -> None:
    """As a layer's prefill makes a cache that is cut as those of its steps."""
    mesh, cut = mesh_of("explicit"), CUTS["tp"]
    with jax.set_mesh(mesh):
        x = put(mesh, cut, [x[:, :0] for x in rows(0)], ROWS)
        for rule in (jax_qla.chunk_gated_delta_rule, jax_qla.recurrent_gated_delta_rule):
            _, state = jax.jit(functools.partial(rule, output_final_state=True))(*x)
            assert jax.typeof(state).sharding.spec == P(cut.batch, cut.heads, None, None)
            assert not np.any(state)


def test_no_token_where_the_compiler_cuts_members_of_vmap() -> None:
    arrays = [np.stack([x[:, :0]] * 3) for x in rows(0)]

    def both(*x: jax.Array) -> Any:
        o, transpose = jax.vjp(jax.vmap(lambda *x: jax_qla.chunk_gated_delta_rule(*x)[0]), *x)
        return o, *transpose(o)

    for x, of in zip(jax.jit(both)(*arrays), (arrays[2], *arrays), strict=True):
        assert x.shape == of.shape


def test_halves_under_a_mesh() -> None:
    x, initial_state = rows(0), states(1, B)
    do, d_final_state = np.ones((B, T, HV, V), np.float32), states(2, B)

    def both(*x: jax.Array) -> Any:
        *operands, initial_state, do, d_final_state = x
        o, final_state, residuals = jax_qla.chunk_gated_delta_rule_fwd(
            *operands, initial_state=initial_state, output_final_state=True
        )
        gradients = jax_qla.chunk_gated_delta_rule_bwd(
            *operands, residuals, do, d_final_state, initial_state=initial_state
        )
        return o, final_state, gradients

    # Unit keys: nothing normalises them here.
    x[1] /= np.linalg.norm(x[1], axis=-1, keepdims=True)
    arrays = [*x, initial_state, do, d_final_state]
    wanted = jax.jit(both)(*arrays)
    for mode in ("auto", "explicit"):
        mesh = mesh_of(mode)
        with jax.set_mesh(mesh):
            placed = put(mesh, CUTS["tp x cp"], arrays, (*ROWS, "bh", "bth", "bh"))
            assert_close(jax.jit(both)(*placed), wanted)


def test_reference_is_cut_over_batch_and_heads_only() -> None:
    x = put(mesh_of("explicit"), CUTS["tp"], rows(0), ROWS)

    def apply(*x: jax.Array) -> jax.Array:
        return jax_qla.chunk_gated_delta_rule(*x, implementation="reference")[0]

    assert_close(jax.jit(apply)(*x), jax.jit(apply)(*rows(0)))
    sequence = put(mesh_of("explicit"), CUTS["cp"], rows(0), ROWS)
    with pytest.raises(NotImplementedError, match="cut over mesh axes 'x', 'y', and implementation='reference'"):
        jax.jit(apply)(*sequence)


def test_token_by_token_over_an_axis_of_one_device() -> None:
    mesh = jax.make_mesh((2, 1), ("data", "seq"), axis_types=(AxisType.Explicit,) * 2)
    x, state = [a[:, :3] for a in rows(0)], states(1, B)
    options: Any = {"output_final_state": True, "implementation": "reference"}
    for rule in (jax_qla.chunk_gated_delta_rule, jax_qla.recurrent_gated_delta_rule):
        with jax.set_mesh(mesh):
            placed = [jax.device_put(a, NamedSharding(mesh, P("data", "seq"))) for a in x]
            found = rule(*placed, initial_state=jax.device_put(state, NamedSharding(mesh, P("data"))), **options)
        assert_close(found, rule(*x, initial_state=state, **options))


def test_vmap_over_an_axis_that_is_cut_is_refused() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    x = [jax.device_put(a, NamedSharding(mesh, P("data"))) for a in arguments()]
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="put that axis into the batch B"):
        jax.vmap(lambda *x: jax_qla.chunk_gated_delta_rule(*(y[None] for y in x))[0])(*x)
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="put that axis into the batch B"):
        jax.vmap(lambda x: jax_qla.causal_conv1d(x[None], jnp.ones((4, 4)))[0])(x[3])


@pytest.mark.parametrize("mode", ["auto", rarely("named"), "explicit", rarely("manual")])
def test_an_axis_of_one_device_cuts_nothing(mode: str) -> None:
    """As in programs for any mesh: the axis is named or typed as one that cuts the sequence; nothing is exchanged."""
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 1), ("data", "seq"), axis_types=(kind, kind))
    arrays, specs = [*rows(0), states(1, B)], (*(P("data", "seq"),) * 5, P("data"))

    def apply(axes: MeshAxes | None, *x: jax.Array) -> Any:
        options: Any = {"use_qk_l2norm_in_kernel": True, "mesh_axes": axes}
        return jax_qla.chunk_gated_delta_rule(*x[:5], initial_state=x[5], output_final_state=True, **options)

    def both(function: Any) -> Any:
        def results_and_gradients(*x: jax.Array) -> Any:
            results, transpose = jax.vjp(function, *x)
            return results, transpose(jax.tree.map(jnp.cos, results))

        return jax.jit(results_and_gradients)

    wanted = both(functools.partial(apply, None))(*arrays)
    axes = {"named": MeshAxes(batch="data", sequence="seq"), "manual": MeshAxes(sequence="seq")}.get(mode)
    with jax.set_mesh(mesh):
        x = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]
        function: Any = functools.partial(apply, axes)
        if mode == "manual":
            function = jax.shard_map(function, in_specs=specs, out_specs=(specs[0], specs[5]))
        compiled = both(function).lower(*x).compile()
        assert_close(compiled(*x), wanted)
    assert not [c for c in collectives(compiled.as_text()) if c[0] != "all-reduce"]


@pytest.mark.parametrize(
    ("mode", "name"),
    [("auto", "layers"), rarely("auto", "packed layers"), rarely("named", "layers"), rarely("manual", "packed layers")],
)
def test_with_what_the_kernels_keep(mode: str, name: str) -> None:
    """Where a program may be lowered for the kernels too, their pieces go from pass to pass, through vmap and scan."""
    program, cut = PROGRAMS[name], CUTS["dp x cp"]
    arrays = [*program.arrays, *weights(name)]

    mesh = mesh_of(mode)
    with stand_in.kernels(), jax.set_mesh(mesh):
        stand_in.forget_traces()
        x = put(mesh, cut, arrays, (*program.dims, *program.out_dims))
        function = value_and_grad(program, spread(mode, cut, program.function, program.dims, program.out_dims))
        found = jax.jit(function, compiler_options=FAST)(*x)
    assert_close(found, expected(name))


@pytest.mark.parametrize(
    ("mode", "cut", "save", "l2norm", "given"),
    [
        ("auto", "cp", None, False, False),
        ("auto", "dp x cp", True, True, True),
        rarely("auto", "tp x cp", None, True, True),
        rarely("auto", "dp x cp", False, True, True),
        ("explicit", "cp", None, True, True),
        rarely("explicit", "cp", True, False, False),
        rarely("named", "dp x cp", None, True, True),
        rarely("manual", "cp", None, True, False),
    ],
)
def test_where_the_platform_decides(
    mode: str, cut: str, save: bool | None, l2norm: bool, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With operands that the kernels take both ways are traced, whatever is kept, and agree in types; here plain JAX
    runs."""
    monkeypatch.setattr("jax_qla.launch.launch", stand_in.launch_zeros)
    monkeypatch.setattr("jax_qla.cuda.support.why_no_kernels", lambda *_, **__: None)
    random = np.random.default_rng(0)
    heads, dims = ((2, 64), (2, 64), (4, 64), (4,), (4,)), (*ROWS, "bh")
    q, k, v, g, beta = (random.standard_normal((2, 512, *shape)).astype(np.float32) for shape in heads)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    state = random.standard_normal((2, 4, 64, 64)).astype(np.float32)
    arrays: list[Any] = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    arrays += [-0.01 * np.exp(g), 1 / (1 + np.exp(-beta)), state]

    def function(axes: MeshAxes | None, *x: jax.Array) -> Any:
        o, final_state = jax_qla.chunk_gated_delta_rule(
            *x[:5],
            initial_state=x[5] if given else None,
            output_final_state=True,
            use_qk_l2norm_in_kernel=l2norm,
            save_chunk_states=save,
            implementation=("cuda", "xla"),
            mesh_axes=axes,
        )
        return o, final_state

    def both(function: Any) -> Any:
        def results(*x: jax.Array) -> Any:
            found, transposed = jax.vjp(function, *x)
            return found, transposed(found)

        return jax.jit(results, compiler_options=FAST)

    stand_in.forget_traces()
    wanted = both(functools.partial(function, None))(*arrays)
    mesh = mesh_of(mode)
    with jax.set_mesh(mesh):
        placed = put(mesh, CUTS[cut], arrays, dims)
        found = both(spread(mode, CUTS[cut], function, dims, ("bth", "bh")))(*placed)
    stand_in.forget_traces()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b)


@pytest.mark.parametrize("mode", ["explicit", rarely("named"), rarely("manual"), rarely("auto")])
def test_gradients_of_members_where_the_sequence_is_cut(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole chunks on each device, which all members' chunks can be kept of side by side."""
    monkeypatch.setattr("jax_qla.launch.launch", stand_in.launch_zeros)
    monkeypatch.setattr("jax_qla.cuda.support.why_no_kernels", lambda *_, **__: None)
    random = np.random.default_rng(0)
    q, k, v, g, beta = (
        random.standard_normal((2, 1, 512, 2, *dim)).astype(np.float32) for dim in [(64,)] * 3 + [()] * 2
    )
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)] + [-0.01 * np.exp(g), 1 / (1 + np.exp(-beta))]

    def losses(axes: MeshAxes | None, *x: jax.Array) -> Any:
        def of_one(*x: jax.Array) -> jax.Array:
            o, _ = jax_qla.chunk_gated_delta_rule(*x, implementation=("cuda", "xla"), mesh_axes=axes)
            return o

        return (jax.vmap(of_one)(*x),)

    def gradients(function: Any) -> Any:
        loss = lambda *x: jnp.sum(jnp.sin(function(*x)[0].astype(jnp.float32)))  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=tuple(range(5))), compiler_options=FAST)

    stand_in.forget_traces()
    wanted = gradients(functools.partial(losses, None))(*arrays)
    mesh, cut, dims = mesh_of(mode), Cut(sequence="y"), ("mbth",) * 5
    with jax.set_mesh(mesh):
        found = gradients(spread(mode, cut, losses, dims, dims[:1]))(*put(mesh, cut, arrays, dims))
    stand_in.forget_traces()
    for a, b in zip(found, wanted, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b)


@pytest.mark.parametrize("save", [None, True])
def test_halves_of_packed_sequences_over_devices(save: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the forward half keeps of each device's part, places for its chunks too, the backward half takes."""
    monkeypatch.setattr("jax_qla.launch.launch", stand_in.launch_zeros)
    monkeypatch.setattr("jax_qla.cuda.support.why_no_kernels", lambda *_, **__: None)
    q = k = v = jnp.ones((1, 1024, 2, 64), jnp.bfloat16)
    g = beta = -jnp.ones((1, 1024, 2))
    ends = jnp.array([0, 100, 700, 1024], jnp.int32)

    def both(*x: jax.Array) -> Any:
        options: dict[str, Any] = {"cu_seqlens": ends, "implementation": ("cuda", "xla")}
        o, _, residuals = jax_qla.chunk_gated_delta_rule_fwd(*x, save_chunk_states=save, **options)
        return jax_qla.chunk_gated_delta_rule_bwd(*x, residuals, o, **options)

    stand_in.forget_traces()
    mesh = mesh_of("explicit")
    with jax.set_mesh(mesh):
        placed = put(mesh, Cut(sequence="y"), [q, k, v, g, beta], ROWS)
        found = jax.eval_shape(jax.jit(both), *placed)
    stand_in.forget_traces()
    assert [x.shape for x in found[:5]] == [x.shape for x in (q, k, v, g, beta)]


@pytest.mark.parametrize(
    ("packed", "piece_rows", "cut"),
    [
        (False, None, Cut(batch="x")),
        (False, 128, Cut(batch="x", sequence="y")),
        (True, 128, Cut(heads="x", sequence="y")),
        (False, 64, None),
    ],
)
def test_states_kept_of_other_shapes_are_refused(
    packed: bool, piece_rows: int | None, cut: Cut | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places for chunks are those of all devices' parts, or, with no cut, of a current mesh of one device."""
    monkeypatch.setattr("jax_qla.launch.launch", stand_in.launch_zeros)
    monkeypatch.setattr("jax_qla.cuda.support.why_no_kernels", lambda *_, **__: None)
    options: dict[str, Any] = {"implementation": "cuda", "piece_rows": piece_rows}
    if packed:
        options["cu_seqlens"] = jnp.array([0, 100, 700, 1024], jnp.int32)
    q = k = v = jnp.ones((1 if packed else 2, 1024, 2, 64), jnp.bfloat16)
    g = beta = -jnp.ones(q.shape[:3])

    def both(more: int, *x: jax.Array) -> Any:
        o, _, residuals = jax_qla.chunk_gated_delta_rule_fwd(*x, save_chunk_states=True, **options)
        assert residuals is not None
        if more:
            *others, h = residuals
            residuals = (*others, jnp.zeros((h.shape[0] + more, *h.shape[1:]), h.dtype))
        return jax_qla.chunk_gated_delta_rule_bwd(*x, residuals, o, **options)[0]

    stand_in.forget_traces()
    mesh = mesh_of("explicit") if cut else jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        x = put(mesh, cut, [q, k, v, g, beta], ROWS) if cut else [q, k, v, g, beta]
        assert jax.eval_shape(functools.partial(both, 0), *x).shape == q.shape
        with pytest.raises(ValueError, match=r"^residuals\[4\] must have shape"):
            jax.eval_shape(functools.partial(both, 8), *x)
    stand_in.forget_traces()


def test_checkpoint_policy_repeats_neither_forward_nor_exchange() -> None:
    mesh = mesh_of("explicit")
    x = put(mesh, CUTS["cp"], rows(0), ROWS)

    def exchanges(names: tuple[str, ...]) -> int:
        policy = jax.checkpoint_policies.save_only_these_names(*names)

        @functools.partial(jax.checkpoint, policy=policy)
        def loss(*x: jax.Array) -> jax.Array:
            return jnp.sum(jax_qla.chunk_gated_delta_rule(*x)[0] ** 2)

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), compiler_options=FAST).lower(*x).compile()
        return sum(operation == "collective-permute" for operation, _, _ in collectives(compiled.as_text()))

    # Forward and backward each take 3 rounds over 8 devices.
    assert exchanges(jax_qla.CHECKPOINT_NAMES) == 2 * 3
    assert exchanges(jax_qla.RESULT_NAMES) == 3 * 3


def arguments(length: int = 16, key_heads: int = 2) -> list[np.ndarray]:
    q = np.ones((2, length, key_heads, 4), np.float32)
    v = np.ones((2, length, 4, 4), np.float32)
    return [q, q, v, -np.ones(v.shape[:3], np.float32), np.ones(v.shape[:3], np.float32)]


@pytest.mark.parametrize(
    ("error", "axes", "length", "match"),
    [
        (
            ValueError,
            MeshAxes(sequence="z"),
            16,
            "mesh_axes.sequence names 'z', which is no axis of the mesh: its axes are 'x', 'y'",
        ),
        (ValueError, MeshAxes(batch="x", heads="x"), 16, "mesh_axes names the mesh axis 'x' twice"),
        (
            ValueError,
            MeshAxes(sequence="y"),
            18,
            "T = 18 cannot be cut evenly over the 4 devices of mesh axis 'y': pad",
        ),
        (ValueError, MeshAxes(batch="y"), 16, "B = 2 cannot be cut evenly over the 4 devices"),
        (ValueError, MeshAxes(heads="y"), 16, "Hk = 2 cannot be cut evenly over the 4 devices"),
        (TypeError, ("x", None, None), 16, r"mesh_axes must be a jax_qla.MeshAxes"),
        (TypeError, MeshAxes(batch=0), 16, "mesh_axes.batch must be a name, a tuple of names or None, got 0"),
    ],
)
def test_names_that_do_not_fit(error: type[Exception], axes: Any, length: int, match: str) -> None:
    with jax.set_mesh(mesh_of("named")), pytest.raises(error, match=match):
        jax_qla.chunk_gated_delta_rule(*arguments(length), mesh_axes=axes)


def test_name_without_a_mesh() -> None:
    with pytest.raises(ValueError, match="names 'y', which is no axis of the mesh: there is no mesh; set one with"):
        jax_qla.chunk_gated_delta_rule(*arguments(), mesh_axes=MeshAxes(sequence="y"))


def test_unnamed_auto_axis_beside_manual_ones() -> None:
    with jax.set_mesh(mesh_of("named")):
        function: Any = jax.shard_map(
            lambda *x: jax_qla.chunk_gated_delta_rule(*x)[0],
            in_specs=P("x"),
            out_specs=P("x"),
            axis_names={"x"},
        )
        with pytest.raises(NotImplementedError, match="over its Auto mesh axis 'y' cannot be seen: name what"):
            function(*arguments())


def test_sequence_over_manual_and_other_axes() -> None:
    with jax.set_mesh(mesh_of("named")):
        function: Any = jax.shard_map(
            lambda *x: jax_qla.chunk_gated_delta_rule(*x, mesh_axes=MeshAxes(sequence=("x", "y")))[0],
            in_specs=P(None, "x"),
            out_specs=P(None, "x"),
            axis_names={"x"},
        )
        with pytest.raises(NotImplementedError, match="of which only x is manual"):
            function(*arguments())


def test_specs_that_cannot_be_kept_warn() -> None:
    mesh = mesh_of("explicit")
    x = arguments()
    wanted = jax_qla.chunk_gated_delta_rule(*x)[0]
    with jax.set_mesh(mesh):
        values = [*x[:2], *(jax.device_put(a, NamedSharding(mesh, P(None, None, "y"))) for a in x[2:])]
        with pytest.warns(UserWarning, match="Hk = 2 cannot be cut evenly over the 4 devices of mesh axis 'y'"):
            assert_close(jax_qla.chunk_gated_delta_rule(*values)[0], wanted)
        by_token = [jax.device_put(a, NamedSharding(mesh, P(None, "x"))) for a in x[:2]]
        others = [jax.device_put(a, NamedSharding(mesh, P("x"))) for a in x[2:]]
        with pytest.warns(UserWarning, match="cut over mesh axis 'x' along its axis 0, others along another"):
            assert_close(jax_qla.chunk_gated_delta_rule(*by_token, *others)[0], wanted)
        keys = [jax.device_put(a, NamedSharding(mesh, P(None, None, None, "y"))) for a in x[:2]]
        with pytest.warns(UserWarning, match="cut over mesh axis 'y' along its axis 3, and is gathered there"):
            assert_close(jax_qla.chunk_gated_delta_rule(*keys, *x[2:])[0], wanted)


@pytest.mark.parametrize(
    ("of_v", "others", "problem", "kept"),
    [
        (P("x"), P("y"), "B = 4 cannot be cut evenly over the 8 devices of mesh axes 'y', 'x'", "y"),
        (P(None, "x"), P(None, "y"), "T = 4 cannot be cut evenly over the 8 devices of mesh axes 'y', 'x'", "y"),
        (P(None, None, ("x", "y")), P(None, None, "x"), "Hk = 2 cannot be cut evenly over the 8 devices", "x"),
    ],
)
def test_axes_that_only_some_operands_are_cut_over(of_v: P, others: P, problem: str, kept: str) -> None:
    """Explicit: what does not divide with them is cut over the axes of the first."""
    mesh = mesh_of("explicit")
    q = np.ones((4, 4, 2, 1), np.float32)
    v, g = np.arange(128, dtype=np.float32).reshape(4, 4, 8, 1), np.full((4, 4, 8), -0.1, np.float32)
    wanted = jax_qla.chunk_gated_delta_rule(q, q, v, g, -g)[0]
    with jax.set_mesh(mesh):
        q, v, g = (jax.device_put(x, spec) for x, spec in ((q, others), (v, of_v), (g, others)))
        with pytest.warns(UserWarning, match=f"{problem}.*, so it is gathered over mesh axis '{'xy'[kept == 'x']}'"):
            o, _ = jax_qla.chunk_gated_delta_rule(q, q, v, g, -g)
    assert kept in jax.typeof(o).sharding.spec
    assert_close(o, wanted)


@pytest.mark.parametrize("what", ["unreduced", "reduced"])
def test_sums_that_are_not_made_yet_are_refused(what: str) -> None:
    """Explicit: in a call, and in a layer's projections."""
    x = arguments()

    def other(v: jax.Array) -> jax.Array:
        if what == "reduced":
            return jax.sharding.reshard(v, P(reduced={"y"}))
        parts = jax.sharding.reshard(jnp.stack([v] * 4), P("y"))
        return jnp.einsum(
            "n...,n->...", parts, jax.sharding.reshard(jnp.ones(4), P("y")), out_sharding=P(unreduced={"y"})
        )

    calls = (
        lambda v: jax_qla.chunk_gated_delta_rule(*x[:2], other(v), *x[3:])[0],
        lambda v: jax_qla.causal_conv1d(v[..., 0], other(jnp.ones((4, HV)))),
        lambda v: projections.dot_general(v[..., 0], other(jnp.ones((HV, 3))), (((2,), (0,)), ((), ()))),
    )
    with jax.set_mesh(mesh_of("explicit")):
        for call in calls:
            with pytest.raises(NotImplementedError, match=rf"is {what} over mesh axis 'y', .* jax.sharding.reshard\(x"):
                jax.eval_shape(call, x[2])


def test_derivatives_over_axes_beside_manual_ones() -> None:
    """Reverse mode of any order; forward mode is refused."""
    x, axes = arguments(2), MeshAxes(heads="x")

    def conv(x: jax.Array, mesh_axes: MeshAxes | None = None) -> jax.Array:
        return jax_qla.causal_conv1d(x, jnp.ones((2, HV)), activation="silu", mesh_axes=mesh_axes)[0]

    def penalty(function: Any) -> Any:
        return lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(function(x)))(x) ** 2)

    wanted = jax.grad(penalty(conv))(x[3])
    with jax.set_mesh(mesh_of("named")):
        local = jax.shard_map(lambda x: conv(x, axes), in_specs=P(), out_specs=P(), axis_names={"y"})
        actual = jax.jit(jax.grad(penalty(local)), compiler_options=FAST)(x[3])
        with pytest.raises(NotImplementedError, match=r"reverse mode only .* over the others"):
            jax.jit(lambda x: jax.jvp(local, (x,), (x,))).lower(x[3])
    assert_close(actual, wanted)


def test_ids_are_not_exchanged_where_the_compiler_cuts_the_batch() -> None:
    mesh = mesh_of("auto")
    ids = jax.device_put(np.repeat(SEGMENT_IDS, 2, axis=0), NamedSharding(mesh, P("y")))
    find = jax.jit(functools.partial(segments_of_rows, Layout(automatic=True), max_segments=MAX_SEGMENTS))
    compiled = find.lower(ids).compile()
    assert collectives(compiled.as_text()) == []
    assert compiled(ids)[:2].tolist() == [[[0, 3], [3, 150], [152, 176], [176, 176]]] * 2
    assert compiled(ids)[2:].tolist() == [[[44, 88], [88, 89], [110, 131], [176, 176]]] * 2


def test_without_jit() -> None:
    """Auto, called eagerly: partitioned all the same, and compiled once."""
    x = put(mesh_of("auto"), CUTS["dp x cp"], rows(0), ROWS)
    o, _ = jax_qla.chunk_gated_delta_rule(*x)
    assert o.sharding.is_equivalent_to(x[2].sharding, o.ndim)
    with mock.patch.object(jax_qla.mesh, "_partition", side_effect=AssertionError("compiled again")):
        again, _ = jax_qla.chunk_gated_delta_rule(*x)
    assert np.array_equal(again, o)


def test_eager_calls_compile_once() -> None:
    """In an Explicit mesh, and token by token anywhere: nothing is mapped anew that was."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    short = [x[:, :3] for x in rows(0)]

    def calls(*x: Any) -> None:
        jax_qla.recurrent_gated_delta_rule(*(y[:, :3] for y in x), implementation="reference")
        jax_qla.causal_conv1d(x[3], jnp.ones((4, x[3].shape[2])))
        jax_qla.chunk_gated_delta_rule(*x, segment_ids=jnp.ones(x[3].shape[:2], jnp.int32), max_segments=2)

    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in rows(0)]
        calls(*placed)
        with mock.patch.object(jax, "shard_map", side_effect=AssertionError("mapped again")):
            calls(*placed)
    by_recurrence = functools.partial(jax_qla.chunk_gated_delta_rule, implementation="reference")
    by_recurrence(*short)
    with mock.patch.object(jax.lax, "scan", side_effect=AssertionError("traced again")):
        by_recurrence(*short)


@pytest.mark.parametrize(("key_heads", "value_heads"), [(1, 1), rarely(1, 4), rarely(4, 4), (2, 8)])
def test_auto_ratios_of_heads(key_heads: int, value_heads: int) -> None:
    """Shardy takes no factor of size 1 beside others, so the rule has several forms."""
    x: list[Any] = [np.ones((2, 16, heads, 4), np.float32) for heads in (key_heads, key_heads, value_heads)]
    x += [-np.ones((2, 16, value_heads), np.float32), np.ones((2, 16, value_heads), np.float32)]
    cut = Cut(batch="x", sequence="y") if key_heads == 1 else Cut(heads="x", sequence="y")
    placed = put(mesh_of("auto"), cut, x, ROWS)
    compiled = jax.jit(lambda *x: jax_qla.chunk_gated_delta_rule(*x)[0]).lower(*placed).compile()
    assert_close(compiled(*placed), jax_qla.chunk_gated_delta_rule(*x)[0])
    assert_nothing_gathered(compiled)


def test_auto_heads_that_do_not_divide() -> None:
    """Two key heads on four devices: computed right, whatever is gathered for it."""
    mesh = mesh_of("auto")
    x = arguments()
    placed = [*x[:2], *(jax.device_put(a, NamedSharding(mesh, P(None, None, "y"))) for a in x[2:])]
    with pytest.warns(UserWarning, match="2 cannot be cut evenly over the 4 devices of mesh axis 'y'"):
        assert_close(jax.jit(jax_qla.chunk_gated_delta_rule)(*placed)[0], jax_qla.chunk_gated_delta_rule(*x)[0])


def test_auto_columns_cut_over_more_devices_than_there_are_heads() -> None:
    """Two key heads of one projection on four devices: each has half a head, which no PartitionSpec can say."""
    mesh = mesh_of("auto")
    x = arguments()
    flat = [np.random.default_rng(i).standard_normal((2, 16, 8)).astype(np.float32) for i in range(2)]

    def apply(q: jax.Array, k: jax.Array, *others: jax.Array) -> jax.Array:
        q, k = (y.reshape(2, 16, 2, 4) for y in (q, k))
        return jax_qla.chunk_gated_delta_rule(q, k, *others, use_qk_l2norm_in_kernel=True)[0]

    def both(*x: jax.Array) -> Any:
        return apply(*x), jax.grad(lambda *x: jnp.sum(jnp.sin(apply(*x))), argnums=(0, 1, 2))(*x)

    wanted = jax.jit(both)(*flat, *x[2:])
    placed = [jax.device_put(y, NamedSharding(mesh, P("x", None, "y"))) for y in flat]
    with pytest.warns(UserWarning, match="is cut along its axis 2.* over parts of mesh axis 'y', and is gathered"):
        assert_close(jax.jit(both)(*placed, *x[2:]), wanted)


@pytest.mark.parametrize("mode", ["explicit", rarely("named"), rarely("manual")])
def test_export(mode: str) -> None:
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    mesh, cut = mesh_of(mode), CUTS["tp x cp"]
    program = PROGRAMS["packed"]
    with jax.set_mesh(mesh):
        arrays = put(mesh, cut, program.arrays, program.dims)
        function = jax.jit(spread(mode, cut, packed, program.dims, program.out_dims))
        exported = jax.export.export(function)(*arrays)
        loaded = jax.export.deserialize(exported.serialize())
        assert exported.nr_devices == 8
        assert_close(loaded.call(*arrays), function(*arrays))


def test_export_from_an_auto_mesh_is_refused() -> None:
    program = PROGRAMS["packed"]
    arrays = put(mesh_of("auto"), CUTS["cp"], program.arrays, program.dims)
    with pytest.raises(NotImplementedError, match="cannot be exported from a mesh with Auto axes"):
        jax.export.export(jax.jit(lambda *x: packed(None, *x)))(*arrays)


CACHED = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_compilation_cache_dir", sys.argv[2])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jax_qla

hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
kind = AxisType.Auto if sys.argv[1] == "auto" else AxisType.Explicit
mesh = jax.make_mesh((4,), ("seq",), axis_types=(kind,))
x = [np.ones((1, 16, 2, 4), np.float32)] * 3 + [np.ones((1, 16, 2), np.float32)] * 2
x = [jax.device_put(a, NamedSharding(mesh, P(None, "seq"))) for a in x]
jax.jit(lambda *x: jax_qla.chunk_gated_delta_rule(*x)[0]).lower(*x).compile()
print("hits", len(hits))
"""


@pytest.mark.parametrize("mode", ["auto", rarely("explicit")])
def test_persistent_compilation_cache_hits_in_another_process(mode: str, tmp_path: Path) -> None:
    def hits() -> int:
        command = [sys.executable, "-c", CACHED, mode, str(tmp_path)]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        return int(result.stdout.split()[-1])

    assert hits() == 0
    assert hits() == 1


def test_several_processes() -> None:
    script = Path(__file__).parents[1] / "examples" / "multi_process.py"
    command = [sys.executable, str(script), "--launch", "2", "--cpu", "--length", "200"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("2 devices (cpu): 200 tokens") == 2


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [("--launch -1", "--launch: must be 1 or more, got -1"), ("--launch 0", "--launch: must be 1 or more, got 0")],
)
def test_processes_to_launch_are_counted(
    argv: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["multi_process.py", *argv.split()])
    with pytest.raises(SystemExit):
        multi_process.main()
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("length", [0, -8, 7])
def test_length_that_the_processes_do_not_divide(length: int) -> None:
    with pytest.raises(SystemExit, match=f"--length: must be a multiple of the 8 devices, got {length}"):
        multi_process.run(length)


def test_gradients_that_are_no_numbers_are_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = multi_process.loss
    monkeypatch.setattr(multi_process, "loss", lambda *x: right(*x) + jnp.sum(jnp.sqrt(0 * x[-1])))
    with pytest.raises(SystemExit, match="differs from the whole one"):
        multi_process.run(8)
    assert "largest difference nan" in capsys.readouterr().out


def test_documentation() -> None:
    text = (Path(__file__).parents[1] / "docs" / "sharding.md").read_text()
    namespace: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 9
    for block in blocks:
        exec(block, namespace)


@pytest.mark.parametrize("devices", [2, rarely(4), rarely(8)])
def test_communicated_bytes_are_as_documented(devices: int) -> None:
    mesh = jax.make_mesh((devices,), ("seq",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = [jax.device_put(a, NamedSharding(mesh, P(None, "seq"))) for a in rows(0)]

        def loss(*x: jax.Array) -> jax.Array:
            return jnp.sum(jax_qla.chunk_gated_delta_rule(*x)[0] ** 2)

        compiled = jax.jit(jax.grad(loss, argnums=tuple(range(5))), compiler_options=FAST).lower(*x).compile()
    sent = sum(
        elements for operation, _, elements in collectives(compiled.as_text()) if operation == "collective-permute"
    )
    rounds = int(np.ceil(np.log2(devices)))
    assert sent == 2 * B * HV * K * (rounds * V + (rounds - 1) * K)
