"""Builds, steers and reads the recording CUDA driver of stub_driver.cc, for tests that have no GPU."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jax_qla import _ffi

FFI_SOURCES = Path(__file__).parents[2] / "ffi"
_serial_number = itertools.count()
COMPILER = [os.environ.get("CXX", "c++"), "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{FFI_SOURCES}"]


class StubDriver:
    """The recording driver of this process; `library` is what $JAX_QLA_LIBCUDA must name."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self._stub = ctypes.CDLL(str(library))
        self._stub.stub_log.restype = ctypes.c_char_p

    def reset(self) -> None:
        """Empties the log, ends all failures, and makes the devices Hopper again."""
        self._stub.stub_reset()

    def set_compute_capability(self, major: int, minor: int) -> None:
        self._stub.stub_set_compute_capability(major, minor)

    def set_launch_milliseconds(self, milliseconds: int) -> None:
        self._stub.stub_set_launch_milliseconds(milliseconds)

    def fail(self, function: str, error: int = 1) -> None:
        """Makes a driver function return `error` from now on; cuFuncSetAttribute for one attribute, whose number
        follows its name."""
        self._stub.stub_fail(function.encode(), error)

    def calls(self, name: str) -> list[dict[str, Any]]:
        """The calls of one driver function since the last reset, in order."""
        log: list[dict[str, Any]] = json.loads(self._stub.stub_log())
        return [call for call in log if call["call"] == name]

    def launches(self) -> list[dict[str, Any]]:
        return self.calls("cuLaunchKernelEx")


@functools.cache
def stub_driver() -> StubDriver:
    """Compiles the recording driver, once a process, and registers the handler for the platform "cpu"."""
    library = Path(tempfile.mkdtemp(prefix="jax_qla_stub_")) / "libcuda_stub.so"
    source = Path(__file__).with_name("stub_driver.cc")
    subprocess.run([*COMPILER, "-O1", "-fPIC", "-shared", str(source), "-o", str(library)], check=True)
    jax.devices("cpu")  # see _ffi.registrations
    for name, registration in _ffi.types("cpu").items():
        jax.ffi.register_ffi_type(name, registration, platform="cpu")
    for name, stages in _ffi.registrations("cpu").items():
        jax.ffi.register_ffi_target(name, stages, platform="cpu")
    return StubDriver(library)


def write_cubin(directory: Path, kernels: Mapping[str, Sequence[int]], padding: str = "") -> str:
    """Writes a cubin of the recording driver (kernel name -> parameter sizes in bytes) and returns its sha256.

    No two are alike, so what one test has loaded is never there for the next.
    """
    lines = ["stub cubin", *(" ".join([name, *map(str, sizes)]) for name, sizes in kernels.items())]
    content = "\n".join([*lines, f"# {next(_serial_number):08x}", padding]).encode()
    digest = hashlib.sha256(content).hexdigest()
    (directory / f"{digest}.cubin").write_bytes(content)
    return digest
