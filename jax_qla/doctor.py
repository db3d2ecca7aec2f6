"""`python -m jax_qla`: says what a report of a fault needs, tries the implementations, and exits with 1 on a problem.

A problem is what the user should mend: damaged or missing files, a cache that cannot be trusted, a variable of the
environment that is not what it may be, a Hopper card that the kernels cannot be used on, a wrong result. That this
machine has no such card is none.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_qla
from jax_qla import driver, implementations, launch, policy, store
from jax_qla.kernels.packaged import PACKAGED

Section = dict[str, Any]
"""A part of the report: JSON."""

_PACKAGES = ("jax", "jaxlib", "numpy")
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
_COMPILERS = ("tilelang", "apache-tvm-ffi", "nvidia-cuda-nvrtc-cu12", "torch")
_VARIABLES = (
    "JAX_QLA_CACHE",
    "JAX_QLA_LIBCUDA",
    policy.OVERRIDE,
    policy.GROUPS_OVERRIDE,
    policy.IN_ONE_OVERRIDE,
    "JAX_PLATFORMS",
    "CUDA_VISIBLE_DEVICES",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)

_NO_DEVICES = (RuntimeError, AssertionError)
"""What JAX raises without devices; the latter, with no words, for JAX_PLATFORMS=cuda where no NVIDIA GPU is visible."""

_RESULTS = ("o", "final_state")
_GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "d_initial_state")

LIMITS = {"cuda": 3e-2, "xla": 1e-4}
"""Largest relative error of any result in the self-test; operands are bfloat16 for "cuda" and float32 for "xla"."""


def examine() -> Section:
    """The whole report; its "problems" are sentences, and the installation is sound if there are none."""
    problems: list[str] = []
    report: Section = {"versions": _versions(), "environment": _environment(problems)}
    report["extension"] = _extension(problems)
    report["driver"] = _driver()
    report["devices"] = _devices(problems)
    report["kernels"] = {"packaged": _packaged(problems), "cache": _cache(problems)}
    report["implementation"] = _implementation(problems)
    report["self_test"] = _self_test(problems)
    report["problems"] = problems
    return report


def _versions() -> Section:
    found = {"jax_qla": jax_qla.__version__, "python": platform.python_version()}
    for package in (*_PACKAGES, *_PLUGINS, *_COMPILERS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if not any(plugin in found for plugin in _PLUGINS):
        found["jax CUDA plugin"] = "none"
    return {**found, "platform": platform.platform(), "installed in": str(Path(jax_qla.__file__).parent)}


def _environment(problems: list[str]) -> Section:
    for override in (policy.rows_override, policy.groups_override, policy.in_one_override):
        try:
            override()
        except ValueError as error:  # With which calls of the kernels end, the self-test's not always.
            problems.append(str(error))
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def _extension(problems: list[str]) -> Section:
    if reason := launch.unavailable():
        if not launch.ON_THIS_SYSTEM:
            return {"none": reason}
        problems.append(reason)
        return {"error": reason}
    from jax_qla import _ffi

    return {**_ffi.build_info(), "file": _ffi.__file__}


def _driver() -> Section:
    supported, compiler = driver.cuda_version(), store.packaged_cuda()
    return {
        "release": driver.release(),
        "cuda": None if supported is None else ".".join(map(str, supported)),
        "needed by the kernels": None if compiler is None else driver.needed(compiler),
    }


def _devices(problems: list[str]) -> list[Section]:
    try:
        devices = [*jax.devices(), *(d for d in implementations.cuda_devices() if d not in jax.devices())]
    except _NO_DEVICES as error:
        problems.append(f"JAX finds no devices: {str(error) or 'JAX_PLATFORMS allows none that is here'}")
        return []
    return [
        {
            "device": str(device),
            "kind": device.device_kind,
            "compute capability": getattr(device, "compute_capability", None),
            "runtime": " ".join(device.client.platform_version.split()),
        }
        for device in devices
    ]


def _packaged(problems: list[str]) -> Section:
    """The package's kernels, each cubin held against its sha256."""
    folder = store.PACKAGED_DIRECTORY
    section: Section = {"folder": str(folder), "of": len(PACKAGED), "count": 0}
    path = folder / "manifest.json"
    with contextlib.suppress(OSError):
        section["manifest sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    vouched = store.vouched_manifest()
    section["vouched for by the extension"] = bool(vouched) and vouched == section.get("manifest sha256")
    try:
        entries = store.packaged_manifest()
        wanted = [entries[key] for key in (store.key(*kernel) for kernel in PACKAGED) if key in entries]
        section["compilers"] = sorted({json.dumps(entry["versions"], sort_keys=True) for entry in wanted})
        states = [_cubin_state(folder, entry["sha256"]) for entry in wanted]
    except (store.ManifestError, LookupError, TypeError, ValueError) as error:
        section["error"] = str(error) if isinstance(error, store.ManifestError) else f"{path} is damaged ({error!r})"
        problems.append(section["error"])
        return section
    section["count"] = states.count("")
    for state in sorted(set(states) - {""}):
        problems.append(f"{states.count(state)} of the kernels in {folder} are {state}; reinstall or rebuild them")
    # A clone has the sources only, and fills the folder by `make kernels`; a wheel has all.
    if vouched and len(wanted) < len(PACKAGED):
        problems.append(f"{len(PACKAGED) - len(wanted)} kernels are missing in {path}; reinstall jax_qla")
    return section


def _cubin_state(folder: Path, sha256: str) -> str:
    """ "" or what is wrong with a cubin."""
    try:
        content = (folder / f"{sha256}.cubin").read_bytes()
    except OSError:
        return "missing"
    return "" if hashlib.sha256(content).hexdigest() == sha256 else "corrupted"


def _cache(problems: list[str]) -> Section:
    section: Section = {"count": 0}
    try:
        folder = store.cache_directory()
        section = {"folder": str(folder), **section}
        if launch.ON_THIS_SYSTEM and folder.exists():
            store.check_trust(folder)
            section["count"] = len(list(folder.glob("*.cubin")))
    except (OSError, store.KernelNotFoundError) as error:
        section["error"] = str(error)
        if section["error"] not in problems:  # The extension may have the same.
            problems.append(section["error"])
    return section


def _implementation(problems: list[str]) -> Section:
    """Of a call that the kernels are made for, on JAX's default platform."""
    q = jax.ShapeDtypeStruct((1, 4096, 8, 128), jnp.bfloat16)
    g = jax.ShapeDtypeStruct((1, 4096, 8), jnp.float32)
    section: Section = {"of": "bfloat16, K = V = 128"}
    try:
        chosen = jax_qla.which_implementation(q, q, q, g, g)
    except _NO_DEVICES:  # Why is reported there.
        return {**section, "error": "JAX finds no devices"}
    if chosen.name != "cuda" and any(_is_hopper(device) for device in implementations.cuda_devices()):
        problems.append(f"the kernels are not used on this machine's Hopper card: {chosen.reason}")
    return {**section, "name": chosen.name, "reason": chosen.reason}


def _is_hopper(device: Any) -> bool:
    return getattr(device, "compute_capability", None) == "9.0"


def _self_test(problems: list[str]) -> list[Section]:
    """Forward and backward by every implementation that can run here, against `jax_qla.reference`."""
    return [_try(name, problems) for name in LIMITS]


def _try(name: str, problems: list[str]) -> Section:
    section: Section = {"implementation": name, "passed": None}
    dtype = jnp.bfloat16 if name == "cuda" else jnp.float32
    try:
        device = jax.devices()[0]
    except _NO_DEVICES:  # Why is reported there.
        return {**section, "not run": "JAX finds no devices"}
    start = time.perf_counter()
    try:
        if name == "cuda":
            hopper = [device for device in implementations.cuda_devices() if _is_hopper(device)]
            if not hopper:
                return {**section, "not run": "there is no Hopper GPU that JAX can use"}
            device = hopper[0]
        operands = _operands(dtype)
        expected = _results("reference", _reference_device(), [x.astype(np.float32) for x in operands])
        section["reference seconds"] = round(time.perf_counter() - start, 2)
        start = time.perf_counter()
        run = _results(name, device, operands)
        section["seconds"] = round(time.perf_counter() - start, 2)
    except Exception as error:  # Whatever it is, it belongs into the report.
        section |= {"passed": False, "error": f"{type(error).__name__}: {error}"}
        problems.append(f"the self-test of '{name}' failed: {section['error']}")
        return section
    errors = {key: _relative_error(run[key], expected[key]) for key in expected}
    section["forward"] = max(errors[key] for key in _RESULTS)
    section["backward"] = max(errors[key] for key in _GRADIENTS)
    section |= {"limit": LIMITS[name], "device": str(device)}
    wrong = [f"{key} by {error:.1e}" for key, error in errors.items() if not error <= LIMITS[name]]
    section["passed"] = not wrong
    if wrong:
        problems.append(
            f"'{name}' differs from the reference: {', '.join(wrong)} of the norm, limit {LIMITS[name]:.0e}"
        )
    return section


def _reference_device() -> Any:
    """The CPU, unless JAX was told to do without it (JAX_PLATFORMS)."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return jax.devices()[0]


def _operands(dtype: Any) -> list[np.ndarray]:
    """q, k, v, g, beta, initial_state and the cotangents of o and the final state; two chunks, the second one short."""
    random = np.random.default_rng(0)
    tokens, key_heads, value_heads, size = 80, 1, 2, 64
    q, k = (random.standard_normal((1, tokens, key_heads, size)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, do = (random.standard_normal((1, tokens, value_heads, size)) for _ in range(2))
    g = -np.exp(random.standard_normal((1, tokens, value_heads)) - 2)
    beta = random.random((1, tokens, value_heads))
    state, d_state = (random.standard_normal((1, value_heads, size, size)) for _ in range(2))
    low, wide = dtype, np.float32
    dtypes = (low, low, low, wide, wide, wide, low, wide)
    return [np.asarray(x, y) for x, y in zip((q, k, v, g, beta, state, do, d_state), dtypes, strict=True)]


def _results(name: str, device: Any, operands: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Results and gradients of the operands by one implementation on a device, by name, in float64."""

    @jax.jit
    def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
        def rule(
            q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            o, final_state = jax_qla.chunk_gated_delta_rule(
                q, k, v, g, beta, initial_state=state, output_final_state=True, implementation=name
            )
            assert final_state is not None
            return o, final_state

        results, vjp = jax.vjp(rule, *operands[:6])
        return *results, *vjp(operands[6:])

    values = run(*(jax.device_put(x, device) for x in operands))
    return {key: np.asarray(x, np.float64) for key, x in zip((*_RESULTS, *_GRADIENTS), values, strict=True)}


def _relative_error(x: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(x - expected) / np.linalg.norm(expected))


def text(report: Section) -> str:
    """The report for reading: a title for each section, and a line for each of its entries."""
    return "\n".join(_lines(report))


def _lines(report: Section) -> Iterator[str]:
    yield from _table("versions", report["versions"])
    if report["environment"]:
        yield from _table("environment", report["environment"])
    yield from _table("extension", report["extension"])
    yield from _table("driver", report["driver"])
    yield "devices"
    for device in report["devices"]:
        capability = device["compute capability"]
        yield f"  {device['device']:<14} {device['kind']}" + (
            f", compute capability {capability}" if capability else ""
        )
        yield f"  {'':14} {device['runtime']}"
    packaged, cache = report["kernels"]["packaged"], report["kernels"]["cache"]
    shown = {key: value for key, value in packaged.items() if key not in ("count", "of")}
    yield from _table("kernels of the package", {"intact": f"{packaged['count']} of {packaged['of']}", **shown})
    yield from _table("kernels of the user's cache", cache)
    yield from _table("implementation that would run", report["implementation"])
    yield "self-test against the reference, forward and backward"
    for test in report["self_test"]:
        yield f"  {test['implementation']:<14} {_outcome(test)}"
    yield ""
    problems = report["problems"]
    yield "no problems found" if not problems else f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    for problem in problems:
        yield from textwrap.wrap(problem, 110, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False)


def _table(title: str, section: Section) -> Iterator[str]:
    yield title
    width = max(14, *map(len, section))
    for key, value in section.items():
        for i, line in enumerate(value if isinstance(value, list) else [value]):
            yield f"  {key if i == 0 else '':<{width}} {_said(line)}"


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value in (None, "") else str(value)


def _outcome(test: Section) -> str:
    if test["passed"] is None:
        return f"not run: {test['not run']}"
    if "error" in test:
        return f"FAILED: {test['error']}"
    return (
        f"{'passed' if test['passed'] else 'FAILED'}: relative error {test['forward']:.1e} forward, "
        f"{test['backward']:.1e} backward (limit {test['limit']:.0e}), {test['seconds']} s with compilation, "
        f"on {test['device']}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report; returns 0 if it names no problem, else 1."""
    parser = argparse.ArgumentParser(prog="python -m jax_qla", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    report = examine()
    said = json.dumps(report, indent=1) if options.json else text(report)
    # A path may have what the terminal or file has no letters for.
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(said.encode(encoding, "backslashreplace").decode(encoding))
    return 1 if report["problems"] else 0
