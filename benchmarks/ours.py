"""jax_qla as a library of the comparison."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import inputs
import jax
import jax.numpy as jnp
import numpy as np
from measurement import CALLS, INTERVAL, WARM_UP, Measurement, repeat, repeat_calls, sampled_rows
from rows import Row

import jax_qla

FORWARD = ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state")
BACKWARD = (*FORWARD, "residuals", "do", "d_final_state")
"""Of both the last is what each call of a chain takes from the one before it."""
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "d_initial_state")


class JaxQla:
    """jax_qla with the given implementation, initial state given and final state returned.

    The device time is that of a jitted function of `calls` calls. Each call takes the state (backward: the gradient of
    the state) that the one before it returned, so XLA can neither merge them nor run them side by side, and the first
    one that of the run before, donated, so XLA need not copy it. Nobody reads the other results, which take the same
    memory in each call, as in the peers' graphs. With `shared_segments`, XLA may derive the chunks from cu_seqlens once
    for all of them, as it does in a model of many layers, and as FlashQLA, which remembers what it derived, does in the
    graph that is timed. `saving`: the API's `save_chunk_states`. `differentiated`: whether forward passes that are
    timed are those of a gradient, which keep something for the backward pass and may cut sequences for its sake, or
    calls without gradients, which do neither. `normalised`: such calls with `use_qk_l2norm_in_kernel`.
    """

    directions: tuple[str, ...] = ("forward", "backward")

    def __init__(
        self,
        name: str,
        implementation: str,
        calls: int = CALLS,
        shared_segments: bool = False,
        saving: bool | None = None,
        differentiated: bool = False,
        normalised: bool = False,
    ) -> None:
        self.name = name
        # Earlier versions (versions.py) have no such option.
        self._forward = partial(
            forward, implementation=implementation, **({} if saving is None else {"save_chunk_states": saving})
        )
        alone = partial(forward_alone, implementation=implementation, use_qk_l2norm_in_kernel=normalised)
        self._timed_forward = self._forward if differentiated else alone
        self._backward = partial(backward, implementation=implementation)
        self._calls = calls
        self._in_plain_jax = implementation != "cuda"
        self._shared_segments = shared_segments
        self._chains: dict[Row, Future[Any]] = {}
        self._memory: dict[Row, Future[dict[str, int]]] = {}

    def version(self) -> str:
        return jax_qla.__version__

    def prepare(self, rows: Sequence[Row], memory: bool = True) -> None:
        """Compiles the chains of calls, several at a time, and reads off the memory of forward and backward."""
        pairs = list(dict.fromkeys(row.both for row in rows)) if memory else []
        # Futures, so that a row which cannot be compiled fails when it is measured, and alone.
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            self._chains |= {row: pool.submit(self._compiled_chain, row) for row in rows}
            self._memory |= {pair: pool.submit(self._memory_of_both, pair) for pair in pairs}

    def measure(self, row: Row, operands: Mapping[str, Any]) -> Measurement:
        single: Callable[..., tuple[Any, ...]] = jax.jit(self._single(row))
        arguments = self.arguments(row, operands)
        results = jax.block_until_ready(single(*arguments))
        names = ("o", "final_state") if row.direction == "forward" else GRADIENTS
        samples = {name: _sample(x) for name, x in zip(names, results, strict=False)}
        del results
        call = repeat_calls(partial(_seconds, single, arguments))  # first, as of the peers
        return Measurement(
            device=self.device_time(row, arguments),
            call=call,
            samples=samples,
            memory=self.memory_found(row),
        )

    def arguments(self, row: Row, operands: Mapping[str, Any]) -> tuple[Any, ...]:
        """What a call takes, the backward pass the forward pass's residuals too."""
        if row.direction == "forward":
            return _pick(operands, FORWARD)
        residuals = jax.block_until_ready(jax.jit(self._forward)(*_pick(operands, FORWARD))[2])
        return _pick({**operands, "residuals": residuals}, BACKWARD)

    def device_time(
        self, row: Row, arguments: tuple[Any, ...], warm_up: float = WARM_UP, interval: float = INTERVAL
    ) -> float:
        """Milliseconds of one call on the device."""
        run = self.run(row, arguments)
        run(1)
        return repeat(run, self._calls, warm_up, interval)

    def run(self, row: Row, arguments: tuple[Any, ...]) -> Run:
        """The calls that are timed."""
        return Run(self._chains[row].result(), arguments)

    def numbers(self, row: Row, arguments: tuple[Any, ...]) -> list[np.ndarray]:
        """Some numbers of results of the calls that are timed: of the last one, in plain JAX of each."""
        run = self.run(row, arguments)
        run(1)
        return [np.asarray(x) for x in (*run.numbers, _probe(run.state))]

    def memory_found(self, row: Row) -> dict[str, int]:
        """Bytes of forward and backward in one program, if `prepare` was to find them and they could be compiled."""
        future = self._memory[row.both]
        if error := future.exception():
            print(f"{row.name} {self.name}: no memory of forward and backward, {str(error)[:300]}", flush=True)
            return {}
        return future.result()

    def _single(self, row: Row) -> Callable[..., tuple[Any, ...]]:
        return self._timed_forward if row.direction == "forward" else self._backward

    def _compiled_chain(self, row: Row) -> Any:
        arguments = inputs.shapes(row)
        chain, operands = forward_chain, _pick(arguments, FORWARD)
        if row.direction == "backward":
            residuals = jax.eval_shape(self._forward, *operands)[2]
            chain, operands = backward_chain, _pick({**arguments, "residuals": residuals}, BACKWARD)
        calls = partial(chain, self._single(row), self._calls, self._materialised)
        return jax.jit(calls, donate_argnums=len(operands) - 1).lower(*operands).compile()

    def _materialised(
        self, results: Sequence[jax.Array], state: jax.Array, cu_seqlens: jax.Array
    ) -> tuple[Sequence[jax.Array], jax.Array, jax.Array]:
        """The same, where XLA must compute in full what plain JAX makes of a call (of a kernel it always does), and
        cannot know that cu_seqlens is the same as before unless it may share what is derived from it."""
        needed = results if self._in_plain_jax else ()
        if self._shared_segments:
            needed, state = jax.lax.optimization_barrier((needed, state))
        else:
            needed, state, cu_seqlens = jax.lax.optimization_barrier((needed, state, cu_seqlens))
        return needed, state, cu_seqlens

    def _memory_of_both(self, row: Row) -> dict[str, int]:
        def both(operands: dict[str, Any]) -> tuple[Any, ...]:
            o, final_state, residuals = self._forward(*_pick(operands, FORWARD))
            return o, final_state, self._backward(*_pick({**operands, "residuals": residuals}, BACKWARD))

        analysis = jax.jit(both).lower(inputs.shapes(row)).compile().memory_analysis()
        if analysis is None:
            return {}
        return {
            "temporary": analysis.temp_size_in_bytes,
            "arguments": analysis.argument_size_in_bytes,
            "results": analysis.output_size_in_bytes,
        }


