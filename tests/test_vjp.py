"""What the derivative saves, what it recomputes, what it is told, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stand_in
from jax.ad_checkpoint import checkpoint_policies
from jax.sharding import AxisType
from test_api import assert_close, states, tokens
from thorough import every_value, rarely
from traced import equations

import jax_qla
from jax_qla import policy, xla
from jax_qla.kernels.common import map_blocks_shape

OPERANDS = (*tokens(1, 5), states(1))


def both(*x: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
    o, final_state = jax_qla.chunk_gated_delta_rule(*x[:5], initial_state=x[5], output_final_state=True, **options)
    assert final_state is not None
    return o, final_state


def loss(*x: jax.Array, **options: Any) -> jax.Array:
    o, final_state = both(*x, **options)
    return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.sin(final_state))


def calls(function: Callable[..., Any], *operands: Any) -> Counter[str]:
    """How often the traced function calls `dispatch.forward` and `dispatch.backward`."""

    def is_call(equation: Any) -> bool:
        return equation.primitive.name in ("jit", "pjit") and equation.params.get("name") in ("forward", "backward")

    def leaf(equation: Any) -> bool:
        return is_call(equation) or equation.primitive.name.startswith("custom_vjp")

    return Counter(x.params["name"] for x in equations(function, *operands, leaf=leaf) if is_call(x))


# What is saved


def saved(*operands: jax.Array) -> list[Any]:
    """Shapes and dtypes of what is kept between forward and backward."""
    kept = jax.eval_shape(lambda *x: jax.vjp(both, *x)[1], *operands)
    return [(x.shape, x.dtype) for x in jax.tree.leaves(kept)]


def test_operands_are_saved_and_residuals_only_for_the_kernels() -> None:
    q, k, v, g, beta, initial_state = OPERANDS
    operands = [(x.shape, x.dtype) for x in (q, k, v, g, beta, initial_state)]
    assert Counter(saved(*OPERANDS)) == Counter(operands)
    with stand_in.kernels():
        bits = jnp.dtype(f"int{8 * v.dtype.itemsize}")
        residuals = [((4, 1, 5, 64), bits), ((1, 5, 4), g.dtype), (v.shape, v.dtype)]
        assert Counter(saved(*OPERANDS)) == Counter(operands + residuals)


def test_pieces_are_saved_with_the_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where JAX sees one device, or the mesh has one, whose program nothing partitions; and the names cover them."""
    monkeypatch.setenv(policy.OVERRIDE, "64")
    operands = (*tokens(1, 130), states(1))
    names = jax_qla.CHECKPOINT_NAMES

    def forwards(names: Sequence[str], save: bool | None = None) -> int:
        function = jax.checkpoint(
            lambda *x: loss(*x, save_chunk_states=save), policy=checkpoint_policies.save_only_these_names(*names)
        )
        return calls(jax.grad(function), *operands)["forward"]

    monkeypatch.setattr(jax, "device_count", lambda: 8)
    with stand_in.kernels():
        several = Counter(saved(*operands))
        # What several devices keep, which is no states; without Vd only who keeps none is spared the second forward.
        alone = (*jax_qla.RESIDUAL_NAMES, *jax_qla.RESULT_NAMES)
        assert [forwards(alone, save) for save in (False, None, True)] == [1, 1, 1]
        without = [name for name in alone if not name.endswith("vd")]
        assert [forwards(without, save) for save in (False, None, True)] == [1, 2, 2]
        stand_in.forget_traces()
        monkeypatch.setattr(jax, "device_count", lambda: 1)
        key_dim, value_dim = operands[0].shape[3], operands[2].shape[3]
        between = [
            ((2, 4, key_dim, value_dim), jnp.float32),
            ((2, 4, *map_blocks_shape(key_dim)), jnp.bfloat16),
            ((2, 4), jnp.int32),
        ]
        assert Counter(saved(*operands)) - several == Counter((s, jnp.dtype(d)) for s, d in between)
        monkeypatch.setattr(jax, "device_count", lambda: 8)
        with jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))):
            assert Counter(saved(*operands)) - several == Counter((s, jnp.dtype(d)) for s, d in between)
        monkeypatch.setattr(jax, "device_count", lambda: 1)
        assert forwards(names) == 1
        assert forwards([name for name in names if name != jax_qla.CARRY_NAMES[2]]) == 2
        assert forwards(()) == 2


