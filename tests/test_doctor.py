"""`python -m jax_qla`: what it reports, and what it calls a problem."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jax_qla import doctor, driver, implementations, launch, store
from jax_qla.kernels.packaged import PACKAGED

CUDA = "13.0.88"
SELF_TEST = doctor._self_test


@pytest.fixture(autouse=True)
def sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package with all its kernels (no real ones), vouched for; an absent cache, and no self-test."""
    folder = tmp_path / "packaged"
    folder.mkdir()
    monkeypatch.setattr(store, "PACKAGED_DIRECTORY", folder)
    monkeypatch.setenv("JAX_QLA_CACHE", str(tmp_path / "cache"))
    fill(folder, PACKAGED)
    vouch(folder, monkeypatch)
    monkeypatch.setattr(doctor, "_self_test", lambda problems: [])
    monkeypatch.setattr(store, "_found", {})
    return folder


def fill(folder: Path, kernels: Sequence[tuple[str, Any]]) -> None:
    entries = {}
    for name, config in kernels:
        cubin = f"{name} {config}".encode()
        store.write_cubin(folder, cubin)
        digest, versions = hashlib.sha256(cubin).hexdigest(), {"cuda": CUDA, "tilelang": "1"}
        settings = store.config_fields(config)
        entries[store.key(name, config)] = {
            "kernel": name,
            "config": settings,
            "source": store.source_hash(name),
            "sha256": digest,
            "plan": {},
            "versions": versions,
        }
    store.write_manifest(folder, entries)


def vouch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    monkeypatch.setattr(store, "vouched_manifest", lambda: digest)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = doctor.main(arguments)
    return code, capsys.readouterr().out


def problems(capsys: pytest.CaptureFixture[str]) -> list[str]:
    code, output = run(capsys, "--json")
    found: list[str] = json.loads(output)["problems"]
    assert code == (1 if found else 0)
    return found


