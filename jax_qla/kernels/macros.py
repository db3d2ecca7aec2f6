"""TileLang macros that several kernels have alike: who computes what, loads, gates, tails, products, and what leaves."""

import functools
from types import SimpleNamespace

from jax_qla.kernels.common import (
    ALL,
    ALWAYS,
    BALANCED,
    CHUNK,
    FAINT,
    FORGOTTEN,
    LATER,
    LOG2_E,
    LONG,
    PLACES,
    SHORT,
    cut_behind,
)
from jax_qla.kernels.inverse import KEPT


def call(name: str, *arguments):
    """A statement: calls a CUDA function of a prelude that returns nothing."""
    import tilelang.language as T

    return T.call_extern("handle", name, *arguments)


def unfenced(element):
    """The address of an element in shared memory, for a CUDA function that reads there, or writes what neither wgmma nor TMA reads before a fence of the
    program's own: behind a pointer by which something may be written TileLang puts a proxy fence (0.1 us)."""
    import tilelang.language as T

    return T.access_ptr(element, "r")


def over(places):
    """The second and third dimension of a grid that has blocks for so many places, and perhaps for some more. (To find a block's place by a division takes
    0.2 us of it, before it has asked for anything.)"""
    import tilelang.language as T

    return T.min(places, PLACES), (places + PLACES - 1) // PLACES


def place_of(low, high):
    """Of a block with these numbers along the second and third dimension of a grid `over` places."""
    return high * PLACES + low


def leave_first(nothing):
    """A statement: all threads return if there is nothing to do, before all else, also before barriers are initialised (lowering.py). Of batches with many
    places blocks that leave are most of all, and half of what they cost is what every kernel begins with. `nothing` may go by operands, scalars and
    the block's place in the grid alone. Some block of the launch must stay, and wait."""
    return call("jax_qla_leave_if", nothing)


def rest_is_empty(segments, sequences, cuts=0):
    """Whether nothing is at this block's place among the sequences, or among pieces of these with so many places for `cuts`, for `leave_first`."""
    import tilelang.language as T

    return T.call_extern("bool", "jax_qla_rest_is_empty", T.address_of(segments[0, 0]), sequences, cuts)


def kept_first(firsts, sequences, sequence, piece):
    """The row of what lies between pieces where `compose` has kept what a sequence that is cut begins with, `piece` being its first one: that of its chain
    (jax_qla/segments.py: chain_table) from `firsts` on."""
    import tilelang.language as T

    return firsts + T.Select(sequences <= firsts, sequence, cut_behind(piece, sequence))


def accumulator_layout(columns: int, first_thread: int = 0, rows: int = 64):
    """The fragment layout of a wgmma accumulator [rows, columns] of the warpgroups, one for every 64 rows, that begin at `first_thread`, for a
    fragment whose registers C++ functions take.

    TileLang drops, without a word, a loop that writes or reads such a fragment alone when `first_thread` is wrong, and a loop over
    a part of one's columns beside another: look at the CUDA source (`build --keep-sources`).
    """
    from tilelang.layout import Fragment

    return Fragment(
        (rows, columns),
        forward_thread_fn=lambda i, j: first_thread + i // 16 * 32 + i % 8 * 4 + j % 8 // 2,
        forward_index_fn=lambda i, j: j // 8 * 4 + i % 16 // 8 * 2 + j % 2,
    )


def macros():
    """TileLang macros, built on demand so that importing a kernel module needs no TileLang."""
    import tilelang.language

    return _read_by(tilelang.language)


