"""What the kernels share: conventions, constants and pass configuration.

Beside this, kernels/preludes.py has the CUDA that several of them call and kernels/macros.py the TileLang.

Every kernel of the chunked rule works on flat token arrays [tokens, heads, dim] and a table, `segments` [N, 2] = (start, end) of each sequence (jax_qla/segments.py);
those that go by chunks and not along sequences find the rows of a chunk slot in it (kernels/preludes.py: CHUNK_PRELUDE). A chunk tile is always loaded whole (64 rows)
with TMA; the rows beyond its sequence hold another sequence's data or nothing at all and must never reach a result, not even as 0 * NaN:
they are replaced by zeros in shared memory wherever a matrix product sums over rows.

With `l2norm`, q and k count as divided by their lengths |x| = sqrt(<x, x> + 1e-6). No kernel divides a tile: the matrix products are
of the rows as they are, and the lengths are those of the gates' vectors beside them,

    beta / |k|^2  for  beta  and  |k| V  for  V  (so that beta V becomes beta / |k| V),     scale / |q_i|  for  scale  in row i,

for beta |k|^-2 k k^T = beta k^ k^^T and k (beta |k|^-2) (|k| v) = beta k^ v with k^ = k / |k|. `a` and all states are those of normalised
keys; Vd and dX between kernels are |k| times less and more. What gradients kernels/gradients.py finds by q and k with the lengths held
constant become the whole ones by dk - k <k, dk> / |k|^2. `prepare` writes the lengths, which are kept for the backward pass, and all others
read them with the gates. (Where kernels measured the rows of their own tiles, both passes took 11 to 18 % longer than without
`l2norm`. But `forward` finds those of queries by a product where each value head has a key head of its own.) In bfloat16 only: lengths far from 1 would leave float16's range. (By a run-time flag, calls without it took
6 to 15 % longer where a block's latency is all that counts.)

With `split`, what meets the inverse of a chunk enters products as the sum of two bf16 numbers, high and low: `a`, X and Vd, of the
backward pass dVd and exp(gamma) beta dX; so do the states and their gradients where X, dVd or a gradient is computed from them, and dX where
dg is. Between kernels `a` and Vd then have twice their columns, the low parts behind the high ones, h and dh twice their tiles, and dh one more a chunk:
the low part of D, transposed (kernels/state_gradients.py). Of a product of two such sums that of the low parts is left out. Where beta
comes near 2 or keys are much alike, the inverse is large and what it is multiplied by cancels: the rounding of these operands is then most of
a result's error. And dg is the inner product of a state and its gradient: where one chunk has nearly all of it, it is as far off as these are.
What enters once and is rounded by itself, P and dO, is little (docs/accuracy.md).
"""

CHUNK = 64
"""Rows of a chunk. Chunks restart at every segment's first row."""

FIRST, LAST = 1, 2
"""Bits of a piece's position in its sequence."""


def cut_behind(piece, sequence):
    """Where the cut behind a piece is among all cuts (jax_qla/segments.py: cut_table); the cut before it is one place before that."""
    return piece - sequence


def state_tile_rows(key_dim: int) -> int:
    """Rows of K of a tile in `h` and `dh`, the states before all chunks and their gradients: such tiles lie one behind the other, so that what TMA
    stores at a time is contiguous."""
    return 64 if key_dim % 64 == 0 else key_dim


def map_block(key_dim: int) -> int:
    """Rows and columns of a block of a map [K, K] as kernels/compose.py takes it."""
    return 16 if key_dim % 16 == 0 else key_dim


def map_blocks_shape(key_dim: int) -> tuple[int, int]:
    """Of such a map (kernels/specification.py: map_blocks)."""
    block = map_block(key_dim)
    return 2 * (key_dim // block) ** 2, block**2


MIN_LOG_DECAY = -110.0  # exp of it is 0 in float32; clamping keeps the cumulative sums of gates exact
LOG2_E = 1.4426950408889634

PLACES = 32768
"""Blocks along the second dimension of a grid, which may have 65535: others have other numbers along the third (macros.py: over)."""

ROUND = 132
"""Blocks that a card runs at once, of those that need a multiprocessor each."""

FAINT = 2.0**-10
"""Where |beta| is less, dv = beta dX in 16 bits has not dX's precision, or is 0: such rows stay dX until kernels/gradients.py
has used them."""

LONG, SHORT = "evict_last", "evict_first"
"""How long the second-level cache is to keep what a kernel reads, and what it writes or nobody reads again, where it waits for memory. Memory that is
read and written at once is slower than either alone, and a little less so like this (docs/performance_kernels.md, "Memory in the backward pass")."""

L2NORM_EPSILON = 1e-6
"""q and k are divided by sqrt(|x|^2 + this) where a call asks for it."""

ALWAYS, BALANCED, UNBALANCED = 0, 1, 2
"""When a kernel computes anything: always, only where sequences keep a card busy to the end (kernels/balance.py), only where they do not."""

ALL, LATER, EARLIER = 0, 1, 2
"""The window of every segment that a launch goes through: all of its chunks, or the later half of them, of an odd number one more, or the earlier one, to
which the launch before has come. What two such launches keep of the chunks then takes the same memory in turn (jax_qla/segments.py: window_slots)."""

PASS_CONFIGS: dict[str, object] = {
    "tl.disable_warp_specialized": True,  # roles are written by hand
    "tl.disable_thread_storage_sync": True,  # and so are barriers
    "tl.disable_safe_memory_legalize": True,  # the tables are in bounds by construction
}

STRETCHES = 1
"""The lowest bit of the gamma of a chunk's last row: some token of the chunk may lengthen a state, beta <k, k> being above 2 or negative."""

FORGOTTEN = -17.0
"""Log of the factor below which what a state contributes to a later one is left out: 4e-8, and float32 rounds by 6e-8."""

SLOW = FORGOTTEN / 16
"""A head whose gates up to the batch's 64th row, from where their sums begin, add up to more may be one of which many chunks matter:
kernels that go by pieces begin with the blocks of such heads. Nothing but time depends on it."""
