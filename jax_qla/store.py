"""Where a kernel's cubin and launch plan come from: the package, the user's cache, or a build here and now.

A cubin is a file `<sha256>.cubin`, named by its content; the extension checks that before the driver sees it. An entry
says which cubin and which launch plan a kernel has, and which compilers made them. It is found by a key: the hash of
the kernel's name, its configuration and its source (the kernel's own file and what all kernels are built with). A
kernel whose source has changed is therefore not found, rather than found old.

The package keeps its entries in one `manifest.json`, whose sha256 is compiled into the extension of a wheel. The user's
cache, $JAX_QLA_CACHE or ~/.cache/jax_qla (of users without a home jax_qla-UID among the temporary files), has one file
for each, so that processes need not share a manifest. It is trusted only if it belongs to the user and nobody else can
write or read it (mode 0700), since code is loaded from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PACKAGED_DIRECTORY = Path(__file__).parent / "cubins"
"""The package's own kernels, filled by `python -m jax_qla.kernels.build`."""

_KERNELS = Path(__file__).parent / "kernels"


def _read(folder: Path) -> dict[str, bytes]:
    """Python files by name, but those that cannot be read, as the link is that an editor leaves beside a file."""
    files = {}
    for file in folder.glob("*.py"):
        with contextlib.suppress(OSError):
            files[file.name] = file.read_bytes()
    return files


_SOURCES = _read(_KERNELS)
"""As they are imported. Read when a kernel is first asked for, they might be those of an update since then, and the
cubin of the program in memory would be found by all processes to come as that of the new source."""
_SHARED_SOURCES = (
    *("common.py", "preludes.py", "macros.py", "inverse.py", "products.py"),
    *("plan.py", "toolchain.py", "lowering.py"),
)
_OWN_SOURCES = {  # of other kernels the file of their name
    "backward": ("backward.py", "gradient_parts.py", "first_state.py"),
    "gradients": ("gradients.py", "gradients_split.py", "gradient_parts.py"),
    "prepare": ("prepare.py", "inversion.py"),
    "forward": ("forward.py", "uncut.py"),
    "summaries": ("summaries.py", "uncut.py"),
    "compose": ("compose.py", "uncut.py"),
    "states": ("states.py", "first_state.py"),
    "states_from_vd": ("states_from_vd.py", "states.py", "first_state.py", "uncut.py"),
    "state_gradients": ("state_gradients.py", "first_state.py"),
    "convolution": ("convolution.py", "sigmoid.py"),
    "convolution_gradients": ("convolution_gradients.py", "convolution.py", "sigmoid.py"),
    "gated_norm": ("gated_norm.py", "sigmoid.py"),
}
_PACKAGED_MODE, _CACHE_MODE = 0o644, 0o600


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


class ManifestError(RuntimeError):
    """The package's manifest cannot be read or is not the one that the extension was built with."""


_found: dict[tuple[str, Any], Kernel] = {}
_building = threading.Lock()


def lookup(name: str, config: Any) -> Kernel:
    """The cubin and launch plan of a kernel, built if need be.

    Args:
        name: module of jax_qla.kernels.
        config: its Config.

    Raises:
        KernelNotFoundError: it is nowhere and cannot be built; the message says what is missing.
        ManifestError: the package's manifest cannot be read, is damaged or not the wheel's.
        PermissionError: the user's cache is not the user's alone.
    """
    if kernel := _find(name, config):
        return kernel
    with _building:
        return _find(name, config) or _build(name, config)


def why_not_at_hand(name: str, config: Any, *, build: bool) -> str | None:
    """Why `lookup` would fail, or None. Cheap, builds nothing and never raises.

    Args:
        name, config: as in `lookup`.
        build: whether a kernel counts as at hand that `lookup` would build.
    """
    try:
        if _find(name, config):
            return None
        if build and _why_not_built(name) is None:
            _make_cache(cache_directory())
            return None
    except (RuntimeError, OSError) as error:
        return str(error)
    return "run python -m jax_qla.kernels.build"


@functools.cache
def why_not_buildable() -> str | None:
    """What a build lacks on this machine, or None if kernels can be built here."""
    if importlib.util.find_spec("tilelang") is None:
        return "TileLang is not installed; install a wheel of jax_qla, which has all kernels, or jax_qla[kernels]"
    from jax_qla.kernels import toolchain

    try:
        toolchain.find_nvrtc()
        _compilers()  # An entry names them; what was found by path has no version.
    except (FileNotFoundError, importlib.metadata.PackageNotFoundError) as error:
        return str(error)
    return None


