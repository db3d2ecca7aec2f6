"""Builds kernels; `python -m jax_qla.kernels.build` fills the package's cubin folder, with what is not there yet."""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import importlib
import importlib.metadata
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jax_qla import store
from jax_qla.kernels import toolchain
from jax_qla.kernels.lowering import compile_program
from jax_qla.kernels.packaged import PACKAGED

Task = tuple[str, Any]
"""A kernel to build: module of jax_qla.kernels and Config."""


def build(name: str, config: Any) -> tuple[bytes, dict[str, Any], str]:
    """Builds one kernel.

    Args:
        name: module of jax_qla.kernels.
        config: its Config.

    Returns:
        The cubin, its manifest entry (JSON) and the CUDA source.

    Raises:
        ImportError, NotImplementedError, ValueError, FileNotFoundError, RuntimeError: as in `compile_program`.
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


def main(arguments: list[str] | None = None) -> None:
    """Builds the packaged kernels, or those named, into a folder that lacks them."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_qla.kernels.build",
        description="Build jax_qla's Hopper kernels that are not there yet, by this source and these compilers.",
    )
    parser.add_argument("names", nargs="*", help="kernels to build (default: all that the wheel carries)")
    parser.add_argument("--output", type=Path, default=store.PACKAGED_DIRECTORY, help="folder for cubins and manifest")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once (default: all cores)")
    parser.add_argument("--keep-sources", type=Path, help="folder for the CUDA sources, of all that are asked for")
    only = "only configurations with this value; may be repeated"
    parser.add_argument("--only", metavar="FIELD=VALUE", action="append", default=[], help=only)
    parser.add_argument("--anew", action="store_true", help="build what is there, too")
    options = parser.parse_args(arguments)
    tasks = _tasks(parser, options.names, options.only)
    if reason := store.why_not_buildable():
        parser.error(f"kernels cannot be built here: {reason}")
    if options.output == store.PACKAGED_DIRECTORY and store.vouched_manifest():
        parser.error("this wheel of jax_qla has all its kernels and takes no others; choose a folder with --output")
    options.output.mkdir(parents=True, exist_ok=True)
    with store.locked(options.output):
        there = {} if options.anew or options.keep_sources else _there(options.output, tasks)
        missing = [task for task in tasks if store.key(*task) not in there]
        if there:
            print(f"{len(there)} of {len(tasks)} kernels are there", flush=True)
        entries: dict[str, dict[str, Any]] = {}
        try:
            for task, (cubin, entry, source) in _built(missing, options.jobs):
                store.write_cubin(options.output, cubin)
                entries[store.key(*task)] = entry
                if options.keep_sources:
                    options.keep_sources.mkdir(parents=True, exist_ok=True)
                    (options.keep_sources / f"{task[0]}-{store.key(*task)[:12]}.cu").write_text(source)
        finally:  # What has been built before something ended it is there the next time.
            whole = len(there) + len(entries) == len(PACKAGED)
            store.write_manifest(options.output, there | entries, keep_others=not whole)


def _there(folder: Path, tasks: Sequence[Task]) -> dict[str, dict[str, Any]]:
    """Entries, by key, of those that the folder has, by the same source and compilers."""
    try:
        entries = store.read_manifest(folder)
    except store.ManifestError:
        return {}
    compilers = versions()
    found = {key: entries[key] for key in (store.key(*task) for task in tasks) if key in entries}
    return {
        key: entry
        for key, entry in found.items()
        if entry.get("versions") == compilers and store.has_cubin(folder, entry["sha256"])
    }


def _built(tasks: Sequence[Task], jobs: int) -> Iterator[tuple[Task, tuple[bytes, dict[str, Any], str]]]:
    """What `build` makes of each, so many at once; a line of each is printed."""
    for done, (task, (made, seconds)) in enumerate(zip(tasks, _timed(tasks, jobs), strict=True), 1):
        cubin, entry, _ = made
        used = entry["resources"]
        settings = " ".join(f"{field}={value}" for field, value in entry["config"].items())
        print(
            f"[{done:3}/{len(tasks)}] {task[0]:16} {settings:66} {used['registers']:3} registers "
            f"{used['spill_stores']:4} B spilled {used['shared']:6} B shared "
            f"{len(cubin) // 1024:4} KiB {seconds:5.1f} s{', products one by one' * used.get('serialized', 0)}",
            flush=True,
        )
        yield task, made


def _timed(tasks: Sequence[Task], jobs: int) -> Iterator[tuple[tuple[bytes, dict[str, Any], str], float]]:
    """What `build` makes of each, and the seconds that took; several in processes of their own."""
    if len(tasks) < 2:
        yield from map(_build_task, tasks)
        return
    # A process that JAX has given threads must not be forked.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context) as pool:
        yield from pool.map(_build_task, tasks)


def _build_task(task: Task) -> tuple[tuple[bytes, dict[str, Any], str], float]:
    start = time.monotonic()
    return build(*task), time.monotonic() - start


def _tasks(parser: argparse.ArgumentParser, names: list[str], only: list[str]) -> list[Task]:
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
