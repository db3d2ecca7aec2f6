"""jax_qla/launch.py: plans evaluated for shapes, and the custom calls they become; without a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from stub_driver import StubDriver, stub_driver, write_cubin

from jax_qla import _ffi, launch, overlap, store
from jax_qla.launch import EXPORT_SAFETY_CHECKS, Step, evaluate

PLAN: dict[str, Any] = {
    "name": "scale_kernel",
    "grid": [["floordiv", ["+", "tokens", 63], 64], "heads", 1],
    "block": [128, 2, 1],
    "cluster": [1, 2, 1],
    "shared": ["*", ["max", "heads", 4], 1024],
    "pdl": True,
    "operands": [
        {"name": "x", "dtype": "bfloat16", "shape": ["tokens", "heads", 64]},
        {"name": "y", "dtype": "float32", "shape": ["heads", "tokens"]},
    ],
    "scalars": [{"name": "ratio", "dtype": "int32"}, {"name": "scale", "dtype": "float32"}],
    "arguments": [
        {
            "kind": "tensor_map",
            "operand": "x",
            "dtype": 9,
            "dims": [64, "heads", "tokens"],
            "strides": [128, ["*", "heads", 128]],
            "box": [64, 1, 32],
            "element_strides": [1, 1, 1],
            "interleave": 0,
            "swizzle": 3,
            "l2": 2,
            "oob": 0,
        },
        {"kind": "pointer", "operand": "y"},
        {"kind": "scalar", "dtype": "float32", "value": "scale"},
        {"kind": "scalar", "dtype": "int32", "value": ["-", "ratio", "heads"]},
        {"kind": "scalar", "dtype": "int64", "value": ["*", "ratio", -(2**40)]},
    ],
}
"""y = f(x), with everything that a plan can hold."""

SHA256 = "0123456789abcdef" * 4
SCALARS: dict[str, int | float] = {"ratio": 2, "scale": -1.5}
PLAN_NUMBERS = [
    # grid, block, cluster, dynamic shared memory, programmatic launch, arguments
    *[*(3, 6, 1), *(128, 2, 1), *(1, 2, 1), 6144, 0, 5],
    # tensor map of buffer 0: dims, strides, box, element strides, modes
    *[2, 0, 9, 3, *(64, 6, 130), *(128, 768), *(64, 1, 32), *(1, 1, 1), *(0, 3, 2, 0)],
    # pointer to buffer 1; -1.5 in float32; 2 - 6 in int32; -2^41 in int64
    *[0, 1],
    *[1, 4, 0xBFC00000],
    *[1, 4, 2**32 - 4],
    *[1, 8, -(2**41)],
]
"""PLAN for tokens = 130 and heads = 6, by hand."""


def use(monkeypatch: pytest.MonkeyPatch, plans: Mapping[str, Any], sha256: str = SHA256) -> None:
    """Makes these plans, by kernel name, all there is in the store."""

    def lookup(name: str, config: Any) -> store.Kernel:
        return store.Kernel(sha256, plans[name], "packaged")

    monkeypatch.setattr(store, "lookup", lookup)


@pytest.fixture
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {"scale": PLAN})


def step(**fields: Any) -> Step:
    return Step(**({"kernel": "scale", "config": None, "scalars": SCALARS} | fields))


def run(x: jax.Array, steps: Sequence[Step] = (step(),), name: str = "x", **more: jax.Array) -> jax.Array:
    result = jax.ShapeDtypeStruct((x.shape[1], x.shape[0]), jnp.float32)
    return launch.launch(steps, {name: x, **more}, {"y": result})["y"]


def tokens(count: int = 130, heads: int = 6) -> jax.Array:
    return jnp.zeros((count, heads, 64), jnp.bfloat16)


def call(function: Any, *operands: Any) -> dict[str, Any]:
    """Parameters of the one FFI call in a function's jaxpr, with its attributes."""
    (equation,) = (e for e in jax.make_jaxpr(function)(*operands).eqns if e.primitive.name == "ffi_call")
    attributes = {name: getattr(value, "val", value) for name, value in equation.params["attributes"]}
    return {**equation.params, **attributes, "operands": [tuple(x.aval.shape) for x in equation.invars]}