def packaged_cuda() -> str | None:
    """Version of the newest CUDA that compiled a packaged kernel; None without any, or if no manifest says so."""
    try:
        versions = {entry["versions"]["cuda"] for entry in packaged_manifest().values()}
        return max(versions, key=lambda version: [int(part) for part in version.split(".")], default=None)
    except (ManifestError, LookupError, TypeError, ValueError, AttributeError):
        return None  # `lookup` says what is wrong with it.


def directories() -> list[str]:
    """Folders in which the extension looks for cubins.

    Raises:
        KernelNotFoundError: as `cache_directory`.
    """
    return [str(PACKAGED_DIRECTORY), str(cache_directory())]


def cache_directory() -> Path:
    """The user's cache, by its absolute path, without links; it may not exist.

    Raises:
        KernelNotFoundError: it has no such path.
    """
    try:
        if chosen := os.environ.get("JAX_QLA_CACHE"):
            return Path(os.path.realpath(os.path.expanduser(chosen)))
        with contextlib.suppress(RuntimeError):  # A user without a home, as some containers have.
            return Path(os.path.realpath(Path.home() / ".cache" / "jax_qla"))
        return Path(tempfile.gettempdir()) / f"jax_qla-{os.getuid()}"
    except OSError as error:  # A relative path in a folder that was removed.
        message = f"the kernel cache has no place ({error}); set JAX_QLA_CACHE to another folder"
        raise KernelNotFoundError(message) from error


