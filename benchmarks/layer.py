"""Where the time of a Gated DeltaNet layer between its projections goes, on one GPU.

    python benchmarks/layer.py                              # the default rows
    python benchmarks/layer.py --rows 16,32/1x8192 --packed # others; with eight documents a row
    python benchmarks/layer.py --devices 2                  # a row on each, as the compiler cuts a batch so long

Of each row, Hk, Hv and batch x tokens, microseconds of kernels of the forward pass and of both passes by part of the
layer (`profile_split.SCOPES`), beside those that memory alone would take for what the part must read and write once:
x and y of the convolution (their gradients and x, backward), o, z and y of the norm. The gated delta rule's own are in
docs/performance.md. K = V = 128, bfloat16, filters of 4.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

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
ROWS = ("8,16/2x8192", "16,32/1x8192", "16,32/4x8192", "2,8/1x8192")


def operands(config: GatedDeltaNetConfig, batch: int, tokens: int) -> tuple[Projected, MixerWeights, jax.Array]:
    """Random ones, and a gradient of the result."""
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
    return projected, weights, normal(*rows, config.value_size)


def measure(function: Any, *arguments: Any) -> dict[str, float]:
    """Microseconds of kernels by part."""
    compiled = jax.jit(function).lower(*arguments).compile()
    for _ in range(3):
        jax.block_until_ready(compiled(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                result = compiled(*arguments)
            jax.block_until_ready(result)
        split, _ = profile_split.read(Path(folder), compiled.as_text() or "", STEPS)
    return {part: 1e3 * milliseconds for part, milliseconds in split.items()}


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
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, jax_qla {jax_qla.__version__}, {jax.devices()[0].device_kind}")
    mesh = jax.make_mesh((arguments.devices,), ("data",), axis_types=(AxisType.Auto,))
    for row in arguments.rows:
        heads, shape = row.split("/")
        key_heads, value_heads = map(int, heads.split(","))
        batch, tokens = map(int, shape.split("x"))
        batch *= arguments.devices
        config = GatedDeltaNetConfig(1024, num_key_heads=key_heads, num_value_heads=value_heads)
        projected, weights, dy = operands(config, batch, tokens)
        ids = None
        if arguments.packed:
            ids = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32) * DOCUMENTS // tokens + 1, (batch, tokens))

        rows_of = NamedSharding(mesh, P("data"))
        projected, dy, ids = jax.device_put((projected, dy, ids), rows_of)
        weights = jax.device_put(weights, NamedSharding(mesh, P()))

        def forward(projected: Projected, weights: MixerWeights, config: Any = config, ids: Any = ids) -> jax.Array:
            return mix(projected, weights, config, segment_ids=ids, implementation=arguments.implementation)

        def both(projected: Projected, weights: MixerWeights, dy: jax.Array, forward: Any = forward) -> Any:
            y, transpose = jax.vjp(forward, projected, weights)
            return y, transpose(dy)

        floors = bytes_of(config, batch // arguments.devices * tokens)
        for name, function, given in (("forward", forward, ()), ("both", both, (dy,))):
            with jax.set_mesh(mesh):
                found = measure(function, projected, weights, *given)
            found = {part: microseconds / arguments.devices for part, microseconds in found.items()}
            cells = [
                f"{part} {found[part]:.0f}"
                + (f" ({floors[name][part] / BANDWIDTH:.0f})" if part in floors[name] else "")
                for part in sorted(found)
            ]
            print(f"{row:14} {name:8} {sum(found.values()):6.0f}  {'  '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