# Expressions


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (7, 7),
        ("n", -7),
        (["+", "n", 3], -4),
        (["-", "n", 3], -10),
        (["*", "n", ["-", 1, "m"]], 7),
        (["floordiv", "n", "m"], -4),
        (["floormod", "n", "m"], 1),
        (["truncdiv", "n", "m"], -3),
        (["truncmod", "n", "m"], -1),
        (["truncdiv", 7, -2], -3),
        (["truncmod", 7, -2], 1),
        (["truncdiv", -8, -2], 4),
        (["truncdiv", 2**62 + 1, 1], 2**62 + 1),
        (["min", "n", "m"], -7),
        (["max", "n", "m"], 2),
        (["<<", 3, "m"], 12),
        ([">>", 13, "m"], 3),
    ],
)
def test_expressions(expression: Any, value: int) -> None:
    assert evaluate(expression, {"n": -7, "m": 2}) == value


# What a call is made of


@pytest.mark.usefixtures("one_kernel")
def test_numbers_of_a_plan() -> None:
    made = call(run, tokens())
    assert made["target_name"] == "jax_qla.launch.v1"
    assert made["cubins"] == SHA256
    assert made["functions"] == "scale_kernel"
    assert made["plan"].dtype == np.int64
    assert made["plan"].tolist() == [1, 1, *PLAN_NUMBERS]


@pytest.mark.usefixtures("one_kernel")
@pytest.mark.parametrize(("count", "heads", "grid", "shared"), [(1, 1, (1, 1), 4096), (64, 8, (1, 8), 8192)])
def test_other_shapes(count: int, heads: int, grid: tuple[int, int], shared: int) -> None:
    numbers = call(run, tokens(count, heads))["plan"].tolist()[2:]
    assert (numbers[0], numbers[1], numbers[9]) == (*grid, shared)
    assert numbers[16:19] == [64, heads, count]
    assert numbers[19:21] == [128, 128 * heads]


@pytest.mark.usefixtures("one_kernel")
@pytest.mark.parametrize(("least", "shared"), [(0, 6144), (4096, 6144), (118784, 118784)])
def test_a_block_may_ask_for_more_shared_memory_than_it_needs(least: int, shared: int) -> None:
    numbers = call(lambda x: run(x, (step(shared_at_least=least),)), tokens())["plan"].tolist()[2:]
    assert numbers == [*PLAN_NUMBERS[:9], shared, *PLAN_NUMBERS[10:]]


@pytest.mark.parametrize(("blocks", "neighbours", "cluster"), [(4, 2, 2), (3, 2, 1), (6, 3, 3), (4, 1, 1)])
def test_blocks_may_be_neighbours_where_the_grid_is_a_multiple(
    monkeypatch: pytest.MonkeyPatch, blocks: int, neighbours: int, cluster: int
) -> None:
    use(monkeypatch, {"scale": PLAN | {"cluster": [1, 1, 1]}})
    numbers = call(lambda x: run(x, (step(neighbours=neighbours),)), tokens(blocks * 64))["plan"].tolist()[2:]
    assert (numbers[0], numbers[6:9]) == (blocks, [cluster, 1, 1])


@pytest.mark.usefixtures("one_kernel")
def test_a_cluster_that_a_kernel_needs_stays() -> None:
    numbers = call(lambda x: run(x, (step(neighbours=2),)), tokens(256))["plan"].tolist()[2:]
    assert (numbers[0], numbers[6:9]) == (4, [1, 2, 1])


@pytest.mark.parametrize(
    ("dtype", "value", "bits"),
    [("int32", -1, 2**32 - 1), ("int32", 2**31 - 1, 2**31 - 1), ("int64", -1, -1), ("int64", -(2**63), -(2**63))],
)
def test_bits_of_integers(monkeypatch: pytest.MonkeyPatch, dtype: str, value: int, bits: int) -> None:
    scalars = [{"name": "n", "dtype": dtype}]
    arguments = [{"kind": "scalar", "dtype": dtype, "value": "n"}]
    use(monkeypatch, {"scale": PLAN | {"scalars": scalars, "arguments": arguments}})
    numbers = call(lambda x: run(x, [step(scalars={"n": value})]), tokens())["plan"].tolist()
    assert numbers[-3:] == [1, 4 if dtype == "int32" else 8, bits]