@functools.cache
def key(name: str, config: Any) -> str:
    """Identifies a kernel: name, configuration and source."""
    text = json.dumps([name, config_fields(config), source_hash(name)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def config_fields(config: Any) -> dict[str, Any]:
    """A Config as JSON."""
    return dataclasses.asdict(config)


def _sources_of(name: str) -> tuple[str, ...]:
    """Files of jax_qla/kernels from which a kernel is built."""
    return (*_OWN_SOURCES.get(name, (f"{name}.py",)), *_SHARED_SOURCES)


@functools.cache
def source_hash(name: str) -> str:
    """Hash of a kernel's source and of what it is built with.

    Raises:
        KernelNotFoundError: the source is not there.
    """
    digest = hashlib.sha256()
    for file in _sources_of(name):
        if file not in _SOURCES:
            raise KernelNotFoundError(f"{_KERNELS / file}, by which kernels are found, is missing; reinstall jax_qla")
        digest.update(_SOURCES[file])
    return digest.hexdigest()


def vouched_manifest() -> str:
    """sha256 of the manifest that the extension was built with; "" if it vouches for none (editable installations)."""
    try:
        from jax_qla import _ffi
    except ImportError:  # Nothing can be launched then, and jax_qla.launch says so.
        return ""
    return _ffi.build_info()["manifest_sha256"]


def read_manifest(directory: Path) -> Mapping[str, Any]:
    """Entries of a folder by key; empty if it has no manifest.

    Raises:
        ManifestError: it cannot be read.
    """
    return _read_manifest(directory, "")


def write_manifest(directory: Path, entries: Mapping[str, Any], *, keep_others: bool = False) -> None:
    """Writes a folder's manifest, atomically; cubins that no entry names are removed.

    Args:
        directory: the folder.
        entries: entries by key.
        keep_others: keep the entries of other kernels, and of other configurations of the same source.
    """
    kernels = dict(entries)
    if keep_others:
        new = [(entry["kernel"], entry["config"]) for entry in entries.values()]
        sources = {name: source_hash(name) for name, _ in new}
        for key, entry in read_manifest(directory).items():
            name = entry["kernel"]
            if (name, entry["config"]) not in new and entry["source"] == sources.get(name, entry["source"]):
                kernels[key] = entry
    content = json.dumps({"kernels": dict(sorted(kernels.items()))}, indent=1)
    _write_atomically(directory / "manifest.json", content.encode(), _PACKAGED_MODE)
    named = {entry["sha256"] for entry in kernels.values()}
    for file in directory.glob("*.cubin"):
        if file.stem not in named:
            file.unlink(missing_ok=True)


def has_cubin(directory: Path, sha256: str) -> bool:
    """Whether a folder has this cubin, undamaged."""
    try:
        return hashlib.sha256(_cubin(directory, sha256).read_bytes()).hexdigest() == sha256
    except OSError:
        return False


def write_cubin(directory: Path, cubin: bytes, *, mode: int = _PACKAGED_MODE) -> None:
    """Writes a cubin under its sha256, atomically; by default everybody can read it."""
    _write_atomically(_cubin(directory, hashlib.sha256(cubin).hexdigest()), cubin, mode)


def _find(name: str, config: Any) -> Kernel | None:
    """A kernel that is packaged or cached. What was found once is remembered, what was not is looked for again."""
    kernel = _found.get((name, config))
    if kernel is None:
        kernel = _find_packaged(name, config) or _find_cached(name, config)
        if kernel is not None:
            _found[name, config] = kernel
    return kernel


def _find_packaged(name: str, config: Any) -> Kernel | None:
    entry = packaged_manifest().get(key(name, config))
    if entry is None:
        return None
    try:
        kernel = _kernel(entry, name, config, "packaged")
    except (ValueError, LookupError, TypeError) as error:
        raise ManifestError(_damaged(PACKAGED_DIRECTORY / "manifest.json", error)) from error
    return kernel if _cubin(PACKAGED_DIRECTORY, kernel.sha256).is_file() else None


def _kernel(entry: Any, name: str, config: Any, source: str) -> Kernel:
    """What an entry says. Raises ValueError, LookupError or TypeError if it is damaged or another kernel's."""
    if (entry["kernel"], entry["config"], entry["source"]) != (name, config_fields(config), source_hash(name)):
        raise ValueError(f"the entry of {name} is that of {entry['kernel']} {entry['config']}")
    return Kernel(entry["sha256"], entry["plan"], source)


def _find_cached(name: str, config: Any) -> Kernel | None:
    """A kernel of the cache, unless its files are damaged or the compilers have changed: then it is built anew."""
    cache = cache_directory()
    try:
        if not cache.exists():
            return None
    except OSError as error:
        raise PermissionError(_unusable(cache, "read", error)) from error
    check_trust(cache)
    try:
        entry = json.loads((cache / f"{key(name, config)}.json").read_bytes())
        kernel = _kernel(entry, name, config, "cache")
        cubin = _cubin(cache, kernel.sha256).read_bytes()
        compilers = {name: entry["versions"][name] for name in ("tilelang", "cuda")}
    except (OSError, ValueError, LookupError, TypeError):
        return None
    if hashlib.sha256(cubin).hexdigest() != kernel.sha256:
        return None
    if why_not_buildable() is None and compilers != _compilers():
        return None
    return kernel


def _compilers() -> dict[str, str]:
    """Versions of those that would build here.

    Raises:
        PackageNotFoundError: one was not installed by a package manager.
    """
    from jax_qla.kernels import toolchain

    return {"tilelang": importlib.metadata.version("tilelang"), "cuda": toolchain.cuda_version()}


def _why_not_built(name: str) -> str | None:
    """What a build of this kernel lacks. Its modules are imported when they are first needed, and may be newer by then
    than `_SOURCES`: the key would be that of another program."""
    if reason := why_not_buildable():
        return reason
    now = _read(_KERNELS)
    for file in _sources_of(name):
        if now.get(file) != _SOURCES.get(file):
            return f"{_KERNELS / file} has changed since jax_qla was imported; start Python anew"
    return None


def _build(name: str, config: Any) -> Kernel:
    cache = cache_directory()
    settings = ", ".join(f"{field}={value}" for field, value in config_fields(config).items())
    missing = (
        f"the kernel {name}({settings}) is neither in {PACKAGED_DIRECTORY} nor in {cache}, and cannot be built here"
    )
    if reason := _why_not_built(name):
        raise KernelNotFoundError(f"{missing}: {reason}")
    _make_cache(cache)
    try:
        with locked(cache / f".{key(name, config)}.lock"):
            # Another process may have built it while this one waited.
            return _find(name, config) or _build_into(cache, name, config, settings)
    except ImportError as error:
        raise KernelNotFoundError(f"{missing}: {error}") from error


def _build_into(cache: Path, name: str, config: Any, settings: str) -> Kernel:
    from jax_qla.kernels.build import build  # the compilers are imported only where they are used

    print(f"jax_qla: building the kernel {name}({settings}) into {cache}", file=sys.stderr, flush=True)
    cubin, entry, _ = build(name, config)
    try:
        write_cubin(cache, cubin, mode=_CACHE_MODE)
        _write_atomically(cache / f"{key(name, config)}.json", json.dumps(entry).encode(), _CACHE_MODE)
    except OSError as error:
        raise KernelNotFoundError(_unusable(cache, "written", error)) from error
    kernel = _found[name, config] = Kernel(entry["sha256"], entry["plan"], "built")
    return kernel


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other processes of this machine out, by a folder, or a file, which is made; they wait. The lock ends with
    its process, however that ends."""
    import fcntl  # which Windows has not, where nothing is built

    try:
        how = os.O_RDONLY if path.is_dir() else os.O_CREAT | os.O_RDWR
        file = os.open(path, how | os.O_CLOEXEC, _CACHE_MODE)
    except OSError as error:
        raise KernelNotFoundError(_unusable(path.parent, "written", error)) from error
    try:
        with contextlib.suppress(OSError):  # Without locks (some network file systems) each process builds its own.
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _unusable(cache: Path, how: str, error: OSError) -> str:
    return f"the kernel cache {cache} cannot be {how} ({error}); set JAX_QLA_CACHE to another folder"


def packaged_manifest() -> Mapping[str, Any]:
    """Entries of the package's kernels by key; empty if it has none.

    Raises:
        ManifestError: it cannot be read, is damaged or not the wheel's.
    """
    return _read_manifest(PACKAGED_DIRECTORY, vouched_manifest())


def _read_manifest(directory: Path, vouched: str) -> Mapping[str, Any]:
    path = directory / "manifest.json"
    try:
        status = path.stat()
        return _parse_manifest(path, vouched, status.st_mtime_ns, status.st_size)
    except FileNotFoundError:
        if vouched:
            message = f"{path}, which belongs to this wheel of jax_qla, is missing; reinstall jax_qla"
            raise ManifestError(message) from None
        return {}
    except OSError as error:
        raise ManifestError(f"{path} cannot be read ({error}); make it readable, or reinstall jax_qla") from error


@functools.lru_cache(maxsize=4)
def _parse_manifest(path: Path, vouched: str, time: int, size: int) -> Mapping[str, Any]:
    """The entries of a manifest; `time` and `size` make sure that one which was written anew is read anew."""
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if vouched and found != vouched:
        raise ManifestError(
            f"{path} must be the manifest that this wheel of jax_qla was built with (sha256 {vouched}), but has sha256 "
            f"{found}; reinstall jax_qla"
        )
    try:
        kernels: Mapping[str, Any] = json.loads(content)["kernels"]
        if not isinstance(kernels, dict):
            raise TypeError(f"its kernels are a {type(kernels).__name__}")
    except (ValueError, LookupError, TypeError) as error:
        raise ManifestError(_damaged(path, error)) from error
    return kernels


def _damaged(path: Path, error: Exception) -> str:
    return f"{path} is damaged ({error!r}); remove it and run python -m jax_qla.kernels.build"


def _cubin(directory: Path, sha256: str) -> Path:
    return directory / f"{sha256}.cubin"


def _make_cache(cache: Path) -> None:
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        message = f"the kernel cache cannot be made ({error}); set JAX_QLA_CACHE to another folder"
        raise KernelNotFoundError(message) from error
    check_trust(cache)


def check_trust(cache: Path) -> None:
    """Raises PermissionError unless the cache is a folder of the user, not a link to one, and closed to others."""
    status = cache.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"the kernel cache {cache} must be a folder, and is none; set JAX_QLA_CACHE to one")
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(
            f"the kernel cache {cache} must be a folder of user {os.getuid()} with mode 0700, but belongs to user "
            f"{status.st_uid} and has mode {stat.S_IMODE(status.st_mode):04o}; run chmod 700 on it or set "
            "JAX_QLA_CACHE to another folder"
        )


def _write_atomically(path: Path, content: bytes, mode: int) -> None:
    """A reader sees the whole file or none, whoever else writes it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.chmod(file.name, mode)
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise
