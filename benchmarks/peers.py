"""The other libraries of the comparison, all on PyTorch, timed by replaying a CUDA graph.

A further one is a subclass of `Peer` and an entry of PEERS.

    python benchmarks/peers.py LIBRARY PATTERN ...

only fills a library's own cache of compiled kernels, with those that the rows need.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from measurement import CALLS, Measurement, repeat, repeat_calls, sampled_rows
from rows import CHUNK, HEAD_DIM, Row, select

SCALE = HEAD_DIM**-0.5


class Peer:
    """A library on PyTorch."""

    name: str
    package: str
    """What it is called on PyPI."""
    compiles = False
    """Whether its first call of a row compiles for so long that the rows had better be compiled side by side."""
    directions: tuple[str, ...] = ("forward", "backward")

    def function(self, row: Row, operands: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
        """The row's pass over torch tensors, as a function that returns the results by the names of jax_qla."""
        raise NotImplementedError

    def version(self) -> str:
        return importlib.metadata.version(self.package)

    def prepare(self, rows: Sequence[Row]) -> None:
        if not self.compiles:
            return
        # Before a backward row is timed, the forward pass computes what it reads.
        jobs = [row for row in dict.fromkeys((*rows, *(row.both for row in rows))) if row.direction in self.directions]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for row, failure in zip(jobs, pool.map(self._run_once_elsewhere, jobs), strict=True):
                if failure:
                    print(f"{self.name} {row.name}: {failure}", flush=True)

    def measure(self, row: Row, operands: Mapping[str, Any]) -> Measurement:
        torch = _torch()
        try:
            return _measure(self.function(row, {name: torch.from_dlpack(x) for name, x in operands.items()}))
        finally:
            torch.cuda.empty_cache()

    def _run_once_elsewhere(self, row: Row) -> str:
        """Runs the row once, on zeros, in a process of its own; why that failed, or nothing."""
        done = subprocess.run(
            [sys.executable, __file__, "--once", self.name, row.name],
            capture_output=True,
            text=True,
            env={**os.environ, "TILELANG_PRINT_ON_COMPILATION": "0"},
        )
        return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["failed"])[-1]


