"""`recurrent_gated_delta_rule` without a GPU: the choice, transformations and bfloat16 states, with a stand-in for the
kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stand_in
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_api import assert_close, on_hopper, states, tokens
from thorough import every_value, rarely

import jax_qla
from jax_qla import implementations
from jax_qla.kernels.packaged import PACKAGED
from jax_qla.l2norm import normalize
from jax_qla.reference import recurrence

SCALE = 16**-0.5


def decode(*operands: Any, **options: Any) -> Any:
    """The rule on the operands q, k, v, g, beta and the state."""
    *rows, state = operands
    return jax_qla.recurrent_gated_delta_rule(*rows, initial_state=state, output_final_state=True, **options)


@jax.jit
def expected(*operands: Any) -> Any:
    q, k, v, g, beta, state = operands
    return recurrence(q, k, v, g, beta, state, None, scale=SCALE)


def operands(batch: int = 2, length: int = 3, seed: int = 0) -> tuple[jax.Array, ...]:
    return tuple(map(jnp.asarray, (*tokens(batch, length, seed), (1 + seed) * states(batch))))


def exported(platforms: Sequence[str], gradient: bool = False, **options: Any) -> str:
    """The module of a program that is exported for the platforms."""

    def program(*x: Any) -> Any:
        if gradient:
            return jax.grad(lambda *x: jnp.sum(jnp.square(decode(*x, **options)[0])), argnums=5)(*x)
        return decode(*x, **options)

    allowed = [jax.export.DisabledSafetyCheck.custom_call(stand_in.TARGET)]
    return jax.export.export(jax.jit(program), platforms=platforms, disabled_checks=allowed)(*operands()).mlir_module()


# The choice


@pytest.mark.parametrize("gradient", [False, True])
def test_lowering_by_platform(gradient: bool) -> None:
    with stand_in.kernels():
        assert stand_in.TARGET in exported(["cuda"], gradient)
        assert stand_in.TARGET not in exported(["cpu"], gradient, implementation=None)
        assert stand_in.TARGET in exported(["cpu", "cuda"], gradient, implementation=None)
        assert stand_in.TARGET in exported(["cuda"], gradient, implementation="cuda")
        assert stand_in.TARGET not in exported(["cuda"], gradient, implementation="xla")
        assert stand_in.TARGET not in exported(["cuda"], gradient, implementation=("reference", "cuda"))
        for platforms in (["cpu"], ["cpu", "cuda"]):
            with pytest.raises(NotImplementedError, match="'cuda' was asked for, but the program is not lowered for"):
                exported(platforms, gradient, implementation="cuda")


def test_loop_or_not() -> None:
    """ "xla" writes few tokens out, "reference" loops."""
    assert "while" not in exported(["cpu"], implementation="xla")
    assert "while" in exported(["cpu"], implementation="reference")
    with stand_in.kernels():
        assert "while" in exported(["cpu"], implementation=("cuda", "reference"))


def test_cuda_is_refused_on_cpu() -> None:
    with stand_in.kernels(), pytest.raises(NotImplementedError, match="'cuda' was asked for, but the program is not"):
        decode(*operands(), implementation="cuda")


def kernel_shapes(key_dim: int = 64, dtype: Any = jnp.bfloat16) -> tuple[jax.ShapeDtypeStruct, ...]:
    q = jax.ShapeDtypeStruct((1, 2, 2, key_dim), dtype)
    gate = jax.ShapeDtypeStruct((1, 2, 2), jnp.float32)
    return q, q, q, gate, gate, jax.ShapeDtypeStruct((1, 2, key_dim, key_dim), jnp.float32)


@pytest.mark.parametrize(
    ("shapes", "options", "sentence"),
    [
        (kernel_shapes(32), {}, "K and V must be 64 or 128 for the kernels of 'cuda', got K=32 and V=32"),
        (kernel_shapes(dtype=jnp.float32), {}, "q, k and v must be bfloat16 or float16 .* got float32"),
        (
            kernel_shapes(),
            {"cu_seqlens": jnp.array([0, 2], jnp.int32)},
            "the decoding kernel of 'cuda' takes dense batches only, without cu_seqlens",
        ),
    ],
    ids=["size", "dtype", "packed"],
)
def test_what_the_kernel_does_not_take(shapes: Any, options: Any, sentence: str) -> None:
    """By name it is refused; left out, XLA takes its place."""
    with pytest.raises(NotImplementedError, match=f"implementation='cuda' cannot take these inputs: {sentence}") as one:
        jax.eval_shape(partial(decode, implementation="cuda", **options), *shapes)
    assert "\n" not in str(one.value)
    with on_hopper():
        o, _ = jax.eval_shape(partial(decode, **options), *shapes)
    assert o.shape == shapes[2].shape


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_symbols_for_the_batch(name: str) -> None:
    """The kernel cannot be launched for these: by name it is refused; left out, XLA takes its place."""
    (batch,) = jax.export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in kernel_shapes(dtype=jnp.dtype(name))]
    with on_hopper():
        exported = jax.export.export(jax.jit(lambda *x: decode(*x)[0]))(*shapes)
        operands = [jnp.ones((3, *x.shape[1:]), x.dtype) for x in shapes]
        found, right = exported.call(*operands), decode(*operands, implementation="xla")[0]
        np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(right, np.float32), rtol=1e-2)
        with pytest.raises(NotImplementedError, match="'cuda' take no symbols for sizes, got q of shape"):
            jax.eval_shape(partial(decode, implementation="cuda"), *shapes)


@pytest.mark.parametrize(
    ("recurrent", "precision"),
    [(None, None), (None, "high"), (implementations.RecurrentCall(packed=False, state_dtype="bfloat16"), None)],
)
def test_only_the_kernels_needed_count(
    monkeypatch: pytest.MonkeyPatch, recurrent: implementations.RecurrentCall | None, precision: str | None
) -> None:
    """A missing decoding kernel does not keep the chunked rule from its own, nor the other way round; nor one
    that takes no split operands the rule in high precision."""
    from jax_qla import launch, store

    asked: list[tuple[str, Any]] = []

    def at_hand(name: str, config: Any, *, build: bool) -> None:
        asked.append((name, config))

    monkeypatch.setattr(store, "why_not_at_hand", at_hand)
    monkeypatch.setattr(launch, "unavailable", lambda: None)
    q, k, v, *_ = kernel_shapes(128)
    with on_hopper():
        choice = implementations.choose(q, k, v, implementation=None, precision=precision, recurrent=recurrent)
    assert choice.on_cuda == "cuda"
    if recurrent is None:
        others = {"recurrent", "convolution", "convolution_gradients", "gated_norm"} | (
            {"backward", "states_from_vd"} if precision else set()
        )
        assert {name for name, _ in asked} == {name for name, _ in PACKAGED} - others
    else:
        ((name, config),) = asked
        assert name == "recurrent"
        assert (config.key_dim, config.dtype, config.state_dtype) == (128, "bfloat16", "bfloat16")


@pytest.mark.parametrize("name", ["float16", "int32"])
def test_states_of_other_dtypes(name: str) -> None:
    *rows, state = operands()
    with pytest.raises(TypeError, match=f"initial_state must be float32 or bfloat16, got {name}"):
        decode(*rows, state.astype(name))


# Values and transformations, on CPU by way of the choice that a Hopper card would decide otherwise


@pytest.fixture(params=[None, rarely("xla"), rarely("reference"), ("cuda", "reference")], ids=str)
def function(request: pytest.FixtureRequest) -> Any:
    """The rule by one choice of implementation."""
    with stand_in.kernels():
        yield jax.jit(partial(decode, implementation=request.param))


RARELY_REFERENCE = pytest.mark.parametrize(
    "function", [None, *map(rarely, ("xla", "reference", ("cuda", "reference")))], ids=str, indirect=True
)
"""Of tests that take long to compile. That the reference can stand in the place of "xla", others say."""


def test_values(function: Any) -> None:
    x = operands()
    assert_close(function(*x), expected(*x))


@pytest.mark.parametrize("implementation", [None, *map(rarely, ("xla", "reference", ("cuda", "reference")))], ids=str)
def test_normalised(implementation: Any) -> None:
    """Values, derivatives and members of a batch are those of q and k divided by their lengths."""
    q, k, *others = operands()
    x = (3 * q, k / 5, *others)

    def right(q: Any, k: Any, *others: Any) -> Any:
        return expected(normalize(q), normalize(k), *others)

    def all_of(f: Any) -> Any:
        results, pull_back = jax.vjp(f, *x)
        members = jax.vmap(f)(*(a[:, None] for a in x))
        return results, pull_back(jax.tree.map(jnp.cos, results)), jax.jvp(f, x, operands(seed=1)), members

    with stand_in.kernels():
        found = jax.jit(partial(all_of, partial(decode, use_qk_l2norm_in_kernel=True, implementation=implementation)))()
    assert_close(found, jax.jit(partial(all_of, right))(), 1e-5)


def test_without_states_and_without_jit() -> None:
    x = operands()
    o, final_state = jax_qla.recurrent_gated_delta_rule(*x[:5])
    assert final_state is None
    assert_close(o, expected(*x[:5], None)[0])


def test_no_tokens(function: Any) -> None:
    *rows, state = operands()
    o, final_state = function(*(x[:, :0] for x in rows), state)
    assert o.shape == (2, 0, 4, 8)
    np.testing.assert_array_equal(final_state, state)
    o, final_state = function(*(x[:0] for x in (*rows, state)))
    assert (o.shape, final_state.shape) == ((0, 3, 4, 8), (0, 4, 16, 8))


def test_jvp_and_vjp(function: Any) -> None:
    def both(f: Any) -> Any:
        def derivatives(x: Any, dx: Any) -> Any:
            results, pull_back = jax.vjp(f, *x)
            return jax.jvp(f, x, dx), pull_back(jax.tree.map(jnp.cos, results))

        return jax.jit(derivatives)(operands(), operands(seed=1))

    assert_close(both(function), both(expected), 1e-5)


@RARELY_REFERENCE
def test_second_derivatives(function: Any) -> None:
    x, dx = operands(1, 2), operands(1, 2, seed=1)

    def hessian_product(f: Any) -> Any:
        loss = lambda *x: sum(jnp.sum(jnp.sin(y)) for y in f(*x))  # noqa: E731
        return jax.jit(lambda *x: jax.jvp(jax.grad(loss, argnums=tuple(range(6))), x, dx)[1])(*x)

    assert_close(hessian_product(function), hessian_product(expected), 1e-4)


@RARELY_REFERENCE
def test_vmap_over_nothing(function: Any) -> None:
    """Results and gradients of no members are empty and shaped as those of some."""
    member = operands()

    def gradients(*x: Any) -> Any:
        return jax.grad(lambda *x: sum(jnp.sum(y) for y in function(*x)), argnums=tuple(range(6)))(*x)

    for each in (function, gradients):
        for axes in ((0,) * 6, (None, 0, None, None, 0, None)):
            x = [a if axis is None else jnp.zeros((0, *a.shape), a.dtype) for a, axis in zip(member, axes, strict=True)]
            found, like = jax.jit(jax.vmap(each, axes))(*x), jax.eval_shape(each, *member)
            assert jax.tree.map(lambda a: (a.shape, a.dtype), found) == jax.tree.map(
                lambda a: ((0, *a.shape), a.dtype), like
            )


@every_value
@pytest.mark.parametrize(
    "batched", [(0,) * 6, (None, 0, None, None, 0, None), (None,) * 5 + (0,), (1, None, 2, 0, 1, 1)]
)
def test_vmap(function: Any, batched: Sequence[int | None]) -> None:
    first, second = operands(), operands(seed=1)
    x = [a if axis is None else jnp.stack((a, b), axis) for a, b, axis in zip(first, second, batched, strict=True)]
    y = [a if axis is None else b for a, b, axis in zip(first, second, batched, strict=True)]
    both = jax.tree.map(lambda *z: jnp.stack(z), expected(*first), expected(*y))
    assert_close(jax.jit(jax.vmap(function, batched))(*x), both)

    # Twice, with the gradient of a sum inside.
    def gradient(f: Any) -> Any:
        loss = lambda *x: sum(jnp.sum(jnp.sin(z)) for z in f(*x))  # noqa: E731
        return jax.jit(jax.vmap(jax.vmap(jax.grad(loss, 5), batched), (None,) * 5 + (0,)))

    twice = [*x[:5], jnp.stack((x[5], 2 * x[5]))]
    assert_close(gradient(function)(*twice), gradient(expected)(*twice), 1e-5)


@RARELY_REFERENCE
def test_bfloat16_states(function: Any) -> None:
    """The state is rounded when it is stored and nowhere else."""
    *rows, state = operands()
    state = state.astype(jnp.bfloat16)
    o, final_state = function(*rows, state)
    right_o, right_state = expected(*rows, state)
    assert final_state.dtype == jnp.bfloat16
    assert_close(o, right_o)
    assert_close(final_state.astype(jnp.float32), right_state, 2.0**-8)

    def gradient(f: Any) -> Any:
        return jax.jit(jax.grad(lambda s: jnp.sum(jnp.sin(f(*rows, s)[0]))))

    d_state, right = gradient(function)(state), gradient(expected)(state.astype(jnp.float32))
    assert d_state.dtype == jnp.bfloat16
    assert_close(d_state.astype(jnp.float32), right, 2.0**-8)


def test_scan_carries_the_state(function: Any) -> None:
    """Token by token is what all at once is."""
    *rows, state = operands(length=4)

    def step(state: Any, token: Any) -> Any:
        o, state = function(*(x[:, None] for x in token), state)
        return state, o[:, 0]

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in rows)
    final_state, o = jax.jit(partial(jax.lax.scan, step))(state, tokens)
    assert_close((jnp.moveaxis(o, 0, 1), final_state), expected(*rows, state))


def test_shard_map(function: Any) -> None:
    x = operands()
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), "data")
    over = jax.sharding.PartitionSpec("data")
    sharded = jax.shard_map(function, mesh=mesh, in_specs=(over,) * 6, out_specs=over)
    assert_close(jax.jit(sharded)(*x), expected(*x))


MESH = ("data", "model")
SPECS = (*(P("data", None, "model"),) * 5, P("data", "model"))


@pytest.mark.parametrize("implementation", [None, rarely("reference")])
def test_explicit_mesh(implementation: Any) -> None:
    """Batch and heads are cut as they come, derivatives included; a cut sequence is refused."""
    mesh = jax.make_mesh((2, 2), MESH, axis_types=(AxisType.Explicit,) * 2)
    call = partial(decode, implementation=implementation)

    def run(*x: jax.Array) -> Any:
        return call(*x), jax.grad(lambda *x: jnp.sum(jnp.sin(call(*x)[1])), argnums=(2, 5))(*x)

    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands(), SPECS, strict=True)]
        found = jax.jit(run)(*placed)
        cut = [jax.device_put(x, NamedSharding(mesh, P(None, "data"))) for x in operands(length=4)[:5]]
        with pytest.raises(NotImplementedError, match="recurrent_gated_delta_rule computes whole sequences only: use"):
            call(*cut, None)
    assert found[0][1].sharding.spec == P("data", "model", None, None)
    assert_close(found, run(*operands()))


def test_beside_manual_axes_over_which_nothing_is_checked() -> None:
    """Computed, and refused where it is differentiated only."""
    mesh = jax.make_mesh((2, 2), MESH, axis_types=(AxisType.Explicit,) * 2)
    options: dict[str, Any] = {"in_specs": (P("data"),) * 6, "out_specs": P("data"), "axis_names": {"data"}}
    call = jax.shard_map(decode, **options, check_vma=False)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands(), SPECS, strict=True)]
        assert_close(jax.jit(call)(*placed), expected(*operands()))
        with pytest.raises(NotImplementedError, match="cannot be differentiated over the others: leave check_vma=True"):
            jax.jit(jax.grad(lambda *x: jnp.sum(call(*x)[0]), argnums=5))(*placed)


def test_kernel_in_an_explicit_mesh() -> None:
    mesh = jax.make_mesh((2, 2), MESH, axis_types=(AxisType.Explicit,) * 2)
    q = (2, 1, 2, 64)
    shapes = [(q, jnp.bfloat16)] * 3 + [(q[:3], jnp.float32)] * 2 + [((2, 2, 64, 64), jnp.float32)]
    with jax.set_mesh(mesh), on_hopper():
        given = [
            jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(mesh, spec))
            for shape, spec in zip(shapes, SPECS, strict=True)
        ]
        o, state = jax.eval_shape(decode, *given)
    assert (o.sharding.spec, state.sharding.spec) == (P("data", None, "model", None), P("data", "model", None, None))


def test_auto_axes_beside_manual_ones() -> None:
    mesh = jax.make_mesh((2, 2), MESH, axis_types=(AxisType.Auto,) * 2)
    over = P("data")
    call = jax.shard_map(decode, mesh=mesh, in_specs=(over,) * 6, out_specs=over, axis_names={"data"})
    assert_close(jax.jit(call)(*operands()), expected(*operands()))


def test_auto_axes_beside_explicit_ones() -> None:
    mesh = jax.make_mesh((2, 2), MESH, axis_types=(AxisType.Explicit, AxisType.Auto))
    call = partial(decode, implementation="reference")
    with jax.set_mesh(mesh):
        found = jax.jit(call)(*jax.device_put(operands(), NamedSharding(mesh, P("data"))))
    assert found[1].sharding.spec[0] == "data"
    assert_close(found, expected(*operands()))


@pytest.mark.parametrize("in_context", [True, False])
def test_auto_mesh(in_context: bool) -> None:
    """The kernel's batch and heads are cut where the compiler cuts the operands, and nothing is gathered."""
    mesh = jax.make_mesh((2, 2), MESH, axis_types=(AxisType.Auto,) * 2)

    def run(*x: jax.Array) -> Any:
        return decode(*x), jax.grad(lambda *x: jnp.sum(jnp.sin(decode(*x)[1])), argnums=(2, 5))(*x)

    x = operands()
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(x, SPECS, strict=True)]
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext(), stand_in.kernels():
        compiled = jax.jit(run).lower(*placed).compile()
        both = jax.jit(jax.vmap(decode))(*([jnp.stack((x, x)) for x in placed]))
        stateless = jax.jit(lambda *x: jax_qla.recurrent_gated_delta_rule(*x)[0])(*placed[:5])
    found = compiled(*placed)
    assert "all-gather" not in (compiled.as_text() or "")
    assert found[0][1].sharding.spec == P("data", "model")
    assert_close(found, run(*x))
    assert_close(both, jax.tree.map(lambda y: jnp.stack((y, y)), expected(*x)))
    assert_close(stateless, expected(*x[:5], None)[0])
