"""The CUDA compiler: found in $CUDA_HOME, on PATH, or in NVIDIA's PyPI wheels, and called."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

ARCHITECTURE = "sm_90a"


@functools.cache
def find_nvcc() -> Path:
    """Path of nvcc.

    Raises:
        FileNotFoundError: there is none; the message says where it was looked for.
    """
    home = os.environ.get("CUDA_HOME")
    candidates = [Path(home, "bin", "nvcc")] if home else []
    if on_path := shutil.which("nvcc"):
        candidates.append(Path(on_path))
    wheels = importlib.util.find_spec("nvidia")
    for location in (wheels.submodule_search_locations or ()) if wheels else ():
        candidates.extend(sorted(Path(location).glob("*/bin/nvcc"), reverse=True))
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(
        "nvcc was not found in $CUDA_HOME, on PATH or in the nvidia-cuda-nvcc wheel, which jax_qla[kernels] brings"
    )


@functools.cache
def nvcc_version() -> str:
    """Version of nvcc, such as "13.0.88"."""
    output = subprocess.run([find_nvcc(), "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", output)
    return found.group(1) if found else output.strip()


def compile_cubin(source: str, include: list[Path]) -> tuple[bytes, dict[str, int]]:
    """Compiles CUDA source for Hopper.

    Args:
        source: CUDA C++ with one kernel.
        include: folders of its headers.

    Returns:
        The cubin, and what ptxas reports of it: registers, spill_stores and spill_loads in bytes.

    Raises:
        RuntimeError: nvcc refuses the source; the message ends with what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Fixed relative names: nothing of this machine enters the cubin.
        Path(folder, "kernel.cu").write_text(source)
        gencode = f"arch=compute_{ARCHITECTURE[3:]},code={ARCHITECTURE}"
        command = [str(find_nvcc()), "-cubin", "-gencode", gencode, "-std=c++17", "-O3", "-ftz=true", "-Xptxas", "-v"]
        command += [f"-I{folder}" for folder in include] + ["kernel.cu", "-o", "kernel.cubin"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"nvcc failed:\n{(done.stdout + done.stderr)[-4000:]}")
        return Path(folder, "kernel.cubin").read_bytes(), _resources(done.stderr)


def _resources(report: str) -> dict[str, int]:
    def number(pattern: str) -> int:
        found = re.search(pattern, report)
        return int(found.group(1)) if found else 0

    return {
        "registers": number(r"Used (\d+) registers"),
        "spill_stores": number(r"(\d+) bytes spill stores"),
        "spill_loads": number(r"(\d+) bytes spill loads"),
    }