@functools.cache
def _read_by(language):
    """The macros as TileLang reads them, once, for that takes it 0.6 s; `language` is its module, in tests a stand-in."""
    import tilelang.language as T

    assert T is language
    C = CHUNK

    @T.macro
    def leave_if(nothing, waits):
        """All threads return if there is nothing to do, those of a block that `waits` after what the kernel waits for. One of a launch must."""
        idle = T.alloc_var("int32")
        # A vote: ptxas knows that all of a warp leave, or none.
        idle = T.call_extern("int32", "__any_sync", T.uint32(0xFFFFFFFF), T.cast(nothing, "int32"))
        if idle != 0:
            if waits:
                T.pdl_sync()
            T.thread_return()

    @T.macro
    def leave_unless(only, balanced, first_block):
        """All threads return if the sequences are not as `only` says, balanced or not: before all else, but for the first block's, which waits."""
        leave_first(T.call_extern("bool", "jax_qla_others_compute", only, T.address_of(balanced[0])))
        if first_block and only != ALWAYS:
            leave_if(balanced[0] != T.Select(only == BALANCED, 1, 0), True)

    @T.macro
    def find_sequence(n: T.Ref, start: T.Ref, end: T.Ref, count: T.Ref, segments, sequences, tokens, place: T.Ref):
        """Number, first row, the row behind the last, and chunks of the one of `sequences`, of `tokens` in all, that blocks at this `place` compute.
        All threads return where there are not so many."""
        if place >= sequences:
            T.thread_return()
        n = T.call_extern("int32", "jax_qla_long_first", T.address_of(segments[0, 0]), sequences, tokens, place)
        start = segments[n, 0]
        end = segments[n, 1]
        count = (end - start + C - 1) // C  # noqa: F841

    @T.macro
    def take_window(start: T.Ref, end: T.Ref, count: T.Ref, slot: T.Ref, n: T.Ref, window):
        """Of segment n, which has `count` chunks from `start` on, those of the `window` that a launch goes through, and the `slot` of the first of them in
        what it keeps of these (jax_qla/segments.py: window_slots)."""
        slot = start // C + n
        if window != ALL:
            earlier = T.alloc_var("int32")
            earlier = T.truncdiv(count, 2)
            slot = T.truncdiv(slot + n, 2)
            if window == LATER:
                start = start + earlier * C
                count = count - earlier
            else:
                end = T.min(end, start + earlier * C)
                count = earlier

    @T.macro
    def find_target(target: T.Ref, n: T.Ref, pieces, spans, cut_pieces):
        """Where the gradient of the state before sequence or piece n goes: to that of its sequence, or, of pieces but a sequence's first, nowhere, -1."""
        target = n
        if cut_pieces > 0:
            target = pieces[n, 2]
            target = T.Select(n == spans[target, 0], target, -1)

    def chunks_that_matter(gamma, heads, head, start, end, chunks, from_end):
        """Of a piece's `chunks`, how many at its end, or its beginning, may matter to the state after it, or the gradient before it: -1, all of them."""
        name = f"jax_qla_reach<{'true' if from_end else 'false'}>"
        return T.call_extern(
            "int32", name, T.address_of(gamma[0, head]), heads, start, end, chunks, T.float32(FORGOTTEN)
        )

    @T.macro
    def fetch_gates(gamma, beta, row, rows, head, thread, fetched):
        """Threads 0..63 read gamma of their row and of the last, and beta, into `fetched` [3] (registers): nothing here waits for them."""
        if thread < rows:
            fetched[0] = gamma[row + thread, head]
            fetched[1] = gamma[row + rows - 1, head]
            fetched[2] = beta[row + thread, head]

    @T.macro
    def store_gates(fetched, rows, thread, stage, gamma_s, rise_s, fall_s, beta_s):
        """Threads 0..63 write gamma (in units of log2), exp(gamma), exp(gamma_C - gamma) and beta of one chunk; 0 beyond `rows`."""
        if thread < C:
            if thread < rows:
                gamma_s[stage, thread] = fetched[0] * T.float32(LOG2_E)
                rise_s[stage, thread] = T.exp2(fetched[0] * T.float32(LOG2_E))
                fall_s[stage, thread] = T.exp2(fetched[1] * T.float32(LOG2_E) - fetched[0] * T.float32(LOG2_E))
                beta_s[stage, thread] = fetched[2]
            else:
                gamma_s[stage, thread] = 0.0
                rise_s[stage, thread] = 0.0
                fall_s[stage, thread] = 0.0
                beta_s[stage, thread] = 0.0

    @T.macro
    def load_rows(source, row, head, first, width, tiles, stage, loaded, kept=None):
        """One warp has TMA load rows row..row + 64, columns first..first + `width` of `source` into tile `stage` of `tiles`; the barrier
        loaded[stage] counts the bytes. How long the second-level cache should keep them is `kept`."""
        T.tma_copy(
            source[row : row + C, head, first : first + width],
            tiles[stage, :, :],
            barrier=loaded[stage],
            leader_scope_threads=32,
            eviction_policy=kept,
        )

    @T.macro
    def load_inverse(a, head, row, rows, part, tiles, stage, loaded, kept=None):
        """One warp has the inverse of a chunk of `rows` rows loaded, or its low `part` (1), which begins at row `row` of `a`, into tile
        `stage` of `tiles`; as `load_rows`."""
        call(
            f"jax_qla_fetch_inverse<{KEPT[kept]}>",
            unfenced(tiles[stage, 0, 0]),
            loaded[stage],
            T.address_of(a[0, 0, 0]),
            (T.cast(head, "int64") * a.shape[1] + row) * a.shape[2] + part * rows * C,
            rows,
        )

    @T.macro
    def load_inverses(a, start, end, count, head, last_first, stages, shared):
        """One warp, which does nothing else, has the inverses of a sequence's chunks loaded, in their order or the last one first. `shared`
        holds a kernel's tiles and barriers by their names; `low_s`, unless it is None, is for the low parts."""
        for c in T.serial(count):
            at = c % stages
            row = start + (count - 1 - c) * C if last_first else start + c * C
            rows = T.min(end - row, C)
            if c >= stages:
                T.barrier_wait(shared.free[at], (c // stages + 1) % 2)
            load_inverse(a, head, row, rows, 0, shared.a_s, at, shared.loaded, LONG)
            if shared.low_s is not None:
                load_inverse(a, head, row, rows, 1, shared.low_s, at, shared.loaded, LONG)
            T.barrier_arrive(shared.loaded[at])

    @T.macro
    def multiply_inverse(x, tiles, stage, u, transposed, clear):
        """Begins u += x a^T, with `transposed` u += x a, with `clear` u = ..., of an inverse in tile `stage` of `tiles`. The fragments must have
        `accumulator_layout`."""
        call(
            f"jax_qla_multiply_inverse<{'true' if transposed else 'false'}, {'true' if clear else 'false'}>",
            u.data,
            x.data,
            unfenced(tiles[0, 0, 0]),
            stage,
        )

    @T.macro
    def multiply_lower(x, tiles, stage, u):
        """Begins u = x t, of a lower triangular tile t [64, 64], `stage` of `tiles` (kernels/products.py). As for `multiply_inverse`."""
        call("jax_qla_multiply_lower", u.data, x.data, unfenced(tiles[0, 0, 0]), stage)

    @T.macro
    def forget(u):
        """What an accumulator [64, 64] of a warpgroup holds is not needed any more, and a product of 64 columns follows one with a triangular
        matrix, or may (kernels/products.py)."""
        call("jax_qla_forget", u.data)

    @T.macro
    def zero_above(tiles, low, stages, thread, threads):
        """What of tiles of inverses, and of those of their low parts unless `low` is None, no load writes becomes zero."""
        for x in T.unroll(stages):
            call("jax_qla_zero_above", T.address_of(tiles[x, 0, 0]), thread, threads)
            if low is not None:
                call("jax_qla_zero_above", T.address_of(low[x, 0, 0]), thread, threads)

    @T.macro
    def zero_beyond(tiles, low, stage, rows, thread, threads):
        """`zero_tail` of an inverse, and of its low part unless `low` is None."""
        call("jax_qla_zero_beyond", T.address_of(tiles[stage, 0, 0]), rows, thread, threads)
        if low is not None:
            call("jax_qla_zero_beyond", T.address_of(low[stage, 0, 0]), rows, thread, threads)

    @T.macro
    def zero_tail(tiles, stage, rows, width, thread, threads):
        """Rows `rows`.. of tile `stage` of tiles [stages, 64, width] in shared memory become zero."""
        call(f"jax_qla_zero_tail<{width // 64}>", unfenced(tiles[stage, 0, 0]), rows, thread, threads)

    @T.macro
    def keep_low(x, high, low):
        """low = x - high, elements of a fragment [.., 64] in float32 and of its rounding."""
        for i, j in T.Parallel(x.shape[0], C):
            low[i, j] = T.cast(x[i, j] - T.cast(high[i, j], "float32"), low.dtype)

    @T.macro
    def begin_correction(u, of_values, factors, x, a, at, low, of_low):
        """Begins Vd^T = X^T a^T, to `u`, which holds U^T: X^T = of_values + factors U^T, rounded to `x`, a the tile a[at]. Where operands are
        split, `low` becomes X^T's low part and of_low[at] is a's; else both are None."""
        if low is None:
            for i, j in T.Parallel(u.shape[0], C):
                x[i, j] = of_values[i, j] + factors[j] * u[i, j]
            multiply_inverse(x, a, at, u, False, True)
        else:
            for i, j in T.Parallel(u.shape[0], C):
                u[i, j] = of_values[i, j] + factors[j] * u[i, j]
            T.copy(u, x)
            keep_low(u, x, low)
            multiply_inverse(x, a, at, u, False, True)
            multiply_inverse(low, a, at, u, False, False)
            multiply_inverse(x, of_low, at, u, False, False)

    @T.macro
    def begin_update(state, u, factors, rounded, k, at, low):
        """Begins state += (factors u) k, of the tile k[at], by way of `rounded` and, unless it is None, its low part."""
        for i, j in T.Parallel(u.shape[0], C):
            rounded[i, j] = u[i, j] * factors[j]
        T.wgmma_gemm(rounded, k[at, :, :], state, policy=T.GemmWarpPolicy.FullRow)
        if low is not None:
            for i, j in T.Parallel(u.shape[0], C):
                low[i, j] = T.cast(u[i, j] * factors[j] - T.cast(rounded[i, j], "float32"), low.dtype)
            T.wgmma_gemm(low, k[at, :, :], state, policy=T.GemmWarpPolicy.FullRow)

    @T.macro
    def send_rows(tiles, stage, column, target, row, rows, head, first, thread, kept=None, threads=128):
        """`threads` threads write columns column..column + 64 of tile `stage` of tiles [stages, 64, width] in shared memory to `target[row.., head, first..]`:
        the whole tile by TMA, with `kept` as in `load_rows`, or if there are less than 64 `rows`, these, by ordinary stores of 16 bytes."""
        if rows >= C:
            T.tma_copy(
                tiles[stage, :, column : column + 64],
                target[row : row + C, head, first : first + 64],
                leader_scope_threads=threads,
                eviction_policy=kept,
            )
        else:
            call(
                "jax_qla_copy_rows",
                unfenced(tiles[stage, 0, column]),
                T.access_ptr(target[row, head, first], "w"),
                rows,
                target.shape[1] * target.shape[2],
                thread,
                threads,
            )

    @T.macro
    def put_state(rounded, tiles, stage):
        """A warpgroup's `rounded` [64, K], the left operand of a wgmma in registers, becomes tile `stage` of tiles [stages, 64, K] in shared memory. Who
        sends the tile has the fence."""
        for x in T.unroll(rounded.shape[1] // 64):
            call("jax_qla_store_operand<false>", rounded.data, x, unfenced(tiles[stage, 0, x * 64]))

    @T.macro
    def multiply_state_split(state, rounded, k, at, u, tiles):
        """Begins U^T = S^T k^T of the tile k[at], of a state that is the sum of two numbers: with the low part in `rounded`, which is awaited, as is
        all that was begun before, and then with the high part, with which `rounded` is left. Unless `tiles` is None, the low part becomes tile 1
        of it (`put_state`)."""
        for i, j in T.Parallel(state.shape[0], state.shape[1]):
            rounded[i, j] = T.cast(state[i, j] - T.cast(T.cast(state[i, j], rounded.dtype), "float32"), rounded.dtype)
        forget(u)
        T.wgmma_gemm(rounded, k[at, :, :], u, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
        if tiles is not None:
            put_state(rounded, tiles, 1)
        T.wait_wgmma(0)
        T.copy(state, rounded)
        T.wgmma_gemm(rounded, k[at, :, :], u, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)

    @T.macro
    def put_rows(x, tiles, stage, column):
        """A warpgroup's x, a wgmma accumulator [64 columns, 64 rows], becomes columns column..column + 64 of tile `stage` of tiles [stages, 64, width] in shared
        memory. As `put_state`."""
        call("jax_qla_store_transposed", x.data, unfenced(tiles[stage, 0, column]))

    @T.macro
    def send_state(tiles, stage, column, target, slot, head, part, first, threads=128):
        """`threads` threads have TMA write columns column..column + 64, rows of K, of tile `stage` of tiles [stages, 64, width] in shared memory, whose
        rows are value columns, to tile `part` of a slot's state in `target`, h or dh, from value column `first` on."""
        T.tma_copy(
            tiles[stage, :, column : column + 64],
            target[slot, head, part, first : first + 64, 0:64],
            leader_scope_threads=threads,
            eviction_policy=SHORT,
        )

    @T.macro
    def send_results(states, rows, low, start, end, count, slot, held, head, first, last_first, lane, sent, last=None):
        """One warp, which does nothing else, sends what a recurrence leaves of a sequence's chunks, in their order or the last one first: the state, unless
        `states` is None, to that, h or dh, of which `slot` is the first chunk's, for its head `held`, and O, Vd or dv to `rows`, for its head `head`, from
        value column `first` on. The low part's columns, unless `low` is None, begin there. `sent` holds by their names the tiles by which these leave,
        [1, 64, K], of two parts [2, 64, K], and [2, 64, 64], and their barriers, of 128 arrivals when they are there, and of 32 when they have left: when a
        state has left, so have the rows of the chunk before. Unless it is None, `last` [2, 64, 64] comes with the rows, a slot's last tile. So the state's warpgroup neither waits for what it sends nor for all its warps."""
        for c in T.serial(count):
            chunk = count - 1 - c if last_first else c
            row = start + chunk * C
            if states is not None:
                T.barrier_wait(sent.state_full[0], c % 2)
                T.fence_proxy_async()
                for part in T.unroll(sent.state_s.shape[0]):  # high, low
                    for x in T.unroll(sent.state_s.shape[2] // 64):
                        send_state(
                            *(sent.state_s, part, x * 64, states, slot + chunk, held),
                            *(part * (sent.state_s.shape[2] // 64) + x, first, 32),
                        )
                T.tma_store_wait(0)
                T.barrier_arrive(sent.state_free[0])
            T.barrier_wait(sent.rows_full[c % 2], c // 2 % 2)
            T.fence_proxy_async()
            send_rows(sent.rows_s, c % 2, 0, rows, row, T.min(end - row, C), head, first, lane, SHORT, 32)
            if low is not None:
                send_rows(sent.low_s, c % 2, 0, rows, row, T.min(end - row, C), head, low + first, lane, SHORT, 32)
            if last is not None:
                send_state(last, c % 2, 0, states, slot + chunk, held, states.shape[2] - 1, first, 32)
            T.tma_store_wait(0)
            if states is None:
                T.barrier_arrive(sent.rows_free[c % 2])

    @T.macro
    def tiles_in_order(key_dim, value_columns, stages, dtype, split, loaders, readers):
        """A kernel's tiles, vectors and barriers for `prepare_in_order`: so many threads arrive when tiles are `loaded`, and free them."""
        k_s = T.alloc_shared((stages, C, key_dim), dtype)
        v_s = T.alloc_shared((stages, C, value_columns), dtype)
        a_s = T.alloc_shared((stages, C, C), dtype)
        if split:
            low_s = T.alloc_shared((stages, C, C), dtype)  # the low part of a
        gamma_s = T.alloc_shared((stages, C), "float32")
        rise_s = T.alloc_shared((stages, C), "float32")
        fall_s = T.alloc_shared((stages, C), "float32")
        beta_s = T.alloc_shared((stages, C), "float32")  # over |k| if keys are normalised
        drop_s = T.alloc_shared((stages, C), "float32")  # -exp(gamma) beta, over |k|^2 if they are
        loaded = T.alloc_barrier([loaders] * stages)
        ready = T.alloc_barrier([64] * stages)
        free = T.alloc_barrier([readers] * stages)
        return SimpleNamespace(
            k_s=k_s,
            v_s=v_s,
            a_s=a_s,
            low_s=low_s if split else None,
            gamma_s=gamma_s,
            rise_s=rise_s,
            fall_s=fall_s,
            beta_s=beta_s,
            drop_s=drop_s,
            loaded=loaded,
            ready=ready,
            free=free,
        )

    @T.macro
    def prepare_in_order(
        gamma, beta, lengths, start, end, count, head, key_head, thread, stages, normed, halfway, shared
    ):
        """64 threads, a row each, fetch the gates of a sequence's chunks and make ready for the state what is `loaded`: rows beyond the sequence become
        0. `shared` holds a kernel's tiles, vectors and barriers by their names: of the gates drop = -exp(gamma) beta, over |k|^2 if keys are
        `normed`, and beta, over |k| if they are. All of it is there when `ready`, so that who waits for that need not wait for `loaded`. `low_s`,
        unless it is None, holds the low part of `a`. Where `halfway`, unless it is None, is true, half of the chunks come before the kernel launched
        before has ended, and the next one may begin behind them."""
        zero_above(shared.a_s, shared.low_s, stages, thread, 64)
        T.fence_proxy_async()
        fetched = T.alloc_local((3,), "float32")  # gates of the chunk to come
        of_key = T.alloc_local((1,), "float32")  # and 1 / |k|
        # Variables, for TileLang would write these out wherever they are used, for which there are no registers.
        rows = T.alloc_var("int32")  # of the chunk
        after = T.alloc_var("int32")  # and of the one to come
        fetch_gates(gamma, beta, start, T.min(end - start, C), head, thread, fetched)
        if normed:
            if thread < T.min(end - start, C):
                of_key[0] = lengths[start + thread, key_head]
        for c in T.serial(count):
            at = c % stages
            rows = T.min(end - (start + c * C), C)
            after = T.min(end - (start + (c + 1) * C), C)
            if halfway is not None:
                if c == count // 2:
                    if halfway:
                        T.pdl_sync()
                        T.pdl_trigger()
            if c >= stages:
                T.barrier_wait(shared.free[at], (c // stages + 1) % 2)
            store_gates(fetched, rows, thread, at, shared.gamma_s, shared.rise_s, shared.fall_s, shared.beta_s)
            shared.drop_s[at, thread] = -(shared.rise_s[at, thread] * shared.beta_s[at, thread])
            if normed:
                # X = beta / |k| V - exp(gamma) beta / |k|^2 K S
                if thread < rows:
                    shared.beta_s[at, thread] = shared.beta_s[at, thread] * of_key[0]
                    shared.drop_s[at, thread] = shared.drop_s[at, thread] * (of_key[0] * of_key[0])
                if thread < after:
                    of_key[0] = lengths[start + (c + 1) * C + thread, key_head]
            fetch_gates(gamma, beta, start + (c + 1) * C, after, head, thread, fetched)
            T.barrier_wait(shared.loaded[at], c // stages % 2)
            if rows < C:
                zero_tail(shared.k_s, at, rows, shared.k_s.shape[2], thread, 64)
                zero_tail(shared.v_s, at, rows, shared.v_s.shape[2], thread, 64)
                zero_beyond(shared.a_s, shared.low_s, at, rows, thread, 64)
                T.fence_proxy_async()
            T.barrier_arrive(shared.ready[at])

    @T.macro
    def tiles_last_first(key_dim, value_columns, stages, dtype, split, l2norm, gives_dv, readers):
        """A kernel's tiles, vectors and barriers for `load_last_first`, `load_inverses`, `gates_last_first` and `prepare_last_first`: so many threads free
        them."""
        q_s = T.alloc_shared((stages, C, key_dim), dtype)
        k_s = T.alloc_shared((stages, C, key_dim), dtype)
        do_s = T.alloc_shared((stages, C, value_columns), dtype)
        a_s = T.alloc_shared((stages, C, C), dtype)  # without its diagonal
        if split:
            low_s = T.alloc_shared((stages, C, C), dtype)  # its low part
        p_s = T.alloc_shared((2, C, C), dtype)  # a third would not fit
        gamma_s = T.alloc_shared((stages, C), "float32")
        rise_s = T.alloc_shared((stages, C), "float32")
        fall_s = T.alloc_shared((stages, C), "float32")
        beta_s = T.alloc_shared((stages, C), "float32")
        drop_s = T.alloc_shared((stages, C), "float32")  # -exp(gamma) beta, over |k|^2 if keys are normalised
        query_s = T.alloc_shared((stages, C), "float32") if l2norm else gamma_s  # 1 / |q|, else not needed
        lift_s = T.alloc_shared((stages, C), "float32")  # scale exp(gamma), over |q| if queries are normalised
        if gives_dv:
            out_s = T.alloc_shared((stages, C), "float32")  # factor of dX in dv
        loaded = T.alloc_barrier([64] * stages)
        gated = T.alloc_barrier([64] * stages)
        ready = T.alloc_barrier([128] * stages)
        free = T.alloc_barrier([readers] * stages)
        taken = T.alloc_barrier([readers] * 2)
        return SimpleNamespace(
            q_s=q_s,
            k_s=k_s,
            a_s=a_s,
            low_s=low_s if split else None,
            do_s=do_s,
            p_s=p_s,
            gamma_s=gamma_s,
            rise_s=rise_s,
            fall_s=fall_s,
            beta_s=beta_s,
            drop_s=drop_s,
            lift_s=lift_s,
            out_s=out_s if gives_dv else None,
            query_s=query_s,
            loaded=loaded,
            taken=taken,
            gated=gated,
            ready=ready,
            free=free,
        )

    @T.macro
    def load_last_first(q, k, do, start, count, key_head, head, first, stages, shared):
        """One warp has TMA load the tiles of a sequence's chunks but the inverse, the last chunk first, of dO the columns from `first` on."""
        for c in T.serial(count):
            if c >= stages:
                T.barrier_wait(shared.free[c % stages], (c // stages + 1) % 2)
            # Not by a loop: TileLang would call these operands what the loop calls them.
            load_rows(
                k,
                start + (count - 1 - c) * C,
                key_head,
                0,
                shared.k_s.shape[2],
                shared.k_s,
                c % stages,
                shared.loaded,
                LONG,
            )
            load_rows(
                q,
                start + (count - 1 - c) * C,
                key_head,
                0,
                shared.q_s.shape[2],
                shared.q_s,
                c % stages,
                shared.loaded,
                LONG,
            )
            load_rows(
                do,
                start + (count - 1 - c) * C,
                head,
                first,
                shared.do_s.shape[2],
                shared.do_s,
                c % stages,
                shared.loaded,
                LONG,
            )
            T.barrier_arrive(shared.loaded[c % stages])

    @T.macro
    def fetch_lengths(lengths, query_lengths, row, rows, key_head, thread, of_rows):
        """Threads 0..63 read 1 / |k| and, unless these are None, 1 / |q| of their row into `of_rows` [2] (registers): nothing here waits for them."""
        if thread < rows:
            of_rows[0] = lengths[row + thread, key_head]
            if query_lengths is not None:
                of_rows[1] = query_lengths[row + thread, key_head]

    @T.macro
    def gates_last_first(
        gamma, beta, lengths, query_lengths, start, end, count, head, key_head, scale, thread, stages, normed, shared
    ):
        """64 threads, a row each, fetch the gates of the chunks that `load_last_first` loads. `shared` holds a kernel's tiles, vectors and barriers
        by their names: of the gates drop = -exp(gamma) beta, over |k|^2 if keys are `normed`, lift = scale exp(gamma), over |q| if queries
        are, and, unless it is None, `out_s`: the factor of dX in dv. They are there when `gated`."""
        fetched = T.alloc_local((3,), "float32")  # gates of the chunk to come
        of_rows = T.alloc_local((2,), "float32")  # and 1 / |k|, 1 / |q|
        if count > 0:
            last = start + (count - 1) * C
            fetch_gates(gamma, beta, last, T.min(end - last, C), head, thread, fetched)
            if normed:
                fetch_lengths(lengths, query_lengths, last, T.min(end - last, C), key_head, thread, of_rows)
        for c in T.serial(count):
            at = c % stages
            rows = T.min(end - (start + (count - 1 - c) * C), C)
            if c >= stages:
                T.barrier_wait(shared.free[at], (c // stages + 1) % 2)
            store_gates(fetched, rows, thread, at, shared.gamma_s, shared.rise_s, shared.fall_s, shared.beta_s)
            shared.drop_s[at, thread] = -(shared.rise_s[at, thread] * shared.beta_s[at, thread])
            shared.lift_s[at, thread] = scale * shared.rise_s[at, thread]
            if shared.out_s is not None:
                shared.out_s[at, thread] = T.Select(
                    T.abs(shared.beta_s[at, thread]) < T.float32(FAINT), T.float32(1), shared.beta_s[at, thread]
                )
            if normed:
                if thread < rows:
                    shared.lift_s[at, thread] = shared.lift_s[at, thread] * of_rows[1]
                    shared.drop_s[at, thread] = shared.drop_s[at, thread] * (of_rows[0] * of_rows[0])
                    if shared.out_s is not None:
                        shared.out_s[at, thread] = shared.out_s[at, thread] * of_rows[0]
                    shared.query_s[at, thread] = of_rows[1]
                else:
                    shared.query_s[at, thread] = 0.0
            T.barrier_arrive(shared.gated[at])
            if c + 1 < count:  # those are whole
                fetch_gates(gamma, beta, start + (count - 2 - c) * C, C, head, thread, fetched)
                if normed:
                    fetch_lengths(lengths, query_lengths, start + (count - 2 - c) * C, C, key_head, thread, of_rows)

    @T.macro
    def prepare_last_first(start, end, count, scale, thread, stages, normed, shared):
        """A warpgroup makes ready for the gradient of the state what `load_last_first` loads: `a` loses its diagonal, rows beyond the sequence become
        0, and P, of the gates that `gates_last_first` fetches. P has two stages, free when `taken`. All of it is there when `ready`, so that
        who waits for that need not wait for `loaded` or `gated`. `low_s`, unless it is None, holds the low part of `a`, whose diagonal is 0."""
        p = T.alloc_fragment((C, C), "float32")
        zero_above(shared.a_s, shared.low_s, stages, thread, 128)
        for c in T.serial(count):
            at = c % stages
            rows = T.min(end - (start + (count - 1 - c) * C), C)
            if c >= 2:
                T.barrier_wait(shared.taken[c % 2], (c // 2 + 1) % 2)
            T.barrier_wait(shared.loaded[at], (c // stages) % 2)
            if thread < C:
                # The fence comes before all is `ready`.
                call("jax_qla_zero_diagonal", unfenced(shared.a_s[at, 0, 0]), thread)
            if rows < C:
                zero_tail(shared.q_s, at, rows, shared.q_s.shape[2], thread, 128)
                zero_tail(shared.k_s, at, rows, shared.k_s.shape[2], thread, 128)
                zero_beyond(shared.a_s, shared.low_s, at, rows, thread, 128)
                zero_tail(shared.do_s, at, rows, shared.do_s.shape[2], thread, 128)
                T.fence_proxy_async()
                T.sync_threads(3, 128)
            T.barrier_wait(shared.gated[at], (c // stages) % 2)
            T.gemm(shared.q_s[at, :, :], shared.k_s[at, :, :], p, transpose_B=True, clear_accum=True)
            call(
                f"jax_qla_store_decayed<{'true' if normed else 'false'}, true>",
                p.data,
                T.address_of(shared.gamma_s[at, 0]),
                scale,
                T.address_of(shared.query_s[at, 0]),
                T.address_of(shared.p_s[c % 2, 0, 0]),
            )
            T.fence_proxy_async()
            T.barrier_arrive(shared.ready[at])

    return SimpleNamespace(
        leave_unless=leave_unless,
        leave_if=leave_if,
        find_sequence=find_sequence,
        take_window=take_window,
        find_target=find_target,
        chunks_that_matter=chunks_that_matter,
        fetch_gates=fetch_gates,
        fetch_lengths=fetch_lengths,
        store_gates=store_gates,
        load_rows=load_rows,
        load_inverse=load_inverse,
        load_inverses=load_inverses,
        multiply_inverse=multiply_inverse,
        multiply_lower=multiply_lower,
        forget=forget,
        zero_above=zero_above,
        zero_beyond=zero_beyond,
        zero_tail=zero_tail,
        keep_low=keep_low,
        begin_correction=begin_correction,
        begin_update=begin_update,
        send_rows=send_rows,
        put_state=put_state,
        multiply_state_split=multiply_state_split,
        put_rows=put_rows,
        send_state=send_state,
        send_results=send_results,
        tiles_in_order=tiles_in_order,
        prepare_in_order=prepare_in_order,
        tiles_last_first=tiles_last_first,
        load_last_first=load_last_first,
        gates_last_first=gates_last_first,
        prepare_last_first=prepare_last_first,
    )
