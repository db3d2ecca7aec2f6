"""The FFI handler of ffi/, on the CPU, against a CUDA driver that records what it is asked (stub_driver/)."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from stub_driver import COMPILER, StubDriver, stub_driver, write_cubin

from jax_qla import _ffi

TARGET = "jax_qla.launch.v1"
Numbers = list[int]

# Bytes of a kernel's parameters.
POINTER, INT32, INT64, TENSOR_MAP = 8, 4, 8, 128

# CUfunction_attribute
MAX_DYNAMIC_SHARED_BYTES, PREFERRED_SHARED_CARVEOUT, NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 8, 9, 14


@pytest.fixture(scope="module")
def driver_of_module() -> Iterator[StubDriver]:
    """The recording driver, named by $JAX_QLA_LIBCUDA while this module runs."""
    driver = stub_driver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_QLA_LIBCUDA", str(driver.library))
        yield driver


@pytest.fixture
def driver(driver_of_module: StubDriver) -> StubDriver:
    driver_of_module.reset()
    return driver_of_module


@pytest.fixture
def cubins(tmp_path: Path) -> Iterator[Path]:
    """An empty cubin directory, the only one that the extension searches."""
    former = _ffi.set_cubin_directories([str(tmp_path)])
    yield tmp_path
    _ffi.set_cubin_directories(former)


def pointer(buffer: int) -> Numbers:
    return [0, buffer]


def scalar(size: int, bits: int) -> Numbers:
    return [1, size, bits]


def tensor_map(
    buffer: int,
    data_type: int = 7,  # FLOAT32
    dims: Sequence[int] = (16, 8),
    strides: Sequence[int] = (64,),
    box: Sequence[int] = (16, 4),
    element_strides: Sequence[int] = (1, 1),
    modes: Sequence[int] = (0, 3, 2, 0),  # interleave, swizzle, L2 promotion, out-of-bounds fill
) -> Numbers:
    return [2, buffer, data_type, len(dims), *dims, *strides, *box, *element_strides, *modes]


def kernel(
    *arguments: Numbers,
    grid: Sequence[int] = (1, 1, 1),
    block: Sequence[int] = (128, 1, 1),
    cluster: Sequence[int] = (1, 1, 1),
    shared: int = 0,
    dependent: int = 0,
) -> Numbers:
    return [*grid, *block, *cluster, shared, dependent, len(arguments), *itertools.chain(*arguments)]


def plan(*kernels: Numbers) -> Numbers:
    return [1, len(kernels), *itertools.chain(*kernels)]


def call(
    numbers: Numbers,
    cubins: str,
    functions: str,
    *operands: jax.Array,
    results: Sequence[tuple[int, ...]] = ((4,),),
    device: Any = None,
) -> list[jax.Array]:
    """Runs a plan on operands and float32 results of these shapes, under jit, on a CPU device."""
    device = device or jax.devices("cpu")[0]

    @jax.jit
    def run(*operands: jax.Array) -> Any:
        launch = jax.ffi.ffi_call(TARGET, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in results])
        return launch(*operands, cubins=cubins, functions=functions, plan=np.array(numbers, np.int64))

    with jax.default_device(device):
        return list(jax.block_until_ready(run(*operands)))


def zeros(*shape: int) -> jax.Array:
    return jax.device_put(jnp.zeros(shape, jnp.float32), jax.devices("cpu")[0])


def address(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer()


def refusal(*arguments: Any, **options: Any) -> str:
    """The sentence with which `call` fails."""
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        call(*arguments, **options)
    return str(error.value)


# What is launched.


def test_geometry_and_argument_values(driver: StubDriver, cubins: Path) -> None:
    digest = write_cubin(cubins, {"main": [POINTER, INT32, POINTER, INT64, INT32, POINTER]})
    numbers = plan(
        kernel(
            pointer(0),
            scalar(4, -7),
            pointer(2),
            scalar(8, -(2**40)),
            scalar(4, int(np.float32(1.5).view(np.uint32))),
            pointer(1),
            grid=(5, 3, 2),
            block=(32, 4, 2),
            shared=50_000,
        )
    )
    x, y = zeros(8), zeros(3)
    (result,) = call(numbers, digest, "main", x, y)
    assert driver.launches() == [
        {
            "call": "cuLaunchKernelEx",
            "device": 0,
            "kernel": "main",
            "grid": [5, 3, 2],
            "block": [32, 4, 2],
            "cluster": None,
            "shared_bytes": 50_000,
            "dependent_launch": False,
            "arguments": [address(x), 2**32 - 7, address(result), 2**64 - 2**40, 0x3FC00000, address(y)],
        }
    ]


def test_tensor_maps_are_encoded_for_each_address(driver: StubDriver, cubins: Path) -> None:
    digest = write_cubin(cubins, {"main": [TENSOR_MAP, INT32, TENSOR_MAP, POINTER]})
    geometry: dict[str, Any] = {
        "dims": [8, 3, 5, 2],
        "strides": [32, 96, 480],
        "box": [4, 1, 2, 2],
        "element_strides": [1, 2, 1, 1],
    }
    modes = {"interleave": 0, "swizzle": 1, "l2_promotion": 3, "out_of_bounds_fill": 1}
    numbers = plan(
        kernel(tensor_map(1), scalar(4, 9), tensor_map(0, **geometry, modes=list(modes.values())), pointer(1))
    )
    inputs = [zeros(2, 5, 3, 8), zeros(2, 5, 3, 8) + 1]
    outputs = [call(numbers, digest, "main", x, results=[(8, 16)])[0] for x in inputs]
    for launch, x, y in zip(driver.launches(), inputs, outputs, strict=True):
        first, number, second, third = launch["arguments"]
        assert first == {
            "address": address(y),
            "data_type": 7,
            "dims": [16, 8],
            "strides": [64],
            "box": [16, 4],
            "element_strides": [1, 1],
            "interleave": 0,
            "swizzle": 3,
            "l2_promotion": 2,
            "out_of_bounds_fill": 0,
        }
        assert number == 9
        assert second == {"address": address(x), "data_type": 7, **geometry, **modes}
        assert third == address(y)


def test_kernels_run_in_the_order_of_the_plan(driver: StubDriver, cubins: Path) -> None:
    one = write_cubin(cubins, {"first": [INT32], "third": [POINTER]})
    two = write_cubin(cubins, {"second": []})
    numbers = plan(
        kernel(scalar(4, 1)),
        kernel(dependent=1, cluster=(2, 1, 1), grid=(4, 1, 1)),
        kernel(pointer(0)),
        kernel(scalar(4, 4)),
    )
    call(numbers, ",".join([one, two, one, one]), "first,second,third,first")
    assert [launch["kernel"] for launch in driver.launches()] == ["first", "second", "third", "first"]
    assert [launch["arguments"][:1] for launch in driver.launches()][::3] == [[1], [4]]
    assert len(driver.calls("cuModuleLoadData")) == 2


@pytest.mark.parametrize("dependent", [0, 1])
@pytest.mark.parametrize("cluster", [(1, 1, 1), (2, 1, 1), (4, 2, 2)])
def test_cluster_and_dependent_launch(
    driver: StubDriver, cubins: Path, cluster: tuple[int, int, int], dependent: int
) -> None:
    digest = write_cubin(cubins, {"main": []})
    call(plan(kernel(grid=(8, 2, 2), cluster=cluster, dependent=dependent)), digest, "main")
    (launch,) = driver.launches()
    assert launch["cluster"] == (list(cluster) if cluster != (1, 1, 1) else None)
    assert launch["dependent_launch"] == bool(dependent)
    # Clusters of more than 8 blocks are opt-in.
    opted_in = [c["value"] for c in driver.calls("cuFuncSetAttribute")] == [1]
    assert opted_in == (np.prod(cluster) > 8)


def test_a_grid_without_blocks_is_skipped(driver: StubDriver, cubins: Path) -> None:
    digest = write_cubin(cubins, {"main": [TENSOR_MAP], "last": []})
    empty = kernel(tensor_map(0, dims=(16, 0), strides=(64,)), grid=(0, 3, 1))
    dependent = kernel(dependent=1)
    names = ["last", "main", "last", "last"]
    call(plan(dependent, empty, dependent, dependent), ",".join([digest] * 4), ",".join(names), zeros(0, 16))
    # What begins behind it begins when all before has ended.
    launches = [(launch["kernel"], launch["dependent_launch"]) for launch in driver.launches()]
    assert launches == [("last", True), ("last", False), ("last", True)]


def test_dynamic_shared_memory_is_raised_and_never_lowered(driver: StubDriver, cubins: Path) -> None:
    digest = write_cubin(cubins, {"main": []})
    for shared in (1000, 60_000, 2000, 200_000):
        call(plan(kernel(shared=shared)), digest, "main")
    changes = driver.calls("cuFuncSetAttribute")
    raised = [(MAX_DYNAMIC_SHARED_BYTES, shared) for shared in (1000, 60_000, 200_000)]
    # Of more than what every kernel may have, a multiprocessor's memory is divided alike, once and for all.
    assert [(c["attribute"], c["value"]) for c in changes] == [*raised[:2], (PREFERRED_SHARED_CARVEOUT, 100), raised[2]]
    assert [launch["shared_bytes"] for launch in driver.launches()] == [1000, 60_000, 2000, 200_000]


# What is loaded, and how often.


def test_call_sites_share_what_is_loaded(driver: StubDriver, cubins: Path) -> None:
    digest = write_cubin(cubins, {"main": [INT32]})
    for value in range(3):
        call(plan(kernel(scalar(4, value))), digest, "main")
    assert [launch["arguments"] for launch in driver.launches()] == [[0], [1], [2]]
    assert len(driver.calls("cuModuleLoadData")) == 1


def test_threads_load_once(driver: StubDriver, cubins: Path) -> None:
    digest = write_cubin(cubins, {"main": [INT32]})
    threads = 8
    start = threading.Barrier(threads)

    def work(value: int) -> None:
        start.wait()
        call(plan(kernel(scalar(4, value))), digest, "main")

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    assert len(driver.calls("cuModuleLoadData")) == 1
    assert sorted(launch["arguments"][0] for launch in driver.launches()) == list(range(threads))


def test_devices_load_side_by_side(driver: StubDriver, cubins: Path) -> None:
    """Two devices run one program of two cubins, of which the second is a pipe: whoever comes to it waits there, and
    must not keep the other from its first."""
    first, second = (write_cubin(cubins, {"main": []}) for _ in range(2))
    path, pipe = cubins / f"{second}.cubin", cubins / "pipe"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    content = path.read_bytes()
    os.replace(pipe, path)
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:2], "x")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    def run(x: jax.Array) -> jax.Array:
        launch = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))
        kernels = np.array(plan(kernel(), kernel()), np.int64)
        result: jax.Array = launch(x, cubins=f"{first},{second}", functions="main,main", plan=kernels)
        return result

    x = jnp.zeros(2)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = pool.submit(lambda: jax.block_until_ready(run(x)))
        deadline = time.monotonic() + 10
        while len(driver.calls("cuModuleLoadData")) < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        loaded = driver.calls("cuModuleLoadData")
        pipe.write_bytes(content)
        os.replace(pipe, path)
        os.close(writer)
        # Those who had opened the pipe read an empty file.
        assert running.exception() is None or "is corrupted" in str(running.exception())
    assert sorted(load["device"] for load in loaded) == [0, 1]
    # What has failed is not kept, and what has not failed is not loaded again.
    jax.block_until_ready(run(x))
    assert len(driver.calls("cuModuleLoadData")) == 4


def test_cubins_of_every_length_are_verified(driver: StubDriver, cubins: Path) -> None:
    """SHA-256 pads to blocks of 64 bytes, with a second block from 56 bytes on."""
    digests = [write_cubin(cubins, {"main": []}, padding="\n" * length) for length in range(130)]
    call(plan(*[kernel()] * len(digests)), ",".join(digests), ",".join(["main"] * len(digests)))
    assert len(driver.launches()) == len(digests)


def test_directories_are_searched_in_order(driver: StubDriver, cubins: Path) -> None:
    missing, first, second = (cubins / name for name in ("missing", "first", "second"))
    first.mkdir()
    second.mkdir()
    digest = write_cubin(second, {"main": []})
    assert _ffi.set_cubin_directories([str(missing), str(first), str(second)]) == [str(cubins)]
    call(plan(kernel()), digest, "main")
    assert len(driver.launches()) == 1
    other = write_cubin(second, {"main": []})
    (first / f"{other}.cubin").write_text("the first one counts")
    assert f"{first}/{other}.cubin is corrupted" in refusal(plan(kernel()), other, "main")


# What is refused.


def test_missing_cubin(driver: StubDriver, cubins: Path) -> None:
    digest = "ab" * 32
    assert f"{digest}.cubin was not found in {cubins}" in refusal(plan(kernel()), digest, "main")
    assert driver.launches() == []


def test_corrupted_cubin(driver: StubDriver, cubins: Path) -> None:
    digest = write_cubin(cubins, {"main": []})
    path = cubins / f"{digest}.cubin"
    path.write_bytes(path.read_bytes() + b"\n")
    message = refusal(plan(kernel()), digest, "main")
    assert f"{path} is corrupted" in message
    assert driver.calls("cuModuleLoadData") == []


def test_kernel_that_the_cubin_lacks(driver: StubDriver, cubins: Path) -> None:
    digest = write_cubin(cubins, {"main": []})
    message = refusal(plan(kernel()), digest, "other")
    assert f"finds no kernel other in {digest}.cubin" in message
    assert "CUDA_ERROR_NOT_FOUND" in message


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ([POINTER], "has 2 arguments for kernel main, the kernel in .* has fewer"),
        ([POINTER, INT32, INT32], "has 2 arguments for kernel main, the kernel in .* has more"),
        ([POINTER, INT64], "Argument 1 .* has 4 bytes, the kernel in .* takes 8"),
        ([TENSOR_MAP, INT32], "Argument 0 .* has 8 bytes, the kernel in .* takes 128"),
    ],
)
def test_arguments_that_are_not_the_kernels(
    driver: StubDriver, cubins: Path, parameters: list[int], message: str
) -> None:
    digest = write_cubin(cubins, {"main": parameters})
    assert re.search(message, refusal(plan(kernel(pointer(0), scalar(4, 1))), digest, "main"))
    assert driver.launches() == []


def test_tensor_map_beyond_its_buffer(driver: StubDriver, cubins: Path) -> None:
    digest = write_cubin(cubins, {"main": [TENSOR_MAP]})
    fits = plan(kernel(tensor_map(0)))
    call(fits, digest, "main", zeros(8, 16))
    message = refusal(fits, digest, "main", zeros(7, 16))
    assert "tensor map of kernel main over buffer 0 reaches 512 bytes, the buffer has 448" in message
    # An extent that does not fit 64 bits saturates.
    huge = tensor_map(0, 7, (16, 2**32, 2**32), (2**39, 2**39), (4, 4, 4), (1, 1, 1))
    assert f"reaches {2**64 - 1} bytes" in refusal(plan(kernel(huge)), digest, "main", zeros(8, 16))
    assert len(driver.launches()) == 1


def test_buffers_that_the_call_lacks(driver: StubDriver, cubins: Path) -> None:
    digest = write_cubin(cubins, {"main": [POINTER]})
    assert "has 2 operands and results, expected 6" in refusal(plan(kernel(pointer(5))), digest, "main", zeros(8))
    assert driver.launches() == []


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("cuModuleLoadData", "cannot load [0-9a-f]{64}.cubin"),
        (
            f"cuFuncSetAttribute {MAX_DYNAMIC_SHARED_BYTES}",
            "Kernel main cannot have 60000 bytes of dynamic shared memory",
        ),
        (
            f"cuFuncSetAttribute {PREFERRED_SHARED_CARVEOUT}",
            "Kernel main cannot have its multiprocessors' memory as shared memory",
        ),
        (f"cuFuncSetAttribute {NON_PORTABLE_CLUSTER_SIZE_ALLOWED}", "Kernel main cannot have clusters of 16 blocks"),
        ("cuTensorMapEncodeTiled", r"over buffer 0, data type 7, dimensions \(16, 8\), strides \(64\), box \(16, 4\)"),
        ("cuLaunchKernelEx", r"refused to launch kernel main with grid \(16, 1, 1\), block \(128, 1, 1\)"),
    ],
)
def test_what_the_driver_refuses(driver: StubDriver, cubins: Path, function: str, message: str) -> None:
    digest = write_cubin(cubins, {"main": [TENSOR_MAP]})
    numbers = plan(kernel(tensor_map(0), shared=60_000, grid=(16, 1, 1), cluster=(16, 1, 1)))
    driver.fail(function)
    text = refusal(numbers, digest, "main", zeros(8, 16))
    assert re.search(message, text)
    assert "CUDA_ERROR_OF_THE_STUB (the stub was told to fail)" in text
    driver.reset()
    call(numbers, digest, "main", zeros(8, 16))
    assert len(driver.launches()) == 1
    _, _, attribute = function.partition(" ")
    asked = [str(c["attribute"]) for c in driver.calls("cuFuncSetAttribute")]
    assert attribute == "" or attribute in asked  # what was refused is asked for again


SHA = "0" * 64
GOOD = kernel(pointer(0))
MALFORMED: dict[str, tuple[Numbers, str, str, str]] = {
    "empty": ([], SHA, "main", "ends after 0 numbers, where version is expected"),
    "version": ([2, 1, *GOOD], SHA, "main", "version, is 2, expected 1 to 1"),
    "no kernels": ([1, 0], SHA, "main", "number of kernels, is 0, expected 1 to 1024"),
    "too many kernels": ([1, 1025], SHA, "main", "number of kernels, is 1025"),
    "more cubins": (plan(GOOD), f"{SHA},{SHA}", "main", 'has 1 kernels, "cubins" names 2 and "functions" 1'),
    "more functions": (plan(GOOD), SHA, "main,more", 'has 1 kernels, "cubins" names 1 and "functions" 2'),
    "short sha256": (plan(GOOD), "abc", "main", 'entry 0 of "cubins" is "abc"'),
    "path as sha256": (plan(GOOD), "../" * 21 + "a", "main", 'entry 0 of "cubins" is'),
    "upper-case sha256": (plan(GOOD), "A" * 64, "main", 'entry 0 of "cubins" is'),
    "no function": (plan(GOOD), SHA, "", 'entry 0 of "functions" is empty'),
    "negative grid": (plan(kernel(grid=(-1, 1, 1))), SHA, "main", r"kernel 0 \(main\): grid x, is -1"),
    "grid y": (plan(kernel(grid=(1, 65536, 1))), SHA, "main", "grid y, is 65536, expected 0 to 65535"),
    "empty block": (plan(kernel(block=(0, 1, 1))), SHA, "main", "block x, is 0"),
    "large block": (plan(kernel(block=(64, 32, 1))), SHA, "main", "a block has 2048 threads"),
    "empty cluster": (plan(kernel(cluster=(1, 0, 1))), SHA, "main", "cluster y, is 0"),
    "large cluster": (plan(kernel(grid=(16, 2, 1), cluster=(16, 2, 1))), SHA, "main", "a cluster has 32 blocks"),
    "cluster": (plan(kernel(grid=(3, 1, 1), cluster=(2, 1, 1))), SHA, "main", "not a multiple of the cluster"),
    "negative shared": (plan(kernel(shared=-1)), SHA, "main", "dynamic shared bytes, is -1"),
    "shared": (plan(kernel(shared=232_449)), SHA, "main", "dynamic shared bytes, is 232449, expected 0 to 232448"),
    "dependent": (plan(kernel(dependent=2)), SHA, "main", "programmatic dependent launch flag, is 2"),
    "negative arguments": ([*plan(kernel())[:-1], -1], SHA, "main", "number of arguments, is -1"),
    "many arguments": (plan(kernel(*[pointer(0)] * 65)), SHA, "main", "number of arguments, is 65, expected 0 to 64"),
    "many maps": (plan(kernel(*[tensor_map(0)] * 25)), SHA, "main", "argument 24: more tensor maps than the 24"),
    "kind": (plan(kernel([3, 0])), SHA, "main", "argument 0: kind, is 3"),
    "negative buffer": (plan(kernel(pointer(-1))), SHA, "main", "buffer, is -1"),
    "large buffer": (plan(kernel(pointer(128))), SHA, "main", "buffer, is 128, expected 0 to 127"),
    "scalar size": (plan(kernel(scalar(5, 0))), SHA, "main", "scalar size is 5 bytes, expected 4 or 8"),
    "wide scalar": (plan(kernel(scalar(4, 2**32))), SHA, "main", "scalar value, is 4294967296"),
    "data type": (plan(kernel(tensor_map(0, data_type=13))), SHA, "main", "data type, is 13, expected 0 to 12"),
    "rank 0": (plan(kernel([2, 0, 7, 0])), SHA, "main", "rank, is 0, expected 1 to 5"),
    "rank 6": (plan(kernel([2, 0, 7, 6])), SHA, "main", "rank, is 6, expected 1 to 5"),
    "empty map": (plan(kernel(tensor_map(0, dims=(16, 0)))), SHA, "main", "dimension, is 0"),
    "stride": (plan(kernel(tensor_map(0, strides=(72,)))), SHA, "main", "stride 0 is 72 bytes, expected a multiple"),
    "long stride": (plan(kernel(tensor_map(0, strides=(2**40,)))), SHA, "main", "stride, is 1099511627776"),
    "box": (plan(kernel(tensor_map(0, box=(16, 257)))), SHA, "main", "box, is 257, expected 1 to 256"),
    "box bytes": (plan(kernel(tensor_map(0, box=(3, 4)))), SHA, "main", "box 0 is 12 bytes, expected a multiple of 16"),
    "element stride": (plan(kernel(tensor_map(0, element_strides=(1, 9)))), SHA, "main", "element stride, is 9"),
    "interleave": (plan(kernel(tensor_map(0, modes=(3, 0, 0, 0)))), SHA, "main", "interleave, is 3"),
    "interleaved rank": (plan(kernel(tensor_map(0, modes=(1, 0, 0, 0)))), SHA, "main", "interleaved .* has rank 2"),
    "interleaved stride": (
        plan(kernel(tensor_map(0, 7, (8, 2, 2), (48, 96), (8, 1, 1), (1, 1, 1), (2, 1, 0, 0)))),
        SHA,
        "main",
        "stride 0 is 48 bytes, expected a multiple of 32",
    ),
    "swizzle": (plan(kernel(tensor_map(0, modes=(0, 7, 0, 0)))), SHA, "main", "swizzle, is 7"),
    "L2 promotion": (plan(kernel(tensor_map(0, modes=(0, 0, 4, 0)))), SHA, "main", "L2 promotion, is 4"),
    "fill": (plan(kernel(tensor_map(0, modes=(0, 0, 0, 2)))), SHA, "main", "out-of-bounds fill, is 2"),
    "trailing": ([*plan(GOOD), 0], SHA, "main", "has 17 numbers, but the last kernel's last argument ends after 16"),
}  # fmt: skip


@pytest.mark.parametrize(("numbers", "digests", "functions", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_plans(driver: StubDriver, numbers: Numbers, digests: str, functions: str, message: str) -> None:
    text = refusal(numbers, digests, functions, zeros(8, 16))
    assert "INVALID_ARGUMENT: Malformed launch plan: " in text
    assert re.search(message, text)


def test_plans_cut_short(driver: StubDriver) -> None:
    numbers = plan(kernel(pointer(0), scalar(8, 3), tensor_map(0)))
    for length in range(len(numbers)):
        assert f"ends after {length} numbers, where " in refusal(numbers[:length], SHA, "main", zeros(8, 16))


@pytest.mark.parametrize("attribute", ["cubins", "functions", "plan"])
def test_missing_attributes(driver: StubDriver, attribute: str) -> None:
    attributes = {"cubins": SHA, "functions": "main", "plan": np.array(plan(GOOD), np.int64)}
    del attributes[attribute]
    launch = jax.ffi.ffi_call(TARGET, [jax.ShapeDtypeStruct((4,), jnp.float32)])
    with jax.default_device(jax.devices("cpu")[0]), pytest.raises(jax.errors.JaxRuntimeError, match="attributes"):
        jax.jit(lambda: launch(**attributes))()


# The module itself.


def test_build_info() -> None:
    info = _ffi.build_info()
    assert re.fullmatch(r"0\.\d+", info["ffi_api"])
    assert info["compiler"]
    assert re.fullmatch(r"([0-9a-f]{64})?", info["manifest_sha256"])


def test_registrations() -> None:
    assert set(_ffi.registrations()) == {TARGET}
    assert set(_ffi.registrations()[TARGET]) == {"instantiate", "initialize", "execute"}
    unknown: Any = "METAL"
    for function in (_ffi.registrations, _ffi.types):
        with pytest.raises(ValueError, match='platform must be "CUDA" or "cpu", got "METAL"'):
            function(unknown)


def test_driver_types_agree_with_cuda(tmp_path: Path) -> None:
    """ffi/driver.h against CUDA's own header, where one is at hand."""
    homes = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), *map(str, Path("/usr/local").glob("cuda-*"))]
    headers = [home for home in homes if (Path(home) / "include" / "cuda.h").exists()]
    if not headers:
        pytest.skip("no cuda.h in $CUDA_HOME or /usr/local")
    source = Path(__file__).parent / "stub_driver" / "check_driver_types.cc"
    subprocess.run([*COMPILER, f"-isystem{headers[0]}/include", "-fsyntax-only", str(source)], check=True)


