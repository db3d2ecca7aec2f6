"""jax_qla/store.py: where kernels are found, and what is refused. Nothing is compiled here."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import multiprocessing
import os
import stat
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import jax_qla
from jax_qla import _ffi, implementations, policy, store
from jax_qla.cuda import rule, support
from jax_qla.kernels.packaged import PACKAGED
from jax_qla.residuals import KEPT, splits

NAME = "prepare"


@dataclasses.dataclass(frozen=True)
class Config:
    key_dim: int = 64
    dtype: str = "bfloat16"


PLAN = {"name": "prepare_kernel"}
VERSION = "9.8.7"
CUDA = "12.6.77"


def entry_of(cubin: bytes, config: Config, version: str = VERSION) -> dict[str, Any]:
    return {
        "kernel": NAME,
        "config": dataclasses.asdict(config),
        "source": store.source_hash(NAME),
        "sha256": hashlib.sha256(cubin).hexdigest(),
        "plan": PLAN,
        "resources": {},
        "versions": {"tilelang": version, "cuda": CUDA},
    }


class Builds:
    """What stands for `jax_qla.kernels.build`: its cubins are the configuration and a serial number."""

    def __init__(self) -> None:
        self.done: list[tuple[str, Any]] = []
        self.reason: str | None = None

    def build(self, name: str, config: Any) -> tuple[bytes, dict[str, Any], str]:
        self.done.append((name, config))
        cubin = f"{name} {config} {len(self.done)}".encode()
        return cubin, entry_of(cubin, config), "source"


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the package's kernels."""
    folder = tmp_path / "packaged"
    folder.mkdir()
    monkeypatch.setattr(store, "PACKAGED_DIRECTORY", folder)
    monkeypatch.setattr(store, "vouched_manifest", lambda: "")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, which does not exist yet, in a process that has found no kernel yet."""
    monkeypatch.setenv("JAX_QLA_CACHE", str(tmp_path / "home" / "cache"))
    new_process(monkeypatch)
    return tmp_path / "home" / "cache"


@pytest.fixture
def builds(packaged: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Builds]:
    """A stand-in for the compilers."""
    from jax_qla.kernels import toolchain

    builds = Builds()
    module: Any = types.ModuleType("jax_qla.kernels.build")
    module.build = builds.build
    versions = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: VERSION if name == "tilelang" else versions(name))
    monkeypatch.setattr(toolchain, "cuda_version", lambda: CUDA)
    monkeypatch.setattr(store, "why_not_buildable", lambda: builds.reason)
    with mock.patch.dict(sys.modules, {module.__name__: module}):
        yield builds


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets what was found."""
    monkeypatch.setattr(store, "_found", {})


