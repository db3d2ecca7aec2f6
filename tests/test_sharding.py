"""Calls spread over a mesh give what one device gives: 8 CPU devices, every kind of mesh, every way to cut operands."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from thorough import every_value, rarely

import jax_qla
from jax_qla import MeshAxes

B, T, HK, HV, K, V = 2, 176, 2, 4, 8, 4
"""22 tokens on each of 8 devices, 44 on each of 4: neither a multiple of a chunk's 64 rows."""
MAX_SEGMENTS = 4
TOLERANCE = 1e-5
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compilation takes most of the time here."""

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


class Cut(NamedTuple):
    """Mesh axes, of "x" (2 devices) and "y" (4), that cut the operands."""

    batch: str | None = None
    heads: str | None = None
    sequence: str | tuple[str, ...] | None = None

    def spec(self, dims: str) -> P:
        of = {"b": self.batch, "t": self.sequence, "h": self.heads}
        return P(*(of.get(letter) for letter in dims))


CUTS = {
    "dp": Cut(batch="x"),
    "tp": Cut(heads="x"),
    "cp": Cut(sequence=("x", "y")),
    "dp x cp": Cut(batch="x", sequence="y"),
    "tp x cp": Cut(heads="x", sequence="y"),
    "cp, y first": Cut(sequence=("y", "x")),  # not in the order of the mesh
}
MODES = ("auto", "named", "explicit", "manual", "manual, unchecked", "partly manual", "partly manual, named")
CASES = [
    (mode, cut)
    for mode in MODES
    for cut in CUTS
    # A few will do for the modes that differ from others in one thing only.
    if mode in ("auto", "explicit")
    or (mode == "manual" and "cp" in cut)
    or (mode == "partly manual" and "cp" in cut and "first" not in cut)
    or cut == "tp x cp"
    or (mode, cut) in (("named", "dp x cp"), ("named", "cp, y first"))
]

ROWS = ("bth", "bth", "bth", "bth", "bth")
"""q, k, v, g, beta, as far as they are cut."""


def mesh_of(mode: str) -> Mesh:
    kind = AxisType.Explicit if mode in ("explicit", "partly manual") else AxisType.Auto
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))


def spread(
    mode: str, cut: Cut, function: Callable[..., Any], dims: tuple[str, ...], out_dims: tuple[str, ...]
) -> Callable[..., Any]:
    """function(mesh_axes, *arrays) as a function of whole arrays, called as `mode` demands."""
    if mode in ("auto", "explicit"):
        return lambda *arrays: function(None, *arrays)
    if mode == "named":
        return lambda *arrays: function(MeshAxes(*cut), *arrays)
    axes, manual = MeshAxes(sequence=cut.sequence), {"x", "y"}
    if mode.startswith("partly manual"):
        # The axis of the sequence is manual where something else is cut too, and else the other axis.
        manual = {"x"} if cut == CUTS["cp"] else {"y"}
        if cut == CUTS["cp"]:
            axes = MeshAxes()
            cut = Cut(sequence="y")
        if mode == "partly manual, named":
            axes = MeshAxes(batch=cut.batch, heads=cut.heads, sequence=cut.sequence)

    def kept(shape: str) -> P:
        entries = [(entry,) if isinstance(entry, str) else entry or () for entry in cut.spec(shape)]
        return P(*(tuple(axis for axis in entry if axis in manual) or None for entry in entries))

    return jax.shard_map(
        lambda *arrays: function(axes, *arrays),
        in_specs=tuple(map(kept, dims)),
        out_specs=tuple(map(kept, out_dims)),
        axis_names=manual,
        check_vma=mode != "manual, unchecked",
    )


def put(mesh: Mesh, cut: Cut, arrays: Any, dims: tuple[str, ...]) -> list[jax.Array]:
    return [jax.device_put(x, NamedSharding(mesh, cut.spec(d))) for x, d in zip(arrays, dims, strict=True)]


def rows(seed: int, *lead: int) -> list[np.ndarray]:
    """q, k, v, g, beta of shapes [*lead, B, T, ...]."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal((*lead, B, T, *shape)).astype(np.float32)

    # Weak decay, so that the state at a shard's start matters at its end; and one head without any.
    g = -0.01 * np.exp(normal(HV))
    g[..., 0] = 0
    return [normal(HK, K), normal(HK, K), normal(HV, V), g, 1 / (1 + np.exp(-normal(HV)))]


