"""Where the time of a Gated DeltaNet layer between its projections goes, on one GPU, or of all of it.

    python benchmarks/layer.py                              # the default rows
    python benchmarks/layer.py --rows 16,32/1x8192 --packed # others; with eight documents a row
    python benchmarks/layer.py --devices 2                  # a row on each, as the compiler cuts a batch so long
    python benchmarks/layer.py --whole 2048                 # Flax layers of a model so wide, and steps of decoding

Of each row, Hk, Hv and batch x tokens, microseconds of kernels of the forward pass and of both passes by part of the
layer (`profile_split.SCOPES`), beside those that memory alone would take for what the part must read and write once:
x and y of the convolution (their gradients and x, backward), o, z and y of the norm. The gated delta rule's own are in
docs/performance.md. K = V = 128, bfloat16, filters of 4. Of kernels that run beside one another both count; behind them
is the time of a call in a row of calls ("wall"), launches that nothing hides included.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

# In command buffers, kernels lose the names by which a profile sorts them.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="

import jax
import jax.numpy as jnp
import profile_split
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_qla
from jax_qla.nn import GatedDeltaNetConfig
from jax_qla.nn.mixer import MixerWeights, mix
from jax_qla.nn.projections import Projected

BANDWIDTH = 4.3e6
"""Bytes in a microsecond, as docs/performance.md has it of an H200."""
STEPS = 8
DOCUMENTS = 8
DECODED = 64
"""Tokens of a scan over steps."""
ROWS = ("8,16/2x8192", "16,32/1x8192", "16,32/4x8192", "2,8/1x8192")


class Layer(NamedTuple):
    """What is timed, and of what."""

    apply: Any
    """y of inputs, weights and segment_ids."""
    inputs: Any
    """By row of the batch."""
    weights: Any
    dy: jax.Array


def between_projections(config: GatedDeltaNetConfig, batch: int, tokens: int, implementation: str | None) -> Layer:
    """Of random operands."""
    heads, keys = config.num_value_heads, iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jax.random.normal(next(keys), shape).astype(dtype)

    rows = (batch, tokens)
    projected = Projected(
        (normal(*rows, config.conv_channels),),
        normal(*rows, config.value_size),
        *(normal(*rows, heads) for _ in range(2)),
    )
    weights = MixerWeights(
        normal(config.conv_kernel_size, config.conv_channels, dtype=jnp.float32) / 2,
        *(jnp.zeros(heads), jnp.zeros(heads), jnp.ones(config.value_head_dim)),
    )

    def apply(projected: Projected, weights: MixerWeights, ids: Any) -> jax.Array:
        return mix(projected, weights, config, segment_ids=ids, implementation=implementation)

    return Layer(apply, projected, weights, normal(*rows, config.value_size))


def whole(config: GatedDeltaNetConfig, batch: int, tokens: int, implementation: str | None) -> tuple[Layer, Any]:
    """A layer with its projections, of random operands, and 64 steps of decoding by inputs and weights."""
    from flax import nnx

    from jax_qla.nn.flax import GatedDeltaNet

    dtypes = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    graph, weights = nnx.split(GatedDeltaNet(config, **dtypes, implementation=implementation, rngs=nnx.Rngs(0)))
    shape = (batch, tokens, config.hidden_size)
    x, dy = (jax.random.normal(jax.random.key(n), shape).astype(jnp.bfloat16) for n in range(2))

    def apply(x: jax.Array, weights: Any, ids: Any) -> jax.Array:
        y: jax.Array = nnx.merge(graph, weights)(x, segment_ids=ids)
        return y

    def steps(x: jax.Array, weights: Any) -> Any:
        layer = nnx.merge(graph, weights)

        def step(carry: Any, _: None) -> tuple[Any, None]:
            x, cache = carry
            y, cache = layer.step(x, cache)
            return (x + y, cache), None

        return jax.lax.scan(step, (x[:, :1], layer.init_cache(batch)), length=DECODED)[0]

    return Layer(apply, x, weights, dy), steps


def measure(function: Any, *arguments: Any) -> tuple[dict[str, float], float]:
    """Microseconds of kernels by part, and of a call."""
    compiled = jax.jit(function).lower(*arguments).compile()
    for _ in range(3):
        jax.block_until_ready(compiled(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                result = compiled(*arguments)
            jax.block_until_ready(result)
        split, _ = profile_split.read(Path(folder), compiled.as_text() or "", STEPS)
    walls = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(2 * STEPS):
            result = compiled(*arguments)
        jax.block_until_ready(result)
        walls.append((time.perf_counter() - begin) / (2 * STEPS))
    return {part: 1e3 * milliseconds for part, milliseconds in split.items()}, 1e6 * statistics.median(walls)


def bytes_of(config: GatedDeltaNetConfig, tokens: int) -> dict[str, dict[str, int]]:
    """What must be read and written at least, by direction and part."""
    channels, values = 2 * tokens * config.conv_channels, 2 * tokens * config.value_size
    forward = {"causal_convolution": 2 * channels, "gated_rms_norm": 3 * values}
    return {
        "forward": forward,
        "both": {"causal_convolution": 5 * channels, "gated_rms_norm": 8 * values},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), metavar="HK,HV/BxT")
    parser.add_argument("--packed", action="store_true", help=f"rows of {DOCUMENTS} documents")
    parser.add_argument("--devices", type=int, default=1, help="of an Auto mesh, each with a row; default: %(default)s")
    parser.add_argument("--implementation", help="of the gated delta rule and the convolution; default: by platform")
    parser.add_argument("--whole", type=int, metavar="D", help="layers with their projections, from and to D features")
    parser.add_argument("--projections", choices=("split", "fused"), default="split", help="of whole layers")
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, jax_qla {jax_qla.__version__}, {jax.devices()[0].device_kind}")
    mesh = jax.make_mesh((arguments.devices,), ("data",), axis_types=(AxisType.Auto,))
    for row in arguments.rows:
        heads, shape = row.split("/")
        key_heads, value_heads = map(int, heads.split(","))
        batch, tokens = map(int, shape.split("x"))
        batch *= arguments.devices
        config = GatedDeltaNetConfig(
            arguments.whole or 1024,
            num_key_heads=key_heads,
            num_value_heads=value_heads,
            projections=arguments.projections,
        )
        steps = None
        if arguments.whole:
            layer, steps = whole(config, batch, tokens, arguments.implementation)
        else:
            layer = between_projections(config, batch, tokens, arguments.implementation)
        ids = None
        if arguments.packed:
            ids = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32) * DOCUMENTS // tokens + 1, (batch, tokens))

        rows_of = NamedSharding(mesh, P("data"))
        inputs, dy, ids = jax.device_put((layer.inputs, layer.dy, ids), rows_of)
        weights = jax.device_put(layer.weights, NamedSharding(mesh, P()))

        forward = functools.partial(layer.apply, ids=ids)

        def both(inputs: Any, weights: Any, dy: jax.Array, forward: Any = forward) -> Any:
            y, transpose = jax.vjp(forward, inputs, weights)
            return y, transpose(dy)

        floors = bytes_of(config, batch // arguments.devices * tokens)
        for name, function, given in (("forward", forward, ()), ("both", both, (dy,)), (f"{DECODED} steps", steps, ())):
            if function is None:
                continue
            with jax.set_mesh(mesh):
                found, wall = measure(function, inputs, weights, *given)
            found = {part: microseconds / arguments.devices for part, microseconds in found.items()}
            known = floors.get(name, {})
            cells = [
                f"{part} {found[part]:.0f}" + (f" ({known[part] / BANDWIDTH:.0f})" if part in known else "")
                for part in sorted(found)
            ]
            print(f"{row:14} {name:8} {sum(found.values()):6.0f}  {'  '.join(cells)}  wall {wall:.0f}", flush=True)


if __name__ == "__main__":
    main()
