"""Device code of the kernels, compiled for the CPU, for tests to call."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np


def compiled(folder: Path, source: str) -> ctypes.CDLL:
    """C++ `source`, with what stands in for CUDA and `extern "C"` functions to call, as a library built in `folder`."""
    (folder / "device_code.cc").write_text(source)
    command = ["c++", "-std=c++17", "-O1", "-pthread", "-shared", "-fPIC", "-o", "device_code.so", "device_code.cc"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "device_code.so"))


def pointers(*arrays: np.ndarray) -> list[ctypes.c_void_p]:
    """For a library's functions; the arrays must be contiguous, and kept until they return."""
    return [x.ctypes.data_as(ctypes.c_void_p) for x in arrays]
