"""Times what a jitted call costs the host, beside a jitted function of one operation on the same machine.

    python benchmarks/host_call.py                               # sequences of 64 and 128 tokens, Hk 2, Hv 8
    python benchmarks/host_call.py --on-cpu                      # no GPU: the handler launches nothing, see below

The calls are small, so that the host is what takes long: one sequence, dense and packed, the forward pass and both,
with an initial and a final state unless a case says otherwise, with XLA's command buffers as they are by default and
without them, each setting in a process of its own. Prints microseconds of a call: `dispatch` until it returns,
`waited` for its results too, both in bursts of calls; beside it x + 1 of eight numbers (`one operation`), and one
kernel of the same operands with as many results (`same operands`), which says what part of the cost is theirs.
`kernels` is what XLA launches besides, by the compiled program.

With a C++ compiler at hand, one more process for each case has the driver timed (host_call_driver.cc): tensor maps that
are encoded and kernels that are launched in one call, with microseconds; `handler` is what is left of the time in the
handler, and `one map` what encoding one costs. With --on-cpu that driver launches nothing: the
CPU client calls the handler, and only `handler` means anything.
Writes host_call.json to the output folder.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import inputs
import jax
import jax.numpy as jnp
from rows import HEAD_DIM, Row

import jax_qla
from jax_qla import _ffi, api, store
from jax_qla.implementations import Choice

BURST = 32
"""Calls that are not waited for in between: few enough that no queue of the driver is full."""
BURSTS = 101
TIMED = 200
"""Calls by which the driver is timed."""
KEY_HEADS, VALUE_HEADS = 2, 8
OPERANDS = ("q", "k", "v", "g", "beta", "initial_state")
NO_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="


def forward(operands: Mapping[str, jax.Array]) -> tuple[Any, Any]:
    state = operands.get("initial_state")
    return jax_qla.chunk_gated_delta_rule(
        *(operands[name] for name in OPERANDS[:5]),
        initial_state=state,
        output_final_state=state is not None,
        cu_seqlens=operands.get("cu_seqlens"),
        implementation="cuda",
    )


def both(operands: Mapping[str, jax.Array]) -> Any:
    """Results and gradients."""
    differentiable = {name: operands[name] for name in OPERANDS if name in operands}
    results, gradients = jax.vjp(lambda x: forward({**operands, **x}), differentiable)
    return results, gradients((operands["do"], operands.get("d_final_state")))


def same_operands(function: Callable[..., Any], operands: Mapping[str, jax.Array]) -> Callable[..., Any]:
    """A function of the operands of `function` with as many results, of eight numbers each, that is one kernel."""
    count = len(jax.tree.leaves(jax.eval_shape(function, operands)))

    def same(operands: Mapping[str, jax.Array]) -> Any:
        first = [x.ravel()[0].astype(jnp.float32) for x in operands.values()]
        return [sum(first) + jnp.full(8, i, jnp.float32) for i in range(count)]

    return same


def operands_of(name: str, tokens: int) -> dict[str, jax.Array]:
    made = inputs.make(Row("forward", KEY_HEADS, VALUE_HEADS, 1, tokens))
    wanted = [*OPERANDS, *(["cu_seqlens"] if "packed" in name else [])]
    wanted += ["do", "d_final_state"] if "both" in name else []
    return {key: made[key] for key in wanted if "without states" not in name or not key.endswith("_state")}


CASES = (
    *("forward dense, without states", "forward dense", "forward packed"),
    *("both dense, without states", "both dense", "both packed"),
)


def burst(function: Callable[[], Any]) -> tuple[float, float]:
    """Microseconds of a call: until it returns, and waited for."""
    begin = time.perf_counter()
    for _ in range(BURST):
        result = function()
    returned = time.perf_counter()
    jax.block_until_ready(result)
    ended = time.perf_counter()
    return 1e6 * (returned - begin) / BURST, 1e6 * (ended - begin) / BURST


def host_times(functions: Mapping[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
    """Medians, the functions taking turns."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for _ in range(BURSTS):
        for name, function in functions.items():
            samples[name].append(burst(function))
    return {
        name: dict(zip(("dispatch", "waited"), map(statistics.median, zip(*found, strict=True)), strict=True))
        for name, found in samples.items()
    }


def kernels_of_xla(text: str) -> int:
    """Kernels and copies in the entry computation of a compiled program, besides custom calls."""
    entry = text.partition("\nENTRY")[2]
    command_buffers = re.findall(r"\n%command_buffer[^\n]*\{\n(.*?)\n\}", text, re.DOTALL)
    return sum(len(re.findall(r" (?:fusion|copy)\(", part)) for part in (entry, *command_buffers))


def measure(tokens: int) -> dict[str, Any]:
    """All cases of one length in this process."""
    x = jnp.zeros(8)
    increment = jax.jit(lambda x: x + 1)
    functions: dict[str, Callable[[], Any]] = {"one operation": partial(increment, x)}
    kernels = {}
    for name in CASES:
        operands = operands_of(name, tokens)
        function: Callable[..., Any] = forward if "forward" in name else both
        compiled = jax.jit(function).lower(operands).compile()
        kernels[name] = kernels_of_xla(compiled.as_text() or "")
        functions[name] = partial(jax.jit(function), operands)
        functions[f"{name}, same operands"] = partial(jax.jit(same_operands(function, operands)), operands)
    for call in functions.values():
        for _ in range(3):  # the first ones compile, and record command buffers
            burst(call)
    return {
        name: times | ({"kernels": kernels[name]} if name in kernels else {})
        for name, times in host_times(functions).items()
    }


