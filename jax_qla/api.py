"""The public functions: they check their arguments, bring them into the form of the lower layers, and back.

All follow the gated delta rule (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464), per value head
with a state S in R^{K x V}:

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - (exp(g_t) S_{t-1})^T k_t))^T        o_t = scale * S_t^T q_t

Parameter names are those of flash-linear-attention.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_qla import decode, policy, reference, sharding, vjp
from jax_qla.checks import Checked, arrays, check, check_gradient, taking_numpy
from jax_qla.dispatch import Settings
from jax_qla.implementations import Choice, RecurrentCall, choose, load
from jax_qla.mesh import Layout, MeshAxes, align, previous_ids, resolve, segments_of_rows
from jax_qla.refusal import first_order
from jax_qla.residuals import Between, ChunkStates, Residuals, keeping, precision_of_kernels, splits
from jax_qla.segments import gates_with_resets, piece_count, segments_from_cu_seqlens
from jax_qla.varying import match_varying
from jax_qla.widening import widen

_HALVES = (
    "chunk_gated_delta_rule_fwd and chunk_gated_delta_rule_bwd are not differentiable themselves: call "
    "chunk_gated_delta_rule, or make the two a jax.custom_vjp, which has first derivatives by reverse mode only"
)


class PieceChoice(NamedTuple):
    """What `which_pieces` returns."""

    rows: int
    """The most tokens that a piece has; 0 if sequences stay whole."""
    pieces: int
    """The number of all pieces, or of sequences if they stay whole. For packed sequences, the number of places for
    pieces, which is enough for any packing."""


class Implementation(NamedTuple):
    """What `which_implementation` returns."""

    name: str
    """"cuda", "xla" or "reference"."""
    reason: str
    """Why it was chosen, and why those that come before it were not."""


@taking_numpy
def chunk_gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    max_segments: int | None = None,
    implementation: str | Sequence[str] | None = None,
    precision: jax.lax.PrecisionLike = None,
    mesh_axes: MeshAxes | None = None,
    piece_rows: int | None = None,
    save_chunk_states: bool | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The gated delta rule over whole sequences, computed by chunks of 64 tokens.

        S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - (exp(g_t) S_{t-1})^T k_t))^T        o_t = scale * S_t^T q_t

    Differentiable once in reverse mode with respect to q, k, v, g, beta and initial_state, from both results; with
    `implementation="reference"` in every mode and order.

    Where k, v, beta or g is not finite (-inf in g is allowed), what follows in that head of the sequence is not finite
    either. Except with "reference", what precedes it in the same chunk need not be finite.

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464); by chunks, Yang et al., "Parallelizing
    Linear Transformers with the Delta Rule" (arXiv 2406.06484).

    Args:
        q, k: [B, T, Hk, K], of one dtype: bfloat16 or float16; float32 too with "xla" and "reference", and float64 with
            "reference".
        v: [B, T, Hv, V] of the same dtype. Hv is a multiple of Hk; value head h reads key head h // (Hv // Hk).
        g: [B, T, Hv], the logarithm of the decay, <= 0; -inf forgets everything. float32 (float64 too if v is);
            bfloat16 and float16 are widened.
        beta: [B, T, Hv], the strength of the update, usually in [0, 1]; at most 2 with normalised keys. dtypes as g.
        scale: factor of q, a Python number; default K ** -0.5.
        initial_state: float32 (float64 too if v is), the states before the first tokens; default zero. [B, Hv, K, V];
            with cu_seqlens [N, Hv, K, V]; with segment_ids [B, max_segments, Hv, K, V].
        output_final_state: whether to return the states after the last tokens, of the same shape.
        use_qk_l2norm_in_kernel: divides q and k by sqrt(|x|^2 + 1e-6) over K first, in float32. Gradients are those of
            q and k as given, and only q and k as given are kept for them. In bfloat16 the kernels of "cuda" normalise
            themselves, and the quotients are never rounded; lengths of q may be 3e-4 off, 3e-3 at the most. In float16,
            whose range long keys would leave, and with the other implementations, it is done before, and the quotients
            are rounded to q's dtype.
        cu_seqlens: int32 [N + 1]: the batch is one row (B = 1) of N sequences. Sequence n is in rows
            [cu_seqlens[n], cu_seqlens[n + 1]) and may be empty. The values are read on the device only. They should be
            sorted and within [0, T]; others are clipped, and never lead outside the arrays.
        segment_ids: int32 [B, T]: a sequence is a maximal run of equal ids other than 0 within a row of the batch; 0 is
            padding. Padding tokens have o = 0 and no gradient; their q, k, v must be finite. Without max_segments,
            values of a sequence that are not finite spread to the other sequences of the row.
        max_segments: the static number of sequences that a row with segment_ids may have. Needed with initial_state or
            output_final_state: the i-th sequence of a row has slot i, and an unused slot's final state is its initial
            state. Sequences beyond max_segments count as padding. Without states and without max_segments, any number
            of sequences is allowed and costs nothing.
        implementation: "cuda" (Hopper kernels; K and V 64 or 128, bfloat16 or float16), "xla" (any platform and size),
            "reference" (token by token), or a sequence of these. Of a sequence, the first is taken that can compute the
            operands on the platform that the program is lowered for. None is ("cuda", "xla"). A single name is never
            replaced by another. See `which_implementation`.
        precision: of the matrix products, as in `jax.lax.dot`. "cuda" has "default" (or None) and "high". With "high"
            in bfloat16, states, their gradients and what meets the inverse of a chunk are not rounded to 16 bits but
            kept as sums of two such numbers. Final states, dg and dbeta then have errors of 1e-5 to 1e-3, also for beta
            above 1 and keys much alike, where default errors are up to twice their usual size, or more. The other
            results have little more than their own rounding. It takes longer, and the residual a is twice as large
            (docs/accuracy.md). "cuda" has no "highest", and None of "xla" is "highest" in float32. "reference" computes
            in float32 or wider whatever is asked for.
        mesh_axes: which mesh axes cut batch, heads and sequence. Sharded operands say it themselves, so it is needed
            only in two cases. One is a mesh with Auto axes beside others. The other is a caller's `jax.shard_map` that
            cuts the sequence: T is then the shard's length, while states and cu_seqlens are the whole sequence's, the
            same on all its shards. See docs/sharding.md.
        piece_rows: how "cuda" cuts sequences into pieces, which one card computes side by side, in both passes. Static.
            A multiple of 64 is the most tokens that a piece has; 0 leaves sequences whole; None leaves it to a model of
            the card, and `which_pieces` says what that takes.
            Results differ by rounding only: what gates leave of an earlier state counts as nothing between pieces if it
            is less than 4e-8 (float32 rounds by 6e-8). 0 is the strict setting, which leaves nothing out.
            Pieces are as equal as may be: those of a dense sequence, or those that all T tokens of a packed batch would
            have. Packed sequences stay whole where none of a batch is long enough for a cut to take less time: one
            alone if it is no longer than a piece, up to eight if none is longer than one and a half.
            The model knows how many packed sequences there may be, not how many are empty. Of up to eight it takes most
            for taken, so give piece_rows where one of them has nearly all tokens. Where devices share a sequence, each
            cuts its part, and 0 is one piece. No other implementation has pieces, so with piece_rows only "cuda" is
            taken.
        save_chunk_states: what the forward pass of "cuda", where it is differentiated, keeps for the backward pass so
            that this need not compute it again. It has no effect with other implementations.
            None: what each token writes to the state, 2 V bytes per token and value head (256 at V = 128). The backward
            pass computes the states before all chunks of 64 tokens from it. With precision "high" in bfloat16: nothing.
            True: these states too, 2 (K V / 64 + V) bytes together (768 at K = V = 128; 1536 with precision "high" in
            bfloat16). None is taken instead where the compiler cuts the operands: in Auto meshes without mesh_axes, and
            with several devices without a mesh. False: neither, for the least memory between the passes.
            The more is kept, the less time the backward pass takes, and the longer the forward pass
            (docs/performance.md). o and the final state are the same bit for bit, and gradients differ by rounding.
            Under `jax.vmap` all results differ by rounding, and True leaves whole what is whole of one member.
            Inside `jax.checkpoint` what is kept takes no memory between the passes unless the policy names it (it is
            among `jax_qla.CHECKPOINT_NAMES`): only the forward pass that runs again computes it.

    Returns:
        o: [B, T, Hv, V] in v's dtype.
        final_state: float32 (float64 with float64 operands) of the shape of initial_state, or None unless
            output_final_state. The final state of an empty sequence is its initial state, bit for bit.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, rank, size or value, or does not go with another.
        NotImplementedError: no implementation asked for can take the operands; a size is a symbol of `jax.export`;
            "cuda" alone was asked for and the platform is not CUDA (raised when the program is lowered); or forward
            mode or a second derivative was asked for with "cuda" or "xla".

    Example:
        >>> import jax, jax.numpy as jnp, jax_qla
        >>> q = k = jnp.ones((2, 100, 2, 32))
        >>> v = jnp.ones((2, 100, 4, 16))
        >>> g, beta = jnp.full((2, 100, 4), -0.1), jnp.full((2, 100, 4), 0.5)
        >>> o, state = jax.jit(
        ...     lambda *x: jax_qla.chunk_gated_delta_rule(*x, use_qk_l2norm_in_kernel=True, output_final_state=True)
        ... )(q, k, v, g, beta)
        >>> o.shape, state.shape
        ((2, 100, 4, 16), (2, 4, 32, 16))
    """
    checked, choice = _checked(
        *(q, k, v, g, beta),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        segment_ids=segment_ids,
        max_segments=max_segments,
        implementation=implementation,
        precision=precision,
        piece_rows=piece_rows,
        save_chunk_states=save_chunk_states,
    )
    q, k, v, g, beta, initial_state, cu_seqlens, segment_ids = arrays(
        q, k, v, g, beta, initial_state, cu_seqlens, segment_ids
    )
    layout, (q, k, v, g, beta, initial_state, cu_seqlens, segment_ids) = _laid_out(
        mesh_axes, q, k, v, g, beta, initial_state, cu_seqlens, segment_ids
    )
    g, beta = widen(g), widen(beta)

    segments = valid = None
    if cu_seqlens is not None:
        segments, initial_state = _one_row(layout, v.shape[1], initial_state, cu_seqlens)
    elif segment_ids is not None and max_segments is None:
        before = previous_ids(layout, segment_ids)
        g, beta, valid = gates_with_resets(segment_ids, g, beta, before)
    elif segment_ids is not None and max_segments is not None:
        segments = segments_of_rows(layout, segment_ids, int(max_segments))

    options = vjp.Options(
        Settings(choice, checked.scale, use_qk_l2norm_in_kernel, precision),
        output_final_state,
        layout=layout,
        keep=keeping(save_chunk_states, precision, q.dtype),
    )
    o, final_state = _compute(options, (q, k, v, g, beta, initial_state, segments))

    if valid is not None:
        o = _without_padding(o, valid)
    if final_state is not None and cu_seqlens is not None:
        final_state = jnp.squeeze(final_state, 0)
    return o, final_state


