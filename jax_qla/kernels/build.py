"""From TileLang program to cubin and launch plan; `python -m jax_qla.kernels.build` fills the package's cubin folder.

    program(config)  --tilelang.lower-->  CUDA source + host module  --nvcc-->  cubin   \\
                                                                     --plan.py->  plan  --> store entry
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import importlib
import importlib.metadata
import time
from pathlib import Path
from typing import Any

from jax_qla import store
from jax_qla.kernels import PACKAGED, toolchain


def build(name: str, config: Any) -> tuple[bytes, dict[str, Any], str]:
    """Builds one kernel; needs TileLang and nvcc but no GPU.

    Args:
        name: module of jax_qla.kernels.
        config: its Config.

    Returns:
        The cubin, its manifest entry (store.Entry as JSON) and the CUDA source.

    Raises:
        ImportError: TileLang is not installed.
        FileNotFoundError: nvcc is not.
        RuntimeError: nvcc refuses the source.
    """
    import tilelang
    import tvm
    from tvm.target import Target

    from jax_qla.kernels.plan import extract_plan

    module = importlib.import_module(f"jax_qla.kernels.{name}")
    target = Target({"kind": "cuda", "arch": toolchain.ARCHITECTURE})
    with tvm.transform.PassContext(opt_level=3, config=module.PASS_CONFIGS), target:
        program = module.program(config)
        artifact = tilelang.lower(program, target=target, enable_host_codegen=False, enable_device_compile=False)
    root = Path(tilelang.__file__).parent
    include = [root / "src", root / "3rdparty" / "cutlass" / "include"]
    cubin, resources = toolchain.compile_cubin(artifact.kernel_source, include)
    plan = extract_plan(artifact, program)
    entry = {
        "kernel": name,
        "config": store.config_fields(config),
        "source": store.source_hash(name),
        "sha256": hashlib.sha256(cubin).hexdigest(),
        "plan": plan,
        "resources": resources | {"shared": plan["shared"]},
        "versions": versions(),
    }
    return cubin, entry, artifact.kernel_source


def versions() -> dict[str, str]:
    """Versions of the compilers."""
    tilelang = importlib.metadata.version("tilelang")
    return {"tilelang": tilelang, "nvcc": toolchain.nvcc_version(), "architecture": toolchain.ARCHITECTURE}


def _build_task(task: tuple[str, Any]) -> tuple[bytes, dict[str, Any], str, float]:
    start = time.monotonic()
    return *build(*task), time.monotonic() - start


def main(arguments: list[str] | None = None) -> None:
    """Builds the packaged kernels, or those named, into a folder."""
    parser = argparse.ArgumentParser(prog="python -m jax_qla.kernels.build", description="Build jax_qla's Hopper kernels.")
    parser.add_argument("names", nargs="*", help="kernels to build (default: all that the wheel carries)")
    parser.add_argument("--output", type=Path, default=store.PACKAGED_DIRECTORY, help="folder for cubins and manifest")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--keep-sources", type=Path, help="folder for the CUDA sources")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - {name for name, _ in PACKAGED}
    if unknown:
        parser.error(f"no kernel named {', '.join(sorted(unknown))}; there are {', '.join(dict(PACKAGED))}")
    tasks = [task for task in PACKAGED if not options.names or task[0] in options.names]
    options.output.mkdir(parents=True, exist_ok=True)
    entries: dict[str, dict[str, Any]] = {}
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
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
                f"{used['spill_stores']:4} B spilled {used['shared']:6} B shared  {len(cubin) // 1024:4} KiB  {seconds:5.1f} s",
                flush=True,
            )
    store.write_manifest(options.output, entries, keep_others=bool(options.names))


if __name__ == "__main__":
    main()