class FlashQla(Peer):
    """https://github.com/QwenLM/FlashQLA, which compiles its TileLang kernels for every layout of heads."""

    name = "flash_qla"
    package = "flash-qla"
    compiles = True

    def function(self, row: Row, operands: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
        flash_qla = importlib.import_module("flash_qla")
        x = operands
        rows = (x["q"], x["k"], x["v"])
        options = {"scale": SCALE, "initial_state": x["initial_state"], "cu_seqlens": x["cu_seqlens"]}

        def forward() -> tuple[Any, ...]:
            results: tuple[Any, ...] = flash_qla.chunk_gated_delta_rule_fwd(
                *rows, x["g"], x["beta"], output_final_state=True, **options
            )
            return results

        def forward_results() -> Mapping[str, Any]:
            _, _, o, _, final_state, _ = forward()
            return {"o": o, "final_state": final_state}

        if row.direction == "forward":
            return forward_results
        gamma, a = x["residuals"] if "residuals" in x else forward()[:2]

        def backward_results() -> Mapping[str, Any]:
            dq, dk, dv, dbeta, dg, d_initial_state = flash_qla.chunk_gated_delta_rule_bwd(
                *rows, gamma, x["beta"], a, x["do"], x["d_final_state"], **options
            )
            return {"dq": dq, "dk": dk, "dv": dv, "dg": dg, "dbeta": dbeta, "d_initial_state": d_initial_state}

        return backward_results


class FlashInfer(Peer):
    """https://github.com/flashinfer-ai/flashinfer, forward pass only, whose CuTe kernels compile at the first call.

    Its gates are factors and its states are transposed: both are converted before the clock starts.
    """

    name = "flashinfer"
    package = "flashinfer-python"
    directions = ("forward",)
    context_parallel: bool | str = "auto"

    def function(self, row: Row, operands: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
        prefill = importlib.import_module("flashinfer.gdn_prefill")
        q, k, v, beta = (operands[name][0] for name in ("q", "k", "v", "beta"))
        factors = operands["g"][0].exp()
        initial_state = operands["initial_state"].transpose(-1, -2).contiguous()
        cu_seqlens = operands["cu_seqlens"].long()

        def results() -> Mapping[str, Any]:
            o, final_state = prefill.chunk_gated_delta_rule(
                q,
                k,
                v,
                factors,
                beta,
                scale=SCALE,
                initial_state=initial_state,
                output_final_state=True,
                cu_seqlens=cu_seqlens,
                use_cp=self.context_parallel,
            )
            return {"o": o[None], "final_state": final_state.transpose(-1, -2)}

        return results


class FlashInferWhole(FlashInfer):
    """FlashInfer without context parallelism."""

    name = "flashinfer_whole"
    context_parallel = False


class FlashInferCut(FlashInfer):
    """FlashInfer with context parallelism, whether or not its own rule would choose that."""

    name = "flashinfer_cut"
    context_parallel = True


PEERS: tuple[type[Peer], ...] = (FlashQla, FlashInfer, FlashInferWhole, FlashInferCut)


def _torch() -> Any:
    """PyTorch, which only those need who compare with it."""
    return importlib.import_module("torch")


def _measure(function: Callable[[], Mapping[str, Any]]) -> Measurement:
    samples = {name: _sample(x) for name, x in function().items()}
    call = repeat_calls(partial(_seconds_of_calls, function))
    graph = captured(function)
    return Measurement(repeat(partial(seconds_of_replays, graph), CALLS), call, samples)


def captured(function: Callable[[], object]) -> Any:
    """A CUDA graph of CALLS calls."""
    torch = _torch()
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            function()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def seconds_of_replays(graph: Any, times: int) -> float:
    torch = _torch()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


def _seconds_of_calls(function: Callable[[], object], times: int) -> float:
    torch = _torch()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _sample(x: Any) -> np.ndarray:
    sample: np.ndarray = x[:, sampled_rows(x.shape[1])].float().cpu().numpy()
    return sample


def _zeros(row: Row) -> dict[str, Any]:
    """Operands of the shapes of `inputs.shapes`, without JAX, and residuals, so that backward needs no forward."""
    torch = _torch()

    def zeros(*shape: int, dtype: Any) -> Any:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    keys = (1, row.tokens, row.key_heads, HEAD_DIM)
    values = (1, row.tokens, row.value_heads, HEAD_DIM)
    states = (row.places, row.value_heads, HEAD_DIM, HEAD_DIM)
    x: dict[str, Any] = {name: zeros(*keys, dtype=torch.bfloat16) for name in ("q", "k")}
    x |= {name: zeros(*values, dtype=torch.bfloat16) for name in ("v", "do")}
    x |= {name: zeros(*values[:3], dtype=torch.float32) for name in ("g", "beta")}
    x |= {name: zeros(*states, dtype=torch.float32) for name in ("initial_state", "d_final_state")}
    x["residuals"] = x["g"], zeros(*values[:3], CHUNK, dtype=torch.bfloat16)
    x["cu_seqlens"] = torch.tensor(row.offsets, dtype=torch.int32, device="cuda")
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiles the kernels that the rows need.")
    parser.add_argument("library", choices=[peer.name for peer in PEERS])
    parser.add_argument("rows", nargs="+", metavar="PATTERN")
    parser.add_argument("--once", action="store_true", help="run the rows once in this process, on zeros")
    options = parser.parse_args()
    (peer,) = (peer() for peer in PEERS if peer.name == options.library)
    rows = select(options.rows)
    if not options.once:
        peer.prepare(rows)
        return
    for row in rows:
        peer.function(row, _zeros(row))()
    _torch().cuda.synchronize()


if __name__ == "__main__":
    main()
