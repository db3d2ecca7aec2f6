"""What a piece of a sequence does to the state before it, so that the pieces of one sequence can be computed side by side.

The state after a piece is affine in the state before it, S -> M S + N per value head (kernels/forward.py has the chunk's
recurrence, of which both follow):

    response    N    the state after the piece from a state of zero; of a sequence's first piece, from its initial state
    transition  M    column c is the state after the piece from the c-th unit vector, without values (V = 0)

kernels/compose.py puts them together. Nothing is needed of a sequence's last piece, and no transition of its first: so a block is told the cut
(jax_qla/segments.py: cut_table) before which its piece is. Places for cuts that no sequence has are left at once, and where none is cut the next kernel
may begin at once (kernels/uncut.py).

Gates decide how much is computed. Where the bounds of the chunks' effect on the state (kernels/prepare.py) add up to less than
FORGOTTEN over the whole piece, M counts as zero, and N is computed from as many chunks at the piece's end as these bounds leave to
matter. Heads that do not decay take the exact way. `forgotten` is 1 where no product with M is to be taken: there, and of a sequence's
first piece. What is found of a piece lies at the cut behind it.

Plan, one block per (cut, value head, tile of 64 columns of [N | M]), two blocks an SM or, where those of heads that do not decay are few, or with `split`, one,
three stages of chunk tiles; the recurrence is that of kernels/states.py, in registers and transposed:

    warpgroup  registers  work
    0          216        64 columns: S^T in float32
    1          40         warp 4 loads K, a and, for N, V with TMA; warps 6 and 7: gates, a thread a row
    (barriers as in kernels/forward.py, but that `ready`, at which warps 6 and 7 arrive, says what `gated` does there; only they wait for `loaded`)

The blocks of heads that seem to forget slowly begin first (kernels/common.py: SLOW): they take longest, and the card would wait for
them if others, of which there are more than fit at once, came before. Those that most likely find nothing to do, M of the other heads, come last
(ITEM_PRELUDE). Two of those that take longest take 1.4 times as long on one SM, and nothing but its shared memory says how many blocks an SM takes. So where
it depends on the gates which is better, this is launched for both: `alone` says of how many such heads each launch computes anything, and of how many it leaves
(policy.summarised). The loads have a warp to themselves: when the gates' warpgroup issued them, each chunk's gates waited for the next chunk's loads.

M leaves as the sum of two bf16 numbers, 16 bits of mantissa, in the order in which kernels/compose.py reads it (kernels/specification.py: map_blocks).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_qla.kernels import uncut
from jax_qla.kernels.common import CHUNK, FIRST, LAST, PASS_CONFIGS, map_blocks_shape
from jax_qla.kernels.inverse import INVERSE_PRELUDE
from jax_qla.kernels.macros import accumulator_layout, call, leave_first, macros, unfenced
from jax_qla.kernels.preludes import PRELUDE, REACH_PRELUDE
from jax_qla.kernels.specification import (
    gather_chunks,
    gather_lengths,
    last_row,
    map_blocks,
    reach,
    scan_slots,
    unpack_inverses,
)

__all__ = ["PASS_CONFIGS", "Config", "program", "specification"]


ITEM_PRELUDE = r"""
// What the block that is launched as the `index`-th computes: head, which of so many pieces, and tile of 64 columns, of which a piece has `value_tiles` of N and then
// `map_tiles` of M. First come heads that are slow by `sums` (more than kSlow), whose blocks take longest; then N of the others; and last their M,
// of which nothing is computed as a rule. The head is -1, and nothing else is said, if this launch leaves all to another: with `alone` > 0 it computes only if
// 1 to `alone` heads are slow, with `alone` < 0 only if not 1 to -`alone` are, with 0 in any case. To be called by whole warps.
__device__ __forceinline__ void jax_qla_item(int* item, const float* sums, int heads, int pieces, int value_tiles, int map_tiles, int index, int alone) {
  const auto is_slow = [&](int head) { return sums[head] > kSlow; };
  const int slow = jax_qla_count(heads, is_slow);
  item[0] = -1;
  if (alone != 0 && (slow > 0 && slow <= abs(alone)) != (alone > 0)) return;
  const int exact = slow * pieces * (value_tiles + map_tiles), responses = (heads - slow) * pieces * value_tiles;
  const bool forgets = index >= exact, map = index >= exact + responses;
  const int rank = index - (map ? exact + responses : forgets ? exact : 0);
  const int tiles = map ? map_tiles : forgets ? value_tiles : value_tiles + map_tiles, tile = map ? value_tiles : 0;
  item[0] = jax_qla_nth(0, heads, rank / (pieces * tiles), [&](int head) { return is_slow(head) != forgets; });
  item[1] = rank % (pieces * tiles) / tiles;
  item[2] = tile + rank % tiles;
}
"""

MAP_PRELUDE = r"""
// Rows 64 `part` to 64 `part` + 63 of a transposed map, in a warpgroup's wgmma accumulator [64, key_dim], to the map's blocks (kernels/specification.py:
// map_blocks) at maps + `at`.
template <int key_dim, typename T>
__device__ __forceinline__ void jax_qla_store_map(T* maps, long long at, const void* accumulator, int part) {
  const float* x = static_cast<const float*>(accumulator);
  const int lane = threadIdx.x & 31, row = part * 4 + (threadIdx.x >> 5 & 3);  // of blocks
  unsigned* to = reinterpret_cast<unsigned*>(maps + at) + row * (key_dim / 16) * 256 + lane;
#pragma unroll
  for (int i = 0; i < key_dim / 4; ++i) {  // matrices [8, 8]: i / 4 of blocks, i / 2 % 2 of columns, i % 2 of rows
    unsigned high, low;
    jax_qla_split(high, low, x[i / 2 * 4 + i % 2 * 2], x[i / 2 * 4 + i % 2 * 2 + 1]);
    to[i / 4 * 256 + i % 4 * 32] = high;
    to[i / 4 * 256 + 128 + i % 4 * 32] = low;
  }
}
"""


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
    value_tiles = V // 64
    tiles = value_tiles + K // 64  # blocks a piece and head
    l2norm, split = config.l2norm, config.split
    stages = 3
    m, leave_if_uncut = macros(), uncut.macro()
    tokens, key_heads, value_heads, parts = T.dynamic("tokens, key_heads, value_heads, parts")
    places = T.dynamic("places")  # for cuts
    sequences = T.dynamic("sequences")
    initial_states = T.dynamic("initial_states")  # sequences, or 0: not given

    @T.prim_func
    def summaries(
        k: T.Tensor((tokens, key_heads, K), dtype),
        v: T.Tensor((tokens, value_heads, V), dtype),
        a: T.Tensor((value_heads, tokens, C * (1 + split)), "int16"),
        gamma: T.Tensor((tokens, value_heads), "float32"),
        beta: T.Tensor((tokens, value_heads), "float32"),
        lengths: T.Tensor((tokens, key_heads), "float32"),  # 1 / |k|, with `l2norm` only
        initial_state: T.Tensor((initial_states, value_heads, K, V), "float32"),
        pieces: T.Tensor((parts, 4), "int32"),
        cuts: T.Tensor((places, 2), "int32"),
        bounds: T.Tensor((sequences, 2), "int32"),
        response: T.Tensor((places, value_heads, K, V), "float32"),
        transition: T.Tensor((places, value_heads, *map_blocks_shape(K)), "bfloat16"),
        forgotten: T.Tensor((places, value_heads), "int32"),
        ratio: T.int32,
        cut_beyond: T.int32,  # rows, or -1 (kernels/uncut.py)
        alone: T.int32,  # of how many slow heads this launch computes anything (ITEM_PRELUDE), or 0: always
    ):
        with T.Kernel(
            places * tiles * value_heads,
            threads=256,
            prelude=PRELUDE + INVERSE_PRELUDE + REACH_PRELUDE + ITEM_PRELUDE + uncut.UNCUT_PRELUDE + MAP_PRELUDE,
        ) as block:
            T.annotate_min_blocks_per_sm(2)
            leave_first(uncut.others_uncut(bounds, sequences, cut_beyond))
            if block == 0:
                leave_if_uncut(bounds, sequences, cut_beyond, True)
            # `prepare` has ended; and so it has where this is launched for the second time, which the first allowed when it knew that
            if alone >= 0:
                T.pdl_sync()
            T.pdl_trigger()  # what follows waits by itself
            head = T.alloc_var("int32")
            cut = T.alloc_var("int32")
            piece = T.alloc_var("int32")
            tile = T.alloc_var("int32")
            start = T.alloc_var("int32")
            end = T.alloc_var("int32")
            position = T.alloc_var("int32")
            chunks = T.alloc_var("int32")
            count = T.alloc_var("int32")  # chunks that matter, at the end of the piece; 0: this block has nothing to do
            key_head = T.alloc_var("int32")
            item = T.alloc_local((3,), "int32")
            call(
                "jax_qla_item",
                item.data,
                T.address_of(gamma[T.min(tokens, C) - 1, 0]),
                value_heads,
                places,
                value_tiles,
                tiles - value_tiles,
                block,
                alone,
            )
            head = item[0]
            if head < 0:
                if alone < 0 and block == 0:
                    T.pdl_sync()  # one block is enough
                T.thread_return()
            if alone < 0:
                T.pdl_sync()
            cut = item[1]
            piece = cuts[cut, 0]
            if piece < 0:
                T.thread_return()
            tile = item[2]
            start = pieces[piece, 0]
            end = pieces[piece, 1]
            position = pieces[piece, 3]
            key_head = T.truncdiv(head, ratio)
            tx = T.get_thread_binding()
            chunks = (end - start + C - 1) // C
            count = m.chunks_that_matter(gamma, value_heads, head, start, end, chunks, from_end=True)
            if tile == 0 and tx == 0:
                forgotten[cut, head] = T.Select(count < 0 and position != FIRST, 0, 1)
            if tile >= value_tiles and (count >= 0 or position == FIRST):
                count = 0
            else:
                if count < 0:
                    count = chunks
            start = start + (chunks - count) * C

            shared = m.tiles_in_order(K, 64, stages, dtype, split, loaders=32, readers=128)
            # a layout that nothing else here asks for
            T.annotate_layout({shared.v_s: make_full_bank_swizzled_layout(shared.v_s)})

            if tx >= 128:
                T.set_max_nreg(40, 0)
                if tx < 160:
                    for c in T.serial(count):
                        if c >= stages:
                            T.barrier_wait(shared.free[c % stages], (c // stages + 1) % 2)
                        m.load_rows(k, start + c * C, key_head, 0, K, shared.k_s, c % stages, shared.loaded)
                        rows = T.min(end - (start + c * C), C)
                        m.load_inverse(a, head, start + c * C, rows, 0, shared.a_s, c % stages, shared.loaded)
                        if split:
                            m.load_inverse(a, head, start + c * C, rows, 1, shared.low_s, c % stages, shared.loaded)
                        if tile < value_tiles:
                            m.load_rows(v, start + c * C, head, tile * 64, 64, shared.v_s, c % stages, shared.loaded)
                        T.barrier_arrive(shared.loaded[c % stages])
                elif tx >= 192:
                    m.prepare_in_order(
                        gamma, beta, lengths, start, end, count, head, key_head, tx - 192, stages, l2norm, None, shared
                    )
            else:
                T.set_max_nreg(216, 1)
                state = T.alloc_fragment((64, K), "float32")
                state_b = T.alloc_fragment((64, K), dtype)
                u = T.alloc_fragment((64, C), "float32")
                x_b = T.alloc_fragment((64, C), dtype)
                vk_b = T.alloc_fragment((64, C), dtype)
                v_t = T.alloc_fragment((64, C), dtype)
                if split:
                    low = T.alloc_fragment((64, C), dtype)  # of X, then of Vd
                T.annotate_layout({v_t: accumulator_layout(C)})
                v_beta = T.alloc_fragment((64, C), "float32")
                of_column = T.alloc_fragment((C,), "float32")  # factors of u's columns, read while a product runs
                whole = T.alloc_var("float32")
                if tile >= value_tiles:
                    for i, j in T.Parallel(64, K):
                        state[i, j] = T.Select(j == (tile - value_tiles) * 64 + i, T.float32(1), T.float32(0))
                else:
                    # a sequence's first piece, of which all chunks matter, begins with the initial state
                    if initial_states > 0 and position == FIRST and count == chunks:
                        for i, j in T.Parallel(64, K):
                            state[i, j] = initial_state[pieces[piece, 2], head, j, tile * 64 + i]
                    else:
                        T.clear(state)
                for c in T.serial(count):
                    at = c % stages
                    if not split:
                        T.copy(state, state_b)
                    T.barrier_wait(shared.ready[at], (c // stages) % 2)
                    # U = S^T K^T
                    if split:
                        m.multiply_state_split(state, state_b, shared.k_s, at, u, None)
                    else:
                        m.forget(u)
                        T.wgmma_gemm(state_b, shared.k_s[at, :, :], u, transpose_B=True, clear_accum=True)
                    call("jax_qla_load_transposed", T.address_of(v_t[0, 0]), unfenced(shared.v_s[at, 0, 0]))
                    # V is 0 for the transition, whatever lies in its tile
                    for i, j in T.Parallel(64, C):
                        v_beta[i, j] = T.Select(
                            tile < value_tiles, T.cast(v_t[i, j], "float32") * shared.beta_s[at, j], T.float32(0)
                        )
                    for j in T.Parallel(C):
                        of_column[j] = shared.drop_s[at, j]
                    T.wait_wgmma(0)
                    # X = beta V^T - beta exp(gamma) U, Vd = X A^T
                    m.begin_correction(u, v_beta, of_column, x_b, shared.a_s, at, low if split else None, shared.low_s)
                    whole = shared.rise_s[at, T.min(end - (start + c * C), C) - 1]
                    for i, j in T.Parallel(64, K):
                        state[i, j] = state[i, j] * whole
                    for j in T.Parallel(C):
                        of_column[j] = shared.fall_s[at, j]
                    T.wait_wgmma(0)
                    # S = exp(gamma_C) S + (exp(gamma_C - gamma) Vd) K
                    m.begin_update(state, u, of_column, vk_b, shared.k_s, at, low if split else None)
                    T.wait_wgmma(0)
                    T.barrier_arrive(shared.free[at])
                if tile < value_tiles:
                    for i, j in T.Parallel(64, K):
                        response[cut, head, j, tile * 64 + i] = state[i, j]
                else:
                    if count > 0:
                        call(
                            f"jax_qla_store_map<{K}>",
                            T.address_of(transition[0, 0, 0, 0]),
                            T.cast(cut * value_heads + head, "int64") * (2 * K * K),
                            state.data,
                            tile - value_tiles,
                        )

    return summaries


def specification(
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
    lengths: jax.Array,
    initial_state: jax.Array,
    pieces: jax.Array,
    cuts: jax.Array,
    chunks: jax.Array,
    *,
    ratio: int,
    l2norm: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(response [cuts, Hv, K, V], transition [cuts, Hv, K K / 128, 256] bf16, forgotten int32 [cuts, Hv]) of the pieces before the cuts.

    `chunks` is the chunk table of the pieces. What the kernel does not write is not a number here, or -1.
    """
    keys = jnp.repeat(gather_chunks(k, chunks), ratio, axis=2)
    values, gates, strength = (gather_chunks(x, chunks) for x in (v, gamma, beta))
    inverse = unpack_inverses(a, chunks, k.dtype)
    if l2norm:
        of_key = gather_lengths(lengths, chunks, ratio)
        strength, values = strength * of_key**2, values / of_key[..., None]
    columns = k.shape[2]
    forgotten, whole, matters = reach(gamma, pieces, chunks, from_end=True)

    def step(state, xs):
        keys, values, inverse, gates, strength, end, matters = xs
        x = strength[..., None] * (values - jnp.exp(gates)[..., None] * jnp.einsum("ihk,hkv->ihv", keys, state))
        vd = jnp.einsum("ihj,jhv->ihv", inverse, x)
        update = jnp.einsum("ihk,ihv->hkv", keys, jnp.exp(end - gates)[..., None] * vd)
        return jnp.where(matters[:, None, None], jnp.exp(end)[:, None, None] * state + update, state), None

    first = pieces[:, 3] % LAST == FIRST
    begin = jnp.zeros((pieces.shape[0], v.shape[1], columns, v.shape[2]), initial_state.dtype)
    if initial_state.shape[0]:
        takes = (first[:, None] & whole)[..., None, None]
        begin = jnp.where(takes, initial_state[pieces[:, 2]], begin)
    xs = (keys, values, inverse, gates, strength, last_row(gates, chunks), matters)
    response, _ = scan_slots(step, begin, pieces, chunks, xs)
    identity = jnp.broadcast_to(jnp.eye(columns, dtype=begin.dtype), (*begin.shape[:2], columns, columns))
    xs = (keys, jnp.zeros_like(keys), *xs[2:])
    transition, _ = scan_slots(step, identity, pieces, chunks, xs)
    forgotten = jnp.maximum(forgotten, first[:, None].astype(jnp.int32))
    transition = jnp.where(forgotten[..., None, None] != 0, jnp.nan, transition)
    is_cut, before = cuts[:, 0] >= 0, cuts[:, 0]
    response, transition = (jnp.where(is_cut[:, None, None, None], x[before], jnp.nan) for x in (response, transition))
    return response, map_blocks(transition), jnp.where(is_cut[:, None], forgotten[before], -1)
