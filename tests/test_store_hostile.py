"""jax_qla/store.py on hostile ground: unusable caches, full disks, killed and crowding processes, swapped files.

What must not be shared with other tests (the user id, limits, forks) happens in a new Python: a function of SCENARIOS,
whose lines are looked at here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jax_qla import store

NAME = "prepare"
CUBIN = b"cubin " * 20_000
PROCESSES = 200


@dataclasses.dataclass(frozen=True)
class Config:
    key_dim: int = 64
    dtype: str = "bfloat16"


def entry_of(cubin: bytes, config: Config) -> dict[str, Any]:
    return {
        "kernel": NAME,
        "config": dataclasses.asdict(config),
        "source": store.source_hash(NAME),
        "sha256": hashlib.sha256(cubin).hexdigest(),
        "plan": {"name": f"kernel of {config}"},
        "versions": {"tilelang": "1", "cuda": "12.9.86"},
    }


def stand_in(during: Callable[[], None] = lambda: None) -> None:
    """Makes a compiler of this process that builds CUBIN, and calls `during` while it does; no kernel is packaged."""
    module: Any = types.ModuleType("jax_qla.kernels.build")

    def build(name: str, config: Config) -> tuple[bytes, dict[str, Any], str]:
        during()
        return CUBIN, entry_of(CUBIN, config), "source"

    module.build = build
    sys.modules[module.__name__] = module
    versions = importlib.metadata.version
    importlib.metadata.version = lambda distribution_name: (
        "1" if distribution_name == "tilelang" else versions(distribution_name)
    )
    store.why_not_buildable = lambda: None  # type: ignore[assignment]
    store.PACKAGED_DIRECTORY = Path("/nowhere")
    store.vouched_manifest = lambda: ""


def outcome() -> str:
    """How a look-up ends, in one line."""
    store._found.clear()
    try:
        return f"found: {store.lookup(NAME, Config()).source}"
    except (store.KernelNotFoundError, PermissionError) as error:
        return f"{type(error).__name__}: {error}"


# What needs a process of its own


def another_user(folder: Path) -> None:
    """Prints how look-ups end in caches that this user, who is not root, cannot use."""
    stand_in()
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    mine = Path(tempfile.mkdtemp())
    os.environ["JAX_QLA_CACHE"] = "/usr"
    print(outcome())
    os.environ["JAX_QLA_CACHE"] = "/usr/jax_qla"
    print(outcome())
    read_only = mine / "read only"
    read_only.mkdir(mode=0o500)
    os.environ["JAX_QLA_CACHE"] = str(read_only)
    print(outcome())
    closed = mine / "closed"
    closed.mkdir(mode=0)
    os.environ["JAX_QLA_CACHE"] = str(closed / "cache")
    print(outcome())
    good = mine / "good"
    os.environ["JAX_QLA_CACHE"] = str(good)
    print(outcome())
    (good / f"{store.key(NAME, Config())}.json").chmod(0)
    print(outcome())
    print(outcome())
    for folder in (read_only, closed):
        folder.rmdir()


def full_disk(folder: Path) -> None:
    """Prints how look-ups end where no file may grow beyond a limit and what they leave; the last has no limit."""
    stand_in()
    os.environ["JAX_QLA_CACHE"] = str(folder / "cache")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 1000, len(CUBIN), hard):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        print(outcome())
        print(sorted(file.suffix for file in (folder / "cache").iterdir() if file.suffix != ".lock"))


def crowd(folder: Path) -> None:
    """Prints how the look-ups of many processes end that start at once on an empty cache, and the number of builds."""
    builds = os.open(folder / "builds", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def during() -> None:
        os.write(builds, b"x")
        time.sleep(0.3)

    stand_in(during)
    os.environ["JAX_QLA_CACHE"] = str(folder / "cache")
    start, go = os.pipe()
    children = []
    for _ in range(PROCESSES):
        child = os.fork()
        if child == 0:
            os.close(go)
            os.read(start, 1)  # Returns when the parent closes the other end.
            kernel = store.lookup(NAME, Config())
            content = (folder / "cache" / f"{kernel.sha256}.cubin").read_bytes()
            os._exit(0 if content == CUBIN and kernel.plan == entry_of(CUBIN, Config())["plan"] else 1)
        children.append(child)
    os.close(go)
    print({os.waitpid(child, 0)[1] for child in children})
    print((folder / "builds").stat().st_size)


def killed(folder: Path) -> None:
    """Prints what a process leaves that is killed while it builds or writes, and how the next look-up ends."""
    os.environ["JAX_QLA_CACHE"] = str(folder / "cache")
    whole = os.replace

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for place in ("build", "write"):
        child = os.fork()
        if child == 0:
            stand_in(die if place == "build" else lambda: None)
            os.replace = die if place == "write" else whole  # type: ignore[assignment]
            store.lookup(NAME, Config())
            os._exit(0)
        print(os.waitpid(child, 0)[1])
    print(sum(file.suffix in (".cubin", ".json") for file in (folder / "cache").iterdir()))
    stand_in()
    print(outcome())
    print(outcome())


SCENARIOS = {function.__name__: function for function in (another_user, full_disk, crowd, killed)}


def in_new_process(scenario: str, folder: Path) -> list[str]:
    command = [sys.executable, __file__, scenario, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_caches_of_others_and_closed_ones(tmp_path: Path) -> None:
    owned, unmade, read_only, closed, good, unreadable, again = in_new_process("another_user", tmp_path)
    assert owned.startswith("PermissionError: the kernel cache /usr must be a folder of user ")
    assert "belongs to user 0 and has mode" in owned
    assert unmade.startswith("KernelNotFoundError: the kernel cache cannot be made ([Errno 13] Permission denied")
    assert unmade.endswith("set JAX_QLA_CACHE to another folder")
    for line, how in ((read_only, "written"), (closed, "read")):
        assert f" cannot be {how} ([Errno 13] Permission denied" in line
        assert line.endswith("set JAX_QLA_CACHE to another folder")
    assert [good, unreadable, again] == ["found: built", "found: built", "found: cache"]


def test_a_full_disk(tmp_path: Path) -> None:
    lines = in_new_process("full_disk", tmp_path)
    refusals, left = lines[:-2:2], lines[1:-2:2]
    for refusal in refusals[:2]:
        assert refusal.startswith(
            f"KernelNotFoundError: the kernel cache {tmp_path / 'cache'} cannot be written ([Errno"
        )
    assert left[:2] == ["[]"] * 2
    # Room for the cubin is room for its entry.
    assert refusals[2:] == ["found: built"]
    assert lines[-2:] == ["found: cache", "['.cubin', '.json']"]


def test_many_processes_build_once(tmp_path: Path) -> None:
    assert in_new_process("crowd", tmp_path) == ["{0}", "1"]


def test_a_killed_process_leaves_nothing_that_counts(tmp_path: Path) -> None:
    in_build, in_write, files, then, after = in_new_process("killed", tmp_path)
    assert (in_build, in_write) == (str(int(signal.SIGKILL)),) * 2
    assert (files, then, after) == ("0", "found: built", "found: cache")


# What does not


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache with the kernels of two configurations, whose compiler is gone."""
    monkeypatch.setattr(importlib.metadata, "version", importlib.metadata.version)
    for name in ("why_not_buildable", "PACKAGED_DIRECTORY", "vouched_manifest"):
        monkeypatch.setattr(store, name, getattr(store, name))
    monkeypatch.setattr(store, "_found", {})
    monkeypatch.setenv("JAX_QLA_CACHE", str(tmp_path / "cache"))
    with contextlib.ExitStack() as stack:
        module = sys.modules.get("jax_qla.kernels.build")
        stack.callback(lambda: sys.modules.pop("jax_qla.kernels.build"))
        if module is not None:
            stack.callback(lambda: sys.modules.update({"jax_qla.kernels.build": module}))
        stand_in()
        for config in (Config(64), Config(128)):
            store.lookup(NAME, config)
        store._found.clear()
        monkeypatch.setattr(store, "why_not_buildable", lambda: "TileLang is not installed")
        yield tmp_path / "cache"


