"""The short convolution by kernels, as far as no card is needed: what they are specified to compute, when they are
taken, and what surrounds them. tests/test_causal_conv1d.py has what holds for every implementation."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import convolution_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_build import lowered_kernel
from test_causal_conv1d import CUT, IDS
from test_sharding import CUTS, FAST, MODES, assert_nothing_gathered, mesh_of, spread
from thorough import every_value, rarely

import jax_qla
from jax_qla import MeshAxes, causal_conv1d, policy, store
from jax_qla import convolution as convolution_of_a_device
from jax_qla.cuda import conv1d
from jax_qla.kernels import convolution, convolution_gradients
from jax_qla.nn.convolution import causal_convolution

B, T, D = 2, 40, 64
REFUSED = r'causal_conv1d in 16 bits .* use implementation="xla"'


def normal(seed: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32).astype(dtype)


@pytest.fixture
def at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the kernels are: "cuda" is taken, and what is lowered for a CPU is plain JAX in its surroundings."""
    monkeypatch.setattr("jax_qla.launch.unavailable", lambda: None)
    monkeypatch.setattr(store, "why_not_at_hand", lambda *_, **__: None)
    monkeypatch.setattr(store, "lookup", lowered_kernel)


@pytest.mark.parametrize("case", cases.SMALL, ids=str)
def test_specification(case: cases.Case) -> None:
    """In float64, through the calls of the kernels: shapes, groups and stretches are theirs."""

    def launch(steps: Any, inputs: Any, outputs: Any) -> Any:
        (step,) = steps
        given: Any = {name: x.astype(jnp.float64 if x.dtype != jnp.int32 else x.dtype) for name, x in inputs.items()}
        marks = given.pop("ids", None), given.pop("ids_before", None)
        operands = [given.pop(name) for name in ("x", "weight", "bias", "before")]
        module: Any = convolution if step.kernel == "convolution" else convolution_gradients
        if step.kernel == "convolution":
            parts = tuple(x.shape[2] for x in outputs.values())
            found = module.specification(*operands, *marks, parts=parts, silu=step.scalars["silu"])
        else:
            found = module.specification(*operands, *marks, **given, **step.scalars)
        assert [x.shape for x in found] == [x.shape for x in outputs.values()]
        return {name: x.astype(like.dtype) for (name, like), x in zip(outputs.items(), found, strict=True)}

    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        patch.setattr("jax_qla.launch.launch", launch)
        patch.setattr(policy, "MULTIPROCESSORS", 2)  # several blocks of rows
        # Compiled as wholes: one operation after the other, it takes three times as long.
        forward = jax.jit(functools.partial(conv1d.forward), static_argnames=("parts", "silu"))
        backward = jax.jit(functools.partial(conv1d.backward), static_argnames="silu")
        cases.check(case, forward, backward)