@taking_numpy
def which_implementation(
    q: jax.Array | jax.ShapeDtypeStruct,
    k: jax.Array | jax.ShapeDtypeStruct,
    v: jax.Array | jax.ShapeDtypeStruct,
    g: jax.Array | jax.ShapeDtypeStruct,
    beta: jax.Array | jax.ShapeDtypeStruct,
    *,
    scale: float | None = None,
    initial_state: jax.Array | jax.ShapeDtypeStruct | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: jax.Array | jax.ShapeDtypeStruct | None = None,
    segment_ids: jax.Array | jax.ShapeDtypeStruct | None = None,
    max_segments: int | None = None,
    implementation: str | Sequence[str] | None = None,
    precision: jax.lax.PrecisionLike = None,
    piece_rows: int | None = None,
    save_chunk_states: bool | None = None,
    mesh_axes: MeshAxes | None = None,
) -> Implementation:
    """Which implementation `chunk_gated_delta_rule` takes for these arguments, and why.

    Nothing is computed; shapes and dtypes are enough. If q is an array with data, the answer is for the platform of its
    devices, else for JAX's default platform.

    Args:
        others: all as in `chunk_gated_delta_rule`. Arrays may be `jax.ShapeDtypeStruct`s. Nothing depends on mesh_axes.

    Returns:
        (name, reason), an `Implementation`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `chunk_gated_delta_rule` for these arguments, which raises them
            when it is called or lowered.

    Example:
        >>> import jax, jax.numpy as jnp, jax_qla
        >>> q = k = v = jax.ShapeDtypeStruct((1, 100, 4, 32), jnp.float32)
        >>> g = beta = jax.ShapeDtypeStruct((1, 100, 4), jnp.float32)
        >>> jax_qla.which_implementation(q, k, v, g, beta).name
        'xla'
    """
    _, choice = _checked(
        *(q, k, v, g, beta),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        segment_ids=segment_ids,
        max_segments=max_segments,
        implementation=implementation,
        precision=precision,
        piece_rows=piece_rows,
        save_chunk_states=save_chunk_states,
    )
    if _is_on_cuda(q):
        return Implementation(choice.on_cuda, choice.why_on_cuda)
    if choice.elsewhere is None:
        raise NotImplementedError(choice.why_elsewhere)
    return Implementation(choice.elsewhere, choice.why_elsewhere)