# What needs a process of its own, because a process opens one driver and keeps it.


def in_new_process(scenario: str) -> str:
    """Runs a function of SCENARIOS in a new Python with two CPU devices, and returns what it prints."""
    environment = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu")
    environment.pop("JAX_QLA_LIBCUDA", None)
    command = [sys.executable, __file__, scenario]
    return subprocess.run(command, env=environment, check=True, text=True, stdout=subprocess.PIPE).stdout


def no_driver(directory: Path) -> None:
    """Prints why a call fails without $JAX_QLA_LIBCUDA, with a library that is not there, and with one that fails."""
    driver = stub_driver()
    digest = write_cubin(directory, {"main": []})
    print(refusal(plan(kernel()), digest, "main"))
    os.environ["JAX_QLA_LIBCUDA"] = "/nowhere/libcuda.so.1"
    print(refusal(plan(kernel()), digest, "main"))
    os.environ["JAX_QLA_LIBCUDA"] = str(driver.library)
    driver.fail("cuInit")
    print(refusal(plan(kernel()), digest, "main"))


def two_devices(directory: Path) -> None:
    """Prints the loads and launches of two calls on each of two devices."""
    driver = stub_driver()
    os.environ["JAX_QLA_LIBCUDA"] = str(driver.library)
    digest = write_cubin(directory, {"main": [INT32]})
    for device in jax.devices("cpu"):
        for value in range(2):
            call(plan(kernel(scalar(4, value))), digest, "main", device=device)
    loads = [load["device"] for load in driver.calls("cuModuleLoadData")]
    print(json.dumps([loads, [(launch["device"], launch["arguments"]) for launch in driver.launches()]]))


