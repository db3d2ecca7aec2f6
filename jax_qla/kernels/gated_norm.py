"""The gated RMS norm behind the gated delta rule, in one pass forward and one backward.

    n = o / sqrt(mean(o^2) + eps),  s = 1 / (1 + exp(-z))                       rows [V] of a token and head
    y = n w z s

    g = dy w z s        do = (g - n mean(g n)) / sqrt(mean(o^2) + eps)          dz = dy n w s (1 + z (1 - s))
    dw = sum over rows of dy z s n

Arithmetic is float32; y, do and dz are rounded once. dw comes as one summand a block, which XLA adds up: the same bits every time.

By bytes alone, at 4.3 TB/s, 262144 rows of 128 numbers of 16 bits (16, 32, 8192 tokens) take 47 us forward (o, z and y) and 78 backward (o, z, dy, do
and dz); XLA takes 60 to 132 and 160 to 235 (docs/performance_kernels.md).

Plan, blocks of 128 threads, each of consecutive rows: a thread has 8 numbers of a row, 16 bytes, so a row is 16 lanes' (V = 128), whose sums go by
shuffles. All rows that a thread has at a time are loaded before any is computed. Backward a block goes through its rows in several steps, and its
threads' dw meet in shared memory.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_qla.kernels import common
from jax_qla.kernels.sigmoid import SIGMOID_PRELUDE

__all__ = ["PASS_CONFIGS", "Config", "program", "rows_of_block", "specification", "specification_of_gradients"]

PASS_CONFIGS = common.PASS_CONFIGS | {"tl.disable_shared_memory_reuse": True}

_THREADS = 128
_COLUMNS = 8  # of a thread
_FORWARD_ROWS, _BACKWARD_ROWS = 4, 2  # of a thread at a time
_STEPS = 4  # of a block backward


@dataclass(frozen=True)
class Config:
    """Sizes this program is specialised for: `value_dim` 64 or 128, `dtype` "bfloat16" or "float16", and whether it is the `backward` one."""

    value_dim: int = 128
    dtype: str = "bfloat16"
    backward: bool = False


def rows_of_block(config: Config) -> int:
    """Rows that a block computes."""
    lines = _THREADS * _COLUMNS // config.value_dim
    return lines * (_BACKWARD_ROWS * _STEPS if config.backward else _FORWARD_ROWS)


def program(config: Config):
    """The TileLang program. The number of rows is a run-time value."""
    import tilelang.language as T

    V, dtype = config.value_dim, config.dtype
    lanes, lines = V // _COLUMNS, _THREADS * _COLUMNS // V
    together = _BACKWARD_ROWS if config.backward else _FORWARD_ROWS
    rows, summands = T.dynamic("rows, summands")

    @T.macro
    def load(array, row, own, r, held):
        for c in T.vectorized(_COLUMNS):
            held[r * _COLUMNS + c] = T.cast(0, dtype)
        if row < rows:
            for c in T.vectorized(_COLUMNS):
                held[r * _COLUMNS + c] = array[row, own + c]

    @T.macro
    def store(held, array, row, own):
        if row < rows:
            for c in T.vectorized(_COLUMNS):
                array[row, own + c] = held[c]

    @T.macro
    def sum_of_row(x):
        for step in T.unroll(lanes.bit_length() - 1):
            x[0] += T.shfl_xor(x[0], 1 << step)

    @T.prim_func
    def gated_norm(
        o: T.Tensor((rows, V), dtype),
        z: T.Tensor((rows, V), dtype),
        weight: T.Tensor((V,), "float32"),
        y: T.Tensor((rows, V), dtype),
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(rows, lines * together), threads=_THREADS, prelude=SIGMOID_PRELUDE) as block:
            tx = T.get_thread_binding()
            own = tx % lanes * _COLUMNS
            first = block * (lines * together) + tx // lanes
            o_ = T.alloc_local((together * _COLUMNS,), dtype)
            z_ = T.alloc_local((together * _COLUMNS,), dtype)
            w = T.alloc_local((_COLUMNS,), "float32")
            result = T.alloc_local((_COLUMNS,), dtype)
            square = T.alloc_local((1,), "float32")
            gate = T.alloc_var("float32")
            for r in T.unroll(together):
                load(o, first + r * lines, own, r, o_)
                load(z, first + r * lines, own, r, z_)
            for c in T.vectorized(_COLUMNS):
                w[c] = weight[own + c]
            for r in T.unroll(together):
                square[0] = 0.0
                for c in T.unroll(_COLUMNS):
                    square[0] += T.cast(o_[r * _COLUMNS + c], "float32") * T.cast(o_[r * _COLUMNS + c], "float32")
                sum_of_row(square)
                square[0] = T.rsqrt(square[0] / V + eps)
                for c in T.unroll(_COLUMNS):
                    gate = T.cast(z_[r * _COLUMNS + c], "float32")
                    gate *= T.call_extern("float32", "jax_qla_sigmoid", gate)
                    result[c] = T.cast(T.cast(o_[r * _COLUMNS + c], "float32") * square[0] * w[c] * gate, dtype)
                store(result, y, first + r * lines, own)

    @T.prim_func
    def gated_norm_gradients(
        o: T.Tensor((rows, V), dtype),
        z: T.Tensor((rows, V), dtype),
        weight: T.Tensor((V,), "float32"),
        dy: T.Tensor((rows, V), dtype),
        d_o: T.Tensor((rows, V), dtype),
        d_z: T.Tensor((rows, V), dtype),
        d_weight: T.Tensor((summands, V), "float32"),
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(rows, lines * together * _STEPS), threads=_THREADS, prelude=SIGMOID_PRELUDE) as block:
            tx = T.get_thread_binding()
            own = tx % lanes * _COLUMNS
            o_ = T.alloc_local((together * _COLUMNS,), dtype)
            z_ = T.alloc_local((together * _COLUMNS,), dtype)
            dy_ = T.alloc_local((together * _COLUMNS,), dtype)
            w = T.alloc_local((_COLUMNS,), "float32")
            dw = T.alloc_local((_COLUMNS,), "float32")
            n = T.alloc_local((_COLUMNS,), "float32")
            g = T.alloc_local((_COLUMNS,), "float32")  # dy w z s
            result = T.alloc_local((_COLUMNS,), dtype)
            gradient = T.alloc_local((_COLUMNS,), dtype)
            square = T.alloc_local((1,), "float32")
            product = T.alloc_local((1,), "float32")
            gate = T.alloc_var("float32")
            s = T.alloc_var("float32")
            of_y = T.alloc_var("float32")
            sums_s = T.alloc_shared((lines, V), "float32")
            for c in T.vectorized(_COLUMNS):
                w[c] = weight[own + c]
            for c in T.unroll(_COLUMNS):
                dw[c] = 0.0
            for step in T.serial(_STEPS):
                for r in T.unroll(together):
                    load(o, ((block * _STEPS + step) * together + r) * lines + tx // lanes, own, r, o_)
                    load(z, ((block * _STEPS + step) * together + r) * lines + tx // lanes, own, r, z_)
                    load(dy, ((block * _STEPS + step) * together + r) * lines + tx // lanes, own, r, dy_)
                for r in T.unroll(together):
                    square[0] = 0.0
                    product[0] = 0.0
                    for c in T.unroll(_COLUMNS):
                        n[c] = T.cast(o_[r * _COLUMNS + c], "float32")
                        square[0] += n[c] * n[c]
                    sum_of_row(square)
                    square[0] = T.rsqrt(square[0] / V + eps)
                    for c in T.unroll(_COLUMNS):
                        n[c] *= square[0]
                        gate = T.cast(z_[r * _COLUMNS + c], "float32")
                        s = T.call_extern("float32", "jax_qla_sigmoid", gate)
                        of_y = T.cast(dy_[r * _COLUMNS + c], "float32")
                        gradient[c] = T.cast(of_y * n[c] * w[c] * (s + gate * (s - s * s)), dtype)
                        of_y *= gate * s
                        dw[c] += of_y * n[c]
                        g[c] = of_y * w[c]
                        product[0] += g[c] * n[c]
                    sum_of_row(product)
                    for c in T.unroll(_COLUMNS):
                        result[c] = T.cast(square[0] * (g[c] - n[c] * (product[0] / V)), dtype)
                    store(result, d_o, ((block * _STEPS + step) * together + r) * lines + tx // lanes, own)
                    store(gradient, d_z, ((block * _STEPS + step) * together + r) * lines + tx // lanes, own)
            for c in T.vectorized(_COLUMNS):
                sums_s[tx // lanes, own + c] = dw[c]
            T.sync_threads()
            if tx < V:
                gate = 0.0
                for line in T.unroll(lines):
                    gate += sums_s[line, tx]
                d_weight[block, tx] = gate

    return gated_norm_gradients if config.backward else gated_norm


def specification(o: jax.Array, z: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """y of rows o and z [R, V] in o's dtype."""
    wide, gate = o.astype(weight.dtype), z.astype(weight.dtype)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normal * weight * gate * jax.nn.sigmoid(gate)).astype(o.dtype)


def specification_of_gradients(
    o: jax.Array, z: jax.Array, weight: jax.Array, dy: jax.Array, *, eps: float, rows: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(d_o, d_z, d_weight [blocks, V]) where a block has `rows` rows."""
    wide, gate, dy = (x.astype(weight.dtype) for x in (o, z, dy))
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    n, s = wide * inverse, jax.nn.sigmoid(gate)
    terms = dy * gate * s * n
    g = dy * weight * gate * s
    d_o = inverse * (g - n * jnp.mean(g * n, axis=-1, keepdims=True))
    d_z = dy * n * weight * s * (1 + gate * (1 - s))
    terms = jnp.pad(terms, ((0, -o.shape[0] % rows), (0, 0))).reshape(-1, rows, o.shape[1])
    return d_o.astype(o.dtype), d_z.astype(o.dtype), terms.sum(axis=1)