@taking_numpy
def which_pieces(
    q: jax.Array | jax.ShapeDtypeStruct,
    k: jax.Array | jax.ShapeDtypeStruct,
    v: jax.Array | jax.ShapeDtypeStruct,
    g: jax.Array | jax.ShapeDtypeStruct,
    beta: jax.Array | jax.ShapeDtypeStruct,
    *,
    cu_seqlens: jax.Array | jax.ShapeDtypeStruct | None = None,
    segment_ids: jax.Array | jax.ShapeDtypeStruct | None = None,
    max_segments: int | None = None,
    piece_rows: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    save_chunk_states: bool | None = None,
    differentiated: bool = False,
) -> PieceChoice:
    """How the kernels of "cuda" cut the sequences of a call into pieces, which one card computes side by side.

    Nothing is computed; shapes are enough, on any machine. Give the shapes that one device has: its part, where batch
    and heads are spread over a mesh. Where devices share a sequence, each always cuts its part, and this function does
    not say how.

    The answer is for the forward pass. The backward pass cuts sequences into the same pieces, or leaves them whole
    where that is faster and piece_rows is not given. Other implementations have no pieces, and neither have calls with
    a dtype, K, V or precision that there are no kernels for.

    Args:
        differentiated: whether gradients of the call are computed too. Then sequences may be cut for the sake of the
            backward pass, where both passes together are faster for it. That does not hold in an Auto mesh of several
            devices, where each pass cuts for itself.
        others: those of `chunk_gated_delta_rule` that matter here, as there. Arrays may be `jax.ShapeDtypeStruct`s.

    Returns:
        (rows, pieces), a `PieceChoice`: the most tokens of a piece and the number of pieces, or 0 and the number of
        sequences if these stay whole.

    Raises:
        TypeError, ValueError, NotImplementedError: as `chunk_gated_delta_rule` for these arguments.

    Example:
        >>> import jax, jax.numpy as jnp, jax_qla
        >>> q = k = jax.ShapeDtypeStruct((1, 32768, 2, 128), jnp.bfloat16)
        >>> v = jax.ShapeDtypeStruct((1, 32768, 8, 128), jnp.bfloat16)
        >>> g = beta = jax.ShapeDtypeStruct((1, 32768, 8), jnp.float32)
        >>> jax_qla.which_pieces(q, k, v, g, beta)
        PieceChoice(rows=2048, pieces=16)
        >>> jax_qla.which_pieces(q, k, v, g, beta, piece_rows=0)
        PieceChoice(rows=0, pieces=1)
    """
    checked = check(
        *(q, k, v, g, beta),
        cu_seqlens=cu_seqlens,
        segment_ids=segment_ids,
        max_segments=max_segments,
        piece_rows=piece_rows,
        precision=precision,
        save_chunk_states=save_chunk_states,
    )
    tokens, sequences = v.shape[0] * v.shape[1], math.prod(checked.state_shape[:-3])
    sizes = (tokens, sequences, v.shape[2], k.shape[3], v.shape[3])
    if load("cuda").why_not_operands(q, k, v) or precision_of_kernels(precision) is None:
        return PieceChoice(0, sequences)
    options: Any = {"packed": checked.packed, "asked_rows": checked.piece_rows}
    rows = None
    # States that are kept are of the pieces of both passes, or of whole sequences.
    with_states = differentiated and bool(save_chunk_states)
    if differentiated:
        of_both: Any = {"ratio": v.shape[2] // k.shape[2], "split": splits(precision, q.dtype), **options}
        rows = policy.kept_rows(*sizes, **of_both, with_states=with_states)
    if rows is None and not with_states:
        rows = policy.piece_rows(*sizes, **options, differentiated=differentiated)
    if rows is None:
        return PieceChoice(0, sequences)
    return PieceChoice(rows, piece_count(tokens, sequences, rows, packed=checked.packed))


@taking_numpy
def chunk_gated_delta_rule_fwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: jax.Array | None = None,
    implementation: str | Sequence[str] | None = None,
    precision: jax.lax.PrecisionLike = None,
    piece_rows: int | None = None,
    save_chunk_states: bool | None = None,
) -> tuple[jax.Array, jax.Array | None, tuple[Any, ...] | None]:
    """The forward half of `chunk_gated_delta_rule`, with what the backward half reads, for writing your own VJP.

    Not differentiable itself. The caller prepares the operands: q and k are not normalised, g and beta must be float32.

    Args:
        g, beta: [B, T, Hv], float32.
        implementation: as in `chunk_gated_delta_rule`, but not "reference", which JAX differentiates.
        others: as in `chunk_gated_delta_rule`.

    Returns:
        o, final_state: as in `chunk_gated_delta_rule`.
        residuals: (a, gamma), and up to three more, vd, between and h. To be handed on as they are. None where only
            "xla" can be chosen, which recomputes all of it. Each of the three may be None where only a later one is
            there. Each may be left out or replaced by None, and is then computed again; h needs vd.
            a: int16 [Hv, B, T, 64], the bits, in v's dtype, of each chunk's inverse
            (I + strict_lower(diag(beta) K K^T o G))^{-1}, packed. With precision "high" in bfloat16
            [Hv, B, T, 128], of its high and low parts.
            gamma: float32 [B, T, Hv], the sums of g within each chunk.
            vd: [B, T, Hv, V] in v's dtype, what each token writes to the state, unless save_chunk_states is False.
            Arbitrary at tokens of no sequence. With precision "high" in bfloat16 [B, T, Hv, 2 V], and only with h.
            between: where one card computes the sequences in pieces, with P places for cuts between these, the tuple
            (entering, transition, forgotten). entering is the state at each cut, float32 [P, Hv, K, V]. transition
            is what multiplies the state before the piece before the cut, bfloat16 [P, Hv, K K / 128, 256] in the
            kernels' own order. forgotten says whether that is zero, int32 [P, Hv]. Arbitrary where no sequence is cut.
            h: where save_chunk_states is True and has an effect, the state before each chunk, in tiles
            [C, Hv, ceil(K / 64), V, min(K, 64)] in v's dtype, with C places for the chunks of all pieces. With
            precision "high" in bfloat16 [C, Hv, 2 K / 64, V, 64], of its high and low parts.

    Raises:
        TypeError, ValueError, NotImplementedError: as `chunk_gated_delta_rule`.
    """
    checked, choice = _checked_half(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        implementation=implementation,
        precision=precision,
        piece_rows=piece_rows,
        save_chunk_states=save_chunk_states,
    )
    layout, operands = _operands(q, k, v, g, beta, initial_state, cu_seqlens)
    forward = functools.partial(
        sharding.forward,
        layout=layout,
        settings=Settings(choice, checked.scale, precision=precision),
        output_final_state=output_final_state,
        with_residuals=True,
        keep=keeping(save_chunk_states, precision, q.dtype),
    )
    o, final_state, residuals, _ = first_order(forward, _HALVES)(*operands)
    if final_state is not None and cu_seqlens is not None:
        final_state = jnp.squeeze(final_state, 0)
    if residuals is None:
        return o, final_state, None
    a, gamma, vd, between, h, _ = residuals  # q and k, as they are, have no lengths
    more = [vd, None if between is None else tuple(between), h]
    while more and more[-1] is None:
        more.pop()
    return o, final_state, (a, gamma, *more)


