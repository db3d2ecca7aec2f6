"""Which part of a model each kernel of a profile belongs to, by the named scopes of the program."""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import NamedTuple

import jax

SCOPES = ("gated_delta_rule", "causal_convolution", "gated_rms_norm", "gated_attention")
"""Named scopes of jax_qla.nn and examples/qwen35_layers.py; the first that is found in a name counts."""
SLOWEST = 15

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = ")
_CALLS = re.compile(r"calls=%?([\w.-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_MATMUL = re.compile(r"dot_general|gemm|matmul|cublas", re.IGNORECASE)


class Kernel(NamedTuple):
    """One run of a kernel."""

    begin: float
    """Nanoseconds of the profile's clock, ..."""
    end: float
    """... as this."""
    name: str
    operation: str
    """The HLO operation, or "" if the profile does not say."""


def read(folder: Path, hlo: str, steps: int) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """Sorts the kernels of a profile by part of the model.

    Args:
        folder: that `jax.profiler.trace` wrote.
        hlo: the compiled program, as `compiled.as_text()` gives it.
        steps: runs of the program within the profile.

    Returns:
        Milliseconds of a step by part: one of `SCOPES`, "other matrix products", "other" or, for kernels that the
        profile does not connect with the program, "unnamed"; and the slowest operations with theirs.
    """
    names = operation_names(hlo)
    parts: dict[str, float] = collections.defaultdict(float)
    operations: dict[str, float] = collections.defaultdict(float)
    for begin, end, kernel, operation in kernels(folder):
        name = names.get(operation, "") if operation else ""
        milliseconds = (end - begin) / 1e6 / steps
        parts[_part(operation, kernel, name)] += milliseconds
        operations[f"{operation or kernel[:60]}  {name[-100:]}"] += milliseconds
    return dict(parts), sorted(operations.items(), key=lambda item: -item[1])[:SLOWEST]


def operation_names(hlo: str) -> dict[str, str]:
    """The op_name of every instruction of a program; for a fusion without one, the commonest within it."""
    names: dict[str, str] = {}
    called: dict[str, str] = {}
    within: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    computation = ""
    for line in hlo.splitlines():
        if start := _COMPUTATION.match(line):
            computation = start[1]
        elif instruction := _INSTRUCTION.match(line):
            if name := _OP_NAME.search(line):
                names[instruction[1]] = name[1]
                within[computation][name[1]] += 1
            if calls := _CALLS.search(line):
                called[instruction[1]] = calls[1]
    for instruction_name, callee in called.items():
        if instruction_name not in names and within[callee]:
            names[instruction_name] = within[callee].most_common(1)[0][0]
    return names


def kernels(folder: Path) -> list[Kernel]:
    """Everything that ran on the device, or on the CPU without one, of a profile that `jax.profiler.trace` wrote."""
    (file,) = folder.glob("plugins/profile/*/*.xplane.pb")
    planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    found = []
    for plane in devices or [plane for plane in planes if plane.name == "/host:CPU"]:
        for line in plane.lines:
            # A GPU's other lines (XLA Ops, Steps, ...) repeat what its streams did.
            if devices and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = {key: value for key, value in event.stats if key is not None}
                operation = str(stats.get("hlo_op", ""))
                if devices or operation:
                    found.append(Kernel(event.start_ns, event.start_ns + event.duration_ns, event.name, operation))
    return found


def _part(operation: str, kernel: str, name: str) -> str:
    for scope in SCOPES:
        if scope in name:
            return scope
    if _MATMUL.search(name) or _MATMUL.search(kernel):
        return "other matrix products"
    return "other" if operation else "unnamed"
