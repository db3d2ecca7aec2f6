"""One function that checks a call's arguments, with one sentence for each thing that can be wrong."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_qla.kernels.common import CHUNK
from jax_qla.widening import widest

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

TOKEN_DTYPES = ("bfloat16", "float16", "float32", "float64")
"""Of what there is a row of for each token: q, k, v, and the input of the convolution."""

_INT32_MAX = int(np.iinfo(np.int32).max)


class Checked(NamedTuple):
    """What the checks found out."""

    scale: float
    state_shape: tuple[int, ...]
    """Of initial_state and final_state as the caller sees them."""
    packed: bool
    """Whether the batch is computed as one row of several sequences (else it is dense)."""
    piece_rows: int | None
    """As given, but no integer of NumPy, whose few bits a number of tokens may not fit into."""


def check(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    scale: Any = None,
    initial_state: Any = None,
    output_final_state: Any = False,
    use_qk_l2norm_in_kernel: Any = False,
    cu_seqlens: Any = None,
    segment_ids: Any = None,
    max_segments: Any = None,
    precision: Any = None,
    piece_rows: Any = None,
    save_chunk_states: Any = None,
    gate_dtypes: Sequence[str] = ("bfloat16", "float16", "float32"),
    state_dtypes: Sequence[str] = ("float32",),
    symbolic_batch: bool = False,
) -> Checked:
    """Checks the arguments of `chunk_gated_delta_rule` against each other.

    Only shapes and dtypes of arrays are looked at, so ShapeDtypeStructs will do. `implementation` is checked where it
    is understood, in `implementations.choose`. `gate_dtypes` are those accepted for g and beta, `state_dtypes` those
    for initial_state; `symbolic_batch` says whether B may be a symbol of `jax.export`.

    Raises:
        NotImplementedError: a size is a symbol.
        TypeError: an argument is of the wrong type or dtype.
        ValueError: an argument has the wrong rank, size or value, or does not go with another.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rank(name, x, ("B", "T", "Hv" if name == "v" else "Hk", "V" if name == "v" else "K"))
        check_dtype(name, x, TOKEN_DTYPES)
        if x.dtype != q.dtype:
            raise TypeError(f"q, k and v must have the same dtype, got q {q.dtype} and {name} {x.dtype}")
        if 0 in x.shape[2:]:
            raise ValueError(f"{name} must have at least one head and one feature, got shape {tuple(x.shape)}")
    batch, tokens, key_heads, key_dim = q.shape
    if not all(isinstance(n, int) for n in (*q.shape[symbolic_batch:], *v.shape[symbolic_batch:])):
        raise NotImplementedError(
            f"all sizes must be static{' but B' if symbolic_batch else ''}, got q of shape {q.shape} and v of {v.shape}"
        )
    value_heads, value_dim = v.shape[2:]
    if k.shape[3] != key_dim:
        raise ValueError(f"q and k must have the same key dimension K, got {key_dim} for q and {k.shape[3]} for k")
    check_shape("k", k, tuple(q.shape), "that of q, [B, T, Hk, K]")
    check_shape("v", v, (batch, tokens, value_heads, value_dim), "[B, T, Hv, V] with B and T of q")
    if value_heads % key_heads:
        raise ValueError(f"v must have a multiple of the heads of q and k, got Hv = {value_heads} and Hk = {key_heads}")

    wide = jnp.dtype(v.dtype) == jnp.float64
    for name, x in (("g", g), ("beta", beta)):
        check_rank(name, x, ("B", "T", "Hv"))
        check_dtype(name, x, (*gate_dtypes, "float64") if wide else gate_dtypes)
        check_shape(name, x, (batch, tokens, value_heads), "[B, T, Hv], one number for each token and head of v")

    check_flag("output_final_state", output_final_state)
    check_flag("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel)
    check_save_chunk_states(save_chunk_states)

    sequences = _check_segments(batch, tokens, cu_seqlens, segment_ids, max_segments)
    stateful = initial_state is not None or output_final_state
    if segment_ids is not None and max_segments is None and stateful:
        which = "initial_state" if initial_state is not None else "output_final_state"
        raise ValueError(
            f"max_segments is missing: with segment_ids, {which} needs a static number of states per row, for example "
            "max_segments=8"
        )
    state_shape = (*sequences, value_heads, key_dim, value_dim)
    if initial_state is not None:
        leading = ("B", "max_segments") if segment_ids is not None else ("N" if cu_seqlens is not None else "B",)
        axes = (*leading, "Hv", "K", "V")
        check_rank("initial_state", initial_state, axes)
        check_dtype("initial_state", initial_state, (*state_dtypes, "float64") if wide else state_dtypes)
        check_shape("initial_state", initial_state, state_shape, f"[{', '.join(axes)}]")

    _check_precision(precision)
    return Checked(
        scale=_check_scale(scale, key_dim, q.dtype),
        state_shape=state_shape,
        packed=cu_seqlens is not None or max_segments is not None,
        piece_rows=check_piece_rows(piece_rows),
    )


def type_name(x: Any) -> str:
    """What a message calls the type of an argument: of arrays one name, for those of NumPy come as JAX's
    (`taking_numpy`); of others, but Python's own, with the module, for NumPy has a `bool` too."""
    if isinstance(x, jax.Array):
        return "array"
    kind = type(x)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def is_integer(x: Any) -> bool:
    """Whether x is a Python integer, or NumPy's."""
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def taking_numpy(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The function, called with JAX's arrays in place of NumPy's: what is checked is what is computed with. Integers of
    64 bits, as NumPy has them unless told otherwise, become such of 32, and are refused if these do not hold them."""

    def of_jax(x: Any, name: str = "an array of integers") -> Any:
        if not isinstance(x, np.ndarray):
            return x
        try:
            taken = jnp.asarray(x, np.int32 if x.dtype == np.int64 else None)
        except TypeError:  # of objects or strings: refused by name, as arrays of other dtypes are
            return x
        if x.size and x.dtype.kind in "iu":
            limits = np.iinfo(taken.dtype)
            for value in (x.min(), x.max()):
                if not limits.min <= value <= limits.max:
                    raise ValueError(f"{name} must have values that {taken.dtype} holds, got {value}")
        return taken

    @functools.wraps(function)
    def call(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        given: Any = map(of_jax, arguments)
        named: Any = {name: of_jax(x, name) for name, x in options.items()}
        return function(*given, **named)

    return call


def arrays(*operands: Any, what: str = "q, k, v", instead: str = " or jax_qla.which_implementation") -> tuple[Any, ...]:
    """The operands as JAX arrays, None where they are None.

    Args:
        operands: those of a call.
        what: the names of some of them.
        instead: what takes shapes alone, besides `jax.eval_shape`.

    Raises:
        TypeError: one is a shape without values.
    """
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in operands):
        raise TypeError(
            f"{what} and all others must have values, got a jax.ShapeDtypeStruct; for shapes alone use "
            f"jax.eval_shape{instead}"
        )
    return tuple(None if x is None else jnp.asarray(x) for x in operands)


def why_not_static(name: str, x: Any) -> str | None:
    """Why kernels cannot be launched for x (array or ShapeDtypeStruct), if one of its sizes is a symbol."""
    if all(isinstance(size, int) for size in x.shape):
        return None
    return f"the kernels of 'cuda' take no symbols for sizes, got {name} of shape {tuple(x.shape)}"


def check_gradient(name: str, x: Any, shape: tuple[int, ...], dtype: Any, meaning: str) -> None:
    """Checks a cotangent or residual, which has the shape and dtype of what it belongs to.

    Raises:
        TypeError, ValueError: it has not.
    """
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    check_shape(name, x, shape, meaning)
    check_dtype(name, x, (jnp.dtype(dtype).name,))


def check_flag(name: str, flag: Any) -> None:
    """Whether a flag is True or False.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(flag, bool):
        raise TypeError(f"{name} must be True or False, got {flag!r} of type {type_name(flag)}")


def _check_precision(precision: Any) -> None:
    if precision is None:
        return
    if isinstance(precision, list):  # `jax.lax.dot` takes it, but what is static in a program is hashed
        raise TypeError(f"precision must be a tuple where it is a pair, got the list {precision!r}")
    matrix = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    try:
        jax.eval_shape(lambda x: jax.lax.dot(x, x, precision=precision), matrix)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"precision must be None or one that jax.lax.dot takes, such as 'high' or jax.lax.Precision.HIGH, "
            f"got {precision!r}"
        ) from error


def check_save_chunk_states(save_chunk_states: Any) -> None:
    """Whether save_chunk_states is what `chunk_gated_delta_rule` takes.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(save_chunk_states, bool | None):
        raise TypeError(
            f"save_chunk_states must be True, False or None, got {save_chunk_states!r} of type "
            f"{type_name(save_chunk_states)}"
        )


def check_piece_rows(piece_rows: Any) -> int | None:
    """piece_rows as a Python integer, if it is what `chunk_gated_delta_rule` takes.

    Raises:
        TypeError, ValueError: it is not.
    """
    if piece_rows is None:
        return None
    if not is_integer(piece_rows):
        raise TypeError(
            f"piece_rows must be None or a Python integer, got {piece_rows!r} of type {type_name(piece_rows)}"
        )
    if piece_rows < 0 or piece_rows % CHUNK:
        raise ValueError(
            f"piece_rows must be a multiple of {CHUNK}, such as 2048, or 0 for whole sequences, got {piece_rows}"
        )
    return int(piece_rows)


def check_packing(cu_seqlens: Any, segment_ids: Any, batch: int, tokens: int, name: str) -> None:
    """Whether the arguments that say where sequences lie are right for an operand of this name [B, T, ...].

    Raises:
        NotImplementedError, TypeError, ValueError: one of them is not, or both are given.
    """
    if cu_seqlens is not None and segment_ids is not None:
        raise ValueError("cu_seqlens and segment_ids both say where the sequences lie: give only one of them")
    if cu_seqlens is not None:
        check_rank("cu_seqlens", cu_seqlens, ("N + 1",))
        check_dtype("cu_seqlens", cu_seqlens, ("int32",))
        if not isinstance(cu_seqlens.shape[0], int):
            raise NotImplementedError(f"cu_seqlens must have a static size, got shape {tuple(cu_seqlens.shape)}")
        if cu_seqlens.shape[0] == 0:
            raise ValueError("cu_seqlens must have N + 1 entries, the first of which is 0, got none")
        if batch != 1:
            raise ValueError(f"cu_seqlens packs all sequences into one row: B must be 1, got {name} with B = {batch}")
    if segment_ids is not None:
        check_rank("segment_ids", segment_ids, ("B", "T"))
        check_dtype("segment_ids", segment_ids, ("int32",))
        check_shape("segment_ids", segment_ids, (batch, tokens), "[B, T], one number for each token")


def _check_segments(batch: int, tokens: int, cu_seqlens: Any, segment_ids: Any, max_segments: Any) -> tuple[int, ...]:
    """`check_packing`, with max_segments. Returns the leading axes of the states."""
    check_packing(cu_seqlens, segment_ids, batch, tokens, "q")
    if max_segments is not None:
        if segment_ids is None:
            raise ValueError(f"max_segments goes with segment_ids, got max_segments={max_segments!r} without them")
        if not is_integer(max_segments):
            raise TypeError(
                f"max_segments must be a Python integer, got {max_segments!r} of type {type_name(max_segments)}"
            )
        if not 1 <= int(max_segments) <= _INT32_MAX:
            raise ValueError(f"max_segments must be positive, and at most {_INT32_MAX}, got {max_segments}")
    if cu_seqlens is not None:
        return (cu_seqlens.shape[0] - 1,)
    return (batch,) if max_segments is None else (batch, int(max_segments))


def _check_scale(scale: Any, key_dim: int, dtype: Any) -> float:
    if scale is None:
        return float(key_dim**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(
            f"scale must be a Python number, which is compiled in, got {type_name(scale)}; multiply q for a scale "
            "that is an array"
        )
    try:
        number = float(scale)
    except OverflowError as error:
        raise ValueError("scale must be a Python number that a float can hold, got a larger one") from error
    wide = widest(dtype)
    if not abs(number) <= float(np.finfo(wide).max):
        raise ValueError(f"scale must be finite, and within the range of {wide}, got {number}")
    return number


def check_rank(name: str, x: Any, axes: Sequence[str]) -> None:
    """Whether x is an array with as many axes as these, which messages name.

    Raises:
        TypeError, ValueError: it is not.
    """
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name} must be an array [{', '.join(axes)}], got {type(x).__name__}")
    if len(x.shape) != len(axes):
        raise ValueError(
            f"{name} must have {len(axes)} axes, [{', '.join(axes)}], got {len(x.shape)}: shape {tuple(x.shape)}"
        )


def check_shape(name: str, x: Any, expected: tuple[int, ...], meaning: str) -> None:
    """Whether an array has this shape, of which messages say what it is.

    Raises:
        ValueError: it has not.
    """
    if tuple(x.shape) != expected:
        raise ValueError(f"{name} must have shape {expected}, {meaning}, got {tuple(x.shape)}")


def known_dtype(x: Any) -> np.dtype[Any] | None:
    """x's dtype, or None where that is none of JAX's numbers: another framework's, or that of random keys."""
    try:
        return jnp.dtype(x.dtype)
    except TypeError:
        return None


def check_dtype(name: str, x: Any, accepted: Sequence[str]) -> None:
    """Whether an array has one of these dtypes.

    Raises:
        TypeError: it has not.
    """
    dtype = known_dtype(x)
    if dtype is None or dtype.name not in accepted:
        raise TypeError(f"{name} must be {' or '.join(accepted)}, got {x.dtype}")
