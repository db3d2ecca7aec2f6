"""One or a few tokens from a state, for decoding: the state is read once, kept in registers over the tokens, and written once.

For every sequence and value head h (key head h // r, r = Hv / Hk), token by token, with S the state before the token, [K, V]:

    u = S^T k,  w = S^T q                                   [V], [V]
    delta = beta (v - exp(g) u)                             [V]
    o = scale (exp(g) w + <q, k> delta)                     [V]        stored in the dtype of v
    S = exp(g) S + k delta^T                                [K, V]

which is the recurrence with the decay taken out of the products, so that one pass over S serves both. Arithmetic is float32;
S is rounded to its dtype once, when it is stored. If q and k are to be `normed`, k counts as k / |k| and q as q / |q|: u and delta are times 1 / |k|,
o times 1 / |q|, and |k|^2 and |q|^2 are sums beside <q, k>.

Plan, one block per (sequence, value head, tile of 32 value columns, 64 of a bfloat16 state), 128 threads, numbered in the order in
which the states lie in memory (72 us instead of 78 for 128 MiB of states, read and written, by heads first); four to eight blocks fit
a multiprocessor, so that their reads keep the memory busy:

    the state         thread t has 16 bytes of a row (t % 8) of the K / 16 rows t // 8, t // 8 + 16, ...: 128 bytes of a row together
    u, w and <q, k>   (with |k|^2 and |q|^2) over a thread's rows, then lanes 8 and 16 apart by shuffles, then the four warps through shared memory
    q, k, v, g, beta  fetched one token ahead, to the other one of two buffers in shared memory
    one barrier a token: behind it lie this token's sums of all warps and the next token's operands

With `single`, for one token and a bfloat16 state, a thread holds that as it was read, two elements a register, and rounds what it computes of it
on its way out: the same numbers, with half as many bytes more under way (six blocks a multiprocessor instead of four). What is not needed across the
barrier, keys and v, is read from shared memory once more behind it.

A thread writes the elements of the state that it has read and no others, after all of the block's reads: `final_state` may be
`initial_state` itself.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_qla.kernels import common
from jax_qla.kernels.macros import call
from jax_qla.kernels.specification import inverse_length

__all__ = ["PASS_CONFIGS", "Config", "program", "specification"]

# Without a loop, TileLang would give the memory of what a thread has read to what it writes next, which other threads may still read.
PASS_CONFIGS = common.PASS_CONFIGS | {"tl.disable_shared_memory_reuse": True}

_THREADS = 128
_WARPS = _THREADS // 32
_LANES = 8  # that share a row
_LINES = _THREADS // _LANES  # rows that the block covers at once


_PRELUDE = r"""
// Keeps a thread's 16-bit numbers as they are: what is computed of them before and after are two conversions, not one whose results wait in as many
// registers again.
template <int pairs>
__device__ __forceinline__ void jax_qla_as_they_are(void* numbers) {
  unsigned* x = static_cast<unsigned*>(numbers);
#pragma unroll
  for (int n = 0; n < pairs; ++n) asm volatile("" : "+r"(x[n]));
}
"""


@dataclass(frozen=True)
class Config:
    """Sizes this program is specialised for: `key_dim`, `value_dim` 64 or 128, `dtype` "bfloat16" or "float16", `state_dtype`
    "float32" or "bfloat16", and `single`: whether there is one token, with bfloat16 states only."""

    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    single: bool = False


def program(config: Config):
    """The TileLang program. Numbers of sequences, tokens and heads are run-time values."""
    import tilelang.language as T

    K, V, dtype, state_dtype = config.key_dim, config.value_dim, config.dtype, config.state_dtype
    columns = 4 if state_dtype == "float32" else 8  # of a thread
    width, lines = _LANES * columns, K // _LINES
    tiles = V // width
    single = config.single
    held = state_dtype if single else "float32"
    sequences, length, key_heads, value_heads = T.dynamic("sequences, length, key_heads, value_heads")
    initial_states, final_states = T.dynamic("initial_states, final_states")  # sequences, or 0: not given, not wanted

    @T.macro
    def fetch(q, k, v, g, beta, n, t, key_head, head, tile, tx, fetched):
        """One token: q and k of key element `tx`; v of column `tx` of the tile by the first warps, g and beta by the last."""
        if tx < K:
            fetched[0] = T.cast(q[n, t, key_head, tx], "float32")
            fetched[1] = T.cast(k[n, t, key_head, tx], "float32")
        if tx < width:
            fetched[2] = T.cast(v[n, t, head, tile + tx], "float32")
        if tx >= _THREADS - 32:
            fetched[2] = g[n, t, head]
            fetched[3] = beta[n, t, head]

    @T.macro
    def store(fetched, buffer, tx, q_s, k_s, v_s, gates_s):
        """What `fetch` has fetched to one of the two buffers."""
        if tx < K:
            q_s[buffer, tx] = fetched[0]
            k_s[buffer, tx] = fetched[1]
        if tx < width:
            v_s[buffer, tx] = fetched[2]
        if tx == _THREADS - 32:
            gates_s[buffer, 0] = fetched[2]
            gates_s[buffer, 1] = fetched[3]

    @T.prim_func
    def recurrent(
        q: T.Tensor((sequences, length, key_heads, K), dtype),
        k: T.Tensor((sequences, length, key_heads, K), dtype),
        v: T.Tensor((sequences, length, value_heads, V), dtype),
        g: T.Tensor((sequences, length, value_heads), "float32"),
        beta: T.Tensor((sequences, length, value_heads), "float32"),
        initial_state: T.Tensor((initial_states, value_heads, K, V), state_dtype),
        o: T.Tensor((sequences, length, value_heads, V), dtype),
        final_state: T.Tensor((final_states, value_heads, K, V), state_dtype),
        ratio: T.int32,
        scale: T.float32,
        normed: T.int32,
    ):
        with T.Kernel(sequences * value_heads * tiles, threads=_THREADS, prelude=_PRELUDE if single else "") as block:
            # more would spill
            if columns == 4:
                T.annotate_min_blocks_per_sm(7 if K == 128 else 8)
            elif single:
                T.annotate_min_blocks_per_sm(6 if K == 128 else 8)
            else:
                T.annotate_min_blocks_per_sm(4 if K == 128 else 5)
            tx = T.get_thread_binding()
            n = T.alloc_var("int32")
            head = T.alloc_var("int32")
            n = T.truncdiv(block // tiles, value_heads)
            head = T.truncmod(block // tiles, value_heads)
            key_head = T.alloc_var("int32")
            key_head = T.truncdiv(head, ratio)
            line = tx // _LANES
            own = tx % _LANES * columns  # first of this thread's columns, within the tile
            tile = block % tiles * width
            first = tile + own

            q_s = T.alloc_shared((2, K), "float32")
            k_s = T.alloc_shared((2, K), "float32")
            v_s = T.alloc_shared((2, width), "float32")
            gates_s = T.alloc_shared((2, 2), "float32")  # g and beta
            sums_s = T.alloc_shared((2, _WARPS, 2, width), "float32")  # u and w of each warp
            products_s = T.alloc_shared((2, _WARPS, 3), "float32")  # <q, k>, <k, k> and <q, q> of each warp

            state = T.alloc_local((lines * columns,), held)
            fetched = T.alloc_local((4,), "float32")
            keys = T.alloc_local((lines,), "float32")
            u = T.alloc_local((columns,), "float32")
            w = T.alloc_local((columns,), "float32")
            delta = T.alloc_local((columns,), "float32")
            result = T.alloc_local((columns,), dtype)
            products = T.alloc_local((3,), "float32")
            of_key = T.alloc_var("float32")  # 1 / |k|, if that is wanted
            of_query = T.alloc_var("float32")
            query = T.alloc_var("float32")
            decay = T.alloc_var("float32")
            beta_t = T.alloc_var("float32")

            fetch(q, k, v, g, beta, n, 0, key_head, head, tile, tx, fetched)
            if initial_states > 0:
                for p in T.unroll(lines):
                    for c in T.vectorized(columns):
                        state[p * columns + c] = T.cast(initial_state[n, head, p * _LINES + line, first + c], held)
            else:
                for x in T.unroll(lines * columns):
                    state[x] = T.cast(0, held)
            store(fetched, 0, tx, q_s, k_s, v_s, gates_s)
            T.sync_threads()
            for t in T.serial(1 if single else length):
                now = t % 2
                # this buffer is another token's behind the barrier
                decay = T.exp(gates_s[now, 0])
                beta_t = gates_s[now, 1]
                for c in T.unroll(columns):
                    u[c] = 0.0
                    w[c] = 0.0
                    if not single:
                        delta[c] = v_s[now, own + c]
                for x in T.unroll(3):
                    products[x] = 0.0
                if not single and t + 1 < length:
                    fetch(q, k, v, g, beta, n, t + 1, key_head, head, tile, tx, fetched)
                for p in T.unroll(lines):
                    keys[p] = k_s[now, p * _LINES + line]
                    query = q_s[now, p * _LINES + line]
                    products[0] += query * keys[p]
                    products[1] += keys[p] * keys[p]
                    products[2] += query * query
                    for c in T.unroll(columns):
                        u[c] += keys[p] * T.cast(state[p * columns + c], "float32")
                        w[c] += query * T.cast(state[p * columns + c], "float32")
                if single:
                    call(f"jax_qla_as_they_are<{lines * columns // 2}>", state.data)
                for step in T.unroll(2):
                    for x in T.unroll(3):
                        products[x] += T.shfl_xor(products[x], _LANES << step)
                    for c in T.unroll(columns):
                        u[c] += T.shfl_xor(u[c], _LANES << step)
                        w[c] += T.shfl_xor(w[c], _LANES << step)
                if tx % 32 < _LANES:
                    for c in T.vectorized(columns):
                        sums_s[now, tx // 32, 0, own + c] = u[c]
                    for c in T.vectorized(columns):
                        sums_s[now, tx // 32, 1, own + c] = w[c]
                    for x in T.unroll(3):
                        products_s[now, tx // 32, x] = products[x]  # the same numbers by all lanes
                if not single and t + 1 < length:
                    store(fetched, 1 - now, tx, q_s, k_s, v_s, gates_s)
                T.sync_threads()
                for x in T.unroll(3):
                    products[x] = 0.0
                    for y in T.unroll(_WARPS):
                        products[x] += products_s[now, y, x]
                of_key = 1.0
                of_query = 1.0
                if normed != 0:
                    of_key = T.rsqrt(products[1] + T.float32(common.L2NORM_EPSILON))
                    of_query = T.rsqrt(products[2] + T.float32(common.L2NORM_EPSILON))
                for c in T.unroll(columns):
                    u[c] = 0.0
                    w[c] = 0.0
                    for x in T.unroll(_WARPS):
                        u[c] += sums_s[now, x, 0, own + c]
                        w[c] += sums_s[now, x, 1, own + c]
                    if single:
                        delta[c] = v_s[now, own + c]
                    delta[c] = of_key * beta_t * (delta[c] - decay * of_key * u[c])
                if not single:
                    for x in T.unroll(lines * columns):
                        state[x] = decay * state[x] + keys[x // columns] * delta[x % columns]
                if line == 0:
                    for c in T.unroll(columns):
                        result[c] = T.cast(scale * of_query * (decay * w[c] + products[0] * delta[c]), dtype)
                    for c in T.vectorized(columns):
                        o[n, t, head, first + c] = result[c]
            if final_states > 0:
                for p in T.unroll(lines):
                    if single:
                        keys[p] = k_s[0, p * _LINES + line]
                        for c in T.unroll(columns):
                            state[p * columns + c] = T.cast(
                                decay * T.cast(state[p * columns + c], "float32") + keys[p] * delta[c], held
                            )
                    for c in T.vectorized(columns):
                        final_state[n, head, p * _LINES + line, first + c] = T.cast(state[p * columns + c], state_dtype)

    return recurrent


def specification(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array,
    *,
    ratio: int,
    scale: float,
    normed: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """(o [N, T, Hv, V] in v's dtype, final_state [N, Hv, K, V] in that of initial_state, which has N or 0 sequences)."""
    wide = jnp.promote_types(v.dtype, jnp.float32)
    shape = (v.shape[0], *initial_state.shape[1:])
    state = (initial_state if initial_state.shape[0] else jnp.zeros(shape, initial_state.dtype)).astype(wide)
    queries, keys = (x * inverse_length(x, normed)[..., None] for x in (q.astype(wide), k.astype(wide)))
    queries, keys = (jnp.repeat(x, ratio, axis=2) for x in (queries, keys))

    def step(state, token):
        q, k, v, g, beta = token
        decay = jnp.exp(g)[..., None]
        u, w = (jnp.einsum("nhk,nhkv->nhv", x, state) for x in (k, q))
        delta = beta[..., None] * (v - decay * u)
        o = scale * (decay * w + jnp.sum(q * k, axis=-1, keepdims=True) * delta)
        return decay[..., None] * state + k[..., None] * delta[..., None, :], o

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (queries, keys, v.astype(wide), g, beta))
    state, o = jax.lax.scan(step, state, tokens)
    return jnp.moveaxis(o, 0, 1).astype(v.dtype), state.astype(initial_state.dtype)
