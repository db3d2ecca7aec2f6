"""What the cotangents of a piece of a sequence do to the gradient of the state before it, from none after it.

The transposed counterpart of kernels/summaries.py. The gradient of the state before a piece is affine in the gradient of the state
after it, dS -> M^T dS + N', with the M of kernels/summaries.py:

    adjoint response  N'   the gradient of the state before the piece from none after it; of a sequence's last piece, from that
                           of the final state

by the recurrence of kernels/state_gradients.py. Nothing is needed of a sequence's first piece: a block is told the cut behind which its piece is. As in kernels/summaries.py, gates
decide how many chunks are computed, here at the piece's beginning, and which blocks begin first.

Plan, one block per (cut, value head, tile of 64 value columns), three stages of chunk tiles (two of P), as in
kernels/state_gradients.py:

    warpgroup  registers  work
    0          240        dS^T in float32, in registers
    1          152        P into shared memory, a without its diagonal of ones
    2          24         warp 8 loads Q, K, dO with TMA, 11 the inverses, 9 and 10 fetch the gates, a row a lane
    (barriers there too)
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_qla.kernels.common import CHUNK, LAST, PASS_CONFIGS
from jax_qla.kernels.inverse import INVERSE_PRELUDE
from jax_qla.kernels.macros import call, macros, unfenced
from jax_qla.kernels.preludes import P_PRELUDE, REACH_PRELUDE
from jax_qla.kernels.specification import (
    decay,
    gather_chunks,
    gather_lengths,
    last_row,
    reach,
    scan_slots,
    unpack_inverses,
)

__all__ = ["PASS_CONFIGS", "Config", "program", "specification"]


@dataclass(frozen=True)
class Config:
    """Sizes this program is specialised for: `key_dim`, `value_dim` 64 or 128, `dtype` "bfloat16" or "float16"; `l2norm`: whether q and k
    are to be normalised; `split` (kernels/common.py): with bfloat16 only."""

    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    l2norm: bool = False
    split: bool = False


def program(config: Config):
    """The TileLang program. Numbers of tokens, heads, pieces and sequences are run-time values."""
    import tilelang.language as T
    from tilelang.layout import make_full_bank_swizzled_layout

    C, K, V, dtype = CHUNK, config.key_dim, config.value_dim, config.dtype
    tiles = V // 64  # blocks a piece and head
    l2norm, split = config.l2norm, config.split
    stages = 3
    m = macros()
    tokens, key_heads, value_heads, parts = T.dynamic("tokens, key_heads, value_heads, parts")
    places = T.dynamic("places")  # for cuts
    final_states = T.dynamic("final_states")  # sequences, or 0: not given

    @T.prim_func
    def adjoint_summaries(
        q: T.Tensor((tokens, key_heads, K), dtype),
        k: T.Tensor((tokens, key_heads, K), dtype),
        do: T.Tensor((tokens, value_heads, V), dtype),
        a: T.Tensor((value_heads, tokens, C * (1 + split)), "int16"),
        gamma: T.Tensor((tokens, value_heads), "float32"),
        beta: T.Tensor((tokens, value_heads), "float32"),
        lengths: T.Tensor((tokens, key_heads), "float32"),  # 1 / |k|, with `l2norm` only, and so
        query_lengths: T.Tensor((tokens, key_heads), "float32"),  # 1 / |q|
        d_final_state: T.Tensor((final_states, value_heads, K, V), "float32"),
        pieces: T.Tensor((parts, 4), "int32"),
        cuts: T.Tensor((places, 2), "int32"),
        adjoint_response: T.Tensor((places, value_heads, K, V), "float32"),
        ratio: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(
            places * tiles, value_heads, threads=384, prelude=P_PRELUDE + INVERSE_PRELUDE + REACH_PRELUDE
        ) as (block, number):
            T.annotate_min_blocks_per_sm(1)
            T.pdl_trigger()  # what follows waits by itself
            piece = T.alloc_var("int32")
            piece = cuts[block // tiles, 1]
            if piece < 0:
                if block + number == 0:
                    T.pdl_sync()  # as below; one block is enough
                T.thread_return()
            head = T.alloc_var("int32")
            head = T.call_extern(
                "int32", "jax_qla_slow_first", T.address_of(gamma[T.min(tokens, C) - 1, 0]), value_heads, number
            )
            start = T.alloc_var("int32")
            end = T.alloc_var("int32")
            position = T.alloc_var("int32")
            chunks = T.alloc_var("int32")
            count = T.alloc_var("int32")  # chunks that matter, at the beginning of the piece; 0: nothing to do
            key_head = T.alloc_var("int32")
            tile = block % tiles
            start = pieces[piece, 0]
            end = pieces[piece, 1]
            position = pieces[piece, 3]
            key_head = T.truncdiv(head, ratio)
            tx = T.get_thread_binding()
            chunks = (end - start + C - 1) // C
            count = m.chunks_that_matter(gamma, value_heads, head, start, end, chunks, from_end=False)
            if count < 0:
                count = chunks

            shared = m.tiles_last_first(K, 64, stages, dtype, split, l2norm, gives_dv=False, readers=128)
            # a layout that nothing else here asks for
            T.annotate_layout({shared.do_s: make_full_bank_swizzled_layout(shared.do_s)})

            if tx >= 256:
                T.set_max_nreg(24, 0)
                if tx < 288:
                    m.load_last_first(q, k, do, start, count, key_head, head, tile * 64, stages, shared)
                elif tx < 352:
                    m.gates_last_first(
                        gamma,
                        beta,
                        lengths,
                        query_lengths,
                        start,
                        end,
                        count,
                        head,
                        key_head,
                        scale,
                        tx - 288,
                        stages,
                        l2norm,
                        shared,
                    )
                else:
                    m.load_inverses(a, start, end, count, head, True, stages, shared)
            elif tx >= 128:
                T.set_max_nreg(152, 0)
                m.prepare_last_first(start, end, count, scale, tx - 128, stages, l2norm, shared)
            else:
                T.set_max_nreg(240, 1)
                d = T.alloc_fragment((64, K), "float32")
                d_b = T.alloc_fragment((64, K), dtype)
                u = T.alloc_fragment((64, C), "float32")
                from_output = T.alloc_fragment((64, C), "float32")  # P^T dO
                dvd_b = T.alloc_fragment((64, C), dtype)
                dw_b = T.alloc_fragment((64, C), dtype)
                if split:
                    low = T.alloc_fragment((64, C), dtype)  # of dVd, then of exp(gamma) beta dX
                do_t = T.alloc_fragment((64, C), dtype)
                do_b = T.alloc_fragment((64, C), dtype)  # dO^T diag(scale exp(gamma))
                whole = T.alloc_var("float32")
                # a sequence's last piece, of which all chunks matter, begins with the gradient of the final state
                if final_states > 0 and position >= LAST and count == chunks:
                    for i, j in T.Parallel(64, K):
                        d[i, j] = d_final_state[pieces[piece, 2], head, j, tile * 64 + i]
                else:
                    T.clear(d)
                for c in T.serial(count):
                    at = c % stages
                    if not split:
                        T.copy(d, d_b)
                    T.barrier_wait(shared.ready[at], (c // stages) % 2)
                    # dVd = exp(gamma_C - gamma) K dS + P^T dO
                    call("jax_qla_load_transposed", do_t.data, unfenced(shared.do_s[at, 0, 0]))
                    m.multiply_lower(do_t, shared.p_s, c % 2, from_output)
                    if split:
                        m.multiply_state_split(d, d_b, shared.k_s, at, u, None)
                    else:
                        m.forget(u)
                        T.wgmma_gemm(d_b, shared.k_s[at, :, :], u, transpose_B=True, clear_accum=True)
                    for i, j in T.Parallel(64, C):
                        do_b[i, j] = T.cast(do_t[i, j], "float32") * shared.lift_s[at, j]
                    T.wait_wgmma(0)
                    T.barrier_arrive(shared.taken[c % 2])
                    for i, j in T.Parallel(64, C):
                        u[i, j] = u[i, j] * shared.fall_s[at, j] + from_output[i, j]
                    T.copy(u, dvd_b)
                    # dX = A^T dVd, on the diagonal (of ones), which a_s lacks, without the rounding of dVd
                    if split:
                        m.keep_low(u, dvd_b, low)
                    m.multiply_inverse(dvd_b, shared.a_s, at, u, True, False)
                    if split:
                        m.multiply_inverse(low, shared.a_s, at, u, True, False)
                        m.multiply_inverse(dvd_b, shared.low_s, at, u, True, False)
                    whole = shared.rise_s[at, T.min(end - (start + (count - 1 - c) * C), C) - 1]
                    for i, j in T.Parallel(64, K):
                        d[i, j] = d[i, j] * whole
                    # dS = exp(gamma_C) dS + Q^T scale exp(gamma) dO - K^T exp(gamma) beta dX
                    T.wgmma_gemm(do_b, shared.q_s[at, :, :], d)
                    T.wait_wgmma(1)
                    for i, j in T.Parallel(64, C):
                        dw_b[i, j] = T.cast(u[i, j] * shared.drop_s[at, j], dtype)
                    T.wgmma_gemm(dw_b, shared.k_s[at, :, :], d)
                    if split:
                        for i, j in T.Parallel(64, C):
                            low[i, j] = T.cast(u[i, j] * shared.drop_s[at, j] - T.cast(dw_b[i, j], "float32"), dtype)
                        T.wgmma_gemm(low, shared.k_s[at, :, :], d)
                    T.wait_wgmma(0)
                    T.barrier_arrive(shared.free[at])
                for i, j in T.Parallel(64, K):
                    adjoint_response[block // tiles, head, j, tile * 64 + i] = d[i, j]
            T.pdl_sync()  # ends after `summaries`, for `compose` waits for this kernel alone

    return adjoint_summaries


def specification(
    q: jax.Array,
    k: jax.Array,
    do: jax.Array,
    a: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array,
    d_final_state: jax.Array,
    pieces: jax.Array,
    cuts: jax.Array,
    chunks: jax.Array,
    *,
    ratio: int,
    scale: float,
    l2norm: int = 0,
) -> jax.Array:
    """The adjoint response [cuts, Hv, K, V] of the pieces behind the cuts; not a number where there is none. `chunks` is the chunk table of the pieces."""
    keys, queries = (jnp.repeat(gather_chunks(x, chunks), ratio, axis=2) for x in (k, q))
    gradient, gates, strength = (gather_chunks(x, chunks) for x in (do, gamma, beta))
    inverse = unpack_inverses(a, chunks, k.dtype)
    scales = jnp.full_like(strength, scale)
    if l2norm:
        strength = strength * gather_lengths(lengths, chunks, ratio) ** 2
        scales = scales * gather_lengths(query_lengths, chunks, ratio)
    p = scales[:, :, None] * jnp.einsum("sihk,sjhk->sijh", queries, keys) * decay(gates)
    _, whole, matters = reach(gamma, pieces, chunks, from_end=False)

    def step(state, xs):
        queries, keys, gradient, inverse, p, gates, strength, scales, end, matters = xs
        rise = jnp.exp(gates)[..., None]
        dvd = jnp.einsum("ijh,ihv->jhv", p, gradient)
        dvd += jnp.exp(end - gates)[..., None] * jnp.einsum("ihk,hkv->ihv", keys, state)
        dx = jnp.einsum("ihj,ihv->jhv", inverse, dvd)
        before = jnp.exp(end)[:, None, None] * state
        before += jnp.einsum("ihk,ihv->hkv", queries, scales[..., None] * rise * gradient)
        before -= jnp.einsum("ihk,ihv->hkv", keys, rise * strength[..., None] * dx)
        return jnp.where(matters[:, None, None], before, state), None

    last = pieces[:, 3] >= LAST
    begin = jnp.zeros((pieces.shape[0], do.shape[1], k.shape[2], do.shape[2]), d_final_state.dtype)
    if d_final_state.shape[0]:
        begin = jnp.where((last[:, None] & whole)[..., None, None], d_final_state[pieces[:, 2]], begin)
    xs = (queries, keys, gradient, inverse, p, gates, strength, scales, last_row(gates, chunks), matters)
    response, _ = scan_slots(step, begin, pieces, chunks, xs, reverse=True)
    return jnp.where((cuts[:, 1] >= 0)[:, None, None, None], response[cuts[:, 1]], jnp.nan)
