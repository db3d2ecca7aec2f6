"""The NVIDIA driver of this machine, and the one that cubins need.

A driver loads the cubins of its own major version of CUDA and of older ones, whatever the minor version, and no newer
ones (NVIDIA, "CUDA Compatibility", minor version compatibility). Asking it needs no GPU and no CUDA context.
"""

from __future__ import annotations

import ctypes
import functools
import os

OLDEST = {12: "525", 13: "580"}
"""The oldest driver for a major version of CUDA on Linux, as NVIDIA's compatibility table has it."""


@functools.cache
def cuda_version() -> tuple[int, int] | None:
    """The newest CUDA that the driver supports, as (major, minor), or None without a driver that says so."""
    try:
        # The library that the extension opens; see ffi/runtime.cc.
        ask = ctypes.CDLL(os.environ.get("JAX_QLA_LIBCUDA") or "libcuda.so.1").cuDriverGetVersion
    except (OSError, AttributeError):
        return None
    number = ctypes.c_int()
    if ask(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


@functools.cache
def release() -> str | None:
    """The driver's own version, such as "580.95.05", or None without a driver that says so."""
    text = ctypes.create_string_buffer(80)
    try:
        management = ctypes.CDLL("libnvidia-ml.so.1")
        if management.nvmlInit_v2() != 0:
            return None
        failed = management.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
        management.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return None if failed else text.value.decode()


def needed(compiler: str) -> str:
    """The oldest driver for what this version of CUDA, such as "12.9.86", has compiled, in words."""
    major = int(compiler.split(".")[0])
    oldest = f"driver {OLDEST[major]} or newer, " if major in OLDEST else ""
    return f"{oldest}CUDA {major}.0 or newer"


def why_too_old(compiler: str) -> str | None:
    """Why the driver cannot load what this version of CUDA has compiled, or None if it can or is not there."""
    supported = cuda_version()
    if supported is None or supported[0] >= int(compiler.split(".")[0]):
        return None
    return (
        f"the kernels were compiled by CUDA {compiler} and need {needed(compiler)}, but this machine's driver supports "
        f"CUDA {supported[0]}.{supported[1]}; install a newer driver"
    )