def other_than_hopper(directory: Path) -> None:
    """Prints why calls fail on devices of these compute capabilities."""
    driver = stub_driver()
    os.environ["JAX_QLA_LIBCUDA"] = str(driver.library)
    digest = write_cubin(directory, {"main": []})
    for major, minor in OTHER_CAPABILITIES:
        driver.set_compute_capability(major, minor)
        print(refusal(plan(kernel()), digest, "main"))


OTHER_CAPABILITIES = [(8, 0), (8, 9), (9, 1), (10, 0), (12, 0)]
SCENARIOS = {function.__name__: function for function in (no_driver, two_devices, other_than_hopper)}


def test_without_a_driver() -> None:
    unset, missing, failing = in_new_process("no_driver").splitlines()
    assert "only talks to a recording driver that $JAX_QLA_LIBCUDA names, and that is not set" in unset
    assert "cannot open the CUDA driver library /nowhere/libcuda.so.1" in missing
    assert re.search("cannot initialise the CUDA driver of .*: CUDA_ERROR_OF_THE_STUB", failing)


def test_two_devices_load_and_launch_each_for_itself() -> None:
    loads, launches = json.loads(in_new_process("two_devices"))
    assert loads == [0, 1]
    assert launches == [[0, [0]], [0, [1]], [1, [0]], [1, [1]]]


def test_devices_other_than_hopper() -> None:
    """In a process of its own, because a device that was Hopper once is not asked again."""
    messages = in_new_process("other_than_hopper").splitlines()
    for message, (major, minor) in zip(messages, OTHER_CAPABILITIES, strict=True):
        assert f"compute capability 9.0 (Hopper), CUDA device 0 has {major}.{minor};" in message


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scenario_directory:
        _ffi.set_cubin_directories([scenario_directory])
        SCENARIOS[sys.argv[1]](Path(scenario_directory))
