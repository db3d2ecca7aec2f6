"""The FFI handler on attributes and buffers that are random: refused with an XLA error, never a crash.

Once called directly by the thousand, under AddressSanitizer and UndefinedBehaviorSanitizer (sanitized/fuzz_handler.cc),
and once through XLA itself.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stub_driver import COMPILER, FFI_SOURCES, stub_driver, write_cubin
from thorough import THOROUGH, only_thorough

from jax_qla import _ffi

pytest.importorskip("hypothesis")
import hypothesis
from hypothesis import strategies

TESTS = Path(__file__).parent
KERNELS = {"none": [], "pointers": [8, 8], "numbers": [4, 8, 4], "maps": [128, 128], "all": [128, 8, 4, 128, 8, 4]}
"""As in sanitized/fuzz_handler.cc."""
SANITIZERS = ["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
CALLS = int(os.environ.get("JAX_QLA_FUZZ_CALLS", "10000"))


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, text=True, capture_output=True, **options)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the handler (fuzz_handler) and the recording driver (driver.so), both under the sanitizers."""
    folder = tmp_path_factory.mktemp("sanitized")
    (folder / "empty.cc").write_text("int main() {}")
    linked = run([COMPILER[0], *SANITIZERS[2:], str(folder / "empty.cc"), "-o", str(folder / "empty")])
    if linked.returncode:
        pytest.skip(f"{COMPILER[0]} has no sanitizers here: {linked.stderr.strip().splitlines()[-1]}")
    handler = [*COMPILER, *SANITIZERS, f"-isystem{jax.ffi.include_dir()}"]
    sources = [TESTS / "sanitized" / "fuzz_handler.cc", *FFI_SOURCES.glob("*.cc")]
    objects = {source: folder / f"{source.stem}.o" for source in sources if source.name != "module.cc"}
    commands = [[*handler, "-c", str(source), "-o", str(target)] for source, target in objects.items()]
    driver = str(TESTS / "stub_driver" / "stub_driver.cc")
    commands.append([*COMPILER, *SANITIZERS, "-fPIC", "-shared", driver, "-o", str(folder / "driver.so")])
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for done in pool.map(run, commands):
            assert done.returncode == 0, done.stderr
    done = run([*handler, *map(str, objects.values()), "-o", str(folder / "fuzz_handler"), "-ldl"])
    assert done.returncode == 0, done.stderr
    return folder


@only_thorough
def test_under_sanitizers(sanitized: Path) -> None:
    """Another seed each time, which is printed; $JAX_QLA_FUZZ_CALLS sets how many calls."""
    digest = write_cubin(sanitized, KERNELS)
    seed = int.from_bytes(os.urandom(4), "little")
    environment = {
        **os.environ,
        "JAX_QLA_LIBCUDA": str(sanitized / "driver.so"),
        "ASAN_OPTIONS": "detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [str(sanitized / "fuzz_handler"), str(sanitized), digest, str(CALLS), str(seed)]
    done = run(command, env=environment)
    print(f"seed {seed}\n{done.stdout}")
    assert (done.returncode, done.stderr) == (0, ""), f"seed {seed}"
    outcomes = dict(line.split(": ") for line in done.stdout.splitlines())
    # Every way to end was taken, and each at least once in a thousand calls.
    for outcome in ("right", "ran", "instantiate 3", "execute 3"):
        assert int(outcomes[outcome]) > CALLS / 1000, f"{outcome}, seed {seed}"
    assert sum(map(int, outcomes.values())) == CALLS


# Through XLA

EDGES = [0, 1, 2, 3, 7, 8, 16, 128, 256, 257, 1024, 65536, 2**31, 2**32, 2**40, 2**62, 2**63 - 1]
integers = strategies.sampled_from([*EDGES, *(-x - 1 for x in EDGES)]) | strategies.integers(-(2**63), 2**63 - 1)
RIGHT = [1, 1, *(1, 1, 1), *(128, 1, 1), *(1, 1, 1), 0, 0, 2, *([2, 0, 7, 2, 16, 8, 64, 16, 4, 1, 1, 0, 3, 2, 0] * 2)]


@strategies.composite
def spoiled_plans(draw: Any) -> list[int]:
    """A right plan of the kernel "maps" with a few of its numbers replaced, and perhaps an end cut off or added."""
    numbers = list(RIGHT)
    for place in draw(strategies.lists(strategies.integers(0, len(numbers) - 1), min_size=1, max_size=3)):
        numbers[place] = draw(integers)
    return numbers[: draw(strategies.integers(0, len(numbers)))] if draw(strategies.booleans()) else numbers


attributes = strategies.fixed_dictionaries(
    {},
    optional={
        "cubins": strategies.text() | strategies.integers(-5, 5) | strategies.booleans(),
        "functions": strategies.sampled_from(["maps", "all", "", "maps,maps"]) | strategies.text(),
        "plan": spoiled_plans().map(lambda numbers: np.array(numbers, np.int64))
        | strategies.lists(strategies.integers(-5, 5)).map(lambda numbers: np.array(numbers, np.int32))
        | strategies.just(np.array(RIGHT, np.float64))
        | strategies.text(),
    },
)


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the one cubin there is; the handler is registered for the CPU and talks to the recording driver."""
    folder = tmp_path_factory.mktemp("cubins")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_QLA_LIBCUDA", str(stub_driver().library))
        former = _ffi.set_cubin_directories([str(folder)])
        yield write_cubin(folder, KERNELS)
        _ffi.set_cubin_directories(former)


serial_numbers = itertools.count()


def call(**given: Any) -> None:
    x = jnp.zeros((8, 16))

    def launch(x: jax.Array) -> Any:
        return jax.ffi.ffi_call("jax_qla.launch.v1", jax.ShapeDtypeStruct((4,), jnp.float32))(x, **given)

    launch.__name__ = f"launch_{next(serial_numbers)}"  # not another's compiled program
    with jax.default_device(jax.devices("cpu")[0]):
        jax.block_until_ready(jax.jit(launch)(x))


@hypothesis.settings(max_examples=400 if THOROUGH else 20, deadline=None, database=None)
@hypothesis.given(given=attributes)
def test_through_xla(digest: str, given: dict[str, Any]) -> None:
    given = {"cubins": digest, "functions": "maps", **given}
    right = {"cubins": digest, "functions": "maps", "plan": np.array(RIGHT, np.int64)}
    try:
        call(**given)
        refused = False
    except jax.errors.JaxRuntimeError as error:
        hypothesis.event(str(error).split(":")[0])
        refused = True
    # What ran had all three, of the right types.
    assert refused or (set(given) == set(right) and given["plan"].dtype == np.int64)
    call(**right)
