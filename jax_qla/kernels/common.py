"""What the kernels share: constants, pass configuration, and TileLang macros for gates, tails and tiles.

Every kernel works on flat token arrays [tokens, heads, dim] and two tables (jax_qla/segments.py): `segments` [N, 2] = (start, end) of each
sequence, and `chunks` [slots, 4] = (sequence, first row, rows, fill rows) of each chunk slot. A chunk tile is always loaded whole (64 rows)
with TMA; the rows beyond its sequence hold another sequence's data or nothing at all and must never reach a result, not even as 0 * NaN:
they are replaced by zeros in shared memory wherever a matrix product sums over rows.
"""

CHUNK = 64
MIN_LOG_DECAY = -110.0  # exp of it is 0 in float32; clamping keeps the cumulative sums of gates exact
# A kernel of three warpgroups is launched with 168 registers a thread, so what `set_max_nreg` gives its warpgroups may add up
# to 504: an increase beyond that waits forever.
LOG2_E = 1.4426950408889634

PASS_CONFIGS: dict[str, object] = {
    "tl.disable_warp_specialized": True,  # roles are written by hand
    "tl.disable_thread_storage_sync": True,  # and so are barriers
    "tl.disable_safe_memory_legalize": True,  # the tables are in bounds by construction
}


def macros():
    """TileLang macros, built on demand so that importing a kernel module needs no TileLang."""
    from types import SimpleNamespace

    import tilelang.language as T

    C = CHUNK

    @T.macro
    def chunk_gates(gamma, beta, row, rows, head, thread, stage, gamma_s, rise_s, fall_s, beta_s):
        """Threads 0..63 write gamma (in units of log2), exp(gamma), exp(gamma_C - gamma) and beta of one chunk; 0 beyond `rows`."""
        last = T.alloc_var("float32")
        own = T.alloc_var("float32")
        if thread < C:
            if thread < rows:
                last = gamma[row + rows - 1, head] * T.float32(LOG2_E)
                own = gamma[row + thread, head] * T.float32(LOG2_E)
                gamma_s[stage, thread] = own
                rise_s[stage, thread] = T.exp2(own)
                fall_s[stage, thread] = T.exp2(last - own)
                beta_s[stage, thread] = beta[row + thread, head]
            else:
                gamma_s[stage, thread] = 0.0
                rise_s[stage, thread] = 0.0
                fall_s[stage, thread] = 0.0
                beta_s[stage, thread] = 0.0

    @T.macro
    def zero_tail(tiles, stage, rows, width, thread, threads):
        """Rows `rows`.. of tile `stage` of tiles [stages, 64, width] in shared memory become zero."""
        for x in T.serial((C - rows) * width // threads):
            tiles[stage, rows + (x * threads + thread) // width, (x * threads + thread) % width] = T.cast(0, tiles.dtype)

    @T.macro
    def store_rows(tiles, stage, target, row, rows, head, first, width, thread, threads):
        """Rows 0..`rows` of tile `stage` of tiles [stages, 64, width] in shared memory to `target[row.., head, first..]` by ordinary stores."""
        for x in T.serial(T.ceildiv(rows * width, threads)):
            if x * threads + thread < rows * width:
                target[row + (x * threads + thread) // width, head, first + (x * threads + thread) % width] = tiles[
                    stage, (x * threads + thread) // width, (x * threads + thread) % width
                ]

    return SimpleNamespace(chunk_gates=chunk_gates, zero_tail=zero_tail, store_rows=store_rows)