class Run:
    """A compiled chain of calls; each run of it goes on from the state that the one before it has returned."""

    def __init__(self, chain: Callable[..., tuple[Any, jax.Array]], arguments: tuple[Any, ...]) -> None:
        self._chain = chain
        *self._others, state = arguments
        self.state: jax.Array = state.copy()  # which is donated
        self.numbers: Sequence[jax.Array] = ()
        """Some of the last run's results."""

    def __call__(self, times: int) -> float:
        """Seconds of so many runs."""
        start = time.perf_counter()
        for _ in range(times):
            self.numbers, self.state = self._chain(*self._others, self.state)
        jax.block_until_ready((self.numbers, self.state))
        return time.perf_counter() - start


def forward(
    q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any, initial_state: Any, **options: Any
) -> tuple[Any, ...]:
    """o, final_state and residuals, of the forward pass of a gradient."""
    return jax_qla.chunk_gated_delta_rule_fwd(
        q,
        k,
        v,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        **options,
    )


def forward_alone(
    q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any, initial_state: Any, **options: Any
) -> tuple[Any, ...]:
    """o, final_state and no residuals, of a call without gradients."""
    o, final_state = jax_qla.chunk_gated_delta_rule(
        *(q, k, v, g, beta),
        initial_state=initial_state,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        **options,
    )
    return o, final_state, None


def backward(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    cu_seqlens: Any,
    initial_state: Any,
    residuals: Any,
    do: Any,
    d_final_state: Any,
    *,
    implementation: str,
) -> tuple[Any, ...]:
    """dq, dk, dv, dg, dbeta, d_initial_state."""
    return jax_qla.chunk_gated_delta_rule_bwd(
        q,
        k,
        v,
        g,
        beta,
        residuals,
        do,
        d_final_state,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        implementation=implementation,
    )


Materialised = Callable[[Sequence[jax.Array], jax.Array, jax.Array], tuple[Sequence[jax.Array], jax.Array, jax.Array]]
"""`JaxQla._materialised`."""


def forward_chain(
    single: Callable[..., tuple[Any, ...]], calls: int, materialised: Materialised, *operands: Any
) -> tuple[list[jax.Array], jax.Array]:
    """`calls` forward calls, each from the final state of the one before it; numbers of what is materialised and of the
    last o, and the state."""
    *rows, cu_seqlens, state = operands
    probes: list[jax.Array] = []
    for _ in range(calls):
        o, state, residuals = single(*rows, cu_seqlens, state)
        needed, state, cu_seqlens = materialised((o, *jax.tree.leaves(residuals)), state, cu_seqlens)
        probes.extend(_probe(x) for x in needed)
    return [*probes, _probe(o)], state


def backward_chain(
    single: Callable[..., tuple[Any, ...]], calls: int, materialised: Materialised, *operands: Any
) -> tuple[list[jax.Array], jax.Array]:
    """`calls` backward calls, each from the state's gradient of the one before it; numbers of what is materialised and
    of the last gradients, and that of the state."""
    *rows, cu_seqlens, initial_state, residuals, do, d_state = operands
    probes: list[jax.Array] = []
    for _ in range(calls):
        *others, d_state = single(*rows, cu_seqlens, initial_state, residuals, do, d_state)
        needed, d_state, cu_seqlens = materialised(others, d_state, cu_seqlens)
        probes.extend(_probe(x) for x in needed)
    return [*probes, *(_probe(x) for x in others)], d_state


def _probe(x: jax.Array) -> jax.Array:
    return x[(0,) * x.ndim].astype(jnp.float32)


def _pick(operands: Mapping[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(operands[name] for name in names)


def _seconds(function: Callable[..., Any], arguments: Sequence[Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        results = function(*arguments)
    jax.block_until_ready(results)
    return time.perf_counter() - start


def _sample(x: jax.Array) -> np.ndarray:
    """A few tokens of [1, T, ...]; of states, a few rows of K."""
    return np.asarray(x[:, sampled_rows(x.shape[1])].astype(jnp.float32))