@pytest.mark.parametrize(("value", "bits"), [(0.0, 0), (1.0, 0x3F800000), (0.1, 0x3DCCCCCD), (-np.inf, 0xFF800000)])
@pytest.mark.usefixtures("one_kernel")
def test_bits_of_floats(value: float, bits: int) -> None:
    numbers = call(lambda x: run(x, [step(scalars={"ratio": 1, "scale": value})]), tokens())["plan"].tolist()
    assert numbers[35:38] == [1, 4, bits]


def test_integers_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {"scale": PLAN | {"arguments": [{"kind": "scalar", "dtype": "int32", "value": "ratio"}]}})
    with pytest.raises(OverflowError):
        jax.eval_shape(lambda x: run(x, [step(scalars={"ratio": 2**31, "scale": 1.0})]), tokens())


@pytest.mark.parametrize("waits", [True, False])
def test_renamed_operands_and_several_kernels(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second kernel reads what the first wrote, under another name; an input that none uses is left out.

    Both are made to start early. The first never does, for what precedes it is not ours; the second where it waits for
    what it reads.
    """
    monkeypatch.setattr(overlap, "uses_early", lambda step, operand: not waits)
    second = PLAN | {
        "name": "second_kernel",
        "operands": [
            {"name": "source", "dtype": "float32", "shape": ["n", "m"]},
            {"name": "target", "dtype": "float32", "shape": ["n", "m"]},
        ],
        "scalars": [],
        "arguments": [{"kind": "pointer", "operand": "target"}, {"kind": "pointer", "operand": "source"}],
        "grid": ["n", 1, 1],
        "block": [32, 1, 1],
        "cluster": [1, 1, 1],
        "shared": 0,
        "pdl": True,
    }
    use(monkeypatch, {"scale": PLAN, "second": second})
    steps = [step(rename={"x": "k"}), step(kernel="second", scalars={}, rename={"source": "y", "target": "z"})]
    shape = jax.ShapeDtypeStruct((6, 130), jnp.float32)

    def function(k: jax.Array) -> dict[str, jax.Array]:
        return launch.launch(steps, {"unused": k[0], "k": k}, {"z": shape, "y": shape})

    made = call(function, tokens())
    assert made["operands"] == [(130, 6, 64)]
    assert made["cubins"] == f"{SHA256},{SHA256}"
    assert made["functions"] == "scale_kernel,second_kernel"
    # The buffers are k, z and y in this order.
    numbers = list(PLAN_NUMBERS)
    numbers[PLAN_NUMBERS.index(0xBFC00000) - 3] = 2
    of_second = [*(6, 1, 1), *(32, 1, 1), *(1, 1, 1), 0, int(waits), 2, *(0, 1), *(0, 2)]
    assert made["plan"].tolist() == [1, 2, *numbers, *of_second]
    assert set(jax.eval_shape(function, tokens())) == {"y", "z"}


IN_PLACE = PLAN | {
    "operands": [{"name": name, "dtype": "float32", "shape": ["n"]} for name in ("x", "y", "z")],
    "scalars": [],
    "arguments": [{"kind": "pointer", "operand": name} for name in ("x", "y", "z")],
    "grid": [1, 1, 1],
    "block": [32, 1, 1],
    "cluster": [1, 1, 1],
    "shared": 0,
    "pdl": False,
}


def in_place(x: jax.Array) -> dict[str, jax.Array]:
    """A kernel of x with the results z and y, where y takes the memory of x."""
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return launch.launch([step(scalars={})], {"unused": x, "x": x}, {"z": result, "y": result}, {"x": "y"})


def test_aliases(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted among the operands that are passed, and the plan is what it would be without."""
    use(monkeypatch, {"scale": IN_PLACE})
    made = call(in_place, jnp.zeros(4))
    assert dict(made["input_output_aliases"]) == {0: 1}
    assert made["plan"].tolist() == [1, 1, *(1, 1, 1), *(32, 1, 1), *(1, 1, 1), 0, 0, 3, *(0, 0), *(0, 2), *(0, 1)]


def test_workspace_within_another_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the number of that buffer, and is no result itself; those behind it move up."""
    use(monkeypatch, {"scale": IN_PLACE})

    def function(x: jax.Array) -> dict[str, jax.Array]:
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return launch.launch([step(scalars={})], {"x": x}, {"y": result, "z": result}, within={"y": "z"})

    made = call(function, jnp.zeros(4))
    assert made["plan"].tolist()[-6:] == [*(0, 0), *(0, 1), *(0, 1)]
    assert set(jax.eval_shape(function, jnp.zeros(4))) == {"z"}


# What does not fit is a bug of jax_qla, and says where.


@pytest.mark.usefixtures("one_kernel")
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            tokens().astype(jnp.float16),
            r"operand x of the kernel scale must be bfloat16\['tokens', 'heads', 64\] .* got fl",
        ),
        (tokens()[:, 0], r"operand x of the kernel scale .* got bfloat16\[130, 64\]"),
        (tokens()[..., :32], r"operand x of the kernel scale .* got bfloat16\[130, 6, 32\]"),
    ],
)
def test_operands_that_do_not_fit(x: jax.Array, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        launch.launch([step()], {"x": x}, {"y": jax.ShapeDtypeStruct((6, 130), jnp.float32)})


@pytest.mark.usefixtures("one_kernel")
def test_operands_that_do_not_fit_each_other() -> None:
    with pytest.raises(RuntimeError, match=r"operand y of the kernel scale .*'tokens': 130.* got float32\[6, 131\]"):
        launch.launch([step()], {"x": tokens()}, {"y": jax.ShapeDtypeStruct((6, 131), jnp.float32)})


@pytest.mark.usefixtures("one_kernel")
def test_missing_scalars() -> None:
    with pytest.raises(RuntimeError, match=r"the kernel scale needs values for \['scale'\]"):
        run(tokens(), [step(scalars={"ratio": 2})])


def test_missing_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {"scale": PLAN})
    with pytest.raises(RuntimeError, match="the kernel scale needs the operand x, which the call lacks"):
        run(tokens(), name="k")


def test_scalars_of_other_types(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {"scale": PLAN | {"arguments": [{"kind": "scalar", "dtype": "float64", "value": "scale"}]}})
    with pytest.raises(RuntimeError, match="float64, expected float32, int32 or int64"):
        run(tokens())


# What XLA gets


@pytest.mark.usefixtures("one_kernel")
def test_lowering_for_cuda_from_a_host_without() -> None:
    lowered = jax.jit(lambda x: run(x)).trace(tokens()).lower(lowering_platforms=("cuda",))
    (text,) = (line for line in lowered.as_text().splitlines() if "custom_call" in line)
    assert "@jax_qla.launch.v1(" in text
    assert f'cubins = "{SHA256}"' in text
    assert 'functions = "scale_kernel"' in text
    numbers = re.search(r"plan = dense<\[([^]]*)\]> : tensor<\d+xi64>", text)
    assert numbers is not None
    assert [int(number) for number in numbers[1].split(",")] == [1, 1, *PLAN_NUMBERS]


@pytest.mark.usefixtures("one_kernel")
def test_export() -> None:
    function = jax.jit(lambda x: run(x))
    with pytest.raises(ValueError, match=r"jax_qla\.launch\.v1"):
        jax.export.export(function, platforms=("cuda",))(tokens())
    exported = jax.export.export(function, platforms=("cuda",), disabled_checks=EXPORT_SAFETY_CHECKS)(tokens())
    assert exported.platforms == ("cuda",)
    assert SHA256 in exported.mlir_module()


@pytest.mark.usefixtures("one_kernel")
def test_results_vary_inside_shard_map() -> None:
    """Over all axes that any operand varies over, however these are spread."""
    mesh = jax.sharding.AbstractMesh((2, 2), ("batch", "head"), axis_types=(AxisType.Auto,) * 2)
    second = {"name": "z", "dtype": "float32", "shape": [4]}
    plan = PLAN | {"operands": [*PLAN["operands"], second]}

    def function(x: jax.Array, z: jax.Array) -> jax.Array:
        assert jax.typeof(x).mat.varying != jax.typeof(z).mat.varying
        y = run(x, z=z)
        assert jax.typeof(y).mat.varying == {"batch", "head"}
        # A scan's carry must not change its type.
        return jax.lax.scan(lambda y, _: (run(x, z=z) + y, None), y, length=2)[0]

    with pytest.MonkeyPatch.context() as patch:
        use(patch, {"scale": plan})
        spec: Any = PartitionSpec
        sharded = jax.shard_map(
            function, mesh=mesh, in_specs=(spec("batch"), spec("head")), out_specs=spec("head", "batch"), check_vma=True
        )
        result = jax.eval_shape(sharded, tokens(260), jnp.zeros(8))
    assert result.shape == (12, 260)


# With the extension, against the recording driver


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StubDriver]:
    driver = stub_driver()
    monkeypatch.setenv("JAX_QLA_LIBCUDA", str(driver.library))
    launch.register()
    former = _ffi.set_cubin_directories([str(tmp_path)])
    driver.reset()
    yield driver
    _ffi.set_cubin_directories(former)


def test_launch_through_the_extension(driver: StubDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PLAN | {"cluster": [1, 2, 1], "block": [128, 1, 1]}
    use(monkeypatch, {"scale": plan}, write_cubin(tmp_path, {"scale_kernel": [128, 8, 4, 4, 8]}))
    x = tokens()
    y = jax.jit(lambda x: run(x))(x)
    (launched,) = driver.launches()
    expected: dict[str, Any] = {"kernel": "scale_kernel", "grid": [3, 6, 1], "block": [128, 1, 1], "cluster": [1, 2, 1]}
    expected |= {"shared_bytes": 6144, "dependent_launch": False}
    assert {name: launched[name] for name in expected} == expected
    tensor_map, *others = launched["arguments"]
    assert others == [y.unsafe_buffer_pointer(), 0xBFC00000, 2**32 - 4, 2**64 - 2**41]
    geometry = SimpleNamespace(**tensor_map)
    assert geometry.address == x.unsafe_buffer_pointer()
    assert (geometry.dims, geometry.strides, geometry.box) == ([64, 6, 130], [128, 768], [64, 1, 32])


def test_cache_chosen_after_the_first_call(driver: StubDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is looked in from the next call on, and those of before still are."""
    # The longest one cannot be opened; an error message advises to set another.
    monkeypatch.setattr(launch, "_folders", ["x" * 300, str(tmp_path)])
    for name in ("one", "another"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setenv("JAX_QLA_CACHE", str(folder))
        use(monkeypatch, {"scale": IN_PLACE}, write_cubin(folder, {"scale_kernel": [8, 8, 8]}))
        jax.block_until_ready(jax.jit(lambda x: in_place(x))(jnp.arange(4.0)))
    assert len(driver.launches()) == 2
    another, one = (str(tmp_path / name) for name in ("another", "one"))
    assert launch._folders == [str(store.PACKAGED_DIRECTORY), another, one, "x" * 300, str(tmp_path)]


def test_cache_whose_name_is_not_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sentence advises helps at once."""
    before = os.environ.get("JAX_QLA_CACHE", "")
    monkeypatch.setenv("JAX_QLA_CACHE", os.fsdecode(b"/tmp/caf\xe9"))
    assert "has a name that is not UTF-8; set JAX_QLA_CACHE to another one" in str(launch.unavailable())
    monkeypatch.setenv("JAX_QLA_CACHE", before)
    assert launch.unavailable() is None


def test_cache_that_has_no_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_QLA_CACHE", "relative")
    tmp_path.rmdir()
    assert "the kernel cache has no place" in str(launch.unavailable())
    tmp_path.mkdir()


def test_aliases_through_the_extension(driver: StubDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A donated operand is updated where it lies; one that is needed afterwards is copied."""
    use(monkeypatch, {"scale": IN_PLACE}, write_cubin(tmp_path, {"scale_kernel": [8, 8, 8]}))
    x = jnp.arange(4.0)
    address = x.unsafe_buffer_pointer()
    kept = jax.block_until_ready(jax.jit(lambda x: in_place(x))(x))
    donated = jax.block_until_ready(jax.jit(lambda x: in_place(x), donate_argnums=0)(x))
    first, second = (launched["arguments"] for launched in driver.launches())
    assert first[0] == first[1] == kept["y"].unsafe_buffer_pointer() != address
    assert second[0] == second[1] == donated["y"].unsafe_buffer_pointer() == address
    assert x.is_deleted()