@taking_numpy
def chunk_gated_delta_rule_bwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    residuals: Sequence[Any] | None,
    do: jax.Array | None,
    d_final_state: jax.Array | None = None,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    implementation: str | Sequence[str] | None = None,
    precision: jax.lax.PrecisionLike = None,
    piece_rows: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """The backward half of `chunk_gated_delta_rule`.

    Args:
        residuals: what `chunk_gated_delta_rule_fwd` returned for the same operands and options, or its a and gamma, or
            these and some of the others. None for "xla". Residuals of another call are refused if their shapes differ.
            If they do not, they cannot be told apart: those of other cu_seqlens, or of a row without, give wrong
            gradients.
        do: [B, T, Hv, V] in v's dtype, the cotangent of o, or None for zero.
        d_final_state: float32, of the shape of final_state, its cotangent, or None for zero. Not both may be None.
        others: as given to `chunk_gated_delta_rule_fwd`.

    Returns:
        (dq, dk, dv, dg, dbeta, d_initial_state), of the shapes of the operands: dq and dk in q's dtype, dv in v's, the
        others in float32. d_initial_state is None without an initial state. Inside `jax.shard_map` they vary over every
        manual axis that an argument varies over; the caller sums over the axes that an operand does not vary over.

    Raises:
        TypeError, ValueError, NotImplementedError: as `chunk_gated_delta_rule`.

    Example:
        >>> import jax.numpy as jnp, jax_qla
        >>> q = k = v = jnp.ones((1, 10, 2, 8))
        >>> g, beta = jnp.full((1, 10, 2), -0.1), jnp.full((1, 10, 2), 0.1)
        >>> o, _, residuals = jax_qla.chunk_gated_delta_rule_fwd(q, k, v, g, beta)
        >>> dq, dk, dv, dg, dbeta, _ = jax_qla.chunk_gated_delta_rule_bwd(q, k, v, g, beta, residuals, jnp.ones_like(o))
        >>> dq.shape, dg.shape
        ((1, 10, 2, 8), (1, 10, 2))
    """
    checked, choice = _checked_half(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        implementation=implementation,
        precision=precision,
        piece_rows=piece_rows,
    )
    if do is None and d_final_state is None:
        raise ValueError("do and d_final_state are both None: give the cotangent of at least one result")
    if do is not None:
        check_gradient("do", do, tuple(v.shape), v.dtype, "that of o and v")
    if d_final_state is not None:
        check_gradient("d_final_state", d_final_state, checked.state_shape, jnp.float32, "that of final_state")
    layout, operands = _operands(q, k, v, g, beta, initial_state, cu_seqlens)
    given = None
    if residuals is not None:
        places = functools.partial(sharding.state_places, layout, choice, operands[1], operands[2], operands[6])
        given = _residuals(residuals, k, v, precision, None if layout.automatic else places)
    elif choice.on_cuda == "cuda":
        raise ValueError(
            'residuals are missing: "cuda" reads them; call chunk_gated_delta_rule_fwd with the same implementation='
        )
    if d_final_state is not None and cu_seqlens is not None:
        d_final_state = jnp.expand_dims(d_final_state, 0)
    settings = Settings(choice, checked.scale, precision=precision)
    backward = functools.partial(sharding.backward, layout=layout, settings=settings)
    dq, dk, dv, dg, dbeta, d_initial_state = first_order(backward, _HALVES)(
        *(*operands, given, None, do, d_final_state)
    )
    if d_initial_state is not None and cu_seqlens is not None:
        d_initial_state = jnp.squeeze(d_initial_state, 0)
    return dq, dk, dv, dg, dbeta, d_initial_state


