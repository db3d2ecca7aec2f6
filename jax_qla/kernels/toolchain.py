"""The CUDA compiler: NVRTC of CUDA 12.9, from NVIDIA's PyPI wheels.

Not the newest, for drivers of CUDA 12 load no cubin of a compiler of CUDA 13, and those of CUDA 13 load both. The wheels
have no nvcc of CUDA 12, and NVRTC needs neither that nor a C++ compiler.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

ARCHITECTURE = "sm_90a"

_HEADERS = ("cuda_runtime", "cuda_nvcc", "cuda_cccl")
"""Wheels whose headers TileLang's include, beside CUTLASS'."""


class Nvrtc(NamedTuple):
    """Where the compiler is."""

    library: Path
    builtins: Path
    include: tuple[Path, ...]


@functools.cache
def find_nvrtc() -> Nvrtc:
    """The compiler in NVIDIA's wheels for CUDA 12.

    Raises:
        FileNotFoundError: it is not there, or not whole; the message says what is missing.
    """
    wheels = importlib.util.find_spec("nvidia")
    for location in (wheels.submodule_search_locations or ()) if wheels else ():
        libraries = Path(location, "cuda_nvrtc", "lib")
        library, builtins = libraries / "libnvrtc.so.12", sorted(libraries.glob("libnvrtc-builtins.so.12.*"))
        include = tuple(Path(location, wheel, "include") for wheel in _HEADERS)
        if library.is_file() and builtins and all(folder.is_dir() for folder in include):
            return Nvrtc(library, builtins[0], include)
    raise FileNotFoundError(
        "NVRTC of CUDA 12 was not found in the wheels nvidia-cuda-nvrtc-cu12, -runtime-cu12, -nvcc-cu12 and -cccl-cu12, "
        "which jax_qla[kernels] brings"
    )


@functools.cache
def cuda_version() -> str:
    """Version of the compiler, such as "12.9.86"."""
    return importlib.metadata.version("nvidia-cuda-nvrtc-cu12")


def compile_cubin(source: str, include: list[Path], *, lines: bool = False) -> tuple[bytes, dict[str, int]]:
    """Compiles CUDA source for Hopper.

    Args:
        source: CUDA C++ with one kernel.
        include: folders of TileLang's headers and of CUTLASS'.
        lines: whether the cubin is to say which line of `source` an instruction is of; its code is the same.

    Returns:
        The cubin, and what ptxas reports of it: registers, spill_stores and spill_loads in bytes, and, if it has made
        every wgmma wait for the one before, `serialized`.

    Raises:
        FileNotFoundError: as `find_nvrtc`.
        RuntimeError: the compiler refuses the source; the message ends with what it printed.
    """
    nvrtc = _nvrtc()
    # CUDA's own functions for programmatic dependent launch, then what TileLang's headers take from the host's C++.
    prelude = '#include "cuda_device_runtime_api.h"\n#include <tl_templates/cuda/nvrtc_std.h>\n#line 1\n'
    # `default-device`: CUTLASS has functions that say nothing of where they run.
    options = [f"--gpu-architecture={ARCHITECTURE}", "-std=c++17", "-ftz=true", "-default-device", "-w"]
    options += ["--generate-line-info"] * lines
    options += ["--ptxas-options=-v", *(f"-I{folder}" for folder in (*include, *find_nvrtc().include))]
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    program = ctypes.c_void_p()
    # A fixed name: nothing of this machine enters the cubin.
    created = nvrtc.nvrtcCreateProgram(ctypes.byref(program), (prelude + source).encode(), b"kernel.cu", 0, None, None)
    if created != 0:
        raise RuntimeError(f"NVRTC cannot begin: {_said(created)}")
    try:
        compiled = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
        log = _text(program, "ProgramLog").decode().rstrip("\0")
        if compiled != 0:
            raise RuntimeError(f"NVRTC failed, {_said(compiled)}:\n{log[:4000]}")
        return _text(program, "CUBIN"), _resources(log)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    found = find_nvrtc()
    # It opens its other half by name, which is on no search path.
    ctypes.CDLL(str(found.builtins), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(found.library))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _text(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(_nvrtc(), f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    failed = getattr(_nvrtc(), f"nvrtcGet{what}")(program, text)
    if failed:
        raise RuntimeError(f"NVRTC gives no {what}: {_said(failed)}")
    return text.raw


def _said(error: int) -> str:
    text: bytes = _nvrtc().nvrtcGetErrorString(error)
    return text.decode()


def _resources(report: str) -> dict[str, int]:
    def number(pattern: str) -> int:
        found = re.search(pattern, report)
        return int(found.group(1)) if found else 0

    found = {
        "registers": number(r"Used (\d+) registers"),
        "spill_stores": number(r"(\d+) bytes spill stores"),
        "spill_loads": number(r"(\d+) bytes spill loads"),
    }
    return found | ({"serialized": 1} if "instructions are serialized" in report else {})
