"""No order of events makes a kernel wait for ever, and none takes what is not there: the programs themselves, run by
tests/barrier_model.py."""

from __future__ import annotations

import importlib
from typing import Any

import barrier_model
import numpy as np
import pytest
from thorough import THOROUGH, only_thorough

from jax_qla import overlap
from jax_qla.kernels import forward, state_gradients, states
from jax_qla.kernels.common import ALL, EARLIER, LATER
from jax_qla.launch import Step

CHUNK = 64
SEEDS = 6 if THOROUGH else 2


def operands_of(chunks: int, rows: int, ratio: int) -> dict[str, Any]:
    """The tables and scalars of a sequence of so many chunks, the last of which has `rows`."""
    end = max((chunks - 1) * CHUNK + rows, 0)
    segments = np.array([[0, end]])
    pieces = np.array([[0, end, 0, 0], [0, end, 0, 2]])  # on either side of a cut, for one kernel looks at each
    spans = np.array([[0, chunks]])
    operands: dict[str, Any] = {"ratio": ratio, "heads": ratio, "scale": 1.0, "tokens": end, "cut_beyond": -1}
    operands |= {"of_pieces": 0, "firsts": -1, "in_place": 0, "together": 1, "alone": 0, "window": ALL}
    numbers = {"segments": segments, "pieces": pieces, "bounds": segments, "spans": spans, "balanced": np.zeros(1)}
    numbers |= {"cuts": np.array([[0, 1]]), "chains": np.array([[0, chunks, 0]])}
    return operands | {key: barrier_model.Value(x.shape, "int32", x) for key, x in numbers.items()}


KERNELS = {
    "prepare": 128,
    "forward": 512,
    "states": 384,
    "states_from_vd": 384,
    "state_gradients": 512,
    "gradients": 512,
    "summaries": 256,
    "adjoint_summaries": 384,
    "compose": 288,
}
"""Kernels with barriers, and threads of a block."""

THREADS = {**KERNELS, "layout": 128, "balance": 32}
"""Of a block of these, and of those that have no barriers."""

SEQUENCES = (
    *((4, 1, 4, 2), (9, 64, 3, 1)),
    *(((0, 0, 1, 1), (1, 48, 2, 1), (2, 64, 1, 3)) if THOROUGH else ()),
)
"""Chunks, rows of the last one, value heads of a key head, key heads."""


def configurations() -> list[Any]:
    """What changes which warps do what."""
    found = []
    for name, threads in KERNELS.items():
        options: list[dict[str, Any]] = [{"l2norm": False}, {"l2norm": True}]
        if name == "compose":
            options = [{"reverse": False}, {"reverse": True}, {"columns": 32}, {"columns": 64, "reverse": True}]
        if name in ("summaries", "adjoint_summaries", "prepare"):
            options += [{"split": True}]
        if name in ("forward", "states", "state_gradients"):
            options += [{"value_tile": 64, "split": True}]
            options += [{"value_tile": 64}, {"key_dim": 64, "value_dim": 64, "value_tile": 64, "l2norm": True}]
        elif name != "prepare":
            options += [{"key_dim": 64, "value_dim": 64}]
        if name == "states_from_vd":
            options = [{}, {"value_tile": 64}, {"key_dim": 64, "value_dim": 64, "value_tile": 64}]
        if name == "forward":
            of_long: list[dict[str, Any]] = [{"halve_long": True}, {"halve_long": True, "keep": "vd", "l2norm": True}]
            keeping = {keep: [{"keep": keep, **option} for option in options] for keep in ("vd", "states")}
            options += [x for x in keeping["vd"] if "split" not in x] + keeping["states"] + of_long
            measures: dict[str, Any] = {"l2norm": True, "measures": True}
            options += [measures, measures | {"keep": "states"}, measures | {"keep": "vd", "halve_long": True}]
            options += [measures | {"value_tile": 64, "keep": keep} for keep in ("nothing", "vd", "states")]
        for option in options:
            # Beside one warpgroup of state there is one with a warp that sends, but where the states are kept.
            alone = option.get("keep") == "states" or name == "states_from_vd"
            size = threads - 128 * (option.get("value_tile") == 64 and alone)
            if name == "compose":  # 16 rows a warp
                size = option.get("key_dim", 128) * 2 + 32
            rare = "keep" in option and option.get("l2norm") is False  # what is kept goes by no lengths
            found.append(pytest.param(name, size, option, id=f"{name} {option}", marks=[only_thorough] * rare))
    return found


