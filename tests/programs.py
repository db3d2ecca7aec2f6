"""Small TileLang programs, one for everything that a launch plan must carry. They need TileLang, as a kernel's do."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator, valid-type"

from __future__ import annotations

from typing import Any

from jax_qla.kernels import uncut
from jax_qla.kernels.forward import HALVES_PRELUDE
from jax_qla.kernels.macros import leave_first, over, place_of, rest_is_empty
from jax_qla.kernels.preludes import LENGTH_PRELUDE

PASS_CONFIGS: dict[str, object] = {"tl.disable_warp_specialized": True}

TILE = 64


def gemm() -> Any:
    """c = a b^T with TMA and wgmma; M is dynamic, N and K are 128."""
    import tilelang.language as T

    rows = T.dynamic("rows")

    @T.prim_func
    def gemm(
        b: T.Tensor((128, 128), "bfloat16"),
        a: T.Tensor((rows, 128), "bfloat16"),
        c: T.Tensor((rows, 128), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, TILE), 2, threads=128) as (i, j):
            a_s = T.alloc_shared((TILE, 128), "bfloat16")
            b_s = T.alloc_shared((TILE, 128), "bfloat16")
            c_f = T.alloc_fragment((TILE, TILE), "float32")
            loaded = T.alloc_barrier(128)
            T.tma_copy(a[i * TILE : i * TILE + TILE, 0:128], a_s, barrier=loaded)
            T.tma_copy(b[j * TILE : j * TILE + TILE, 0:128], b_s, barrier=loaded)
            T.barrier_arrive(loaded)
            T.barrier_wait(loaded, 0)
            T.gemm(a_s, b_s, c_f, transpose_B=True, clear_accum=True)
            T.copy(c_f, c[i * TILE : i * TILE + TILE, j * TILE : j * TILE + TILE])

    return gemm


def heads() -> Any:
    """y = scale x + shift where a row is beyond `first`, through a 3-D tensor map with dynamic tokens and heads."""
    import tilelang.language as T

    tokens, heads = T.dynamic("tokens, heads")

    @T.prim_func
    def scale_heads(
        x: T.Tensor((tokens, heads, TILE), "float16"),
        y: T.Tensor((tokens, heads, TILE), "float16"),
        first: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(tokens, TILE), heads, threads=128) as (i, h):
            x_s = T.alloc_shared((TILE, TILE), "float16")
            loaded = T.alloc_barrier(128)
            T.tma_copy(x[i * TILE : i * TILE + TILE, h, 0:TILE], x_s, barrier=loaded)
            T.barrier_arrive(loaded)
            T.barrier_wait(loaded, 0)
            for row, column in T.Parallel(TILE, TILE):
                if i * TILE + row >= first and i * TILE + row < tokens:
                    y[i * TILE + row, h, column] = T.cast(scale * T.cast(x_s[row, column], "float32"), "float16")

    return scale_heads


def boxes() -> Any:
    """y = x, by two tensor maps of x that differ in their boxes alone."""
    import tilelang.language as T

    rows = T.dynamic("rows")

    @T.prim_func
    def boxes(x: T.Tensor((rows, TILE), "float16"), y: T.Tensor((rows, TILE), "float16")):
        with T.Kernel(T.ceildiv(rows, TILE), threads=128) as i:
            x_s = T.alloc_shared((TILE, TILE), "float16")
            loaded = T.alloc_barrier(128)
            T.tma_copy(x[i * TILE : i * TILE + 16, 0:TILE], x_s[0:16, :], barrier=loaded)
            T.tma_copy(x[i * TILE + 16 : i * TILE + TILE, 0:TILE], x_s[16:TILE, :], barrier=loaded)
            T.barrier_arrive(loaded)
            T.barrier_wait(loaded, 0)
            for row, column in T.Parallel(TILE, TILE):
                if i * TILE + row < rows:
                    y[i * TILE + row, column] = x_s[row, column]

    return boxes


def cluster() -> Any:
    """y = x, two blocks in a cluster."""
    import tilelang.language as T

    blocks = T.dynamic("blocks")

    @T.prim_func
    def clustered(x: T.Tensor((blocks, 128), "float32"), y: T.Tensor((blocks, 128), "float32")):
        with T.ClusterKernel(blocks, cluster_dims=2, threads=128) as i:
            for column in T.Parallel(128):
                y[i, column] = x[i, column]

    return clustered


def dependent() -> Any:
    """y = x, once the kernel before has let it."""
    import tilelang.language as T

    blocks = T.dynamic("blocks")

    @T.prim_func
    def dependent(x: T.Tensor((blocks, 128), "float32"), y: T.Tensor((blocks, 128), "float32")):
        with T.Kernel(blocks, threads=128) as i:
            T.pdl_sync()
            for column in T.Parallel(128):
                y[i, column] = x[i, column]

    return dependent


def sized() -> Any:
    """y = 1 in its first rows, as many as x and z have, of which nothing else is used."""
    import tilelang.language as T

    rows = T.dynamic("rows")

    @T.prim_func
    def sized(
        x: T.Tensor((rows, 128), "float32"),
        y: T.Tensor((TILE, 128), "float32"),
        z: T.Tensor((rows, 4), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, 4), threads=128) as i:
            for row, column in T.Parallel(4, 128):
                if i * 4 + row < rows and i * 4 + row < TILE:
                    y[i * 4 + row, column] = 1.0

    return sized


def order() -> Any:
    """Which sequence comes at each place."""
    import tilelang.language as T

    count = T.dynamic("count")

    @T.prim_func
    def order(segments: T.Tensor((count, 2), "int32"), found: T.Tensor((count,), "int32"), tokens: T.int32):
        with T.Kernel(count, threads=32, prelude=LENGTH_PRELUDE) as place:
            found[place] = T.call_extern(
                "int32", "jax_qla_long_first", T.address_of(segments[0, 0]), count, tokens, place
            )

    return order


def leaving() -> Any:
    """Which blocks of each place stay: the others leave first of all."""
    import tilelang.language as T

    count, heads, places = T.dynamic("count, heads, places")

    @T.prim_func
    def leaving(segments: T.Tensor((count, 2), "int32"), stays: T.Tensor((places, heads), "int32"), cuts: T.int32):
        with T.Kernel(heads, *over(places), threads=32, prelude=LENGTH_PRELUDE) as (head, low, high):
            met = T.alloc_barrier([32])
            T.barrier_arrive(met[0])
            T.barrier_wait(met[0], 0)
            leave_first(rest_is_empty(segments, count, cuts))
            if place_of(low, high) < places:
                stays[place_of(low, high), head] = 1

    return leaving


def leaving_uncut() -> Any:
    """Which blocks stay where some sequence is cut: all of them, or none."""
    import tilelang.language as T

    count, heads, blocks = T.dynamic("count, heads, blocks")
    leave_if_uncut = uncut.macro()

    @T.prim_func
    def leaving_uncut(
        bounds: T.Tensor((count, 2), "int32"), stays: T.Tensor((blocks, heads), "int32"), cut_beyond: T.int32
    ):
        with T.Kernel(blocks, heads, threads=32, prelude=uncut.UNCUT_PRELUDE) as (block, head):
            met = T.alloc_barrier([32])
            T.barrier_arrive(met[0])
            T.barrier_wait(met[0], 0)
            leave_first(uncut.others_uncut(bounds, count, cut_beyond))
            if block + head == 0:
                leave_if_uncut(bounds, count, cut_beyond, True)
            T.pdl_sync()
            stays[block, head] = 1

    return leaving_uncut


def leaving_late() -> Any:
    """What is to be asked before all else goes by a variable."""
    import tilelang.language as T

    count = T.dynamic("count")

    @T.prim_func
    def leaving_late(x: T.Tensor((count,), "int32"), y: T.Tensor((count,), "int32")):
        with T.Kernel(count, threads=32) as block:
            found = T.alloc_var("int32")
            found = x[block]
            leave_first(found == 0)
            y[block] = found

    return leaving_late


def in_halves() -> Any:
    """What each block of kernels/forward.py computes where long sequences are halved: whether anything, and what."""
    import tilelang.language as T

    count, blocks = T.dynamic("count, blocks")

    @T.prim_func
    def in_halves(
        segments: T.Tensor((count, 2), "int32"),
        found: T.Tensor((blocks, 4), "int32"),
        heads: T.int32,
        share: T.int32,
        least: T.int32,
    ):
        with T.Kernel(blocks, threads=32, prelude=HALVES_PRELUDE) as block:
            item = T.alloc_local((3,), "int32")
            found[block, 0] = T.call_extern(
                "int32",
                "jax_qla_in_halves",
                *(item.data, T.address_of(segments[0, 0]), count, heads, share, least, block),
            )
            for i in T.unroll(3):
                found[block, 1 + i] = item[i]

    return in_halves


def unsupported() -> Any:
    """A grid that no launch plan can hold."""
    import tilelang.language as T

    blocks = T.dynamic("blocks")

    @T.prim_func
    def unsupported(x: T.Tensor((blocks, 128), "float32")):
        with T.Kernel(T.if_then_else(blocks > 4, blocks, 4), threads=128) as i:
            for column in T.Parallel(128):
                x[i, column] = 0.0

    return unsupported


def equal_names() -> Any:
    """Of two buffers in shared memory the first takes the name of the second."""
    import tilelang.language as T

    @T.prim_func
    def equal_names(x: T.Tensor((128,), "float32"), y: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128):
            first = T.alloc_shared((128,), "float32")
            second = first
            second = T.alloc_shared((128,), "float32")
            for n in T.Parallel(128):
                first[n] = x[n]
                second[127 - n] = x[n]
            for n in T.Parallel(128):
                y[n] = first[127 - n] + second[n]

    return equal_names
