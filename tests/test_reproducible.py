"""Kernels are reproducible: the same source gives the same cubin, and packaged cubins are those of the sources here.

Where jax_qla/cubins is filled (by `make kernels`, or in a wheel) all of it is looked at. A clone has none, as git
ignores it; there a kernel is built twice all the same, in two processes that share nothing.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from thorough import only_thorough

from jax_qla import store
from jax_qla.kernels.packaged import PACKAGED

LACKING = store.why_not_buildable()
needs_compilers = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
HEXADECIMAL = re.compile("[0-9a-f]{64}")

BUILD = """
import hashlib, json, sys
from jax_qla.kernels import build
from jax_qla.kernels.packaged import PACKAGED
cubin, entry, source = build.build(*PACKAGED[int(sys.argv[1])])
print(json.dumps([hashlib.sha256(cubin).hexdigest(), hashlib.sha256(source.encode()).hexdigest(), entry]))
"""


def packaged() -> Mapping[str, Any]:
    entries = store.packaged_manifest()
    if not entries:
        pytest.skip("no kernels are packaged here; `make kernels` builds them")
    return entries


def what_is_stale(entries: Mapping[str, Any], folder: Path) -> list[str]:
    """What of a package is not what its sources here would give, as sentences."""
    wanted = {store.key(name, config): (name, config) for name, config in PACKAGED}
    stale = [
        f"{name} {config} has changed or was never built"
        for key, (name, config) in wanted.items()
        if key not in entries
    ]
    for key, entry in entries.items():
        label = f"{entry['kernel']} {entry['config']}"
        if key not in wanted:
            stale.append(f"{label} is of an older source")
            continue
        if entry["source"] != store.source_hash(entry["kernel"]):
            stale.append(f"{label} has the hash of another source")
        if not all(entry["versions"].get(name) for name in ("tilelang", "cuda", "architecture")):
            stale.append(f"{label} does not say what compiled it")
        file = folder / f"{entry['sha256']}.cubin"
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != entry["sha256"]:
            stale.append(f"{label} has a missing or corrupted cubin")
    return stale


def test_packaged_kernels_are_those_of_the_sources() -> None:
    """Fails when a kernel's source, or what all are built with, changed and jax_qla/cubins did not."""
    assert what_is_stale(packaged(), store.PACKAGED_DIRECTORY) == [], "run `make kernels`"


def test_a_changed_source_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the function that the test above stands on, on a package made up for it."""
    entries = {}
    for name, config in PACKAGED:
        cubin = f"{name} {config}".encode()
        store.write_cubin(tmp_path, cubin)
        entries[store.key(name, config)] = {
            "kernel": name,
            "config": store.config_fields(config),
            "source": store.source_hash(name),
            "sha256": hashlib.sha256(cubin).hexdigest(),
            "versions": {"tilelang": "1", "cuda": "12.9.86", "architecture": "sm_90a"},
        }
    assert what_is_stale(entries, tmp_path) == []
    hashes = store.source_hash.cache_clear, store.key.cache_clear
    monkeypatch.setitem(store._SOURCES, "forward.py", store._SOURCES["forward.py"] + b"# changed\n")
    try:
        for clear in hashes:
            clear()
        changed = sum(name == "forward" for name, _ in PACKAGED)
        stale = what_is_stale(entries, tmp_path)
        assert sum("has changed" in line for line in stale) == changed
        assert sum("of an older source" in line for line in stale) == changed
        assert len(stale) == 2 * changed
    finally:
        monkeypatch.undo()
        for clear in hashes:
            clear()
    (first, *_) = tmp_path.glob("*.cubin")
    first.unlink()
    assert [line.split(" has ")[1] for line in what_is_stale(entries, tmp_path)] == ["a missing or corrupted cubin"]


def build_in(folder: Path, kernel: int) -> Any:
    """[sha256 of the cubin, of the CUDA source, manifest entry] of PACKAGED[kernel], by a new process."""
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder), "HOME": str(folder), "PYTHONHASHSEED": str(len(folder.name))}
    command = [sys.executable, "-c", BUILD, str(kernel)]
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_compilers
@only_thorough
def test_building_twice_gives_the_same(tmp_path: Path) -> None:
    """In other folders, with other hash seeds and nothing cached. The packaged cubin, if there is one, is that too."""
    kernel = next(i for i, (name, _) in enumerate(PACKAGED) if name == "compose")  # one of the fastest to build
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda name: build_in(tmp_path / name, kernel), ("one", "another"))
    assert one == two
    cubin, _, entry = one
    assert HEXADECIMAL.fullmatch(entry["source"])
    assert entry["source"] == store.source_hash("compose")
    assert entry["sha256"] == cubin
    assert set(entry["versions"]) == {"tilelang", "cuda", "architecture"}
    present = store.packaged_manifest().get(store.key(*PACKAGED[kernel]))
    if present is not None and present["versions"] == entry["versions"]:
        assert present["sha256"] == cubin
