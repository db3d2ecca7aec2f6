"""From TileLang program to cubin and launch plan.

program(config)  --tilelang.lower-->  CUDA source + host module  --NVRTC-->  cubin
                                                                 --plan.py->  plan
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jax_qla.kernels import toolchain


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a program becomes."""

    cubin: bytes
    plan: dict[str, Any]
    """The launch plan, as jax_qla/launch.py describes it."""
    resources: dict[str, Any]
    """Registers a thread; spill_stores, spill_loads and dynamic shared memory (an expression of the plan) in bytes; and
    `serialized`, 1 if no wgmma runs beside another."""
    source: str
    """CUDA C++."""


def lower_program(program: Callable[[], Any], pass_configs: Mapping[str, object]) -> tuple[str, dict[str, Any]]:
    """CUDA source and launch plan of a TileLang program; needs TileLang alone.

    Args:
        program: returns the prim_func; called with Hopper as the current target, which macros ask for.
        pass_configs: TileLang's pass configuration.

    Raises:
        ImportError: TileLang is not installed.
        NotImplementedError: its host module has something that a launch plan cannot hold.
        ValueError: two of its buffers in shared memory have one name, or its kernel's beginning is not found.
    """
    import tilelang
    import tvm
    from tvm.target import Target

    from jax_qla.kernels.plan import extract_plan

    target = Target({"kind": "cuda", "arch": toolchain.ARCHITECTURE})
    with tvm.transform.PassContext(opt_level=3, config=dict(pass_configs)), target:
        prim_func = program()
        artifact = tilelang.lower(prim_func, target=target, enable_host_codegen=False, enable_device_compile=False)
    _refuse_equal_names(artifact.kernel_source)
    return _leave_first(artifact.kernel_source), extract_plan(artifact, prim_func)


def _leave_first(source: str) -> str:
    """The kernel's statements `jax_qla_leave_if(nothing);` (macros.py: leave_first) as the first that it executes. TileLang has all blocks initialise
    the barriers, and meet, before what a program begins with. One that names a variable of the kernel's, or stands within
    another statement, does not compile."""
    statement = re.compile(r"^  jax_qla_leave_if\((.*)\);\n", re.MULTILINE)
    kernel = re.compile(r'^extern "C" __global__ void __launch_bounds__.*\{\n', re.MULTILINE)
    checks = [f"  if (__any_sync(0xffffffffu, {nothing})) return;\n" for nothing in statement.findall(source)]
    moved, kernels = kernel.subn(lambda begun: begun.group() + "".join(checks), statement.sub("", source))
    if kernels != 1:
        raise ValueError(f"{kernels} kernels in the CUDA source, not one that begins as is known")
    return moved


def _refuse_equal_names(source: str) -> None:
    """TileLang lays buffers of one size into shared memory by their names, and of equal names (`b = a` gives a's buffer
    that of b) as its own pointers happen to be: the cubin would not be the same in every build."""
    names = set(re.findall(r"void\* (\w+) = \(\(void\*\)\(\(char\*\)buf_dyn_shmem", source))
    for name, _, number in sorted(name.rpartition("_") for name in names):
        if number.isdecimal() and name in names:
            raise ValueError(f"two buffers in shared memory are named {name}")


def compile_program(program: Callable[[], Any], pass_configs: Mapping[str, object]) -> Compiled:
    """Compiles a TileLang program; needs TileLang and NVRTC but no GPU.

    Args:
        program, pass_configs: as in `lower_program`.

    Raises:
        ImportError, NotImplementedError, ValueError: as in `lower_program`.
        FileNotFoundError: NVRTC is not installed.
        RuntimeError: NVRTC refuses the source.
    """
    source, plan = lower_program(program, pass_configs)
    cubin, resources = toolchain.compile_cubin(source, headers())
    return Compiled(cubin, plan, resources | {"shared": plan["shared"]}, source)


def headers() -> list[Path]:
    """Folders of TileLang's headers and of CUTLASS', which come with it."""
    import tilelang

    root = Path(tilelang.__file__).parent
    return [root / "src", root / "3rdparty" / "cutlass" / "include"]
