"""From TileLang program to cubin and launch plan; `python -m jax_qla.kernels.build` fills the package's cubin folder.

    program(config)  --tilelang.lower-->  CUDA source + host module  --NVRTC-->  cubin  \\
                                                                     --plan.py->  plan  --> store entry
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import hashlib
import importlib
import importlib.metadata
import multiprocessing
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jax_qla import store
from jax_qla.kernels import toolchain
from jax_qla.kernels.packaged import PACKAGED


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
    """
    import tilelang
    import tvm
    from tvm.target import Target

    from jax_qla.kernels.plan import extract_plan

    target = Target({"kind": "cuda", "arch": toolchain.ARCHITECTURE})
    with tvm.transform.PassContext(opt_level=3, config=dict(pass_configs)), target:
        prim_func = program()
        artifact = tilelang.lower(prim_func, target=target, enable_host_codegen=False, enable_device_compile=False)
    return artifact.kernel_source, extract_plan(artifact, prim_func)


def compile_program(program: Callable[[], Any], pass_configs: Mapping[str, object]) -> Compiled:
    """Compiles a TileLang program; needs TileLang and NVRTC but no GPU.

    Args:
        program, pass_configs: as in `lower_program`.

    Raises:
        ImportError, NotImplementedError: as in `lower_program`.
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


def build(name: str, config: Any) -> tuple[bytes, dict[str, Any], str]:
    """Builds one kernel.

    Args:
        name: module of jax_qla.kernels.
        config: its Config.

    Returns:
        The cubin, its manifest entry (JSON) and the CUDA source.

    Raises:
        ImportError, NotImplementedError, FileNotFoundError, RuntimeError: as in `compile_program`.
    """
    module = importlib.import_module(f"jax_qla.kernels.{name}")
    compiled = compile_program(lambda: module.program(config), module.PASS_CONFIGS)
    entry = {
        "kernel": name,
        "config": store.config_fields(config),
        "source": store.source_hash(name),
        "sha256": hashlib.sha256(compiled.cubin).hexdigest(),
        "plan": compiled.plan,
        "resources": compiled.resources,
        "versions": versions(),
    }
    return compiled.cubin, entry, compiled.source


def versions() -> dict[str, str]:
    """Versions of the compilers."""
    tilelang = importlib.metadata.version("tilelang")
    return {"tilelang": tilelang, "cuda": toolchain.cuda_version(), "architecture": toolchain.ARCHITECTURE}


def _build_task(task: tuple[str, Any]) -> tuple[bytes, dict[str, Any], str, float]:
    start = time.monotonic()
    return *build(*task), time.monotonic() - start


def main(arguments: list[str] | None = None) -> None:
    """Builds the packaged kernels, or those named, into a folder."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_qla.kernels.build", description="Build jax_qla's Hopper kernels."
    )
    parser.add_argument("names", nargs="*", help="kernels to build (default: all that the wheel carries)")
    parser.add_argument("--output", type=Path, default=store.PACKAGED_DIRECTORY, help="folder for cubins and manifest")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--keep-sources", type=Path, help="folder for the CUDA sources")
    only = "only configurations with this value; may be repeated"
    parser.add_argument("--only", metavar="FIELD=VALUE", action="append", default=[], help=only)
    options = parser.parse_args(arguments)
    tasks = _tasks(parser, options.names, options.only)
    if reason := store.why_not_buildable():
        parser.error(f"kernels cannot be built here: {reason}")
    if options.output == store.PACKAGED_DIRECTORY and store.vouched_manifest():
        parser.error("this wheel of jax_qla has all its kernels and takes no others; choose a folder with --output")
    options.output.mkdir(parents=True, exist_ok=True)
    entries: dict[str, dict[str, Any]] = {}
    # A process that JAX has given threads must not be forked.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(options.jobs, len(tasks)), mp_context=context) as pool:
        for done, (task, result) in enumerate(zip(tasks, pool.map(_build_task, tasks), strict=True), 1):
            cubin, entry, source, seconds = result
            store.write_cubin(options.output, cubin)
            entries[store.key(*task)] = entry
            if options.keep_sources:
                options.keep_sources.mkdir(parents=True, exist_ok=True)
                (options.keep_sources / f"{task[0]}-{store.key(*task)[:12]}.cu").write_text(source)
            used = entry["resources"]
            settings = " ".join(f"{field}={value}" for field, value in entry["config"].items())
            print(
                f"[{done:3}/{len(tasks)}] {task[0]:16} {settings:66} {used['registers']:3} registers "
                f"{used['spill_stores']:4} B spilled {used['shared']:6} B shared "
                f"{len(cubin) // 1024:4} KiB {seconds:5.1f} s{', products one by one' * used.get('serialized', 0)}",
                flush=True,
            )
    store.write_manifest(options.output, entries, keep_others=len(tasks) < len(PACKAGED))


def _tasks(parser: argparse.ArgumentParser, names: list[str], only: list[str]) -> list[tuple[str, Any]]:
    """The packaged kernels with these names, or all, and these settings."""
    known = dict.fromkeys(name for name, _ in PACKAGED)
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"no kernel named {', '.join(unknown)}; there are {', '.join(known)}")

    def settings(config: Any) -> list[str]:
        return [f"{field}={value}" for field, value in store.config_fields(config).items()]

    tasks = [(name, config) for name, config in PACKAGED if not names or name in names]
    tasks = [(name, config) for name, config in tasks if set(only) <= set(settings(config))]
    if not tasks:
        parser.error(f"no kernel {'of ' + ', '.join(names) + ' ' if names else ''}has {' and '.join(only)}")
    return tasks


if __name__ == "__main__":
    main()