@pytest.mark.parametrize(
    ("length", "columns"), [(1, 1), (3, 700), (300, 7), (8192, 32), (8192, 64), (2048, 12), (10**6, 12)]
)
def test_stretches(length: int, columns: int) -> None:
    found = conv1d._stretches(length, columns)
    rows, blocks = found["rows"], found["blocks_of_rows"]
    assert rows % convolution.TAPS == 0
    assert 0 < rows <= 256
    assert 0 <= blocks * convolution.WARPS * rows - length < convolution.WARPS * rows  # all rows, and no block without
    waves = blocks * columns / (4 * policy.MULTIPROCESSORS)
    assert waves <= 1 or waves > 0.8 * -(-waves // 1) or blocks == 1


def test_when_kernels_are_taken(at_hand: None) -> None:
    x, weight = normal(0, B, T, D), normal(1, 4, D, dtype="float32")

    def kernels(x: Any, weight: Any, **options: Any) -> list[str]:
        def loss(x: Any) -> Any:
            return jnp.sum(causal_conv1d(x, weight, **options)[0].astype(jnp.float32))

        lowered = jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        return re.findall(r'functions = "([^"]*)"', lowered)

    assert kernels(x, weight) == ["convolution_gradients_kernel"]  # whose operands are what is kept
    assert kernels(x, weight, activation="silu") == ["convolution_gradients_kernel"]
    assert kernels(x, weight, implementation="cuda") == ["convolution_gradients_kernel"]
    assert kernels(x, weight, implementation="xla") == []
    assert kernels(x.astype(jnp.float32), weight) == []
    assert kernels(x, weight[:3]) == []
    assert kernels(x[..., :60], weight[:, :60]) == []
    for given, message in (
        ((x.astype(jnp.float32), weight), "x must be bfloat16 or float16 .*, got float32"),
        ((x, weight[:3]), "W = 4 .*, got W = 3"),
        ((x[..., :60], weight[:, :60]), "D must be a multiple of 8 .*, got D = 60"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            causal_conv1d(*given, implementation="cuda")
    with pytest.raises(NotImplementedError, match="the convolution is 'cuda' or 'xla'"):
        causal_conv1d(x, weight, implementation="reference")
    with pytest.raises(NotImplementedError, match="not lowered for CUDA"):
        jax.jit(functools.partial(causal_conv1d, implementation="cuda"))(x, weight)


def test_parts_are_written_as_such(at_hand: None) -> None:
    """Of one device, the layer's q, k and v are results of the kernel, and their gradients operands of the other."""
    x, weight = normal(0, B, T, D), normal(1, 4, D, dtype="float32")

    def loss(x: Any, weight: Any) -> Any:
        q, k, v = causal_convolution(x, weight, parts=(16, 16, 32))
        return [jnp.sum(jnp.square(y.astype(jnp.float32))) for y in (q, k, v)]

    def both(x: Any, weight: Any) -> Any:
        y, transpose = jax.vjp(loss, x, weight)
        return y, transpose([jnp.ones(())] * 3)

    with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        lowered = jax.jit(both).trace(x, weight).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r'functions = "([^"]*)"', lowered) == ["convolution_kernel", "convolution_gradients_kernel"]
    for call in ("convolution_kernel", "convolution_gradients_kernel"):
        (line,) = (line for line in lowered.splitlines() if f'"{call}"' in line)
        assert all(f"tensor<{B}x{T}x{part}x{channels}xbf16>" in line for part, channels in _groups(call))


def _groups(call: str) -> list[tuple[int, int]]:
    channels = (convolution if call == "convolution_kernel" else convolution_gradients).CHANNELS
    return [(part // channels, channels) for part in (16, 32)]


@every_value
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "mode", [rarely(m) if m in ("manual, unchecked", "partly manual, named") else m for m in MODES]
)
def test_cut_over_devices(mode: str, packed: bool, at_hand: None) -> None:
    """As tests/test_causal_conv1d.py has it for plain JAX: whatever cuts operands, results are those of one device."""
    arrays = [normal(0, B, T, D), normal(1, 4, D), normal(2, D), IDS if packed else normal(3, B, 3, D)]
    dims = ("bth", "jh", "h", "bt" if packed else "bjh")
    with_tail = not mode.startswith("partly manual")  # XLA for CPUs (jax 0.10.2) aborts where that sums bfloat16
    out_dims = ("bth", "bjh") if with_tail else ("bth",)

    def convolve(axes: MeshAxes | None, x: Any, weight: Any, bias: Any, more: Any) -> Any:
        option = {"segment_ids" if packed else "initial_tail": more, "output_final_tail": with_tail}
        y, tail = causal_conv1d(x, weight, bias, activation="silu", mesh_axes=axes, **option)
        return (y,) if tail is None else (y, tail)

    def loss(function: Any, *x: Any) -> Any:
        results = jax.tree.map(lambda y: y.astype(jnp.float32), jax.tree.leaves(function(*x[:4])))
        return sum((jnp.sum(y**2) for y in results[1:]), jnp.sum(jnp.sin(results[0]) * x[4])), results

    def gradients(function: Any) -> Any:
        argnums = (0, 1, 2) if packed else (0, 1, 2, 3)
        return jax.jit(
            jax.value_and_grad(functools.partial(loss, function), argnums, has_aux=True), compiler_options=FAST
        )

    weight = normal(4, B, T, D, dtype="float32")
    expected = gradients(functools.partial(convolve, None))(*arrays, weight)
    cut = CUT[mode]
    mesh = mesh_of(mode)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, cut.spec(d)))
            for x, d in zip([*arrays, weight], (*dims, "bth"), strict=True)
        ]
        function = spread(mode, cut, convolve, dims, out_dims)
        compiled = gradients(function).lower(*placed).compile()
        actual = compiled(*placed)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 4e-3 * np.linalg.norm(b)  # what two roundings differ by
    if mode != "partly manual":
        assert_nothing_gathered(compiled, besides=B * 6 * D)  # tails