@taking_numpy
def recurrent_gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: jax.Array | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The gated delta rule token by token: one or a few tokens from a state, for decoding.

    Computes what `chunk_gated_delta_rule` computes, with its conventions. Arithmetic is float32, or float64 with a
    float64 operand. It is differentiable in every mode and order; derivatives are those of the recurrence in plain JAX.
    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464).

    The kernel of "cuda" writes the final state into the memory of the initial one. Nothing is copied in a loop that
    carries the state, or under `jax.jit` with the state among `donate_argnums`. Elsewhere XLA copies the state first.

    Args:
        use_qk_l2norm_in_kernel: divides q and k by sqrt(|x|^2 + 1e-6) over K first. The kernel of "cuda" does it in
            float32. The other implementations do it before, and round the quotients to q's dtype.
        initial_state: float32 or bfloat16, of the shapes in `chunk_gated_delta_rule`; default zero. It is read once and
            written once, whatever the number of tokens.
        implementation: "cuda" (a Hopper kernel; K and V 64 or 128, bfloat16 or float16, without cu_seqlens), "xla" (the
            recurrence in plain JAX on any platform, for any size, written out for few tokens), "reference" (the same as
            a loop), or a sequence of these. Of a sequence, the first is taken that can compute the operands on the
            platform that the program is lowered for. None is ("cuda", "xla"). A single name is never replaced by
            another.
        others: as in `chunk_gated_delta_rule`.

    Returns:
        o: as in `chunk_gated_delta_rule`.
        final_state: as in `chunk_gated_delta_rule`, but in bfloat16 where initial_state is.

    Raises:
        TypeError, ValueError: as in `chunk_gated_delta_rule`.
        NotImplementedError: no implementation asked for can take the operands; a size other than B is a symbol of
            `jax.export`; or "cuda" alone was asked for and the platform is not CUDA (raised when the program is
            lowered).

    Example:
        >>> import jax.numpy as jnp, jax_qla
        >>> q = k = v = jnp.ones((2, 1, 4, 8))
        >>> g, beta = jnp.full((2, 1, 4), -0.1), jnp.full((2, 1, 4), 0.5)
        >>> o, state = jax_qla.recurrent_gated_delta_rule(
        ...     q, k, v, g, beta, initial_state=jnp.zeros((2, 4, 8, 8)), output_final_state=True
        ... )
        >>> o.shape, state.shape
        ((2, 1, 4, 8), (2, 4, 8, 8))
    """
    checked = check(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        state_dtypes=("float32", "bfloat16"),
        symbolic_batch=True,
    )
    state_dtype = "float32" if initial_state is None else jnp.dtype(initial_state.dtype).name
    call = RecurrentCall(packed=cu_seqlens is not None, state_dtype=state_dtype)
    choice = choose(q, k, v, implementation=implementation, precision=None, recurrent=call)
    # What Auto axes beside others cut is left to the compiler.
    layout, (q, k, v, g, beta, *others) = _operands(q, k, v, g, beta, initial_state, cu_seqlens, partly=True)
    o, final_state = sharding.without_exchange(
        *(layout, decode.recurrent, (q, k, v, widen(g), widen(beta), *others)),
        options=(
            ("choice", choice),
            ("scale", checked.scale),
            ("output_final_state", output_final_state),
            ("l2norm", use_qk_l2norm_in_kernel),
            ("automatic", layout.automatic),
        ),
        output_final_state=output_final_state,
        name="recurrent_gated_delta_rule",
        instead="chunk_gated_delta_rule",
    )
    if final_state is not None and cu_seqlens is not None:
        final_state = jnp.squeeze(final_state, 0)
    return o, final_state


def _compute(options: vjp.Options, operands: Sequence[Any]) -> tuple[jax.Array, jax.Array | None]:
    """o and final_state by the chosen implementation, differentiable as that is."""
    settings, choice = options.settings, options.settings.choice

    def by_recurrence(*operands: Any) -> tuple[jax.Array, jax.Array | None]:
        return sharding.without_exchange(
            *(options.layout, reference.recurrence, operands),
            options=(("scale", settings.scale), ("l2norm", settings.l2norm)),
            output_final_state=options.output_final_state,
            name="implementation='reference'",
            instead="'cuda' or 'xla'",
        )

    if choice.on_cuda == "reference":
        return by_recurrence(*operands)
    if choice.elsewhere != "reference":
        return vjp.gated_delta_rule(options, *operands)
    # The kernels where they run and the reference elsewhere: two functions that are differentiated differently.
    by_kernels = dataclasses.replace(settings, choice=dataclasses.replace(choice, elsewhere=None))
    kernels = dataclasses.replace(options, settings=by_kernels)
    return jax.lax.platform_dependent(
        *match_varying(tuple(operands), operands),
        cuda=lambda *operands: vjp.gated_delta_rule(kernels, *operands),
        default=by_recurrence,
    )


def _laid_out(
    mesh_axes: MeshAxes | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
    cu_seqlens: jax.Array | None,
    segment_ids: jax.Array | None,
    *,
    partly: bool = False,
) -> tuple[Layout, tuple[Any, ...]]:
    """How the operands are cut over the mesh, and the operands cut so where their types say how."""
    states = "bHkv"
    if initial_state is not None and (cu_seqlens is not None or initial_state.ndim == 5):
        states = "nHkv" if cu_seqlens is not None else "bnHkv"
    operands = (q, k, v, g, beta, initial_state, cu_seqlens, segment_ids)
    dims = (*sharding.OPERANDS, states, "n", "bt")
    layout = resolve(mesh_axes, operands, dims, partly=partly)
    aligned = (x if x is None else align(layout, x, d) for x, d in zip(operands, dims, strict=True))
    return layout, tuple(aligned)


# Compiled, as all that surrounds the rule: a call that is not under `jax.jit` would else run every operation by itself,
# and move constants to the device for it, which `jax.transfer_guard` may forbid.
@functools.partial(jax.jit, static_argnames=("layout", "length"))
def _one_row(
    layout: Layout, length: int, initial_state: jax.Array | None, cu_seqlens: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """segments [1, N, 2] and initial states [1, N, Hv, K, V] of a row packed by cu_seqlens, of which this device has
    `length` tokens where the caller has cut it."""
    shards = jax.lax.axis_size(layout.manual_sequence) if layout.manual_sequence else 1
    segments = segments_from_cu_seqlens(cu_seqlens, length * shards)
    return segments[None], None if initial_state is None else initial_state[None]


@jax.jit
def _without_padding(o: jax.Array, valid: jax.Array) -> jax.Array:
    """o, zero where `valid` [B, T] is False."""
    return jnp.where(valid[..., None, None], o, jnp.zeros((), o.dtype))


def _checked(
    q: Any, k: Any, v: Any, g: Any, beta: Any, *, implementation: Any, precision: Any, **options: Any
) -> tuple[Checked, Choice]:
    """What the checks of a call found out, and what computes it; `options` as of `check`."""
    checked = check(q, k, v, g, beta, precision=precision, **options)
    choice = choose(q, k, v, implementation=implementation, precision=precision, piece_rows=checked.piece_rows)
    return checked, choice


def _checked_half(*tokens: Any, **options: Any) -> tuple[Checked, Choice]:
    """`_checked`, of a forward or backward half."""
    checked, choice = _checked(*tokens, **options, gate_dtypes=("float32",))
    if "reference" in (choice.on_cuda, choice.elsewhere):
        raise NotImplementedError(
            'implementation="reference" has no forward and backward half: JAX differentiates it as a whole; use '
            "chunk_gated_delta_rule"
        )
    return checked, choice


def _operands(
    q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, cu_seqlens: Any, partly: bool = False
) -> tuple[Layout, tuple[Any, ...]]:
    """How the operands of a call without segment_ids are cut over the mesh, and these in `sharding.forward`'s form."""
    layout, (q, k, v, g, beta, initial_state, cu_seqlens, _) = _laid_out(
        None, *arrays(q, k, v, g, beta, initial_state, cu_seqlens, None), partly=partly
    )
    segments = None
    if cu_seqlens is not None:
        segments, initial_state = _one_row(layout, v.shape[1], initial_state, cu_seqlens)
    return layout, (q, k, v, g, beta, initial_state, segments)