def test_swapped_entries_are_not_taken(cache: Path) -> None:
    """A cubin under its own sha256, with its own plan, in the place of another kernel."""
    files = [cache / f"{store.key(NAME, config)}.json" for config in (Config(64), Config(128))]
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, reversed(contents), strict=True):
        file.write_bytes(content)
    for config in (Config(64), Config(128)):
        with pytest.raises(store.KernelNotFoundError, match="TileLang is not installed"):
            store.lookup(NAME, config)
        assert store.why_not_at_hand(NAME, config, build=True) is not None


def test_a_swapped_pair_in_a_package(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cubin and manifest together are replaced: a wheel refuses it, and a clone refuses what is another kernel's."""
    packaged = tmp_path / "packaged"
    packaged.mkdir()
    monkeypatch.setattr(store, "PACKAGED_DIRECTORY", packaged)
    good, evil = b"good", b"evil"
    store.write_cubin(packaged, good)
    store.write_manifest(packaged, {store.key(NAME, Config()): entry_of(good, Config())})
    digest = hashlib.sha256((packaged / "manifest.json").read_bytes()).hexdigest()
    store.write_cubin(packaged, evil)
    store.write_manifest(packaged, {store.key(NAME, Config()): entry_of(evil, Config())})
    monkeypatch.setattr(store, "vouched_manifest", lambda: digest)
    with pytest.raises(store.ManifestError, match="reinstall jax_qla"):
        store.lookup(NAME, Config())
    assert "reinstall jax_qla" in str(store.why_not_at_hand(NAME, Config(), build=True))
    monkeypatch.setattr(store, "vouched_manifest", lambda: "")
    store.write_manifest(packaged, {store.key(NAME, Config()): entry_of(evil, Config(128))})
    with pytest.raises(
        store.ManifestError, match=r"manifest\.json is damaged .*the entry of prepare is that of prepare"
    ):
        store.lookup(NAME, Config())


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number nobody has."""

    def nobody(_: int) -> Any:
        raise KeyError("uid not found")

    monkeypatch.delenv("JAX_QLA_CACHE", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert store.cache_directory() == Path(tempfile.gettempdir()) / f"jax_qla-{os.getuid()}"
    assert len(store.directories()) == 2


if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](Path(sys.argv[2]))
