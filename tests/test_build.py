"""From TileLang program to cubin and plan, with the real compilers; without a GPU."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import re
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from thorough import every_value, rarely

from jax_qla import launch, policy, store
from jax_qla.cuda import rule
from jax_qla.kernels import build, compose, lowering, prepare, toolchain
from jax_qla.kernels.packaged import PACKAGED

LACKING = store.why_not_buildable()
pytestmark = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))

FLOAT16, FLOAT32, BFLOAT16 = 6, 7, 9
"""CUtensorMapDataType."""


@functools.cache
def compiled(name: str) -> lowering.Compiled:
    return lowering.compile_program(getattr(programs, name), programs.PASS_CONFIGS)


def numbers(
    name: str,
    inputs: Mapping[str, jax.ShapeDtypeStruct],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    scalars: Mapping[str, int | float],
    launches: int = 1,
) -> list[int]:
    """The numbers of a program's launches, behind version and number of kernels."""
    made = compiled(name)
    kernel = store.Kernel(hashlib.sha256(made.cubin).hexdigest(), made.plan, "built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "lookup", lambda name, config: kernel)
        steps = [launch.Step(name, None, scalars)] * launches
        jaxpr = jax.make_jaxpr(lambda **given: launch.launch(steps, given, outputs))
        (equation,) = jaxpr(**inputs).eqns
    return dict(equation.params["attributes"])["plan"].val.tolist()[2:]


def shape(dtype: Any, *sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize("rows", [1, 64, 1000])
def test_gemm(rows: int) -> None:
    inputs = {"a": shape(jnp.bfloat16, rows, 128), "b": shape(jnp.bfloat16, 128, 128)}
    found = numbers("gemm", inputs, {"c": shape(jnp.float32, rows, 128)}, {})
    blocks = -(-rows // programs.TILE)
    assert found[:12] == [*(blocks, 2, 1), *(128, 1, 1), *(1, 1, 1), 2 * 64 * 128 * 2, 0, 4]
    # Boxes of 128 bytes, which is as wide as the 128-byte swizzle takes them; the buffers are a, b and c.
    modes = [*(64, 64), *(1, 1), *(0, 3, 2, 0)]
    maps = [[2, buffer, BFLOAT16, 2, *(128, extent), 256, *modes] for buffer, extent in ((0, rows), (1, 128))]
    assert found[12:] == [*maps[0], *maps[1], *(0, 2), *(1, 4, rows)]


@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (130, 3)])
def test_tensor_map_of_rank_3_and_scalars(tokens: int, heads: int) -> None:
    x = shape(jnp.float16, tokens, heads, 64)
    found = numbers("heads", {"x": x}, {"y": x}, {"first": -3, "scale": 0.1})
    assert found[:12] == [*(-(-tokens // 64), heads, 1), *(128, 1, 1), *(1, 1, 1), 64 * 64 * 2, 0, 6]
    kind, buffer, dtype, rank, *geometry = found[12:31]
    assert (kind, buffer, dtype, rank) == (2, 0, FLOAT16, 3)
    # Innermost first, whichever way the others stand.
    dims, strides, box = geometry[:3], geometry[3:5], geometry[5:8]
    axes = {(size, stride, part) for size, stride, part in zip(dims[1:], strides, box[1:], strict=True)}
    assert (dims[0], box[0]) == (64, 64)
    assert axes == {(tokens, 128 * heads, 64), (heads, 128, 1)}
    assert geometry[8:11] == [1, 1, 1]
    scale = int(np.float32(0.1).view(np.uint32))
    assert found[31:33] == [0, 1]
    values = [tuple(found[at : at + 3]) for at in range(33, len(found), 3)]
    assert sorted(values) == sorted([(1, 4, 2**32 - 3), (1, 4, heads), (1, 4, scale), (1, 4, tokens)])


def test_two_tensor_maps_of_an_operand() -> None:
    """Each where the kernel loads its box."""
    maps = [x for x in compiled("boxes").plan["arguments"] if x["kind"] == "tensor_map"]
    assert [x["operand"] for x in maps] == ["x", "x"]
    source = compiled("boxes").source
    first, second = re.findall(r"tma_load(?:<[^>]*>)?\((\w+),", source)
    signature = re.search(r"boxes_kernel\(([^)]*)\);", source)
    assert signature is not None
    order = [name for name in re.findall(r"\w+_desc\w*", signature[1]) if name in (first, second)]
    boxes = {name: x["box"] for name, x in zip(order, maps, strict=True)}
    assert boxes == {first: [64, 16], second: [64, 48]}


def test_order_of_arguments() -> None:
    """The cubin's parameters stand in an order of TileLang's, which the source shows."""
    source = compiled("heads").source
    signature = re.search(r"scale_heads_kernel\(([^)]*)\);", source)
    assert signature is not None
    parameters = [parameter.split()[-1].lstrip("*") for parameter in signature[1].split(",")]
    arguments = compiled("heads").plan["arguments"]
    named = [x["value"] if x["kind"] == "scalar" else x["operand"] for x in arguments]
    assert [re.sub("_desc$", "", parameter) for parameter in parameters] == named


def test_cluster() -> None:
    x = shape(jnp.float32, 6, 128)
    assert numbers("cluster", {"x": x}, {"y": x}, {})[:11] == [*(6, 1, 1), *(128, 1, 1), *(2, 1, 1), 0, 0]


def test_programmatic_dependent_launch() -> None:
    x = shape(jnp.float32, 6, 128)
    twice = numbers("dependent", {"x": x}, {"y": x}, {}, launches=2)
    first, second = twice[: len(twice) // 2], twice[len(twice) // 2 :]
    # The first does not overlap with what precedes it: that is not of the sequence.
    assert first[:11] == [*(6, 1, 1), *(128, 1, 1), *(1, 1, 1), 0, 0]
    assert second[:11] == [*(6, 1, 1), *(128, 1, 1), *(1, 1, 1), 0, 1]
    assert "griddepcontrol.wait" in compiled("dependent").source or "cudaGridDependency" in compiled("dependent").source


def test_what_a_plan_cannot_hold() -> None:
    with pytest.raises(NotImplementedError, match=r"an expression that a launch plan cannot hold: .*if_then_else"):
        lowering.lower_program(programs.unsupported, programs.PASS_CONFIGS)


def test_buffers_of_one_name() -> None:
    """Which of them comes first is chance, and the cubin another."""
    with pytest.raises(ValueError, match="two buffers in shared memory are named second"):
        lowering.lower_program(programs.equal_names, programs.PASS_CONFIGS)


def test_blocks_that_have_nothing_to_do_leave_before_all_else() -> None:
    """What is asked for it goes by nothing that the kernel has computed."""
    source, _ = lowering.lower_program(programs.leaving, programs.PASS_CONFIGS)
    kernel = source[source.index("__launch_bounds__") :]
    assert kernel.splitlines()[1].startswith("  if (__any_sync(0xffffffffu, jax_qla_rest_is_empty(")
    assert kernel.index("return;") < kernel.index("met")
    source, _ = lowering.lower_program(programs.leaving_uncut, programs.PASS_CONFIGS)
    kernel = source[source.index("__launch_bounds__") :]
    assert kernel.splitlines()[1].startswith("  if (__any_sync(0xffffffffu, jax_qla_others_uncut(")
    with pytest.raises(RuntimeError, match=r'"found" is undefined'):
        lowering.compile_program(programs.leaving_late, programs.PASS_CONFIGS)
    for kernels in (0, 2):
        with pytest.raises(ValueError, match=f"{kernels} kernels in the CUDA source"):
            lowering._leave_first(kernels * 'extern "C" __global__ void __launch_bounds__(32) kernel() {\n}\n')


def test_cubins() -> None:
    """They are ELF files, the same whenever and wherever they are compiled."""
    made = compiled("heads")
    assert made.cubin.startswith(b"\x7fELF")
    again = lowering.compile_program(programs.heads, programs.PASS_CONFIGS)
    assert hashlib.sha256(again.cubin).digest() == hashlib.sha256(made.cubin).digest()
    assert again == made
    assert made.plan["name"].encode() in made.cubin
    assert json.loads(json.dumps(made.plan)) == made.plan


def test_resources() -> None:
    resources = compiled("gemm").resources
    assert 16 <= resources["registers"] <= 255
    assert (resources["spill_stores"], resources["spill_loads"]) == (0, 0)
    assert resources["shared"] == 2 * 64 * 128 * 2


def test_spills_are_counted() -> None:
    report = """ptxas info    : Function properties for main
    104 bytes stack frame, 92 bytes spill stores, 96 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 104 bytes cumulative stack size"""
    expected = {"registers": 168, "spill_stores": 92, "spill_loads": 96}
    assert toolchain._resources(report) == expected
    slow = "ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
    assert toolchain._resources(f"{slow}\n{report}") == expected | {"serialized": 1}


def test_products_run_beside_each_other() -> None:
    """ptxas gives up on that for a whole kernel, and says so where nobody looks."""
    kernels = store.packaged_manifest().values()
    if not kernels:
        pytest.skip("no kernels are packaged")
    assert not [entry["config"] for entry in kernels if "serialized" in entry["resources"]]


def test_what_the_compiler_refuses() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)NVRTC failed, .*:.*kernel\.cu"):
        toolchain.compile_cubin("this is no CUDA", lowering.headers())


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jax_qla.kernels.build", *arguments]
    return subprocess.run(command, text=True, capture_output=True)


@pytest.mark.parametrize("split", [False, rarely(True)], ids=["", "split"])
@pytest.mark.parametrize(
    "name", ["prepare", "forward", "states", "state_gradients", "gradients", "summaries", "adjoint_summaries"]
)
@pytest.mark.parametrize("key_dim", [64, rarely(128)])
def test_every_tile_is_swizzled(key_dim: int, name: str, split: bool) -> None:
    """By 128 bytes, as the kernels' C++ takes it. TileLang drops it, without a word, where nothing asks for it."""
    module = importlib.import_module(f"jax_qla.kernels.{name}")
    sizes = {"key_dim": key_dim, "value_dim": 128, "value_tile": 64}
    fields = store.config_fields(module.Config())
    config = module.Config(split=split, **{field: size for field, size in sizes.items() if field in fields})
    _, plan = emulator.lowered(name, config)
    maps = [argument for argument in plan["arguments"] if argument["kind"] == "tensor_map"]
    assert maps
    assert {(tensor_map["swizzle"], tensor_map["box"][0]) for tensor_map in maps} == {(3, 64)}


@pytest.mark.parametrize("key_dim", [64, 128])
def test_prepare_leaves_room_for_a_cache(key_dim: int) -> None:
    """For more shared memory ffi/kernel_cache.cc asks for all of a multiprocessor's, which costs calls 2 %."""
    _, plan = emulator.lowered("prepare", prepare.Config(key_dim))
    assert plan["shared"] <= 48 * 1024


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One real kernel into a folder, where the store finds it."""
    folder, sources = tmp_path / "cubins", tmp_path / "sources"
    config = compose.Config(64, 64)
    settings = ["--only", "key_dim=64", "--only", "value_dim=64", "--only", "reverse=False", "--only", "columns=16"]
    done = run_cli("compose", *settings, "--output", str(folder), "--keep-sources", str(sources))
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    settings_shown = "key_dim=64 value_dim=64 reverse=False columns=16"
    assert re.search(rf"\[  1/1\] compose +{settings_shown} +\d+ registers +\d+ B spilled .* s$", line)
    manifest, cubin = sorted(folder.iterdir(), key=lambda file: file.suffix, reverse=True)
    assert {stat.S_IMODE(file.stat().st_mode) for file in (manifest, cubin)} == {0o644}
    (entry,) = json.loads(manifest.read_text())["kernels"].values()
    assert cubin.name == f"{entry['sha256']}.cubin"
    assert hashlib.sha256(cubin.read_bytes()).hexdigest() == entry["sha256"]
    assert (entry["kernel"], entry["config"]) == ("compose", store.config_fields(config))
    assert entry["versions"] == build.versions()
    assert set(entry["versions"]) == {"tilelang", "cuda", "architecture"}
    assert "__global__" in next(sources.iterdir()).read_text()

    monkeypatch.setattr(store, "vouched_manifest", lambda: "")  # a wheel would know another
    monkeypatch.setattr(store, "PACKAGED_DIRECTORY", folder)
    monkeypatch.setattr(store, "_found", {})
    kernel = store.lookup("compose", config)
    assert kernel == store.Kernel(entry["sha256"], entry["plan"], "packaged")


def test_command_line_builds_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of other compilers, damaged or never built; what has been built when something fails is there the next time."""
    configs = [compose.Config(64, 64, columns=columns) for columns in (16, 32, 64)]
    built: list[int] = []
    failing: list[int] = []

    def build_task(task: build.Task) -> Any:
        name, config = task
        if config.columns in failing:
            raise RuntimeError("no memory")
        built.append(config.columns)
        cubin = f"cubin {config.columns}".encode()
        entry = {"kernel": name, "config": store.config_fields(config), "source": store.source_hash(name)}
        entry |= {"sha256": hashlib.sha256(cubin).hexdigest(), "versions": compilers, "plan": {}}
        used = {"registers": 1, "spill_stores": 0, "shared": 0}
        return (cubin, entry | {"resources": used}, ""), 0.0

    class Here:
        """In place of other processes."""

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __enter__(self) -> Here:
            return self

        def __exit__(self, *_: object) -> None: ...

        map = staticmethod(map)

    def run(*options: str) -> list[int]:
        built.clear()
        build.main(["--output", str(tmp_path), *options])
        return built

    compilers = {"tilelang": "1", "cuda": "2"}
    monkeypatch.setattr(build, "versions", lambda: compilers)
    monkeypatch.setattr(build, "_build_task", build_task)
    monkeypatch.setattr(build, "PACKAGED", tuple(("compose", config) for config in configs))
    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", Here)
    failing.append(64)
    with pytest.raises(RuntimeError, match="no memory"):
        run()
    failing.clear()
    assert run() == [64]
    assert "2 of 3 kernels are there" in capsys.readouterr().out
    assert run() == []
    entry = store.read_manifest(tmp_path)[store.key("compose", configs[1])]
    (tmp_path / f"{entry['sha256']}.cubin").write_bytes(b"damaged")
    assert run("--only", "columns=16") == []
    assert run() == [32]
    assert run("--anew", "--only", "columns=16") == [16]
    assert len(store.read_manifest(tmp_path)) == len([*tmp_path.glob("*.cubin")]) == 3
    compilers = {"tilelang": "2", "cuda": "2"}
    assert run("compose", "--only", "columns=64") == [64]
    assert run() == [16, 32]
    (tmp_path / "manifest.json").write_text("no JSON")
    assert run() == [16, 32, 64]


def test_command_line_refuses_unknown_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build.main(["nothing", "--output", str(tmp_path)])
    assert "no kernel named nothing; there are layout, balance, prepare" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        build.main(["prepare", "--only", "key_dim=65", "--output", str(tmp_path)])
    assert "no kernel of prepare has key_dim=65" in capsys.readouterr().err


def test_command_line_leaves_a_wheel_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(store, "vouched_manifest", lambda: "0" * 64)
    with pytest.raises(SystemExit):
        build.main([])
    assert "this wheel of jax_qla has all its kernels" in capsys.readouterr().err


def test_command_line_without_compilers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(store, "why_not_buildable", lambda: "TileLang is not installed")
    with pytest.raises(SystemExit):
        build.main([])
    assert "kernels cannot be built here: TileLang is not installed" in capsys.readouterr().err


@every_value
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "in pieces"])
def test_kernels_fit_the_calls_of_the_implementation(
    packed: bool, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `rule` passes is what the kernels take: names, dtypes, shapes and scalars, forward and backward.

    The kernels are lowered, not compiled, for one combination of K, V, dtype and tile; a build of the wheel lowers all.
    """
    monkeypatch.setattr(store, "lookup", lowered_kernel)
    monkeypatch.setenv(policy.OVERRIDE, "64" if pieces else "0")
    batch, tokens, key_heads, value_heads, key_dim, value_dim = 1, 200, 2, 4, 64, 128
    q = shape(jnp.bfloat16, batch, tokens, key_heads, key_dim)
    v = shape(jnp.bfloat16, batch, tokens, value_heads, value_dim)
    g = shape(jnp.float32, batch, tokens, value_heads)
    state = shape(jnp.float32, 3 if packed else batch, value_heads, key_dim, value_dim)
    segments = shape(jnp.int32, 3, 2) if packed else None
    rows = 64 if pieces else None

    def both(q: Any, v: Any, g: Any, state: Any, segments: Any) -> Any:
        options: dict[str, Any] = {"output_final_state": True, "with_residuals": True, "piece_rows": rows}
        o, final_state, residuals = rule.forward(q, q, v, g, g, state, segments, scale=0.1, **options)
        assert final_state is not None
        assert residuals is not None
        assert (residuals.between is None) == (not pieces)
        gradients = rule.backward(q, q, v, g, g, state, segments, residuals, o, final_state, piece_rows=rows, scale=0.1)
        residuals = residuals._replace(between=None)
        without = rule.backward(q, q, v, g, g, None, segments, residuals, o, None, scale=0.1)
        return o, final_state, residuals[:2], gradients, without

    o, final_state, (a, gamma), gradients, without = jax.eval_shape(both, q, v, g, state, segments)
    described = [(x.dtype, x.shape) for x in (o, final_state, a, gamma, *gradients, *without[:5])]
    inverses = shape(jnp.int16, value_heads, batch, tokens, 64)
    per_call = [(x.dtype, x.shape) for x in (q, q, v, g, g)]
    assert described == [
        *((x.dtype, x.shape) for x in (v, state, inverses, g)),
        *per_call,
        (state.dtype, state.shape),
        *per_call,
    ]
    assert without[5] is None
    lowered = jax.jit(both).trace(q, v, g, state, segments).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r'functions = "([^"]*)"', lowered)
    of_states = ["summaries", "compose"] if pieces else []
    of_gradients = ["adjoint_summaries", "compose"] if pieces else []
    anew = ["summaries", "adjoint_summaries", "compose", "compose"] if pieces else []
    tables = ["layout"] if packed and pieces else []
    assert [re.sub("_kernel", "", call).split(",") for call in calls] == [
        ["prepare", *tables, *of_states, "forward"],
        *[[*tables, *first, "states", "state_gradients", "gradients"] for first in (of_gradients, anew)],
    ]


@pytest.mark.parametrize(("key_heads", "counted"), [(4, 0), (2, 0), (1, 2)])
def test_counts_of_chunks_begin_at_zero(key_heads: int, counted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a key head has value heads in several clusters, the kernel of all gradients is given zeros to count in,
    which the call may write."""
    monkeypatch.setattr(store, "lookup", lowered_kernel)
    monkeypatch.setenv(policy.IN_ONE_OVERRIDE, "1")
    q, v = shape(jnp.bfloat16, 2, 100, key_heads, 128), shape(jnp.bfloat16, 2, 100, 4, 128)
    g = shape(jnp.float32, 2, 100, 4)

    def both(q: Any, v: Any, g: Any) -> Any:
        options: dict[str, Any] = {"output_final_state": False, "with_residuals": True, "keep": "vd", "scale": 0.1}
        o, _, residuals = rule.forward(q, q, v, g, g, None, None, **options)
        assert residuals is not None
        return rule.backward(q, q, v, g, g, None, None, residuals, o, None, scale=0.1)

    lowered = jax.jit(both).trace(q, v, g).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in lowered.splitlines() if "states_from_vd_kernel,backward_kernel" in line)
    operands = re.search(r"\(([^()]*)\) \{", call)
    types = re.search(r": \(([^()]*)\) -> \(?([^()]*)\)?", call)
    aliased = re.search(r"output_operand_alias<output_tuple_indices = \[(\d+)\], operand_index = (\d+)", call)
    assert operands
    assert types
    assert aliased
    result, operand = int(aliased[1]), int(aliased[2])
    numbers = f"tensor<{counted}x4xi32>"
    assert (types[1].split(", ")[operand], types[2].split(", ")[result]) == (numbers, numbers)
    zeros = operands[1].split(", ")[operand]
    assert re.search(
        rf"{re.escape(zeros)} = stablehlo.broadcast_in_dim %c\w*, dims = \[\] : \(tensor<i32>\) -> {numbers}", lowered
    )


@pytest.mark.parametrize("l2norm", [False, True])
def test_plan_has_no_operand_that_a_configuration_does_nothing_with(l2norm: bool) -> None:
    plan = lowered_kernel("prepare", prepare.Config(128, "bfloat16", l2norm, keys=1)).plan
    operands = {operand["name"] for operand in plan["operands"]}
    assert {"k", "g", "beta", "a", "gamma"} < operands
    assert operands.issuperset(("q", "lengths", "query_lengths")) == l2norm
    assert operands.isdisjoint(("q", "lengths", "query_lengths")) != l2norm
    assert {argument["operand"] for argument in plan["arguments"] if "operand" in argument} == operands


@pytest.mark.parametrize("rows", [1, 30])
def test_operand_that_only_gives_a_size(rows: int) -> None:
    """Is part of a call, as far as none that is touched gives that size; a second one that gives it is not."""
    assert [operand["name"] for operand in compiled("sized").plan["operands"]] == ["x", "y"]
    inputs = {"x": shape(jnp.float32, rows, 128), "z": shape(jnp.float32, rows, 4)}
    found = numbers("sized", inputs, {"y": shape(jnp.float32, programs.TILE, 128)}, {})
    assert found == [*(-(-rows // 4), 1, 1), *(128, 1, 1), *(1, 1, 1), 0, 0, 2, *(0, 1), *(1, 4, rows)]


@pytest.mark.parametrize("state_dtype", [None, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("output_final_state", [True, False])
def test_decoding_kernel_fits_its_call(
    state_dtype: Any, output_final_state: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above; the final state takes the memory of the initial one where there are both."""
    monkeypatch.setattr(store, "lookup", lowered_kernel)
    q, v = shape(jnp.float16, 3, 2, 2, 64), shape(jnp.float16, 3, 2, 6, 128)
    g = shape(jnp.float32, 3, 2, 6)
    state = None if state_dtype is None else shape(state_dtype, 3, 6, 64, 128)

    def function(q: Any, v: Any, g: Any, state: Any) -> Any:
        return rule.recurrent(q, q, v, g, g, state, scale=0.1, output_final_state=output_final_state)

    o, final_state = jax.eval_shape(function, q, v, g, state)
    assert (o.dtype, o.shape) == (v.dtype, v.shape)
    assert (final_state is not None) == output_final_state
    if final_state is not None:
        assert (final_state.dtype, final_state.shape) == (state_dtype or jnp.float32, (3, 6, 64, 128))
    lowered = jax.jit(function).trace(q, v, g, state).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r'functions = "([^"]*)"', lowered) == ["recurrent_kernel"]
    in_place = re.findall(r"output_operand_alias<output_tuple_indices = \[(\d)\], operand_index = (\d)", lowered)
    assert in_place == ([("1", "5")] if state is not None and output_final_state else [])


WAITING = re.compile(
    r"atomic|\batom|\bred\.|threadfence|membar|volatile \w+\s*\*|\.(gpu|sys|cluster)\b|cooperative|grid\.sync"
)
"""CUDA by which blocks of one launch could tell each other anything, let alone wait for each other."""


def test_what_blocks_could_wait_by() -> None:
    found = (
        "atomicAdd(x, 1)",
        'asm("red.add.u32 [%0], 1;")',
        "__threadfence()",
        "ld.acquire.gpu.u32",
        "volatile int* x",
    )
    assert all(WAITING.search(text) for text in found)
    assert WAITING.search('asm volatile("fence.proxy.async.shared::cta;")') is None


@functools.cache
def lowered_kernel(name: str, config: Any) -> store.Kernel:
    """A kernel with its real plan and no cubin.

    Its blocks do not wait for each other: it ends however few multiprocessors a device has, as a slice of a card has.
    Those of kernels/backward.py wait for some that have begun before them.
    """
    assert (name, config) in PACKAGED
    source, plan = emulator.lowered(name, config)
    assert plan["cluster"] == [1, 1, 1]
    assert name == "backward" or not WAITING.search(source)
    return store.Kernel(hashlib.sha256(name.encode()).hexdigest(), plan, "built")