def _residuals(
    residuals: Sequence[Any], k: Any, v: Any, precision: Any, places: Callable[[int], int] | None
) -> Residuals:
    """What the forward half returned, checked.

    Args:
        places: of h, by those for cuts; None where h is not read.
    """
    if not isinstance(residuals, Sequence) or not 2 <= len(residuals) <= 5:
        raise TypeError(f"residuals must be what chunk_gated_delta_rule_fwd returned, got {type(residuals).__name__}")
    of_a, of_gamma = Residuals.shapes(v, precision).values()
    check_gradient("residuals[0]", residuals[0], of_a.shape, of_a.dtype, f"[Hv, B, T, {of_a.shape[-1]}]")
    check_gradient("residuals[1]", residuals[1], of_gamma.shape, of_gamma.dtype, "that of g")
    a, gamma, vd, between, h = (*residuals, None, None, None)[:5]
    cuts = 0
    if between is not None:
        if not isinstance(between, Sequence) or len(between) != len(Between._fields):
            raise TypeError(
                "residuals[3] must be what chunk_gated_delta_rule_fwd returned, or be left out, got "
                f"{type(between).__name__}"
            )
        between = Between(*between)
        cuts = between.entering.shape[0] if getattr(between.entering, "ndim", 0) else 0
        shapes = Between.shapes(cuts, v.shape[2], k.shape[3], v.shape[3])
        for i, (x, right) in enumerate(zip(between, shapes.values(), strict=True)):
            check_gradient(f"residuals[3][{i}]", x, right.shape, right.dtype, "of P cuts")
    of_h, of_vd = ChunkStates.shapes(0, v, k.shape[3], precision).values()
    if vd is not None:
        check_gradient("residuals[2]", vd, of_vd.shape, of_vd.dtype, f"[B, T, Hv, {of_vd.shape[3]}]")
    if h is not None:
        given = h.shape[0] if getattr(h, "ndim", 0) else 0
        of_h = of_h.update(shape=(given if places is None else places(cuts), *of_h.shape[1:]))
        what = "of the chunks, with residuals[3] where that was returned too"
        check_gradient("residuals[4]", h, of_h.shape, of_h.dtype, what)
        if vd is None:
            raise ValueError("residuals[2] is None but residuals[4] is not: give both or leave out residuals[4]")
    return Residuals(a, gamma, vd, between, h)


def _is_on_cuda(q: Any) -> bool:
    """Whether q lies on CUDA devices or, if it has no data, whether JAX computes on CUDA by default."""
    if isinstance(q, jax.Array) and not isinstance(q, jax.core.Tracer):
        platform = next(iter(q.devices())).platform
    else:
        platform = jax.default_backend()
    if platform not in ("gpu", "cuda"):
        return False
    try:
        return bool(jax.local_devices(backend="cuda"))
    except RuntimeError:  # A GPU of another maker.
        return False
