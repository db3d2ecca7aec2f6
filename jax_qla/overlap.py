"""Which kernels of a sequence may begin before the end of the one before them (programmatic dependent launch).

Every kernel waits, at its own end at the latest, until the one before it has ended; so when a kernel has ended, all
before it have. (Blocks that find nothing to do, in a place for a sequence that is not taken say, leave at once; others
of the same launch always wait, if only the first one.)
Patient kernels wait before they let the next one begin, which then knows that all before the patient one has ended.
Others let it begin at once.

What a kernel uses before it waits must have been written before the last patient kernel that precedes it, or before
the last that began only when the one before it had ended, or be written by none of the sequence. What it writes before
it waits must have been used for the last time before one of these, by whatever name: one that a sequence has twice
writes the same results twice, and a result may lie in an operand's memory. Otherwise it may begin only when the one
before it has ended. What several kernels of a sequence have, each elements of its own, is no reason for these to wait
for each other (`_apart`).

Of two launches of `summaries` the second looks at the gates before it has waited, and is not patient: the first, which
is, begins it when all before have ended, and one of them computes nothing.

Where a forward pass finds no sequence to be cut (kernels/uncut.py), `summaries` and `compose` are not patient: they
have nothing to do, and let `forward` begin, which then uses nothing of theirs nor of `layout`, and waits as without
pieces.

What is said of the kernels here, tests/test_barriers.py sees in their programs (but of `backward`, whose blocks all
wait before they do more than ask whether they have anything to do, and of `gradients` of split operands), and
tests/test_overlap.py holds all sequences of calls against it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax_qla.kernels import forward, state_gradients, states
from jax_qla.kernels.common import EARLIER

if TYPE_CHECKING:
    from jax_qla.launch import Step

_HASTY = frozenset({"layout", "prepare", "adjoint_summaries", "state_gradients"})
"""Let the next kernel begin at once, use everything, and wait at their end. So does `compose` of the gradients.
`state_gradients` may have to wait for the gradient that it begins with."""

_OF_PREPARE = frozenset({"a", "gamma", "lengths", "query_lengths"})

_OF_PIECES = frozenset({"leaving", "d_initial_state"})
"""What `state_gradients` does not touch before it has waited for `compose`: but gradients of initial states of whole
sequences, of which `compose` uses nothing."""

_OF_EARLIER = frozenset({"leaving", "carried", "dh", "dv", "d_initial_state"})
"""What it does not touch before `gradients` of the later window has ended."""

_OF_OTHER_HEADS = frozenset({"o", "initial_state", "final_state", "h", "vd"})
"""What several launches of `forward` have, each of heads of its own."""


def _apart(step: Step) -> frozenset[str]:
    """What a kernel has elements of its own of, where others have theirs: `prepare` writes rows of o that no sequence
    has, `forward` the others."""
    if step.kernel == "prepare":
        return frozenset({"o"})
    if step.kernel == "forward":  # which may measure the queries of its heads, else `prepare` does
        return _OF_OTHER_HEADS | {"query_lengths"} if step.config.measures else _OF_OTHER_HEADS
    return frozenset()


def patient(step: Step) -> bool:
    """Whether a kernel lets the next one begin only after it has waited for the one before."""
    if step.kernel == "compose":
        return not step.config.reverse
    if step.kernel == "forward":
        return step.scalars["awaits"] == forward.PREPARED
    if step.kernel == "summaries":
        return not _is_second(step)
    return step.kernel not in _HASTY


def _is_second(step: Step) -> bool:
    """Whether `summaries` stands behind another of the same call, and finds out from gates whether that computes."""
    return step.scalars["alone"] < 0


def uses_early(step: Step, operand: str) -> bool:
    """Whether a kernel uses an operand before it has waited."""
    if step.kernel == "forward":
        awaits = step.scalars["awaits"]
        if awaits == forward.STATE:
            return operand not in ("initial_state", "final_state", "entering")
        return awaits == forward.NOTHING or operand not in _OF_PREPARE
    if step.kernel in ("states", "states_from_vd"):
        return operand == "segments" or step.scalars["awaits"] == states.NOTHING
    if step.kernel == "state_gradients":
        if step.scalars["awaits"] == state_gradients.NOTHING:
            return True
        return operand not in (_OF_EARLIER if step.scalars["window"] == EARLIER else _OF_PIECES)
    if step.kernel in ("gradients", "backward"):
        return operand in ("segments", "balanced")  # where it looks its rows up, and whether it computes anything
    if step.kernel == "compose" and not step.config.reverse:
        return operand in ("chains", "initial_state", "bounds")
    if step.kernel == "summaries":
        return operand == "bounds" or (operand == "gamma" and _is_second(step))
    return not patient(step)


def _in_order(before: Step, step: Step) -> bool:
    """Whether a kernel's blocks are to begin together, when the one before has ended, and so to lie side by side in
    their order. Those of `backward` that begin one by one, where blocks of `states` end, take up to 1.4 times as long
    (docs/performance_kernels.md); behind `gradients` it has something to do where that had nothing."""
    return step.kernel == "backward" and before.kernel != "gradients"


def early_starts(
    steps: Sequence[Step],
    plans: Sequence[Mapping[str, Any]],
    results: Collection[str],
    aliases: Mapping[str, str] | None = None,
    within: Mapping[str, str] | None = None,
) -> list[bool]:
    """For every kernel of a sequence, whether it may begin before the end of the one before it.

    The first may not: what precedes it is not of the sequence.

    Args:
        steps: the kernels.
        plans: their launch plans, which name their operands.
        results: what is written; whoever has it first writes it.
        aliases, within: operands, and results, that lie in the memory of a result, and of which.
    """
    memory = {name: name for name in results} | dict(aliases or {}) | dict(within or {})
    writers: dict[str, int] = {}
    written: set[tuple[str, str]] = set()  # by which kernel, and its name for it
    used: dict[tuple[str, bool], int] = {}  # memory, and whether each kernel has elements of its own there
    known = -1  # all kernels before this one have ended
    found = []
    for index, (step, plan) in enumerate(zip(steps, plans, strict=True)):
        names = [operand["name"] for operand in plan["operands"]]
        buffers = {name: step.in_call(name) for name in names}
        written |= {
            (step.kernel, name) for name, buffer in buffers.items() if buffer in results and buffer not in writers
        }
        apart = _apart(step)
        early = {name: buffer for name, buffer in buffers.items() if uses_early(step, name)}
        awaited = [writers.get(buffer, -2) for name, buffer in early.items() if name not in apart]
        for name, buffer in early.items():
            if (step.kernel, name) in written:
                ways = (False,) if name in apart else (False, True)
                awaited += [used.get((memory[buffer], way), -2) for way in ways]
        may = index > 0 and not _in_order(steps[index - 1], step)
        found.append(may and all(which < known for which in awaited))
        for name, buffer in buffers.items():
            if buffer in memory:
                used[memory[buffer], name in apart] = index
            if buffer in results:
                writers.setdefault(buffer, index)
        if patient(step) or not found[-1]:
            known = index
    return found