@every_value
@pytest.mark.parametrize("lead", [(), (3,)], ids=["", "vmap"])
@pytest.mark.parametrize("cut", ["dp x cp", "tp", "tp x cp"])
def test_parts_where_the_compiler_cuts(
    cut: str, lead: tuple[int, ...], at_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an Auto mesh the parts are results and operands of the kernels, unless it cuts channels, and nothing is left
    of the other way in the program."""
    parts, dims = (16, 16, 32), ("bth", "jh", "bt")
    arrays = [normal(0, *lead, B, T, D), normal(1, 4, D, dtype="float32"), jnp.asarray(IDS)]
    of_devices: dict[str, tuple[int, ...]] = {}

    def spy(name: str, parts_of: Any) -> None:
        function = getattr(convolution_of_a_device, name)

        def noting(choice: Any, rows: Any, *arguments: Any, **options: Any) -> Any:
            if rows.x.shape != (B * math.prod(lead), T, D):  # what a device computes, not the whole
                of_devices[name] = parts_of(*arguments, **options)
            return function(choice, rows, *arguments, **options)

        monkeypatch.setattr(convolution_of_a_device, name, noting)

    spy("forward", lambda parts, silu: tuple(parts))
    spy("backward", lambda dys, silu: tuple(dy.shape[2] for dy in dys))

    def both(x: Any, weight: Any, ids: Any) -> Any:
        def convolve(x: Any, weight: Any) -> Any:
            return causal_convolution(x, weight, segment_ids=ids, parts=parts)

        y, transpose = jax.vjp(convolve, x, weight)
        return y, transpose(y)

    if lead:
        both = jax.vmap(both, (0, None, None))
    expected = jax.jit(both, compiler_options=FAST)(*arrays)
    mesh = mesh_of("auto")
    with jax.set_mesh(mesh):
        specs = [CUTS[cut].spec(shape) for shape in dims]
        specs[0] = P(*(None for _ in lead), *specs[0])
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
        compiled = jax.jit(both).lower(*placed).compile()
        actual = compiled(*placed)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 4e-3 * np.linalg.norm(b)
    assert of_devices == dict.fromkeys(("forward", "backward"), (D // 2,) if "tp" in cut else parts)
    # Nothing is chosen any more between the parts and those of the whole.
    assert "jit(_forward)/jit(_where)/select_n" not in (compiled.as_text() or "")
    if "tp" not in cut:
        assert_nothing_gathered(compiled)


def test_vmap_and_refusals(at_hand: None) -> None:
    x, weight, bias, ids = normal(0, 3, B, T, D), normal(1, 3, 4, D), normal(2, D), jnp.asarray(IDS)

    def loss(x: Any, weight: Any, bias: Any = None, ids: Any = None) -> Any:
        y, _ = causal_conv1d(x, weight, bias, segment_ids=ids, activation="silu")
        return jnp.sum(y.astype(jnp.float32) ** 2)

    gradient = jax.grad(loss, (0, 1))
    of_one = jax.jit(gradient)
    for axes, given in (
        ((0, None), (x, weight[0])),
        ((0, 0), (x, weight)),
        ((None, 0), (x[0], weight)),
        ((0, 0, None), (x, weight, bias)),
        ((0, None, None, None), (x, weight[0], bias, ids)),
    ):
        found = jax.jit(jax.vmap(gradient, axes))(*given)
        for n in range(3):
            member = [a if axis is None else a[n] for a, axis in zip(given, axes, strict=True)]
            for a, b in zip(found, of_one(*member), strict=True):
                np.testing.assert_allclose(
                    np.asarray(a[n], np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=2e-2
                )
    assert jax.vmap(gradient, (0, None))(x[:0], weight[0])[0].shape == (0, B, T, D)
    with pytest.raises(NotImplementedError, match=REFUSED):
        jax.jvp(lambda x: loss(x, weight[0]), (x[0],), (x[1],))
    with pytest.raises(NotImplementedError, match=REFUSED):
        jax.grad(lambda x: jnp.sum(jax.grad(loss)(x, weight[0]).astype(jnp.float32)))(x[0])
    y, tangent = jax.jvp(lambda x: causal_conv1d(x, weight[0], implementation="xla")[0], (x[0],), (x[1],))
    assert y.shape == tangent.shape


@pytest.mark.parametrize("members", [False, True], ids=["", "vmap"])
@pytest.mark.parametrize("cut", ["channels", rarely("batch")])
def test_operands_that_are_not_cut_alike(cut: str, members: bool, at_hand: None) -> None:
    """In an Explicit mesh, where gradients are cut as their operands are; and members beside a batch that is cut."""
    arrays: list[Any] = [normal(0, B, T, D), normal(1, 4, D, dtype="float32"), normal(2, D, dtype="float32")]
    arrays.append(normal(3, B, 3, D))
    mesh = mesh_of("explicit")
    spec = P("x", None, "y") if cut == "channels" else P("x")

    def loss(x: jax.Array, weight: jax.Array, bias: jax.Array, tail: jax.Array, scale: jax.Array) -> jax.Array:
        y, _ = causal_conv1d(x * scale, weight, bias, initial_tail=tail)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    def gradients(*x: jax.Array) -> Any:
        def of_scale(scale: jax.Array) -> Any:
            return jax.grad(loss, argnums=(0, 1, 2, 3))(*x, scale)

        scales = jnp.array([0.5, 1], jnp.bfloat16)
        return jax.vmap(of_scale)(scales) if members else of_scale(scales[0])

    wanted = jax.jit(gradients)(*arrays)
    with jax.set_mesh(mesh):
        found = jax.jit(gradients)(jax.device_put(arrays[0], NamedSharding(mesh, spec)), *arrays[1:])
    for a, b in zip(found, wanted, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b)


def test_refusals_where_the_compiler_cuts(at_hand: None) -> None:
    """In the convolution's own name, in a scan too."""
    x, weight = normal(0, 1, 2 * jax.device_count(), D), normal(1, 4, D)
    mesh = jax.make_mesh((jax.device_count(),), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))

    def layers(x: jax.Array) -> jax.Array:
        found = jax.lax.scan(lambda x, _: (causal_conv1d(x, weight)[0], None), x, None, length=2)[0]
        return jnp.sum(found.astype(jnp.float32) ** 2)

    def twice(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(jax.grad(layers)(x).astype(jnp.float32)))(x)

    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P(None, "seq")))
        for function in (twice, lambda x: jax.jvp(layers, (x,), (x,))):
            with pytest.raises(NotImplementedError, match=REFUSED):
                jax.jit(function)(placed)


