"""The training step of a 0.3 B Qwen3.5 hybrid: tokens per second, memory and where the time goes.

    python benchmarks/train_step.py                          one Hopper GPU: "cuda" against "xla"
    python benchmarks/train_step.py --size tiny --implementations xla          a CPU, to try the script

Each implementation runs in a process of its own, so that the peak of the memory is its own. The model is
examples/qwen35_flax.py. Needs flax and optax.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import jax
import optax
import profile_split
from flax import nnx
from qwen35_config import Qwen35Config
from qwen35_flax import Qwen35

import jax_qla
from jax_qla.nn import GatedDeltaNetConfig

WARM_UP = 3
PROFILED = 3
REPETITIONS = 7

SIZES = {
    "tiny": Qwen35Config(256, 4, 64, 128, GatedDeltaNetConfig(64, 1, 2, 16, 16), 2, 1, 32, 8),
    "0.3b": Qwen35Config(
        32768,
        layers=24,
        width=1024,
        mlp_width=2048,
        gated_deltanet=GatedDeltaNetConfig(1024, num_key_heads=8, num_value_heads=16),
        attention_heads=8,
        key_value_heads=2,
        head_dim=128,
        rotary_dim=32,
        dtype="bfloat16",
        attention_implementation="cudnn",
    ),
}


def measure(config: Qwen35Config, batch: int, length: int) -> dict[str, Any]:
    """Runs training steps on random tokens, in this process."""
    graphdef, params = nnx.split(Qwen35(config, nnx.Rngs(0)))
    optimizer = optax.adamw(1e-4)
    state = params, optimizer.init(params)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, params)(tokens[:, :-1])
        losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, tokens: jax.Array) -> Any:
        params, optimizer_state = state
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), value

    tokens = jax.random.randint(jax.random.key(0), (batch, length + 1), 0, config.vocabulary)
    clock = time.perf_counter()
    compiled = step.lower(state, tokens).compile()
    compile_seconds = time.perf_counter() - clock
    losses = []
    for _ in range(WARM_UP):
        state, value = compiled(state, tokens)
        losses.append(float(value))
    seconds = []
    for _ in range(REPETITIONS):
        clock = time.perf_counter()
        state, value = compiled(state, tokens)
        jax.block_until_ready(value)
        seconds.append(time.perf_counter() - clock)
    device = jax.devices()[0]
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROFILED):
                state, value = compiled(state, tokens)
            jax.block_until_ready(value)
        split, slowest = profile_split.read(Path(folder), compiled.as_text() or "", PROFILED)
    analysis = compiled.memory_analysis()
    return {
        "device": device.device_kind,
        "parameters": sum(p.size for p in jax.tree.leaves(params)),
        "loss": losses,
        "compile_s": compile_seconds,
        "step_ms": 1e3 * statistics.median(seconds),
        "tokens_per_s": batch * length / statistics.median(seconds),
        "peak_gib": None if peak is None else peak / 2**30,
        "temporary_gib": None if analysis is None else analysis.temp_size_in_bytes / 2**30,
        "split_ms": split,
        "slowest_ms": slowest,
    }


def in_a_process(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """`measure` with one implementation, alone in a new process. Raises SystemExit with its output if it fails."""
    command = [sys.executable, __file__, "--worker", name, "--size", arguments.size]
    command += ["--batch", str(arguments.batch), "--length", str(arguments.length)]
    command += ["--attention", arguments.attention] if arguments.attention else []
    # In command buffers, kernels lose the names by which a profile sorts them.
    flags = os.environ.get("XLA_FLAGS", "") + (" --xla_gpu_enable_command_buffer=" if arguments.no_graphs else "")
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "XLA_FLAGS": flags})
    if result.returncode:
        raise SystemExit(f"{name} failed:\n{result.stderr[-3000:]}")
    measured: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return measured


def report(results: dict[str, dict[str, Any]]) -> None:
    """Prints one column for each implementation."""

    def row(name: str, cells: list[str]) -> None:
        print(f"{name:34}" + "".join(f"{cell:>16}" for cell in cells))

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:,.2f}"

    first = next(iter(results.values()))
    print(f"{first['device']}, {first['parameters']:,} parameters")
    row("", list(results))
    for key in ("tokens_per_s", "step_ms", "peak_gib", "temporary_gib", "compile_s"):
        row(key, [number(result[key]) for result in results.values()])
    row("loss of the third step", [f"{result['loss'][-1]:.4f}" for result in results.values()])
    print("kernel time of a step, ms:")
    for part in sorted({part for result in results.values() for part in result["split_ms"]}):
        row("  " + part, [number(result["split_ms"].get(part)) for result in results.values()])
    row("  sum", [number(sum(result["split_ms"].values())) for result in results.values()])
    for name, result in results.items():
        print(f"slowest operations with {name}, ms of a step:")
        for operation, milliseconds in result["slowest_ms"]:
            print(f"  {milliseconds:9.2f}  {operation}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=sorted(SIZES), default="0.3b", help="default: %(default)s")
    parser.add_argument("--implementations", nargs="+", default=["cuda", "xla"], help="default: cuda xla")
    parser.add_argument("--batch", type=int, default=2, help="sequences; default: %(default)s")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence; default: %(default)s")
    parser.add_argument("--attention", help="implementation of jax.nn.dot_product_attention; default: by size")
    parser.add_argument("--no-graphs", action="store_true", help="without command buffers, for a profile with names")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    parser.add_argument("--worker", metavar="IMPLEMENTATION", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        config = dataclasses.replace(SIZES[arguments.size], implementation=arguments.worker)
        if arguments.attention:
            config = dataclasses.replace(config, attention_implementation=arguments.attention)
        print(json.dumps(measure(config, arguments.batch, arguments.length)))
        return
    print(f"jax {jax.__version__}, jax_qla {jax_qla.__version__}, {arguments.batch} x {arguments.length} tokens")
    results = {name: in_a_process(name, arguments) for name in arguments.implementations}
    report(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
