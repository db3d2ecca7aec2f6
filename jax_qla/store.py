"""Where a kernel's cubin and launch plan come from: the package, the user's cache, or a build here and now.

A folder of kernels holds `<sha256>.cubin` files, named by their content, and `manifest.json`, whose entries are found by a
key: the hash of the kernel's name, its configuration and its source (the kernel's own file and what all kernels share).
A kernel whose source has changed is therefore not found, rather than found old. The extension reads the cubins themselves
and checks their sha256 before the driver sees them.

The user's cache is $JAX_QLA_CACHE or ~/.cache/jax_qla. It is trusted only if it belongs to the user and nobody else can
write or read it (mode 0700), since code is loaded from it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PACKAGED_DIRECTORY = Path(__file__).parent / "cubins"
"""The package's own kernels, filled by `python -m jax_qla.kernels.build`."""

_KERNELS = Path(__file__).parent / "kernels"
_SHARED_SOURCES = ("common.py", "plan.py", "toolchain.py", "build.py")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel ready to launch."""

    sha256: str
    """Of the cubin; `<sha256>.cubin` is in one of `directories()`."""
    plan: Mapping[str, Any]
    """The launch plan, as jax_qla/launch.py describes it."""
    source: str
    """"packaged", "cache" or "built"."""


class KernelNotFoundError(RuntimeError):
    """A kernel is neither packaged nor cached and cannot be built here."""


@functools.cache
def lookup(name: str, config: Any) -> Kernel:
    """The cubin and launch plan of a kernel.

    Args:
        name: module of jax_qla.kernels.
        config: its Config.

    Raises:
        KernelNotFoundError: it is nowhere and cannot be built; the message says what is missing.
        PermissionError: the user's cache is not the user's alone.
    """
    wanted = key(name, config)
    if entry := read_manifest(PACKAGED_DIRECTORY).get(wanted):
        return Kernel(entry["sha256"], entry["plan"], "packaged")
    cache = cache_directory()
    if cache.exists():
        _check_trust(cache)
        if entry := _read_cached(cache, wanted):
            return Kernel(entry["sha256"], entry["plan"], "cache")
    return _build(name, config, cache)


def directories() -> list[str]:
    """Folders in which the extension looks for cubins."""
    return [str(PACKAGED_DIRECTORY), str(cache_directory())]


def cache_directory() -> Path:
    """The user's cache; it may not exist."""
    return Path(os.environ.get("JAX_QLA_CACHE") or Path.home() / ".cache" / "jax_qla")


def key(name: str, config: Any) -> str:
    """Identifies a kernel: name, configuration and source."""
    text = json.dumps([name, config_fields(config), source_hash(name)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def config_fields(config: Any) -> dict[str, Any]:
    """A Config as JSON."""
    return dataclasses.asdict(config)


@functools.cache
def source_hash(name: str) -> str:
    """Hash of a kernel's source and of what it is built with."""
    digest = hashlib.sha256()
    for file in (f"{name}.py", *_SHARED_SOURCES):
        digest.update((_KERNELS / file).read_bytes())
    return digest.hexdigest()


def read_manifest(directory: Path) -> dict[str, Any]:
    """Entries of a folder by key; empty if it has no manifest."""
    try:
        text = (directory / "manifest.json").read_text()
    except FileNotFoundError:
        return {}
    return json.loads(text)["kernels"]


def write_manifest(directory: Path, entries: Mapping[str, Any], *, keep_others: bool = False) -> None:
    """Writes a folder's manifest, atomically; cubins that no entry names are removed."""
    kernels = dict(sorted(((read_manifest(directory) if keep_others else {}) | dict(entries)).items()))
    _write_atomically(directory / "manifest.json", json.dumps({"kernels": kernels}, indent=1).encode())
    named = {entry["sha256"] for entry in kernels.values()}
    for file in directory.glob("*.cubin"):
        if file.stem not in named:
            file.unlink(missing_ok=True)


def write_cubin(directory: Path, cubin: bytes) -> None:
    """Writes a cubin under its sha256, atomically."""
    _write_atomically(directory / f"{hashlib.sha256(cubin).hexdigest()}.cubin", cubin)


def _read_cached(cache: Path, wanted: str) -> dict[str, Any] | None:
    """The cache has one file for every entry, so that processes need not share a manifest."""
    try:
        entry = json.loads((cache / f"{wanted}.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return entry if (cache / f"{entry['sha256']}.cubin").exists() else None


def _build(name: str, config: Any, cache: Path) -> Kernel:
    settings = ", ".join(f"{field}={value}" for field, value in config_fields(config).items())
    missing = f"the kernel {name}({settings}) is neither in {PACKAGED_DIRECTORY} nor in {cache}, and cannot be built here"
    if importlib.util.find_spec("tilelang") is None:
        raise KernelNotFoundError(
            f"{missing}: TileLang is not installed; install a wheel of jax_qla, which has all kernels, or jax_qla[kernels]"
        )
    from jax_qla.kernels.build import build  # the compilers are imported only where they are used

    print(f"jax_qla: building the kernel {name}({settings}) into {cache}", file=sys.stderr, flush=True)
    try:
        cubin, entry, _ = build(name, config)
    except (ImportError, FileNotFoundError) as error:
        raise KernelNotFoundError(f"{missing}: {error}") from error
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_trust(cache)
    write_cubin(cache, cubin)
    _write_atomically(cache / f"{key(name, config)}.json", json.dumps(entry).encode())
    return Kernel(entry["sha256"], entry["plan"], "built")


def _check_trust(cache: Path) -> None:
    status = cache.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(
            f"the kernel cache {cache} must belong to user {os.getuid()} with mode 0700, but belongs to user {status.st_uid} "
            f"with mode {stat.S_IMODE(status.st_mode):04o}; run chmod 700 on it or set JAX_QLA_CACHE to another folder"
        )


def _write_atomically(path: Path, content: bytes) -> None:
    """A reader sees the whole file or none, whoever else writes it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(content)
    os.replace(file.name, path)