def states(seed: int, *lead: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((*lead, HV, K, V)).astype(np.float32)


SEGMENT_IDS = np.zeros((B, T), np.int32)
SEGMENT_IDS[0, :3], SEGMENT_IDS[0, 3:150], SEGMENT_IDS[0, 152:] = 5, 4, 5
"""One sequence over six whole shards of 22 tokens, padding across a border, one to the end."""
SEGMENT_IDS[1, 44:88], SEGMENT_IDS[1, 88:89], SEGMENT_IDS[1, 110:131] = 1, 2, 3
"""One that fills one shard of 44 tokens, one of a single token, one inside a shard; shards of padding alone."""


def packed(axes: MeshAxes | None, *x: jax.Array) -> tuple[jax.Array, jax.Array]:
    *tokens, initial_state, segment_ids = x
    o, final_state = jax_qla.chunk_gated_delta_rule(
        *tokens,
        initial_state=initial_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        segment_ids=segment_ids,
        max_segments=MAX_SEGMENTS,
        mesh_axes=axes,
    )
    assert final_state is not None
    return o, final_state


def layers(axes: MeshAxes | None, *x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two checkpointed layers in a scan, each reading and writing v and the state; q and k, and segment_ids if there
    are any, are the same for all members of a `jax.vmap`."""
    options: dict[str, Any] = {"segment_ids": x[6], "max_segments": MAX_SEGMENTS} if len(x) > 6 else {}

    def one(v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        @jax.checkpoint
        def layer(carry: Any, gate: jax.Array) -> Any:
            v, state = carry
            o, final_state = jax_qla.chunk_gated_delta_rule(
                *x[:2],
                v,
                gate * g,
                beta,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                mesh_axes=axes,
                **options,
            )
            return (v + jnp.sin(o), final_state), None

        return jax.lax.scan(layer, (v, state), jnp.array([0.5, 1.0]))[0]

    return jax.vmap(one)(*x[2:6])


class Program(NamedTuple):
    function: Callable[..., Any]
    arrays: list[np.ndarray]
    dims: tuple[str, ...]
    out_dims: tuple[str, ...]


PROGRAMS = {
    "packed": Program(
        packed, [*rows(0), states(1, B, MAX_SEGMENTS), SEGMENT_IDS], (*ROWS, "bnh", "bt"), ("bth", "bnh")
    ),
    "layers": Program(
        layers, [*rows(0)[:2], *rows(2, 2)[2:], states(3, 2, B)], ("bth", "bth", *("mbth",) * 3, "mbh"), ("mbth", "mbh")
    ),
    "packed layers": Program(
        layers,
        [*rows(0)[:2], *rows(2, 2)[2:], states(3, 2, B, MAX_SEGMENTS), SEGMENT_IDS],
        ("bth", "bth", *("mbth",) * 3, "mbnh", "bt"),
        ("mbth", "mbnh"),
    ),
}


def value_and_grad(program: Program, function: Callable[..., Any]) -> Callable[..., Any]:
    """Results, and the gradients of all floating arrays from both; arguments: the arrays, then weights of results."""
    count = sum(x.dtype == np.float32 for x in program.arrays)

    def loss(*x: Any) -> Any:
        o, final_state = function(*x[:-2])
        return jnp.sum(jnp.sin(o) * x[-2]) + jnp.sum(final_state**2 * x[-1]), (o, final_state)

    return jax.value_and_grad(loss, argnums=tuple(range(count)), has_aux=True)


@functools.cache
def weights(name: str) -> list[np.ndarray]:
    program = PROGRAMS[name]
    shapes = jax.eval_shape(lambda *x: program.function(None, *x), *program.arrays)
    return [np.random.default_rng(i).standard_normal(x.shape).astype(np.float32) for i, x in enumerate(shapes)]


@functools.cache
def expected(name: str) -> Any:
    """What one device computes."""
    program = PROGRAMS[name]
    function = value_and_grad(program, lambda *x: program.function(None, *x))
    return jax.jit(function)(*program.arrays, *weights(name))


def assert_close(actual: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= TOLERANCE * np.linalg.norm(b)


COLLECTIVE = re.compile(r"= (\S+|\(.*?\)) (all-gather|all-to-all|all-reduce|collective-permute)(?:-start)?\(")


def collectives(text: str) -> list[tuple[str, str, int]]:
    """(operation, dtype, elements) of every array that a compiled program communicates."""
    found = []
    for shapes, operation in COLLECTIVE.findall(text):
        for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            found.append((operation, dtype, int(np.prod([int(size) for size in sizes.split(",") if size]))))
    return found


def programs_of(mode: str, cut: str) -> tuple[str, str]:
    # Where two axes cut them or the compiler does, packed layers stand for the packed call too.
    return "layers", "packed layers" if " x " in cut or mode == "auto" else "packed"


def few_of(mode: str, cut: str, name: str) -> Any:
    """A case, or what only `make thorough` makes of it."""
    # Layers are packed, and the carries unchecked, elsewhere: in test_transforms.py and test_causal_conv1d.py.
    return rarely(mode, cut, name) if name == "packed layers" or mode == "manual, unchecked" else (mode, cut, name)


@every_value
@pytest.mark.parametrize(
    ("mode", "cut", "name"),
    [
        ("named", "dp x cp", "packed"),
        *(few_of(mode, cut, name) for mode, cut in CASES for name in programs_of(mode, cut)),
    ],
)
def test_every_mesh_and_cut(mode: str, cut: str, name: str) -> None:
    program, mesh = PROGRAMS[name], mesh_of(mode)
    axes = Cut(sequence="y") if mode.startswith("partly manual") and cut == "cp" else CUTS[cut]
    with jax.set_mesh(mesh):
        arrays = put(mesh, axes, [*program.arrays, *weights(name)], program.dims + program.out_dims)
        function = spread(mode, CUTS[cut], program.function, program.dims, program.out_dims)
        compiled = jax.jit(value_and_grad(program, function), compiler_options=FAST).lower(*arrays).compile()
        actual = compiled(*arrays)
    assert_close(actual, expected(name))
    assert actual[0][1][0].sharding.is_equivalent_to(arrays[-2].sharding, arrays[-2].ndim)
    if mode != "partly manual":  # There jax 0.10.2 gathers the operands of any jax.shard_map, for a mere sine too.
        assert_nothing_gathered(compiled)


def assert_nothing_gathered(compiled: Any, besides: int = 0) -> None:
    """Segment ids may be gathered (integers) and arrays up to the size `besides`; q, k, v, o and so on may not."""
    for operation, dtype, elements in collectives(compiled.as_text()):
        if operation in ("all-gather", "all-to-all") and dtype not in ("s32", "pred"):
            assert elements <= besides, (operation, dtype, elements)


def test_partly_annotated_operands() -> None:
    """Auto: one sharded operand is enough. Explicit: likewise, the others are cut without communication."""
    program = PROGRAMS["packed"]
    for mode in ("auto", "explicit"):
        mesh = mesh_of(mode)
        with jax.set_mesh(mesh):
            arrays: list[Any] = put(mesh, Cut(), program.arrays, program.dims)
            arrays[2] = jax.device_put(arrays[2], NamedSharding(mesh, P("x", "y")))
            compiled = jax.jit(lambda *x: packed(None, *x)).lower(*arrays).compile()
            o, final_state = compiled(*arrays)
        assert o.sharding.spec[:2] == ("x", "y")
        assert_close((o, final_state), expected("packed")[0][1])
        assert_nothing_gathered(compiled)
