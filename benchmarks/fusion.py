"""Times what stands before the gated delta rule in a layer, in the kernels where they can do it and by XLA.

    python benchmarks/fusion.py                                  # on a Hopper GPU
    python benchmarks/fusion.py --rows 'forward/16,32/*'    # some forward rows; both passes are timed
    python benchmarks/fusion.py --ways kernels              # some ways, and plain
    python benchmarks/fusion.py --spread 1                  # lengths of q and k that differ much
    python benchmarks/fusion.py --steady                    # a second of each in turn, four times

Of each row, milliseconds on the device of the forward pass alone and of both passes:

    plain       q, k, g and beta as they are: what follows cannot be faster
    kernels     q and k divided by their lengths, by `use_qk_l2norm_in_kernel`
    xla         the same by XLA, before
    gates       as `kernels`, and g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), by XLA

The ways take turns; beside each stands the median of its times over those of `plain` next to them.
`kernels` less `plain` is what the normalisation costs there; `gates` less `kernels` is the most that the gates could
gain by being computed in the kernels too. Every call of a chain has its own operands as far as XLA can tell, so nothing
is computed once for several. Lengths of q and k are exp(spread x), x normal: where those of a chunk's keys differ by
more than a spread of some 0.6, kernels/prepare.py inverts by twice as many products, as for keys that are much alike.
Writes fusion.json to the output folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import inputs
import jax
import jax.numpy as jnp
from measurement import in_steady_turns, in_turn
from rows import Row, select

import jax_qla
from jax_qla.l2norm import normalize
from jax_qla.nn.gates import log_decay, update_strength

CALLS = 6
"""In one jitted function."""
WAYS = ("plain", "kernels", "xla", "gates")
ROWS = ("forward/16,32/4x8192", "forward/16,32/8x1024", "forward/2,8/4x8192")


def rule(way: str, x: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """o and the final state, what precedes the rule being computed in this `way`."""
    q, k, g, beta = (x[name] for name in ("q", "k", "g", "beta"))
    if way == "xla":
        q, k = normalize(q), normalize(k)
    if way == "gates":
        g, beta = log_decay(x["a"], x["A_log"], x["dt_bias"]), update_strength(x["b"], allow_neg_eigval=False)
    o, final_state = jax_qla.chunk_gated_delta_rule(
        *(q, k, x["v"], g, beta),
        initial_state=x["initial_state"],
        output_final_state=True,
        cu_seqlens=x["cu_seqlens"],
        use_qk_l2norm_in_kernel=way in ("kernels", "gates"),
        implementation="cuda",
    )
    assert final_state is not None
    return o, final_state


def forward(way: str, x: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The final state and o."""
    o, final_state = rule(way, x)
    return final_state, o


def both(way: str, x: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
    """The final state and the gradients of the floating-point operands that this `way` uses."""
    used = {"q", "k", "v", "initial_state", *(("a", "b") if way == "gates" else ("g", "beta"))}
    operands = {name: value for name, value in x.items() if name in used}
    (_, final_state), transpose = jax.vjp(lambda operands: rule(way, x | operands), operands)
    return final_state, transpose((x["do"], x["d_final_state"]))[0]


def chain(run: Callable[[dict[str, jax.Array]], tuple[jax.Array, Any]], x: dict[str, jax.Array]) -> Any:
    """CALLS calls, each from the final state of the one before."""
    state, rest = x["initial_state"], {name: value for name, value in x.items() if name != "initial_state"}
    results: list[Any] = []
    for _ in range(CALLS):
        state, rest = jax.lax.optimization_barrier((state, rest))
        state, others = run(rest | {"initial_state": state})
        results.append(others)
    return state, results


def seconds(function: Any, x: dict[str, jax.Array], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        result = function(x)
    jax.block_until_ready(result)
    return time.perf_counter() - start


def operands(row: Row, spread: float) -> dict[str, jax.Array]:
    """Those of the comparison, q and k of lengths exp(spread x), x normal, and what gates are computed from."""
    x = inputs.make(row)
    lengths = jnp.exp(spread * jax.random.normal(jax.random.key(1), (2, *x["q"].shape[:-1], 1)))
    x |= {"q": (x["q"] * lengths[0]).astype(x["q"].dtype), "k": (x["k"] * lengths[1]).astype(x["k"].dtype)}
    a, b = jax.random.normal(jax.random.key(2), (2, *x["g"].shape)).astype(x["q"].dtype)
    decays = jnp.arange(row.value_heads) < row.value_heads * 3 // 4  # as those of the comparison
    A_log = jnp.where(decays, -jnp.log(16.0), -jnp.inf)
    return x | {"a": a, "b": b, "A_log": A_log, "dt_bias": jnp.zeros(row.value_heads)}


def measure(row: Row, ways: Sequence[str], spread: float, steady: bool) -> dict[str, dict[str, dict[str, float]]]:
    """By pass and way, milliseconds and the time over that of `plain`."""
    x = operands(row, spread)
    short = x | {"q": normalize(x["q"]), "k": normalize(x["k"])}  # `plain` diverges with keys as long as those
    found: dict[str, dict[str, dict[str, float]]] = {}
    for direction, run in (("forward", forward), ("both", both)):
        runs = []
        for way in ways:
            function, given = jax.jit(partial(chain, partial(run, way))), short if way == "plain" else x
            jax.block_until_ready(function(given))
            runs.append(partial(seconds, function, given))
        timed = in_steady_turns(runs, CALLS) if steady else in_turn(runs, CALLS)
        times = dict(zip(ways, timed, strict=True))
        found[direction] = {
            way: {
                "ms": statistics.median(ms),
                "of_plain": statistics.median(a / b for a, b in zip(ms, times["plain"], strict=True)),
            }
            for way, ms in times.items()
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), metavar="PATTERN")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--spread", type=float, default=0.5, help="standard deviation of the lengths' logarithms")
    parser.add_argument("--steady", action="store_true", help="turns of 1.2 s, not of 20 ms")
    parser.add_argument("--output", type=Path, default=Path("runs/fusion"), metavar="DIR")
    arguments = parser.parse_args()
    found = {}
    for row in select(arguments.rows):
        if row.direction != "forward":
            continue
        ways = [way for way in WAYS if way == "plain" or way in arguments.ways]
        found[row.name] = measure(row, ways, arguments.spread, arguments.steady)
        for direction, times in found[row.name].items():
            cells = "  ".join(f"{way} {x['ms']:.4f} ({x['of_plain']:.3f})" for way, x in times.items())
            print(f"{row.name:24} {direction:8} {cells}", flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "fusion.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
