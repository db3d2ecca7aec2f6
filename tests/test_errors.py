"""Every wrong argument is one clear sentence when the call is traced, or lowered where only that can tell."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_qla
from jax_qla import checks

TOKENS = ("q", "k", "v", "g", "beta")


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def good() -> dict[str, Any]:
    """B 2, T 10, Hk 2, Hv 4, K 64, V 64."""
    token = {"q": array(2, 10, 2, 64), "k": array(2, 10, 2, 64), "v": array(2, 10, 4, 64)}
    return token | {"g": array(2, 10, 4), "beta": array(2, 10, 4)}


def one_row() -> dict[str, Any]:
    """The same with B 1."""
    return {name: array(1, *x.shape[1:], dtype=x.dtype) for name, x in good().items()}


def positional(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The call with the first five arguments given by position."""
    tokens = [arguments[name] for name in TOKENS]
    return function(*tokens, **{name: x for name, x in arguments.items() if name not in TOKENS})


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Traces the function on ShapeDtypeStructs and plain values."""
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {name: x for name, x in arguments.items() if name not in arrays}

    def traced(arrays: dict[str, Any]) -> Any:
        return positional(function, arrays | static)

    return jax.eval_shape(traced, arrays)


IDS = array(2, 10, dtype=jnp.int32)
FOREIGN = SimpleNamespace(shape=(2, 10, 2, 64), dtype="torch.bfloat16")
BF16 = {name: array(*x.shape, dtype=jnp.bfloat16) for name, x in good().items() if name in "qkv"}

CASES: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    # name, what differs from good(), error, what its sentence must say
    ("q not an array", {"q": [1.0]}, TypeError, r"q must be an array \[B, T, Hk, K\], got list"),
    ("q of another framework", {"q": FOREIGN}, TypeError, "q must be bfloat16 or .*, got torch.bfloat16"),
    ("state of another framework", {"initial_state": FOREIGN}, TypeError, "initial_state must be float32, got torch"),
    ("q rank", {"q": array(2, 10, 64)}, ValueError, r"q must have 4 axes, \[B, T, Hk, K\], got 3: shape \(2, 10, 64\)"),
    ("k rank", {"k": array(2, 10, 2, 64, 1)}, ValueError, "k must have 4 axes"),
    ("v rank", {"v": array(10, 4, 64)}, ValueError, r"v must have 4 axes, \[B, T, Hv, V\], got 3"),
    ("g rank", {"g": array(2, 10, 4, 1)}, ValueError, r"g must have 3 axes, \[B, T, Hv\], got 4"),
    ("beta rank", {"beta": array(10, 4)}, ValueError, r"beta must have 3 axes"),
    ("q integer", {"q": array(2, 10, 2, 64, dtype=jnp.int32)}, TypeError, "q must be bfloat16 or .* got int32"),
    ("k dtype", {"k": array(2, 10, 2, 64, dtype=jnp.bfloat16)}, TypeError, "same dtype, got q float32 and k bfloat16"),
    ("v dtype", {"v": array(2, 10, 4, 64, dtype=jnp.float16)}, TypeError, "same dtype, got q float32 and v float16"),
    ("g integer", {"g": array(2, 10, 4, dtype=jnp.int32)}, TypeError, "g must be bfloat16 or float16 or float32, got"),
    ("beta bool", {"beta": array(2, 10, 4, dtype=jnp.bool_)}, TypeError, "beta must be .* got bool"),
    ("K mismatch", {"k": array(2, 10, 2, 32)}, ValueError, "same key dimension K, got 64 for q and 32 for k"),
    ("k tokens", {"k": array(2, 9, 2, 64)}, ValueError, r"k must have shape \(2, 10, 2, 64\)"),
    ("k heads", {"k": array(2, 10, 1, 64)}, ValueError, r"k must have shape \(2, 10, 2, 64\)"),
    ("v batch", {"v": array(1, 10, 4, 64)}, ValueError, r"v must have shape \(2, 10, 4, 64\)"),
    ("v tokens", {"v": array(2, 11, 4, 64)}, ValueError, r"v must have shape \(2, 10, 4, 64\)"),
    ("heads", {"v": array(2, 10, 3, 64)}, ValueError, "multiple of the heads of q and k, got Hv = 3 and Hk = 2"),
    ("no heads", {"v": array(2, 10, 0, 64)}, ValueError, "v must have at least one head and one feature"),
    ("g shape", {"g": array(2, 10, 2)}, ValueError, r"g must have shape \(2, 10, 4\), .* got \(2, 10, 2\)"),
    ("beta shape", {"beta": array(2, 9, 4)}, ValueError, r"beta must have shape \(2, 10, 4\)"),
    ("scale array", {"scale": jnp.ones(())}, TypeError, "scale must be a Python number"),
    ("scale bool", {"scale": True}, TypeError, "scale must be a Python number"),
    ("large scale", {"scale": 10**5000}, ValueError, "scale must be a Python number that a float can hold"),
    ("scale nan", {"scale": float("nan")}, ValueError, "scale must be finite, .* got nan"),
    ("infinite scale", {"scale": -np.inf}, ValueError, "scale must be finite, .* got -inf"),
    ("scale beyond float32", {"scale": -1e39}, ValueError, r"within the range of float32, got -1e\+39"),
    ("objects", {"q": np.full((2, 10, 2, 64), None)}, TypeError, "q must be bfloat16 or .*, got object"),
    ("strings", {"beta": np.full((2, 10, 4), "1")}, TypeError, "beta must be bfloat16 or .*, got <U1"),
    ("final flag", {"output_final_state": 1}, TypeError, "output_final_state must be True or False, got 1 of type int"),
    ("precision list", {"precision": ["high", "high"]}, TypeError, "precision must be a tuple where it is a pair"),
    (
        "flag of NumPy",
        {"output_final_state": np.True_},
        TypeError,
        "must be True or False, got .*True_? of type numpy.bool",
    ),
    (
        "flag in an array",
        {"output_final_state": np.array(True)},
        TypeError,
        "must be True or False, got .* of type array",
    ),
    ("norm flag", {"use_qk_l2norm_in_kernel": "yes"}, TypeError, "use_qk_l2norm_in_kernel must be True or False"),
    ("state rank", {"initial_state": array(4, 64, 64)}, ValueError, r"initial_state must have 4 axes, \[B, Hv, K, V\]"),
    (
        "state shape",
        {"initial_state": array(2, 2, 64, 64)},
        ValueError,
        r"initial_state must have shape \(2, 4, 64, 64",
    ),
    (
        "state dtype",
        {"initial_state": array(2, 4, 64, 64, dtype=jnp.bfloat16)},
        TypeError,
        "initial_state must be float32, got bfloat16",
    ),
    (
        "state with cu_seqlens",
        one_row() | {"cu_seqlens": array(4, dtype=jnp.int32), "initial_state": array(1, 4, 64, 64)},
        ValueError,
        r"initial_state must have shape \(3, 4, 64, 64\), \[N, Hv, K, V\]",
    ),
    ("cu_seqlens and B", {"cu_seqlens": array(4, dtype=jnp.int32)}, ValueError, "B must be 1, got q with B = 2"),
    ("cu_seqlens list", one_row() | {"cu_seqlens": [0, 10]}, TypeError, r"cu_seqlens must be an array \[N \+ 1\]"),
    ("cu_seqlens dtype", one_row() | {"cu_seqlens": array(4)}, TypeError, "cu_seqlens must be int32, got float32"),
    ("cu_seqlens rank", one_row() | {"cu_seqlens": array(1, 4, dtype=jnp.int32)}, ValueError, "cu_seqlens must have 1"),
    ("cu_seqlens empty", one_row() | {"cu_seqlens": array(0, dtype=jnp.int32)}, ValueError, r"N \+ 1 entries"),
    (
        "both packings",
        one_row() | {"cu_seqlens": array(4, dtype=jnp.int32), "segment_ids": array(1, 10, dtype=jnp.int32)},
        ValueError,
        "give only one of them",
    ),
    ("ids rank", {"segment_ids": array(10, dtype=jnp.int32)}, ValueError, r"segment_ids must have 2 axes, \[B, T\]"),
    ("ids shape", {"segment_ids": array(2, 9, dtype=jnp.int32)}, ValueError, r"segment_ids must have shape \(2, 10\)"),
    ("ids dtype", {"segment_ids": array(2, 10)}, TypeError, "segment_ids must be int32, got float32"),
    (
        "no max_segments for the final state",
        {"segment_ids": IDS, "output_final_state": True},
        ValueError,
        "max_segments is missing: with segment_ids, output_final_state needs",
    ),
    (
        "no max_segments for the initial state",
        {"segment_ids": IDS, "initial_state": array(2, 3, 4, 64, 64)},
        ValueError,
        "max_segments is missing: with segment_ids, initial_state needs",
    ),
    ("max_segments 0", {"segment_ids": IDS, "max_segments": 0}, ValueError, "max_segments must be positive, .* got 0"),
    ("max_segments 2^31", {"segment_ids": IDS, "max_segments": 2**31}, ValueError, "at most 2147483647, got 21"),
    ("max_segments 2.0", {"segment_ids": IDS, "max_segments": 2.0}, TypeError, "max_segments must be a Python integer"),
    ("max_segments alone", {"max_segments": 2}, ValueError, "max_segments goes with segment_ids, got max_segments=2"),
    (
        "state with max_segments",
        {"segment_ids": IDS, "max_segments": 3, "initial_state": array(2, 2, 4, 64, 64)},
        ValueError,
        r"initial_state must have shape \(2, 3, 4, 64, 64\), \[B, max_segments, Hv, K, V\]",
    ),
    ("name", {"implementation": "triton"}, ValueError, "'cuda', 'xla', 'reference', got 'triton'"),
    ("names", {"implementation": ["xla", "gpu"]}, ValueError, "be made of the names .* got \\['xla', 'gpu'\\]"),
    ("no names", {"implementation": ()}, ValueError, "be made of the names .* got \\(\\)"),
    ("names type", {"implementation": 3}, TypeError, "a name or a sequence of names, got 3 of type int"),
    (
        "precision",
        {"precision": "exact"},
        ValueError,
        "precision must be None or one that jax.lax.dot takes.* got 'exact'",
    ),
    ("precision type", {"precision": 3}, ValueError, "precision must be None or one that jax.lax.dot takes.* got 3"),
    (
        "precision and cuda",
        BF16 | {"precision": "highest", "implementation": "cuda"},
        NotImplementedError,
        "the precision of the kernels of 'cuda' is None, 'default' or 'high', got precision='highest'",
    ),
    (
        "two precisions and cuda",
        BF16 | {"precision": ("high", "high"), "implementation": "cuda"},
        NotImplementedError,
        "the precision of the kernels of 'cuda' is None, 'default' or 'high', got precision=\\('high', 'high'\\)",
    ),
    ("piece_rows type", {"piece_rows": 64.0}, TypeError, "piece_rows must be None or a Python integer, got 64.0"),
    ("piece_rows flag", {"piece_rows": True}, TypeError, "piece_rows must be None or a Python integer, got True"),
    ("piece_rows", {"piece_rows": 100}, ValueError, "piece_rows must be a multiple of 64, .* got 100"),
    ("negative piece_rows", {"piece_rows": -64}, ValueError, "piece_rows must be a multiple of 64, .* got -64"),
    (
        "piece_rows and xla",
        {"piece_rows": 0, "implementation": "xla"},
        NotImplementedError,
        "implementation='xla' cannot take these inputs: piece_rows is an option of 'cuda' only, got piece_rows=0",
    ),
    (
        "piece_rows and precision",
        {"piece_rows": 64, "precision": "highest"},
        NotImplementedError,
        "'cuda': the precision of the kernels .*'xla': piece_rows is an option of 'cuda' only",
    ),
]


@pytest.mark.parametrize(
    ("changes", "error", "sentence"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_wrong_argument(changes: dict[str, Any], error: type[Exception], sentence: str) -> None:
    for function in (jax_qla.chunk_gated_delta_rule, jax_qla.which_implementation):
        run = positional if function is jax_qla.which_implementation else call
        with pytest.raises(error, match=sentence) as raised:
            run(function, good() | changes)
        assert "\n" not in str(raised.value)


def test_wrong_flag_of_states() -> None:
    with pytest.raises(TypeError, match="save_chunk_states must be True, False or None, got 'no' of type str"):
        call(jax_qla.chunk_gated_delta_rule, good() | {"save_chunk_states": "no"})


RECURRENT = ("q rank", "k dtype", "heads", "state shape", "cu_seqlens and B", "scale array", "large scale", "objects")


@pytest.mark.parametrize(("name", "changes", "error", "sentence"), [case for case in CASES if case[0] in RECURRENT])
def test_other_functions_check_alike(name: str, changes: dict[str, Any], error: type[Exception], sentence: str) -> None:
    for function in (jax_qla.recurrent_gated_delta_rule, jax_qla.chunk_gated_delta_rule_fwd):
        with pytest.raises(error, match=sentence):
            call(function, good() | changes)


def test_both_halves_take_float32_gates_only() -> None:
    narrow = {"g": array(2, 10, 4, dtype=jnp.bfloat16)}
    with pytest.raises(TypeError, match="g must be float32, got bfloat16"):
        call(jax_qla.chunk_gated_delta_rule_fwd, good() | narrow)


def test_reference_has_no_halves() -> None:
    with pytest.raises(NotImplementedError, match="JAX differentiates it as a whole"):
        call(jax_qla.chunk_gated_delta_rule_fwd, good() | {"implementation": "reference"})


@pytest.mark.parametrize(
    ("residuals", "do", "d_final_state", "error", "sentence"),
    [
        (None, None, None, ValueError, "do and d_final_state are both None"),
        (None, array(2, 10, 4, 32), None, ValueError, r"do must have shape \(2, 10, 4, 64\), that of o and v"),
        (None, array(2, 10, 4, 64, dtype=jnp.bfloat16), None, TypeError, "do must be float32, got bfloat16"),
        (None, "o", None, TypeError, "do must be an array, got str"),
        (None, None, array(2, 4, 64), ValueError, r"d_final_state must have shape \(2, 4, 64, 64\)"),
        ((), array(2, 10, 4, 64), None, TypeError, "residuals must be what chunk_gated_delta_rule_fwd returned"),
        (
            (array(2, 10, 4, 32), array(2, 10, 4)),
            array(2, 10, 4, 64),
            None,
            ValueError,
            r"residuals\[0\] must have shape \(4, 2, 10, 64\)",
        ),
    ],
)
def test_backward_half(residuals: Any, do: Any, d_final_state: Any, error: type[Exception], sentence: str) -> None:
    operands = [jnp.zeros(x.shape, x.dtype) for x in good().values()]
    with pytest.raises(error, match=sentence):
        jax_qla.chunk_gated_delta_rule_bwd(*operands, residuals, do, d_final_state, implementation="xla")


def test_shapes_alone_are_told_where_to_go() -> None:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in good().values()]
    for rule in (jax_qla.chunk_gated_delta_rule, jax_qla.recurrent_gated_delta_rule):
        with pytest.raises(TypeError, match=r"must have values, got a jax\.ShapeDtypeStruct; .* jax\.eval_shape"):
            rule(*shapes)
        with pytest.raises(TypeError, match=r"must have values, got a jax\.ShapeDtypeStruct"):
            rule(*(jnp.zeros(x.shape) for x in shapes[:-1]), shapes[-1])


def test_integers_that_32_bits_do_not_hold() -> None:
    """Of which JAX would leave the lower bits: here 0, and all tokens would be padding."""
    ids = np.full((2, 10), 2**32)
    with pytest.raises(ValueError, match="segment_ids must have values that int32 holds, got 4294967296"):
        call(jax_qla.chunk_gated_delta_rule, good() | {"segment_ids": ids})


@pytest.mark.parametrize("number", [2**31 - 1, -(2**31)])
def test_integers_that_32_bits_just_hold(number: int) -> None:
    call(jax_qla.chunk_gated_delta_rule, good() | {"segment_ids": np.full((2, 10), number)})


def test_integers_of_numpy_count_as_those_of_python() -> None:
    """Into their few bits a number of tokens may not fit."""
    ids = array(2, 10, dtype=jnp.int32)
    found = checks.check(*good().values(), segment_ids=ids, max_segments=np.int8(3), piece_rows=np.int8(64))
    assert found.state_shape == (2, 3, 4, 64, 64)
    assert {type(x) for x in (found.piece_rows, *found.state_shape)} == {int}
    most = checks.check(*good().values(), segment_ids=ids, max_segments=np.int64(2**31 - 1))
    assert most.state_shape[1] == 2**31 - 1


def test_what_is_computed_as_one_row() -> None:
    """What has a number of sequences; with segment_ids alone their gates are enough."""
    ids, bounds = array(2, 10, dtype=jnp.int32), array(3, dtype=jnp.int32)
    assert checks.check(*one_row().values(), cu_seqlens=bounds).packed
    assert checks.check(*good().values(), segment_ids=ids, max_segments=3).packed
    assert not checks.check(*good().values(), segment_ids=ids).packed
    assert not checks.check(*good().values()).packed


def test_float64_is_for_the_reference() -> None:
    wide = {name: jax.ShapeDtypeStruct(x.shape, np.float64) for name, x in good().items()}
    with pytest.raises(NotImplementedError, match="'xla' takes bfloat16, float16, float32, and q is float64"):
        jax_qla.which_implementation(*wide.values())
    state = array(2, 4, 64, 64, dtype=np.float64)
    assert checks.check(*wide.values(), initial_state=state).state_shape == state.shape
    with pytest.raises(TypeError, match="initial_state must be float32, got float64"):
        checks.check(*good().values(), initial_state=state)
    # Whose scale need not fit into float32.
    assert jax_qla.which_implementation(*wide.values(), scale=1e39, implementation="reference").name == "reference"


@pytest.mark.parametrize("shape", ["b, 10", "2, t"])
def test_symbolic_sizes(shape: str) -> None:
    """`jax.export` may leave B open where a step of decoding is, and nothing elsewhere."""
    batch, tokens = jax.export.symbolic_shape(shape)
    x = [array(batch, tokens, *each.shape[2:]) for each in good().values()]
    refusal = r"all sizes must be static{}, got q of shape \(.*, 2, 64\) and v of"
    with pytest.raises(NotImplementedError, match=refusal.format("")):
        jax.eval_shape(jax_qla.chunk_gated_delta_rule, *x)
    if isinstance(tokens, int):
        assert jax.eval_shape(jax_qla.recurrent_gated_delta_rule, *x)[0].shape == x[2].shape
    else:
        with pytest.raises(NotImplementedError, match=refusal.format(" but B")):
            jax.eval_shape(jax_qla.recurrent_gated_delta_rule, *x)


def test_symbolic_heads_and_filters() -> None:
    (size,) = jax.export.symbolic_shape("n")
    tokens, gates = array(2, 10, size, 64), array(2, 10, size)
    for rule in (jax_qla.chunk_gated_delta_rule, jax_qla.recurrent_gated_delta_rule):
        with pytest.raises(NotImplementedError, match=r"all sizes must be static.*, got q of shape \(2, 10, n, 64\)"):
            jax.eval_shape(rule, tokens, tokens, tokens, gates, gates)
        values = array(2, 10, 4, size)
        with pytest.raises(
            NotImplementedError, match=r"all sizes must be static.*, got q of .* and v of \(2, 10, 4, n\)"
        ):
            jax.eval_shape(rule, *list(good().values())[:2], values, *list(good().values())[3:])
    with pytest.raises(NotImplementedError, match=r"weight must have a static W, got shape \(n, 6\)"):
        jax.eval_shape(jax_qla.causal_conv1d, array(2, 10, 6), array(size, 6))


def test_a_symbolic_number_of_sequences() -> None:
    tokens = [jnp.zeros(x.shape) for x in one_row().values()]
    cu_seqlens = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), np.int32)
    x, weight = jnp.zeros((1, 10, 6)), jnp.zeros((4, 6))
    for call in (
        lambda cu_seqlens: jax_qla.chunk_gated_delta_rule(*tokens, cu_seqlens=cu_seqlens),
        lambda cu_seqlens: jax_qla.recurrent_gated_delta_rule(*tokens, cu_seqlens=cu_seqlens),
        lambda cu_seqlens: jax_qla.causal_conv1d(x, weight, cu_seqlens=cu_seqlens),
    ):
        with pytest.raises(NotImplementedError, match=r"cu_seqlens must have a static size, got shape \(n,\)"):
            jax.eval_shape(call, cu_seqlens)