def test_a_sound_installation(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run(capsys)
    assert code == 0
    assert output.endswith("\nno problems found\n")
    assert re.search(rf"^  jax +{re.escape(jax.__version__)}$", output, re.MULTILINE)
    assert f"{len(PACKAGED)} of {len(PACKAGED)}" in output
    report = json.loads(run(capsys, "--json")[1])
    assert set(report) == {
        "versions", "environment", "extension", "driver", "devices", "kernels", "implementation", "self_test",
        "problems",
    }  # fmt: skip
    packaged = report["kernels"]["packaged"]
    assert packaged["count"] == packaged["of"] == len(PACKAGED)
    assert packaged["vouched for by the extension"] is True
    assert packaged["manifest sha256"] == hashlib.sha256((sound / "manifest.json").read_bytes()).hexdigest()
    assert report["driver"]["needed by the kernels"] == "driver 580 or newer, CUDA 13.0 or newer"
    assert report["environment"]["JAX_QLA_CACHE"] == str(sound.parent / "cache")
    if not implementations.cuda_devices():
        assert report["implementation"]["name"] == "xla"


def test_a_clone_without_kernels_is_sound(
    sound: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in sound.iterdir():
        file.unlink()
    monkeypatch.setattr(store, "vouched_manifest", lambda: "")
    code, output = run(capsys)
    assert code == 0
    assert re.search(rf"intact +0 of {len(PACKAGED)}", output)


def test_a_corrupted_cubin(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = sorted(sound.glob("*.cubin"))[:3]
    for file in (first, second):
        file.write_bytes(file.read_bytes()[:-1])
    third.unlink()
    assert problems(capsys) == [
        f"2 of the kernels in {sound} are corrupted; reinstall or rebuild them",
        f"1 of the kernels in {sound} are missing; reinstall or rebuild them",
    ]
    code, output = run(capsys)
    assert code == 1
    assert "2 problems\n  - 2 of the kernels" in output
    assert re.search(rf"intact +{len(PACKAGED) - 3} of {len(PACKAGED)}", output)


def test_a_manifest_that_is_not_the_wheels(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(sound, PACKAGED[:3])
    (problem,) = problems(capsys)
    assert "must be the manifest that this wheel of jax_qla was built with" in problem


def test_a_damaged_manifest(sound: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(store, "vouched_manifest", lambda: "")
    (key, *_) = (store.key(*kernel) for kernel in PACKAGED)
    entries: list[dict[str, Any]] = [{}, {"versions": {"cuda": None}}, {"versions": {"cuda": CUDA}, "sha256": "\0"}]
    for content in ("{", '{"kernels": []}', *(json.dumps({"kernels": {key: entry}}) for entry in entries)):
        (sound / "manifest.json").write_text(content)
        (problem,) = problems(capsys)
        assert "manifest.json is damaged" in problem


def test_a_manifest_that_cannot_be_read(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sound / "manifest.json").unlink()
    (sound / "manifest.json").mkdir()
    (problem,) = problems(capsys)
    assert "manifest.json cannot be read" in problem


def test_a_wheel_that_lacks_kernels(
    sound: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(sound, PACKAGED[3:])
    vouch(sound, monkeypatch)
    (problem,) = problems(capsys)
    assert problem.startswith("3 kernels are missing in ")


def test_a_cache_that_has_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("JAX_QLA_CACHE", "relative")
    folder.rmdir()
    (problem,) = problems(capsys)
    assert "the kernel cache has no place" in problem


def test_variables_that_change_what_runs_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"JAX_QLA_PIECE_ROWS": "0", "JAX_QLA_HEAD_GROUPS": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert variables.items() <= json.loads(run(capsys, "--json")[1])["environment"].items()
    monkeypatch.setenv("JAX_QLA_HEAD_GROUPS", "0")
    monkeypatch.setenv("JAX_QLA_IN_ONE", "yes")
    of_groups, of_one = problems(capsys)
    assert of_groups == "JAX_QLA_HEAD_GROUPS must be a positive integer, got '0'"
    assert of_one == "JAX_QLA_IN_ONE must be 0 or 1, got 'yes'"


def test_no_extension(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(launch, "unavailable", lambda: "the extension cannot be imported")
    assert problems(capsys) == ["the extension cannot be imported"]


def test_names_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a folder, in bytes that are not UTF-8."""
    monkeypatch.setenv("JAX_QLA_CACHE", "/nowhere/caf\udce9")
    code, output = run(capsys)
    assert code == 1
    assert re.search(r"^  folder +/nowhere/caf\\udce9$", output, re.MULTILINE)
    assert "has a name that is not UTF-8" in output
    monkeypatch.setattr(sys, "stdout", None)  # as where it is closed
    assert doctor.main([]) == 1


def test_no_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def without(error: Exception) -> Any:
        def devices(*arguments: Any) -> Any:
            raise error

        return devices

    monkeypatch.setattr(doctor, "_self_test", SELF_TEST)
    for error, expected in (
        (RuntimeError("Unable to initialize backend 'cuda'"), "Unable to initialize backend 'cuda'"),
        (AssertionError(), "JAX_PLATFORMS allows none that is here"),
    ):
        for name in ("devices", "default_backend"):
            monkeypatch.setattr(jax, name, without(error))
        assert problems(capsys) == [f"JAX finds no devices: {expected}"]
    output = run(capsys)[1]
    assert "  error          JAX finds no devices\n" in output
    assert "  cuda           not run: JAX finds no devices\n" in output


def test_without_docstrings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As of python -OO."""
    monkeypatch.setattr(doctor, "__doc__", None)
    assert problems(capsys) == []


def hopper(monkeypatch: pytest.MonkeyPatch, kind: str = "NVIDIA Test", **attributes: Any) -> None:
    platform = types.SimpleNamespace(platform_version="test")
    device = types.SimpleNamespace(device_kind=kind, compute_capability="9.0", client=platform, **attributes)
    monkeypatch.setattr(implementations, "cuda_devices", lambda: [device])
    monkeypatch.setattr("jax_qla.api._is_on_cuda", lambda q: True)


# A card, and a slice of one as MIG makes them.
@pytest.mark.parametrize(("kind", "multiprocessors"), [("NVIDIA H200", 132), ("NVIDIA H200 MIG 1g.18gb", 16)])
def test_a_hopper_card_that_is_used(
    kind: str, multiprocessors: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hopper(monkeypatch, kind, core_count=multiprocessors)
    monkeypatch.setattr(driver, "cuda_version", lambda: (13, 0))
    code, output = run(capsys)
    assert code == 0
    assert re.search(r"^  name +cuda$", output, re.MULTILINE)
    assert f"{kind}, compute capability 9.0" in output


def test_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is passed over by the choice, too."""
    hopper(monkeypatch)
    monkeypatch.setattr(driver, "cuda_version", lambda: (12, 8))
    (problem,) = problems(capsys)
    assert problem == (
        "the kernels are not used on this machine's Hopper card: 'cuda' was passed over: the kernels were compiled by "
        "CUDA 13.0.88 and need driver 580 or newer, CUDA 13.0 or newer, but this machine's driver supports CUDA 12.8; "
        "install a newer driver"
    )


def test_what_a_driver_can_load(monkeypatch: pytest.MonkeyPatch) -> None:
    for supported, compiler, loads in (
        (None, "13.0.88", True),  # unknown
        ((13, 0), "13.1.2", True),  # minor versions are compatible
        ((13, 0), "12.9.86", True),
        ((12, 9), "12.8.93", True),
        ((12, 9), "13.0.88", False),
        ((12, 8), "12.9.86", True),  # what the packaged kernels are compiled by
    ):
        monkeypatch.setattr(driver, "cuda_version", lambda supported=supported: supported)
        assert (driver.why_too_old(compiler) is None) == loads
    assert driver.needed("12.9.86") == "driver 525 or newer, CUDA 12.0 or newer"
    assert driver.needed("14.1.0") == "CUDA 14.0 or newer"


def test_what_the_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so"
    source.write_text("int cuDriverGetVersion(int* version) { *version = 12080; return FAILS; }")
    for fails, expected in ((0, (12, 8)), (1, None)):
        library = tmp_path / f"libcuda{fails}.so"
        subprocess.run(["cc", f"-DFAILS={fails}", "-shared", "-fPIC", source, "-o", library], check=True)
        monkeypatch.setenv("JAX_QLA_LIBCUDA", str(library))
        assert driver.cuda_version.__wrapped__() == expected
    monkeypatch.setenv("JAX_QLA_LIBCUDA", str(tmp_path / "none.so"))
    assert driver.cuda_version.__wrapped__() is None


def test_the_self_test_finds_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (*doctor._RESULTS, *doctor._GRADIENTS)

    def results(name: str, device: Any, operands: Any) -> dict[str, np.ndarray]:
        wrong = {"dg": np.full(3, np.nan), "o": np.full(3, 1.5)} if name == "xla" else {}
        return {key: np.ones(3) for key in names} | wrong

    monkeypatch.setattr(doctor, "_results", results)
    found: list[str] = []
    section = doctor._try("xla", found)
    assert section["passed"] is False
    assert found == ["'xla' differs from the reference: o by 5.0e-01, dg by nan of the norm, limit 1e-04"]


def test_a_call_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def results(name: str, device: Any, operands: Any) -> dict[str, np.ndarray]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(doctor, "_results", results)
    found: list[str] = []
    assert doctor._try("xla", found)["passed"] is False
    assert found == ["the self-test of 'xla' failed: RuntimeError: out of memory"]


def test_as_a_user_runs_it(tmp_path: Path) -> None:
    """The real installation with its real self-test; what is wrong is its cache, which is open to others."""
    cache = tmp_path / "open"
    cache.mkdir(mode=0o755)
    environment = {**os.environ, "JAX_QLA_CACHE": str(cache)}
    command = [sys.executable, "-m", "jax_qla", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    (problem,) = report["problems"]
    assert f"the kernel cache {cache} must be a folder of user" in problem
    cuda, xla = report["self_test"]
    assert cuda["passed"] is (True if any(d["compute capability"] == "9.0" for d in report["devices"]) else None)
    assert xla["passed"] is True
    assert 0 < xla["forward"] < xla["backward"] < 1e-4
