"""Whether one kernel, kernels/backward.py, does the work of kernels/state_gradients.py and gradients.py."""

from __future__ import annotations

from typing import Literal, NamedTuple

from jax_qla.policy import card, overrides

InOne = Literal["never", "if balanced", "always"]
"""Whether kernels/backward.py computes a backward pass; "if balanced": if the device finds that its sequences keep all
multiprocessors busy until nearly the end."""

_LIMITS = {1: 80, 2: 72, 4: 68}
"""By value heads of a key head, the most time that blocks of uneven sequences may take, in 64ths of what they took if
their work could be divided at will (docs/performance_policy.md, "Uneven batches by one kernel").

With other numbers of value heads kernels/backward.py is never chosen: with three, whose blocks are no clusters, it
takes 1.1 times as long as three kernels, and with eight, whose dq and dk it rounds eight times and sums in four steps,
errors of dk exceed 5e-3 (docs/accuracy.md)."""

_LIMIT_OF_ROUNDS = 70
"""The least limit of the time of as many rounds of the longest block as all blocks make, in the same 64ths. That is
nearly what blocks take, where the other limit is of a bound."""

_ROUNDS_OF_ANY = 2
"""Rounds of blocks from which on a card may be busy to the end whatever the sequences' lengths."""


def is_measured(ratio: int) -> bool:
    """Whether kernels/backward.py may be chosen where `ratio` value heads share a key head."""
    return ratio in _LIMITS


def in_one(
    recurrences: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    ratio: int,
    split: bool,
    packed: bool,
) -> InOne:
    """Whether kernels/backward.py computes the backward pass, instead of state_gradients.py and gradients.py.

    It can with K = V = 128 and operands that are not split. It should where its blocks, one a recurrence, keep all
    multiprocessors busy: where they fill the card in each of their rounds and are alike, or are so many, and so few of
    them much longer than others, that the last ones end nearly together. Which packed batches are like that is known on
    the device only: all three are launched then, and leave or stay by what kernels/balance.py finds (`balance`).

    Args:
        recurrences: of a head: sequences, or the pieces of them that are computed side by side.
        value_heads: that are computed at once.
        key_dim, value_dim: K and V.
        ratio: value heads of a key head, for which it should be 1, 2 or 4.
        split: whether operands are sums of two numbers.
        packed: whether lengths of several sequences are known on the device only. (Of one, all but the last piece are.)

    Raises:
        ValueError: the environment says something else than 0 or 1.
    """
    if split or key_dim != 128 or value_dim != 128:
        return "never"
    if (asked := overrides.in_one_override()) is not None:
        return "always" if asked else "never"
    blocks = recurrences * value_heads
    if not is_measured(ratio):
        return "never"
    if packed:
        return "if balanced" if card.fills(blocks) or blocks >= _ROUNDS_OF_ANY * card.MULTIPROCESSORS else "never"
    return "always" if card.fills(blocks) else "never"


class Balance(NamedTuple):
    """By what kernels/balance.py finds whether the sequences of a packed batch are balanced, in 64ths."""

    share: int
    """Multiprocessors over blocks of a sequence, which has one for each head."""
    limit: int
    """The most that blocks may take, by a bound, of what they took if their work could be divided at will."""
    limit_of_rounds: int
    """The same of as many rounds of the longest block as all blocks make."""


def balance(value_heads: int, *, ratio: int) -> Balance:
    """Of so many value heads that are computed at once, `ratio` of a key head."""
    limit = _LIMITS.get(ratio, 0)
    return Balance(-(-64 * card.MULTIPROCESSORS // value_heads), limit, max(limit, _LIMIT_OF_ROUNDS))


def in_one_width(ratio: int) -> int:
    """Blocks of a cluster of kernels/backward.py, value heads of a key head, which has `ratio`. Clusters of the same
    key head go through a sequence one behind the other. (Of clusters of four a card runs 30, not 33.)"""
    return 2 if ratio % 2 == 0 else 1