@pytest.mark.parametrize(("name", "threads", "options"), configurations())
def test_no_order_of_events_stops_a_kernel(
    name: str, threads: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every warp in turn comes last whenever it can, and then all come as chance has it."""
    module = importlib.import_module(f"jax_qla.kernels.{name}")
    for chunks, rows, ratio, key_heads in SEQUENCES:
        sizes = dict.fromkeys(("sequences", "initial_states", "final_states", "cut_sequences"), 1) | {
            "heads": key_heads * ratio,
            "kept_heads": key_heads * ratio,
            "vd_heads": key_heads * ratio,
            "cut_pieces": 2,
            **dict.fromkeys(("tokens", "measured"), max(chunks, 1) * CHUNK),
            "key_heads": key_heads,
            "value_heads": key_heads * ratio,
            "value_dim": 128,
            "parts": max(chunks, 2),
            **dict.fromkeys(("rows", "entering_rows"), max(chunks, 2)),  # as `compose` takes `chains`
            "cuts": 1,
            "places": 1,
            "chain_places": 1,
            "state_slots": 1,
            "window_slots": 1,
            **dict.fromkeys(("carried_states", "whole_sequences"), 1),
            "uncut": chunks % 2 if name == "states_from_vd" else 0,
            "chunk": (0, rows, 0),
            "half": chunks % 2,  # that a block computes, with `halve_long`
        }
        barrier_model.replace_tilelang(monkeypatch, sizes)
        operands = operands_of(chunks, rows, ratio) | {"group": key_heads, "together": 2 + chunks % 2 * 2}
        operands["window"] = EARLIER if chunks % 2 else ALL
        program = module.program(module.Config(**options))
        for late in range(threads // barrier_model.WARP):
            barrier_model.run(program, threads, operands, late=late)
        for seed in range(SEEDS):
            ran = barrier_model.run(program, threads, operands, seed=seed)
            passed = any(barrier.phase for barriers in ran.barriers for barrier in barriers)
            assert passed or chunks < 2  # else nothing was seen


WAITING = [
    ("layout", {}, {}),
    ("balance", {}, {}),
    ("prepare", {}, {"together": 4}),
    ("forward", {}, {"awaits": forward.STATE}),
    ("forward", {}, {"awaits": forward.PREPARED}),
    ("forward", {}, {"awaits": forward.NOTHING}),
    ("forward", {"l2norm": True, "measures": True}, {"awaits": forward.STATE}),
    ("forward", {"l2norm": True, "measures": True}, {"awaits": forward.PREPARED}),
    ("forward", {"l2norm": True, "measures": True, "value_tile": 64}, {"awaits": forward.PREPARED}),
    ("summaries", {}, {"alone": 0}),
    ("summaries", {}, {"alone": 4}),
    ("summaries", {}, {"alone": -4}),
    ("adjoint_summaries", {}, {}),
    ("compose", {"reverse": False}, {}),
    ("compose", {"reverse": True}, {}),
    ("states", {}, {"awaits": states.EVERYTHING}),
    ("states", {}, {"awaits": states.NOTHING}),
    ("state_gradients", {}, {"awaits": state_gradients.STATE, "window": ALL}),
    ("state_gradients", {}, {"awaits": state_gradients.NOTHING, "window": ALL}),
    ("state_gradients", {}, {"awaits": state_gradients.STATE, "window": LATER}),
    ("state_gradients", {}, {"awaits": state_gradients.NOTHING, "window": EARLIER}),
    ("forward", {"value_tile": 64}, {"awaits": forward.STATE}),
    ("states", {"value_tile": 64}, {"awaits": states.NOTHING}),
    ("states_from_vd", {}, {"awaits": states.EVERYTHING}),
    ("states_from_vd", {}, {"awaits": states.NOTHING}),
    ("forward", {"value_tile": 64, "keep": "vd"}, {"awaits": forward.PREPARED}),
    ("state_gradients", {"value_tile": 64}, {"awaits": state_gradients.STATE, "window": ALL}),
    ("gradients", {}, {"group": 1}),
]
"""Kernels that wait for the one before them, with fields of their Config and values of scalars."""


@pytest.mark.parametrize(("kernel", "options", "scalars"), WAITING)
def test_who_has_waited_when_the_next_kernel_may_begin(
    kernel: str, options: dict[str, Any], scalars: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As jax_qla/overlap.py says, which other kernels rely on."""
    module = importlib.import_module(f"jax_qla.kernels.{kernel}")
    sizes: dict[str, Any] = dict.fromkeys(
        (
            "sequences",
            "initial_states",
            "final_states",
            "key_heads",
            "value_heads",
            "heads",
            "kept_heads",
            "vd_heads",
            "cut_sequences",
        ),
        1,
    )
    sizes |= {
        "cut_pieces": 2,
        "cuts": 1,
        **dict.fromkeys(("tokens", "measured"), 2 * CHUNK),
        "value_dim": 128,
        "parts": 2,
        **dict.fromkeys(("rows", "entering_rows"), 2),
        "places": 1,
        "chain_places": 1,
        "state_slots": 1,
        "window_slots": 1,
        **dict.fromkeys(("carried_states", "whole_sequences"), 1),
        "chunk": (0, CHUNK, 0),
    }
    barrier_model.replace_tilelang(monkeypatch, sizes)
    operands = operands_of(2, CHUNK, 1)
    config = module.Config(**options)
    ran = barrier_model.run(module.program(config), THREADS[kernel], operands | scalars)
    everybody = set(range(len(ran.warps)))
    assert ran.waited == everybody
    step = Step(kernel, config, scalars)
    assert overlap.patient(step) == (not ran.hasty)
    assert not {name for name in ran.early if not overlap.uses_early(step, name)}


@pytest.mark.parametrize(
    ("kernel", "options"),
    [("summaries", {}), ("adjoint_summaries", {}), ("compose", {"reverse": False}), ("compose", {"reverse": True})],
)
def test_who_has_waited_when_nothing_is_cut(
    kernel: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block, for the others, which may leave at once; it writes nothing, and a patient one triggers nothing
    before."""
    module = importlib.import_module(f"jax_qla.kernels.{kernel}")
    ones = ("initial_states", "final_states", "key_heads", "value_heads", "places", "chain_places", "sequences")
    sizes = dict.fromkeys(ones, 1)
    barrier_model.replace_tilelang(
        monkeypatch, sizes | {"tokens": 2 * CHUNK, "parts": 2, "rows": 2, "entering_rows": 2}
    )
    nothing = {"cuts": np.array([[-1, -1]]), "chains": np.zeros((1, 3), int)}
    tables = {name: barrier_model.Value(x.shape, "int32", x) for name, x in nothing.items()}
    config = module.Config(**options)
    ran = barrier_model.run(module.program(config), THREADS[kernel], operands_of(2, CHUNK, 1) | tables)
    assert ran.waited == set(range(len(ran.warps)))
    step = Step(kernel, config, {"alone": 0})
    assert overlap.patient(step) == (not ran.hasty)
    assert not {name for name in ran.early if not overlap.uses_early(step, name)}
    assert all(barrier.phase == 0 for barriers in ran.barriers for barrier in barriers)


@pytest.mark.parametrize("alone", [4, -4])
def test_who_has_waited_when_another_launch_summarises(alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of the first, and of the second one for the others; neither writes anything."""
    module = importlib.import_module("jax_qla.kernels.summaries")
    ones = ("initial_states", "key_heads", "value_heads", "places", "sequences")
    barrier_model.replace_tilelang(monkeypatch, dict.fromkeys(ones, 1) | {"tokens": 2 * CHUNK, "parts": 2, "item": -1})
    config = module.Config()
    ran = barrier_model.run(module.program(config), THREADS["summaries"], operands_of(2, CHUNK, 1) | {"alone": alone})
    step = Step("summaries", config, {"alone": alone})
    assert ran.waited == set(range(len(ran.warps)))
    assert overlap.patient(step) == (not ran.hasty)
    assert not {name for name in ran.early if not overlap.uses_early(step, name)}
    assert ran.used <= {"bounds", "gamma"}


@pytest.mark.parametrize(
    ("kernel", "options"),
    [("summaries", {}), ("compose", {"reverse": False}), ("forward", {}), ("forward", {"value_tile": 64})],
)
def test_who_waits_for_what_where_a_block_finds_nothing_cut(
    kernel: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two have nothing to do and let the next begin at once, and `forward` waits as without pieces and reads none
    of their tables."""
    module = importlib.import_module(f"jax_qla.kernels.{kernel}")
    ones = ("initial_states", "final_states", "key_heads", "value_heads", "places", "chain_places", "cut_sequences")
    sizes = dict.fromkeys((*ones, "sequences", "state_slots"), 1) | {"tokens": 2 * CHUNK, "parts": 2, "rows": 2}
    sizes |= {"cut_pieces": 2, "cuts": 1, "entering_rows": 2}
    barrier_model.replace_tilelang(monkeypatch, sizes | {"uncut": 1})
    config = module.Config(**options)
    scalars = {"cut_beyond": 2 * CHUNK, "awaits": forward.STATE}
    ran = barrier_model.run(module.program(config), THREADS[kernel], operands_of(2, CHUNK, 1) | scalars)
    assert ran.waited == set(range(len(ran.warps)))
    if kernel == "forward":
        step = Step(kernel, config, {"awaits": forward.PREPARED})
        assert not {name for name in ran.early if not overlap.uses_early(step, name)}
        assert not {"pieces", "spans"} & ran.used  # of `segments` and `entering` it has the addresses
    else:
        assert ran.hasty
        assert ran.used <= {"bounds"}


def test_macros_write_what_they_refer_to(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier_model.replace_tilelang(monkeypatch, {})
    import tilelang.language as T

    factor = 3

    @T.macro  # type: ignore[untyped-decorator]
    def multiply(x: T.Ref, y: Any, z: T.Ref) -> None:
        x = x * factor + y
        z = 7  # noqa: F841

    seen = []

    @T.prim_func  # type: ignore[untyped-decorator]
    def program() -> None:
        a = T.alloc_var("int32")
        b = T.alloc_var("int32")
        a = 2
        for _ in T.serial(2):
            multiply(a, a, b)
        seen.append((a, b))

    barrier_model.run(program, 32, {})
    assert seen == [(32, 7)]


@pytest.mark.parametrize("arrives_after", [True, False])
def test_who_is_behind_a_barrier_is_behind_what_others_waited_for(
    arrives_after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier_model.replace_tilelang(monkeypatch, {})
    import tilelang.language as T

    def program(x: Any) -> None:
        barrier = T.alloc_barrier([32])
        if T.get_thread_binding() == 0:
            if arrives_after:
                T.pdl_sync()
            T.barrier_arrive(barrier[0])
            T.pdl_sync()
        else:
            T.barrier_wait(barrier[0], 0)
            x[0] = 1

    ran = barrier_model.run(program, 64, {})
    assert ran.early == (set() if arrives_after else {"x"})
    assert ran.waited == {0}


def test_a_warp_that_is_late_by_two_phases_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two warps pass a barrier for the second time before a third has looked at it once."""
    barrier_model.replace_tilelang(monkeypatch, {})
    import tilelang.language as T

    def program() -> None:
        barrier = T.alloc_barrier([64])
        T.sync_threads(1, 96)
        if T.get_thread_binding() < 64:
            for _ in T.serial(2):
                T.barrier_arrive(barrier[0])
                T.sync_threads(2, 64)
        else:
            T.barrier_wait(barrier[0], 0)

    with pytest.raises(barrier_model.Stuck, match=r"warp 2 waits for phase 0 .*, which is in phase 2"):
        barrier_model.run(program, 96, {}, late=2)
    barrier_model.run(program, 96, {}, late=0)