def test_cu_seqlens_and_nothing(at_hand: None) -> None:
    x, weight = normal(0, 1, T, D), normal(1, 4, D)
    y, _ = causal_conv1d(x, weight, cu_seqlens=jnp.array([0, 3, 3, 30], jnp.int32))
    expected, _ = causal_conv1d(x, weight, cu_seqlens=jnp.array([0, 3, 3, 30], jnp.int32), implementation="xla")
    assert np.array_equal(y, expected)
    assert not np.asarray(y[:, 30:], np.float32).any()
    for empty in (x[:, :0], x[:0], x[..., :0]):
        found = jax.grad(lambda x: jnp.sum(causal_conv1d(x, weight[:, : x.shape[2]])[0].astype(jnp.float32)))(empty)
        assert found.shape == empty.shape


def test_a_scan_keeps_x_alone(at_hand: None) -> None:
    def layers(x: jax.Array, weights: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weight: jax.Array) -> Any:
            return jax_qla.causal_conv1d(x, weight, activation="silu")[0], None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32))

    _, residuals = jax.eval_shape(lambda *x: jax.vjp(layers, *x), normal(0, B, T, D), normal(1, 3, 4, D))
    assert sum(x.size >= B * T * D for x in jax.tree.leaves(residuals)) == 1


def test_symbolic_sizes(at_hand: None) -> None:
    """No kernel is launched for these; by plain JAX B and T may be left open."""
    sizes = jax.export.symbolic_shape("b, t")
    x, weight = jax.ShapeDtypeStruct((*sizes, D), jnp.bfloat16), normal(1, 4, D)
    exported = jax.export.export(jax.jit(lambda x: causal_conv1d(x, weight, activation="silu")[0]))(x)
    found = exported.call(normal(0, B, T, D))
    wanted, _ = jax.jit(lambda x: causal_conv1d(x, weight, activation="silu", implementation="xla"))(normal(0, B, T, D))
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(wanted, np.float32), rtol=2e-2, atol=2e-2)
    one_row = jax.ShapeDtypeStruct((1, *x.shape[1:]), jnp.float32)
    packed = jax.jit(lambda x: causal_conv1d(x, weight, cu_seqlens=jnp.array([2, 5, 5, 8]))[0])
    row = normal(0, 1, T, D).astype(jnp.float32)
    found = jax.export.export(packed)(one_row).call(row)
    np.testing.assert_allclose(found, packed(row), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match=r"'cuda' take no symbols for sizes, got x of shape \(b, t, 64\)"):
        jax.eval_shape(lambda x: causal_conv1d(x, weight, implementation="cuda"), x)
    with pytest.raises(NotImplementedError, match="output_final_tail needs a static T"):
        jax.eval_shape(lambda x: causal_conv1d(x, weight, output_final_tail=True), x)


def test_nothing_traced_is_left_behind(at_hand: None) -> None:
    with jax.checking_leaks():
        jax.jit(jax.grad(lambda *x: jnp.sum(causal_conv1d(*x)[0].astype(jnp.float32))))(
            normal(0, 1, 5, D), normal(1, 4, D)
        )


def test_layer_checks_too() -> None:
    with pytest.raises(ValueError, match="weight must have shape"):
        causal_convolution(normal(0, B, T, D), normal(1, 4, D + 8), parts=(D,))