def measure_driver(tokens: int, name: str) -> dict[str, float]:
    """What one call of a case asks of the driver, in a process whose driver is timed."""
    driver = ctypes.CDLL(os.environ["JAX_QLA_LIBCUDA"])
    driver.driver_times_overhead.restype = ctypes.c_int64
    operands = operands_of(name, tokens)
    function = jax.jit(forward if "forward" in name else both)
    call = partial(function, operands)
    found = (ctypes.c_int64 * 10)()
    overhead = driver.driver_times_overhead()
    # Operands that take turns, more of them than the handler keeps maps of, so that many are encoded.
    copies = [jax.tree.map(jnp.copy, operands) for _ in range(8)]
    for i in range(50):
        if i == 10:
            driver.driver_times_take(found)
        jax.block_until_ready(function(copies[i % 8]))
    driver.driver_times_take(found)
    one_map = (found[5] / found[4] - overhead / 2) / 1e3 if found[4] else 0.0
    for _ in range(20):
        jax.block_until_ready(call())
    driver.driver_times_take(found)
    for _ in range(TIMED):
        jax.block_until_ready(call())
    driver.driver_times_take(found)
    executions, span, look_ups, look_up_ns, encoded, encode_ns, launched, launch_ns, *_ = found

    def each(nanoseconds: float) -> float:
        return max(0.0, nanoseconds) / 1e3 / TIMED

    # Half of what timing adds lies within what is timed.
    look_up_ns, encode_ns, launch_ns = (
        ns - calls * overhead / 2 for ns, calls in ((look_up_ns, look_ups), (encode_ns, encoded), (launch_ns, launched))
    )
    span -= (look_ups + encoded + launched) * overhead
    return {
        "executions": executions / TIMED,
        "in the handler": each(span),
        "look-ups": each(look_up_ns),
        "maps": encoded / TIMED,
        "encoding": each(encode_ns),
        "one map": max(0.0, one_map),
        "launches": launched / TIMED,
        "launching": each(launch_ns),
        "handler": each(span - look_up_ns - encode_ns - launch_ns),
    }


def register_on_cpu() -> None:
    """Has the CPU client run the handler, for programs that are lowered for it as they would be for CUDA."""
    jax.devices("cpu")  # see _ffi.registrations
    for name, registration in _ffi.types("cpu").items():
        jax.ffi.register_ffi_type(name, registration, platform="cpu")
    for name, stages in _ffi.registrations("cpu").items():
        jax.ffi.register_ffi_target(name, stages, platform="cpu")
    _ffi.set_cubin_directories(store.directories())
    vars(api)["choose"] = lambda *_, **__: Choice("cuda", "cuda", "", "")


def in_new_process(task: Sequence[str], environment: Mapping[str, str]) -> Any:
    """The result of one of the functions above, from another Python."""
    done = subprocess.run(
        [sys.executable, __file__, *task], env={**os.environ, **environment}, check=True, text=True, stdout=-1
    )
    return json.loads(done.stdout.splitlines()[-1])


def build_driver(folder: Path) -> Path | None:
    """The driver that is timed, or None without a compiler."""
    library = folder.resolve() / "host_call_driver.so"
    here = Path(__file__).resolve().parent
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-fPIC", "-shared", f"-I{here.parent / 'ffi'}"]
    try:
        subprocess.run([*command, str(here / "host_call_driver.cc"), "-o", str(library), "-ldl"], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the driver is not timed: {error}")
        return None
    return library


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 128], help="default: 64 128")
    parser.add_argument("--on-cpu", action="store_true", help="without a GPU: the handler alone")
    parser.add_argument("--output", type=Path, default=Path("runs/host_call"), metavar="DIR")
    parser.add_argument("--task", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.task:
        if options.on_cpu:
            register_on_cpu()
        tokens, *case = options.task
        print(json.dumps(measure_driver(int(tokens), *case) if case else measure(int(tokens))))
        return
    options.output.mkdir(parents=True, exist_ok=True)
    driver = build_driver(options.output)
    timed: dict[str, str] = {} if driver is None else {"JAX_QLA_LIBCUDA": str(driver)}
    settings = {"": "", "no command buffers": NO_COMMAND_BUFFERS}
    task = ["--task"]
    if options.on_cpu:
        settings = {"": ""}
        task = ["--on-cpu", "--task"]
    elif timed:
        timed["JAX_QLA_TIMED_LIBCUDA"] = os.environ.get("JAX_QLA_LIBCUDA") or "libcuda.so.1"
    found: dict[str, Any] = {}
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}, Hk {KEY_HEADS}, Hv {VALUE_HEADS}, K = V = {HEAD_DIM}"
    )
    for tokens in options.tokens:
        for setting, flags in settings.items():
            environment = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
            title = ", ".join(filter(None, (f"{tokens} tokens", setting)))
            print(f"\n{title}: us of a call\n{'':44s} dispatch  waited  kernels of XLA")
            untimed = timed if options.on_cpu else {}
            found[title] = in_new_process([*task, str(tokens)], environment | untimed)
            for name, times in found[title].items():
                print(f"{name:44s} {times['dispatch']:8.1f} {times['waited']:7.1f} {times.get('kernels', '')!s:>8s}")
            for name in CASES if timed else ():
                times = in_new_process([*task, str(tokens), name], environment | timed)
                found[title][name]["driver"] = times
                print(f"{name}: " + ", ".join(f"{part} {value:.2f}" for part, value in times.items()), flush=True)
            (options.output / "host_call.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