@pytest.mark.parametrize("rows", [rarely("0"), "64"], ids=["whole", "in pieces"])
def test_chunk_states_are_saved_where_they_are_wanted(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the kernels: Vd, unless the caller wants nothing; the states where JAX sees one device, with the pieces that
    they are of; and the names cover both."""
    monkeypatch.setenv(policy.OVERRIDE, rows)
    operands = tokens(1, 130)

    def rule(*x: jax.Array, save: bool | None = True, precision: Any = None) -> jax.Array:
        return jax_qla.chunk_gated_delta_rule(*x, save_chunk_states=save, precision=precision)[0]

    def kept(save: bool | None, operands: Any = operands, **options: Any) -> Counter[Any]:
        stand_in.forget_traces()
        function = partial(rule, save=save, **options)
        leaves = jax.tree.leaves(jax.eval_shape(lambda *x: jax.vjp(function, *x)[1], *operands))
        return Counter((x.shape, x.dtype) for x in leaves)

    def forwards(save: bool | None, *names: str) -> int:
        stand_in.forget_traces()
        remembering = jax.checkpoint(
            lambda *x: rule(*x, save=save).sum(), policy=checkpoint_policies.save_only_these_names(*names)
        )
        return calls(jax.grad(remembering), *operands)["forward"]

    assert kept(True) == kept(None) == kept(False)
    parts = 1 if rows == "0" else 3
    (key_dim, (heads, value_dim)), dtype = (operands[0].shape[3], operands[2].shape[2:]), operands[2].dtype
    low: Any = tuple(x.astype(jnp.bfloat16) for x in operands)
    with stand_in.kernels():
        h, vd = ((130 // 64 + parts, heads, 1, value_dim, key_dim), dtype), (operands[2].shape, dtype)
        monkeypatch.setattr(jax, "device_count", lambda: 1)
        assert kept(True) - kept(False) == Counter([h, vd])
        assert kept(None) - kept(False) == Counter([vd])
        # In high precision h and Vd are two numbers each, and Vd of no use without the states.
        high = [kept(save, low, precision="high") for save in (False, None, True)]
        assert high[0] == high[1]
        of_two = (*h[0][:2], 2, *h[0][3:]), (1, 130, heads, 2 * value_dim)
        assert high[2] - high[0] == Counter([(shape, jnp.dtype("bfloat16")) for shape in of_two])
        others = [name for name in jax_qla.CHECKPOINT_NAMES if name not in jax_qla.CHUNK_STATE_NAMES]
        for save, without in ((False, 1), (None, 1), (True, 2)):
            assert forwards(save, *jax_qla.CHECKPOINT_NAMES) == 1
            assert forwards(save, *others) == without
        monkeypatch.setattr(jax, "device_count", lambda: 8)
        assert kept(True) == kept(None)
        assert kept(None) - kept(False) == Counter([vd])
        assert kept(True, low, precision="high") == kept(False, low, precision="high")


@pytest.mark.parametrize(  # each of the three in both ways; and, rarely, every two of them in each way
    ("rows", "save", "devices"),
    [rarely("0", True, 8), ("64", None, 1), rarely("0", None, 1), rarely("64", None, 8), rarely("64", True, 1)],
    ids=["whole-states-8", "in pieces-vd-1", "whole-vd-1", "in pieces-vd-8", "in pieces-states-1"],
)
def test_checkpoint_has_chunk_states_computed_once(
    rows: str, save: bool | None, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where the forward pass runs for the first time and nobody keeps them, whichever way it is mapped, and whether
    or not the compiler may partition it."""
    monkeypatch.setenv(policy.OVERRIDE, rows)
    monkeypatch.setattr(jax, "device_count", lambda: devices)

    def rule(*x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(jax_qla.chunk_gated_delta_rule(*x, save_chunk_states=save)[0]))

    def is_asked(equation: Any) -> bool:
        return equation.primitive.name == "jax_qla_computed_if_used"

    def results(function: Callable[..., Any], *x: jax.Array) -> list[int]:
        """Of each run of the forward pass that is asked for the states."""
        return [len(found.outvars) for found in equations(function, *x, leaf=is_asked) if is_asked(found)]

    def remembering(*names: str) -> Callable[..., jax.Array]:
        stand_in.forget_traces()
        return jax.checkpoint(lambda *x: rule(*x), policy=checkpoint_policies.save_only_these_names(*names))

    pieces = rows == "64" and devices == 1
    without = 6 if pieces else 3  # o, a, gamma, and what lies between the pieces
    extras = 2 if save and devices == 1 else 1  # Vd, and h where it can be kept
    for length in (128, 130):
        x = tokens(1, length)
        members = tuple(jnp.stack([y, y[:, ::-1]]) for y in x)
        with stand_in.kernels():
            assert results(jax.grad(rule), *x) == [without + extras]
            assert results(jax.grad(remembering(*jax_qla.CHECKPOINT_NAMES)), *x) == [without + extras]
            for gradient, operands in (
                (jax.grad, x),
                (lambda f, **options: jax.vmap(jax.grad(f, **options)), members),
            ):
                assert results(gradient(remembering()), *operands) == [without, without + extras]
                if length == 130:
                    all_of = partial(gradient, argnums=tuple(range(5)))
                    # Compiled as wholes, which takes half as long as one operation after the other.
                    actual, expected = (jax.jit(all_of(f))(*operands) for f in (remembering(), rule))
                    jax.tree.map(lambda ours, theirs: assert_close(ours, theirs, 1e-6), actual, expected)


def test_gradient_is_one_forward_and_one_backward() -> None:
    assert calls(loss, *OPERANDS) == {}  # inside the custom_vjp
    assert calls(jax.grad(loss), *OPERANDS) == {"forward": 1, "backward": 1}


@pytest.mark.parametrize("kernels", [False, True])
def test_named_results_spare_the_second_forward(kernels: bool) -> None:
    def forwards(policy: Any) -> Counter[str]:
        # A function of its own each time: jax.checkpoint remembers what it has traced.
        function = jax.checkpoint(lambda *x: loss(*x), policy=policy)
        return calls(jax.grad(function), *OPERANDS)

    names = jax_qla.CHECKPOINT_NAMES
    groups = (jax_qla.RESIDUAL_NAMES, jax_qla.CARRY_NAMES, jax_qla.CHUNK_STATE_NAMES, jax_qla.RESULT_NAMES)
    assert names == sum(groups, ())
    with stand_in.kernels() if kernels else mock.MagicMock():
        assert forwards(checkpoint_policies.nothing_saveable) == {"forward": 2, "backward": 1}
        assert forwards(checkpoint_policies.save_only_these_names(*names)) == {"forward": 1, "backward": 1}
        # Whoever does not need the results again need not save them.
        results_only = checkpoint_policies.save_only_these_names(*jax_qla.RESULT_NAMES)
        assert forwards(results_only) == {"forward": 2 if kernels else 1, "backward": 1}


def test_all_that_the_kernels_keep_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of queries that they normalise lengths too."""
    monkeypatch.setattr("jax_qla.launch.launch", stand_in.launch_zeros)
    monkeypatch.setattr("jax_qla.cuda.support.why_no_kernels", lambda *_, **__: None)
    rows = [jax.ShapeDtypeStruct((1, 128, heads, 64), jnp.bfloat16) for heads in (2, 2, 4)]
    gates = jax.ShapeDtypeStruct((1, 128, 4), jnp.float32)

    def o(*x: Any) -> jax.Array:
        options: dict[str, Any] = {"implementation": "cuda", "use_qk_l2norm_in_kernel": True}
        return jax_qla.chunk_gated_delta_rule(*x, **options)[0]

    stand_in.forget_traces()
    both_passes = jax.grad(lambda *x: jnp.sum(o(*x).astype(jnp.float32)))
    named = [x.params["name"] for x in equations(both_passes, *rows, gates, gates) if x.primitive.name == "name"]
    stand_in.forget_traces()
    assert {*jax_qla.RESIDUAL_NAMES} <= {*named}


# What the backward is told


def cotangents_given(function: Callable[..., Any]) -> list[tuple[bool, bool]]:
    """For each traced call of the backward, whether it got do and d_final_state."""
    given = []
    backward = xla.backward

    def spy(*operands: Any, **options: Any) -> Any:
        given.append((operands[8] is not None, operands[9] is not None))
        return backward(*operands, **options)

    stand_in.forget_traces()
    with mock.patch.object(xla, "backward", spy):
        jax.make_jaxpr(jax.grad(function, argnums=tuple(range(6))))(*OPERANDS)
    stand_in.forget_traces()
    return given


def test_unused_results_have_no_cotangent() -> None:
    assert cotangents_given(loss) == [(True, True)]
    assert cotangents_given(lambda *x: jnp.sum(both(*x)[0])) == [(True, False)]
    assert cotangents_given(lambda *x: jnp.sum(both(*x)[1])) == [(False, True)]
    assert cotangents_given(lambda *x: jnp.sum(jax.lax.stop_gradient(both(*x)[0]))) == []
    without_final_state = lambda *x: jnp.sum(jax_qla.chunk_gated_delta_rule(*x[:5])[0])  # noqa: E731
    assert cotangents_given(without_final_state) == [(True, False)]


@pytest.mark.parametrize("result", [0, 1])
def test_gradient_of_one_result(result: int) -> None:
    def of(implementation: str) -> Any:
        function = lambda *x: jnp.sum(jnp.sin(both(*x, implementation=implementation)[result]))  # noqa: E731
        return jax.jit(jax.grad(function, argnums=tuple(range(6))))(*OPERANDS)

    assert_close(of("xla"), of("reference"))


# What is refused

SENTENCE = 'for jvp and second derivatives use implementation="reference"'


def _jvp(f: Any, x: Any) -> Any:
    return jax.jvp(f, (x,), (x,))


def _in_scan(f: Any) -> Any:
    return lambda x: jax.lax.scan(lambda carry, _: (carry + f(carry), None), x, None, 2)[0].sum()


def _of_two(f: Any) -> Any:
    return lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])).sum()


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "jvp": _jvp,
    "jvp in jit": lambda f, x: jax.jit(partial(_jvp, f))(x),
    "jvp of jit": lambda f, x: _jvp(jax.jit(f), x),
    "jvp of scan": lambda f, x: _jvp(_in_scan(f), x),
    "jvp of checkpoint": lambda f, x: _jvp(jax.checkpoint(f), x),
    "jvp of vmap": lambda f, x: _jvp(jax.vmap(f), jnp.stack([x, x])),
    "vmap of jvp": lambda f, x: jax.vmap(partial(_jvp, f))(jnp.stack([x, x])),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "grad of grad": lambda f, x: jax.grad(lambda x: jnp.sum(jax.grad(f)(x)))(x),
    "grad of grad in jit": lambda f, x: jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(f)(x))))(x),
    "grad of jit of grad": lambda f, x: jax.grad(lambda x: jnp.sum(jax.jit(jax.grad(f))(x)))(x),
    "jvp of grad": lambda f, x: _jvp(jax.grad(f), x),
    "jvp of grad of scan": lambda f, x: _jvp(jax.grad(_in_scan(f)), x),
    "hessian": lambda f, x: jax.hessian(f)(x),
    "grad of jvp": lambda f, x: jax.grad(lambda x: jnp.sum(_jvp(f, x)[1]))(x),
    "jit of jacfwd": lambda f, x: jax.jit(jax.jacfwd(f))(x),
    "jacfwd of jit": lambda f, x: jax.jacfwd(jax.jit(f))(x),
    "jit of vmap of jvp": lambda f, x: jax.jit(jax.vmap(partial(_jvp, f)))(jnp.stack([x, x])),
    "grad of grad of scan": lambda f, x: jax.grad(lambda x: jnp.sum(jax.grad(_in_scan(f))(x)))(x),
    "jacfwd of checkpoint of scan": lambda f, x: jax.jacfwd(jax.checkpoint(_in_scan(f)))(x),
    "grad of grad of checkpoint": lambda f, x: jax.grad(lambda x: jnp.sum(jax.grad(jax.checkpoint(f))(x)))(x),
    "grad of grad of vmap": lambda f, x: jax.grad(lambda x: jnp.sum(jax.grad(_of_two(f))(x)))(x),
}


@every_value
@pytest.mark.parametrize("derivative", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("operand", [0, 5], ids=["q", "initial_state"])
def test_refused_with_what_to_do(derivative: Callable[..., Any], operand: int) -> None:
    def function(x: jax.Array) -> jax.Array:
        return loss(*OPERANDS[:operand], x, *OPERANDS[operand + 1 :])

    with pytest.raises(NotImplementedError, match=SENTENCE):
        derivative(function, OPERANDS[operand])


@pytest.mark.parametrize("within", [_of_two, lambda f: _of_two(_in_scan(f))], ids=["vmap", "vmap of scan"])
def test_reverse_mode_of_vmap_is_not_refused(within: Callable[..., Any]) -> None:
    def gradient(implementation: str) -> jax.Array:
        function = within(lambda x: loss(x, *OPERANDS[1:], implementation=implementation))
        found: jax.Array = jax.jit(jax.vmap(jax.grad(function)))(jnp.stack([OPERANDS[0], -OPERANDS[0]]))
        return found

    assert_close(gradient("xla"), gradient("reference"))


def test_refused_for_the_halves() -> None:
    def forward(q: jax.Array) -> Any:
        return jax_qla.chunk_gated_delta_rule_fwd(q, *OPERANDS[1:5])[0]

    def backward(do: jax.Array) -> Any:
        return jax_qla.chunk_gated_delta_rule_bwd(*OPERANDS[:5], None, do, implementation="xla")[0]

    for half, x in ((forward, OPERANDS[0]), (backward, jnp.ones_like(OPERANDS[2]))):
        with pytest.raises(NotImplementedError, match="are not differentiable themselves: call chunk_gated_delta_rule"):
            jax.grad(lambda x, half=half: jnp.sum(half(x)))(x)


def test_reference_has_every_derivative() -> None:
    """jvp and vjp are transposes of each other, and so is the Hessian symmetric."""
    function = partial(loss, implementation="reference")
    random = np.random.default_rng(0)
    x, y = (tuple(jnp.asarray(random.standard_normal(a.shape), a.dtype) for a in OPERANDS) for _ in range(2))

    def dot(a: Any, b: Any) -> jax.Array:
        return sum(map(jnp.vdot, a, b), jnp.zeros(()))

    @jax.jit
    def both_ways() -> Any:
        gradient = jax.grad(function, argnums=tuple(range(6)))
        forward = jax.jvp(function, OPERANDS, x)[1]
        value, hessian_x = jax.jvp(gradient, OPERANDS, x)
        _, hessian_y = jax.jvp(gradient, OPERANDS, y)
        return forward, dot(value, x), dot(hessian_x, y), dot(hessian_y, x)

    forward, reverse, one, other = both_ways()
    np.testing.assert_allclose(forward, reverse, rtol=1e-4)
    np.testing.assert_allclose(one, other, rtol=1e-3)