def package(folder: Path, config: Config, cubin: bytes = b"packaged") -> None:
    store.write_cubin(folder, cubin)
    store.write_manifest(folder, {store.key(NAME, config): entry_of(cubin, config)}, keep_others=True)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_order(builds: Builds, packaged: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built where it is nowhere, then found in the cache, and in the package before that."""
    kernel = store.lookup(NAME, Config())
    assert (kernel.source, kernel.plan) == ("built", PLAN)
    assert (cache / f"{kernel.sha256}.cubin").is_file()
    assert store.lookup(NAME, Config()) is kernel
    new_process(monkeypatch)
    assert store.lookup(NAME, Config()) == dataclasses.replace(kernel, source="cache")
    package(packaged, Config())
    assert store.lookup(NAME, Config()).source == "cache"
    new_process(monkeypatch)
    found = store.lookup(NAME, Config())
    assert (found.source, found.sha256) == ("packaged", hashlib.sha256(b"packaged").hexdigest())
    assert len(builds.done) == 1
    assert store.directories() == [str(packaged), str(cache)]


def test_configurations_are_apart(builds: Builds, packaged: Path) -> None:
    package(packaged, Config())
    assert store.lookup(NAME, Config()).source == "packaged"
    assert store.lookup(NAME, Config(key_dim=128)).source == "built"
    assert builds.done == [(NAME, Config(key_dim=128))]


def test_a_build_says_so(builds: Builds, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store.lookup(NAME, Config())
    store.lookup(NAME, Config())
    line = f"jax_qla: building the kernel prepare(key_dim=64, dtype=bfloat16) into {cache}\n"
    assert capsys.readouterr() == ("", line)


def test_key_depends_on_name_configuration_and_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources = dict(store._SOURCES)
    monkeypatch.setattr(store, "_SOURCES", sources)
    monkeypatch.setattr(store, "_KERNELS", tmp_path)  # what the files have become since does not count

    def keys() -> list[str]:
        store.key.cache_clear()
        store.source_hash.cache_clear()
        return [store.key("prepare", Config()), store.key("prepare", Config(128)), store.key("states", Config())]

    def changed_by(file: str) -> list[bool]:
        sources[file] += b"# changed\n"
        before[:], former = keys(), list(before)
        return [old != new for old, new in zip(former, before, strict=True)]

    before = keys()
    try:
        assert len(set(before)) == 3
        assert keys() == before
        assert changed_by("prepare.py") == [True, True, False]
        assert changed_by("inversion.py") == [True, True, False]
        assert changed_by("common.py") == [True, True, True]
        assert changed_by("toolchain.py") == [True, True, True]
        # What is no part of the programs changes nothing.
        assert changed_by("specification.py") == [False, False, False]
        assert changed_by("__init__.py") == [False, False, False]
    finally:
        monkeypatch.undo()
        keys()


def test_sources_of_a_kernel_have_all_its_text() -> None:
    """Every file that a program takes anything from counts, or one that is out of date would be found for it."""

    def taken_from(name: str, known: frozenset[str] = frozenset()) -> set[str]:
        tree = ast.parse(store._SOURCES[f"{name}.py"])
        # Of modules and by their names: specifications, of which no program has anything, do not count.
        attributes = (x for x in ast.walk(tree) if isinstance(x, ast.Attribute) and x.attr != "specification")
        of_modules = {x.value.id for x in attributes if isinstance(x.value, ast.Name)}
        imports = [x for x in tree.body if isinstance(x, ast.ImportFrom)]
        found = {y.name for x in imports if x.module == "jax_qla.kernels" for y in x.names if y.name in of_modules}
        modules = (x.module or "" for x in imports)
        found |= {x.removeprefix("jax_qla.kernels.") for x in modules if x.startswith("jax_qla.kernels.")}
        found.discard("specification")
        return found.union(*(taken_from(x, known | found) for x in found - known))

    kernels = {name for name, _ in PACKAGED}
    assert taken_from("prepare") >= {"common", "inverse", "inversion", "preludes", "products"}
    assert taken_from("gradients_split") >= {"common", "gradient_parts", "macros", "preludes"}
    assert "uncut" in taken_from("compose")
    assert "gradients_split.py" in store._sources_of("gradients")  # which takes its program from there
    for name in kernels:
        assert {f"{x}.py" for x in {name} | taken_from(name)} <= set(store._sources_of(name)), name


def test_sources_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such as the link that Emacs leaves beside a file that it edits; and a kernel without a source is a reason."""
    (tmp_path / ".#prepare.py").symlink_to("somebody@somewhere.1")
    (tmp_path / "prepare.py").write_bytes(b"program")
    assert store._read(tmp_path) == {"prepare.py": b"program"}
    assert store._read(tmp_path / "nowhere") == {}
    monkeypatch.setattr(store, "_SOURCES", {})
    store.key.cache_clear()
    store.source_hash.cache_clear()
    assert "prepare.py, by which kernels are found, is missing" in str(
        store.why_not_at_hand(NAME, Config(), build=False)
    )


def test_sources_that_changed_since_are_not_built(
    builds: Builds, packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program in memory may be the one or the other; what is found needs none."""
    for name, content in store._SOURCES.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(store, "_KERNELS", tmp_path)
    assert store.lookup(NAME, Config(64)).source == "built"
    (tmp_path / "plan.py").write_text("# changed")
    assert store.lookup(NAME, Config(64)).source == "built"
    with pytest.raises(store.KernelNotFoundError, match=r"plan\.py has changed since jax_qla was imported; start Pyt"):
        store.lookup(NAME, Config(128))
    assert store.why_not_at_hand(NAME, Config(128), build=True) is not None
    assert len(builds.done) == 1


def test_content_addressing_and_modes(builds: Builds, packaged: Path, cache: Path) -> None:
    """What the package holds is for all to read, what the cache holds for its user alone."""
    former = os.umask(0o077)
    try:
        package(packaged, Config(), b"one")
        store.lookup(NAME, Config(128))
    finally:
        os.umask(former)
    assert {mode(file) for file in packaged.iterdir()} == {0o644}
    assert mode(cache) == 0o700
    assert {mode(file) for file in cache.iterdir()} == {0o600}
    files = [*packaged.glob("*.cubin"), *cache.glob("*.cubin")]
    assert [file.stem for file in files] == [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert len(files) == 2


def test_manifest_forgets_what_is_replaced(packaged: Path) -> None:
    package(packaged, Config(64), b"one")
    package(packaged, Config(128), b"two")
    stale = {**entry_of(b"three", Config(64)), "source": "of yesterday"}
    store.write_cubin(packaged, b"three")
    store.write_manifest(packaged, {"key of yesterday": stale}, keep_others=True)
    store.write_cubin(packaged, b"four")
    package(packaged, Config(64), b"four")
    contents = {file.read_bytes() for file in packaged.glob("*.cubin")}
    assert contents == {b"two", b"four"}
    assert {entry["sha256"] for entry in store.read_manifest(packaged).values()} == {
        hashlib.sha256(content).hexdigest() for content in contents
    }
    older = {**entry_of(b"five", Config(192)), "source": "of yesterday"}
    store.write_cubin(packaged, b"five")
    store.write_manifest(packaged, {"key of yesterday": older}, keep_others=True)
    package(packaged, Config(64), b"four")  # a configuration of an older source is nobody's any more
    assert {file.read_bytes() for file in packaged.glob("*.cubin")} == {b"two", b"four"}
    store.write_manifest(packaged, {})
    assert [file.name for file in packaged.iterdir()] == ["manifest.json"]


def _write_much(folder: str, process: int) -> None:
    for _ in range(20):
        store.write_cubin(Path(folder), bytes(100_000))
        entry = {"process": process, "padding": "x" * 100_000}
        store.write_manifest(Path(folder), {"key": {**entry, "sha256": hashlib.sha256(bytes(100_000)).hexdigest()}})


def _write_much_at_once(folder: str) -> None:
    """Three processes, of which each has what this one has imported."""
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_much, args=(folder, process)) for process in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]


def test_many_processes_write_at_once(tmp_path: Path) -> None:
    """A reader sees whole files only."""
    writing = multiprocessing.get_context("spawn").Process(target=_write_much_at_once, args=(str(tmp_path),))
    writing.start()
    reads = 0
    while writing.is_alive():
        if not (tmp_path / "manifest.json").exists():
            time.sleep(0.001)
            continue
        (entry,) = store.read_manifest(tmp_path).values()
        assert len((tmp_path / f"{entry['sha256']}.cubin").read_bytes()) == 100_000
        reads += 1
    assert writing.exitcode == 0
    assert reads > 0
    assert len(list(tmp_path.iterdir())) == 2


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with mock.patch.object(os, "replace", side_effect=OSError("disk full")), pytest.raises(OSError, match="disk full"):
        store.write_cubin(tmp_path, b"cubin")
    assert list(tmp_path.iterdir()) == []


# What is not trusted


@pytest.mark.parametrize("bits", [0o777, 0o750, 0o701])
def test_a_cache_open_to_others(builds: Builds, packaged: Path, cache: Path, bits: int) -> None:
    cache.mkdir(parents=True)
    cache.chmod(bits)
    with pytest.raises(
        PermissionError, match=rf"cache {cache} must be a folder of user .* mode {bits:04o}; run chmod 700"
    ):
        store.lookup(NAME, Config())
    assert "must be a folder of user" in str(store.why_not_at_hand(NAME, Config(), build=False))
    assert builds.done == []
    # The package needs no cache.
    package(packaged, Config())
    assert store.lookup(NAME, Config()).source == "packaged"
    assert store.why_not_at_hand(NAME, Config(), build=False) is None


def test_a_cache_of_somebody_else(builds: Builds, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.lookup(NAME, Config())
    new_process(monkeypatch)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {user} and has mode 0700"):
        store.lookup(NAME, Config())


def test_a_cache_that_is_no_folder(builds: Builds, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("not a folder")
    cache.chmod(0o600)
    with pytest.raises(PermissionError, match="must be a folder, and is none; set JAX_QLA_CACHE to one"):
        store.lookup(NAME, Config())
    cache.unlink()
    cache.parent.rmdir()
    cache.parent.write_text("not a folder")
    with pytest.raises(store.KernelNotFoundError, match=r"the kernel cache cannot be made .* set JAX_QLA_CACHE"):
        store.lookup(NAME, Config())
    assert "run python -m jax_qla.kernels.build" in str(store.why_not_at_hand(NAME, Config(), build=False))


# What is damaged


def _truncate_cubin(cache: Path) -> None:
    (file,) = cache.glob("*.cubin")
    file.write_bytes(file.read_bytes()[:-1])


def _remove_cubin(cache: Path) -> None:
    (file,) = cache.glob("*.cubin")
    file.unlink()


def _truncate_entry(cache: Path) -> None:
    (file,) = cache.glob("*.json")
    file.write_bytes(file.read_bytes()[:-1])


def _empty_entry(cache: Path) -> None:
    (file,) = cache.glob("*.json")
    file.write_text("{}")


def _strange_entry(cache: Path) -> None:
    (file,) = cache.glob("*.json")
    file.write_text("[1]")


def _older_compiler(cache: Path) -> None:
    (file,) = cache.glob("*.json")
    file.write_text(file.read_text().replace(VERSION, "0.0.1"))


def _older_nvrtc(cache: Path) -> None:
    (file,) = cache.glob("*.json")
    file.write_text(file.read_text().replace(CUDA, "12.0.1"))


DAMAGES = [_truncate_cubin, _remove_cubin, _truncate_entry, _empty_entry, _strange_entry, _older_compiler, _older_nvrtc]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_old_entry_is_built_anew(
    builds: Builds, cache: Path, damage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.lookup(NAME, Config())
    damage(cache)
    new_process(monkeypatch)
    assert store.why_not_at_hand(NAME, Config(), build=False) is not None
    assert store.lookup(NAME, Config()).source == "built"
    new_process(monkeypatch)
    assert store.lookup(NAME, Config()).source == "cache"
    assert len(builds.done) == 2


def test_an_old_entry_serves_where_nothing_can_be_built(
    builds: Builds, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.lookup(NAME, Config())
    _older_compiler(cache)
    new_process(monkeypatch)
    builds.reason = "TileLang is not installed"
    assert store.lookup(NAME, Config()).source == "cache"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"other": {}}'])
def test_a_damaged_manifest(builds: Builds, packaged: Path, content: str) -> None:
    (packaged / "manifest.json").write_text(content)
    with pytest.raises(store.ManifestError, match=r"manifest\.json is damaged"):
        store.lookup(NAME, Config())
    assert "is damaged" in str(store.why_not_at_hand(NAME, Config(), build=False))


def test_a_manifest_that_cannot_be_read(builds: Builds, packaged: Path) -> None:
    (packaged / "manifest.json").mkdir()
    with pytest.raises(store.ManifestError, match=r"manifest\.json cannot be read .*; make it readable"):
        store.lookup(NAME, Config())
    assert store.packaged_cuda() is None


def test_a_packaged_cubin_that_is_missing(builds: Builds, packaged: Path) -> None:
    package(packaged, Config())
    _remove_cubin(packaged)
    assert store.lookup(NAME, Config()).source == "built"


def test_the_manifest_that_the_extension_vouches_for(
    builds: Builds, packaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(packaged, Config())
    manifest = packaged / "manifest.json"
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
    monkeypatch.setattr(store, "vouched_manifest", lambda: digest)
    assert store.lookup(NAME, Config()).source == "packaged"
    new_process(monkeypatch)
    manifest.write_text(manifest.read_text() + " ")
    with pytest.raises(
        store.ManifestError, match=f"built with .sha256 {digest}., but has sha256 .*; reinstall jax_qla"
    ):
        store.lookup(NAME, Config())
    manifest.unlink()
    with pytest.raises(
        store.ManifestError, match=r"manifest\.json, which belongs to this wheel of jax_qla, is missing"
    ):
        store.lookup(NAME, Config())
    assert builds.done == []


def test_what_the_extension_vouches_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.vouched_manifest() == _ffi.build_info()["manifest_sha256"]
    monkeypatch.delattr(jax_qla, "_ffi")
    monkeypatch.setitem(sys.modules, "jax_qla._ffi", None)
    assert store.vouched_manifest() == ""


# Where nothing can be built


def test_of_a_compiler_found_by_path_no_version_is_known(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    store.lookup(NAME, Config())

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    builds.reason = "No package metadata was found for tilelang"  # test_what_a_build_lacks
    new_process(monkeypatch)
    assert store.why_not_at_hand(NAME, Config(), build=False) is None
    assert store.lookup(NAME, Config()).source == "cache"


def test_cache_of_a_relative_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_QLA_CACHE", "cache")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert store.cache_directory() == tmp_path / "cache"
    monkeypatch.setenv("JAX_QLA_CACHE", "~/cache")
    assert store.cache_directory() == Path("/home/somebody/cache")


def test_without_tilelang(builds: Builds, packaged: Path, cache: Path) -> None:
    builds.reason = "TileLang is not installed"
    with pytest.raises(store.KernelNotFoundError) as error:
        store.lookup(NAME, Config())
    assert str(error.value) == (
        f"the kernel prepare(key_dim=64, dtype=bfloat16) is neither in {packaged} nor in {cache}, and cannot be built "
        "here: TileLang is not installed"
    )
    assert not cache.exists()


def test_what_a_build_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax_qla.kernels import toolchain

    reason = store.why_not_buildable.__wrapped__
    with mock.patch.object(importlib.util, "find_spec", return_value=None):
        assert "jax_qla[kernels]" in str(reason())
    with mock.patch.object(importlib.util, "find_spec"):
        with mock.patch.object(toolchain, "find_nvrtc", side_effect=FileNotFoundError("NVRTC was not found")):
            assert reason() == "NVRTC was not found"
        monkeypatch.setattr(toolchain, "cuda_version", lambda: CUDA)
        with mock.patch.object(toolchain, "find_nvrtc"), mock.patch.object(importlib.metadata, "version") as version:
            assert reason() is None
            version.side_effect = importlib.metadata.PackageNotFoundError("tilelang")
            assert reason() == "No package metadata was found for tilelang"


# What it means for the choice of an implementation


def operands(key_dim: int = 64, value_dim: int = 128, dtype: Any = jnp.bfloat16) -> tuple[jax.ShapeDtypeStruct, ...]:
    k = jax.ShapeDtypeStruct((1, 5, 2, key_dim), dtype)
    return k, k, jax.ShapeDtypeStruct((1, 5, 2, value_dim), dtype)


def choose(implementation: Any = None) -> implementations.Choice:
    return implementations.choose(*operands(), implementation=implementation, precision=None)


def hopper() -> Any:
    device = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA Test", compute_capability="9.0")
    return mock.patch.object(implementations, "cuda_devices", return_value=[device])


NOT_BUILT = "'cuda' was passed over: its kernels are not built: run python -m jax_qla.kernels.build"


def test_kernels_that_are_not_built_are_passed_over(builds: Builds) -> None:
    """Without a device for them, they are not even built where that is possible."""
    for builds.reason in (None, "TileLang is not installed"):
        for implementation in (None, ("cuda", "xla")):
            choice = choose(implementation)
            assert (choice.on_cuda, choice.elsewhere) == ("xla", "xla")
            assert choice.why_on_cuda == NOT_BUILT
            assert "its kernels are not built" in choice.why_elsewhere
    with hopper():
        assert choose().why_on_cuda == NOT_BUILT
        builds.reason = None
        assert choose().on_cuda == "cuda"
    assert builds.done == []


def test_kernels_asked_for_by_name_are_not_passed_over(builds: Builds) -> None:
    builds.reason = "TileLang is not installed"
    assert choose("cuda").on_cuda == "cuda"


def test_kernels_that_are_at_hand_are_taken(builds: Builds, packaged: Path) -> None:
    needed = support._needed(support._CHUNKED, key_dim=64, value_dim=128, dtype="bfloat16", split=False)
    others = {
        "recurrent",
        "convolution",
        "convolution_gradients",
        "gated_norm",
        "backward",
    }  # the last is of K = V = 128
    of_these_sizes = {name for name, _ in PACKAGED} - others
    assert {name for name, _ in needed} == of_these_sizes
    entries = {}
    for name, config in needed:
        cubin = f"{name} {config}".encode()
        store.write_cubin(packaged, cubin)
        source = store.source_hash(name)
        entries[store.key(name, config)] = {**entry_of(cubin, config), "kernel": name, "source": source}
    first = dict(list(entries.items())[1:])
    store.write_manifest(packaged, first)
    assert choose().on_cuda == "xla"
    for name, config in needed:
        store.write_cubin(packaged, f"{name} {config}".encode())
    store.write_manifest(packaged, entries)
    assert choose().on_cuda == "cuda"
    assert choose().elsewhere == "xla"
    # Other sizes need other kernels, and so does another precision.
    for size, precision in ((128, None), (64, "high")):
        other = implementations.choose(*operands(size), implementation=None, precision=precision)
        assert other.why_on_cuda == NOT_BUILT
    assert builds.done == []


def test_a_broken_cache_is_a_reason(builds: Builds, cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o755)
    assert "its kernels are not built: the kernel cache" in choose().why_on_cuda
    with hopper():
        assert "its kernels are not built: the kernel cache" in choose().why_on_cuda
        cache.rmdir()
        with mock.patch.object(Path, "mkdir", side_effect=PermissionError("read-only")):
            assert "the kernel cache cannot be made (read-only)" in choose().why_on_cuda
        assert choose().on_cuda == "cuda"
    assert builds.done == []


@pytest.mark.parametrize("piece_rows", ["0", "64"], ids=["whole", "in pieces"])
def test_every_kernel_that_a_call_can_ask_for_is_packaged(piece_rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all sizes, dtypes and tiles, by the steps that `rule` makes."""
    asked: set[tuple[str, Any]] = set()
    of_shards: set[tuple[str, Any]] = set()

    def recording(into: set[tuple[str, Any]]) -> Any:
        def launch(steps: Any, inputs: Any, outputs: Any, aliases: Any = None, within: Any = None) -> Any:
            into.update((step.kernel, step.config) for step in steps)
            return {name: jax.lax.empty(x.shape, x.dtype) for name, x in outputs.items()}  # what is traced fastest

        return launch

    monkeypatch.setattr("jax_qla.launch.launch", recording(asked))
    monkeypatch.setenv(policy.OVERRIDE, piece_rows)
    shape: Any = jax.ShapeDtypeStruct
    for key_dim, value_dim, dtype in itertools.product(support.HEAD_DIMS, support.HEAD_DIMS, support.DTYPES):
        # Whether q and k are normalised, and value heads of a key head, by which it depends who then measures them.
        ways = ((False, 1), (True, 1), (True, 2)) if dtype in rule.L2NORM_DTYPES else ((False, 1),)
        precisions = (None, "high")
        for heads, packed, (l2norm, ratio), precision, keep in itertools.product(
            (1, 33, 66, 67, 1000), (False, True), ways, precisions, KEPT
        ):
            if keep == "vd" and splits(precision, dtype):
                continue
            key_heads = -(-heads // ratio)
            k, v = (shape((1, 400, *sizes), dtype) for sizes in ((key_heads, key_dim), (ratio * key_heads, value_dim)))
            g, segments = shape(v.shape[:3], "float32"), shape((3, 2), "int32") if packed else None
            common: dict[str, Any] = {"scale": 1.0, "l2norm": l2norm, "precision": precision}
            if keep != "nothing" and piece_rows != "0":
                common["piece_rows"] = int(piece_rows)

            def both(k: Any, v: Any, g: Any, segments: Any, common: dict[str, Any] = common, keep: Any = keep) -> Any:
                options = common | {"output_final_state": True, "with_residuals": True, "keep": keep}
                o, final_state, residuals = rule.forward(k, k, v, g, g, None, segments, **options)
                assert residuals is not None
                return rule.backward(k, k, v, g, g, None, segments, residuals, o, final_state, **common)

            def of_a_shard(k: Any, v: Any, g: Any, common: dict[str, Any] = common, keep: Any = keep) -> Any:
                options: Any = {name: common[name] for name in ("l2norm", "precision")} | {"cut": policy.Cut(64, 7)}
                *_, residuals, pieces = rule.summary(k, k, v, g, g, None, None, with_residuals=True, **options)
                options |= {"scale": 1.0, "output_final_state": True, "with_residuals": True, "keep": keep}
                return rule.forward(k, k, v, g, g, None, None, residuals, pieces, **options)

            jax.eval_shape(both, k, v, g, segments)
            if ratio == 2 and not packed:  # where it is not `forward` that measures queries
                with monkeypatch.context() as patched:
                    patched.setattr("jax_qla.launch.launch", recording(of_shards))
                    jax.eval_shape(of_a_shard, k, v, g)
    of_pieces = {"layout", "summaries", "adjoint_summaries", "compose"} if piece_rows == "0" else set()
    others = {"recurrent", "convolution", "convolution_gradients", "gated_norm"} | of_pieces
    wanted = {(name, config) for name, config in PACKAGED if name not in others}
    assert asked | {x for x in of_shards if x[0] == "forward"} == wanted
    assert of_shards <= {*PACKAGED}


def test_every_decoding_kernel_that_a_call_can_ask_for_is_packaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all sizes and dtypes, by the step that `rule` makes, which is what it looks for before."""
    asked: set[tuple[str, Any]] = set()
    looked_for: list[tuple[str, Any]] = []

    def at_hand(name: str, config: Any, *, build: bool) -> None:
        looked_for.append((name, config))

    monkeypatch.setattr(store, "why_not_at_hand", at_hand)

    def launch(steps: Any, inputs: Any, outputs: Any, aliases: Any) -> Any:
        asked.update((step.kernel, step.config) for step in steps)
        return {name: jnp.zeros(x.shape, x.dtype) for name, x in outputs.items()}

    monkeypatch.setattr("jax_qla.launch.launch", launch)
    shape: Any = jax.ShapeDtypeStruct
    sizes = itertools.product((1, 2), support.HEAD_DIMS, support.HEAD_DIMS, support.DTYPES, ("float32", "bfloat16"))
    for tokens, key_dim, value_dim, dtype, state_dtype in sizes:
        k, v = shape((1, tokens, 2, key_dim), dtype), shape((1, tokens, 2, value_dim), dtype)
        g, state = shape((1, tokens, 2), jnp.float32), shape((1, 2, key_dim, value_dim), state_dtype)
        function = functools.partial(rule.recurrent, scale=1.0, output_final_state=True)
        jax.eval_shape(function, k, k, v, g, g, state)
        looked_for.clear()
        call = implementations.RecurrentCall(packed=False, state_dtype=state_dtype)
        rule.why_not_recurrent(k, k, v, call=call, build=False)
        assert len(looked_for) == 1
        assert looked_for[0] in asked
    assert asked == {(name, config) for name, config in PACKAGED if name == "recurrent"}
