"""How much energy an NVIDIA GPU has taken, by NVML's counter."""

from __future__ import annotations

import ctypes
import functools
import os
import time
from typing import Any


class Meter:
    """Watts between two moments."""

    def __init__(self) -> None:
        self._joules, self._seconds = joules(), time.perf_counter()

    def watts(self) -> float | None:
        """The mean since the meter was made; None where nothing counts energy."""
        now, seconds = joules(), time.perf_counter() - self._seconds
        return None if now is None or self._joules is None else (now - self._joules) / seconds


def joules() -> float | None:
    """What the first visible GPU has taken since its driver was loaded; None without NVML, a GPU or such a counter."""
    found = _library()
    if found is None:
        return None
    library, device = found
    millijoules = ctypes.c_ulonglong()
    if library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)) != 0:
        return None
    return millijoules.value / 1e3


@functools.cache
def _library() -> tuple[Any, ctypes.c_void_p] | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device = ctypes.c_void_p()
    # An index, or a name that NVML does not know as one.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    if not visible.isdecimal() or library.nvmlInit_v2() != 0:
        return None
    if library.nvmlDeviceGetHandleByIndex_v2(int(visible), ctypes.byref(device)) != 0:
        return None
    return library, device
