"""The card: how many blocks of a kernel run at once, and how full they keep it."""

from __future__ import annotations

import math

from jax_qla.kernels.common import ROUND

MULTIPROCESSORS = ROUND
"""Of an H100 or H200 SXM."""

MORE_THAN_HALF = 116 * 1024
"""Bytes of shared memory of which a multiprocessor has no two: blocks that ask for it do not share one."""

FULL = 0.95
"""The part of the multiprocessors, over all rounds of blocks, that has to be busy for a card to count as full."""

NEARLY_FULL = 0.88
"""The part that is enough where more would cost memory, or where sequences are uneven
(docs/performance_policy.md, "Several packed sequences, counted as one", "Uneven sequences in both passes")."""


def rounds(blocks: float, together: int = 1) -> float:
    """Rounds in which blocks that are alike are computed, one at the least.

    Args:
        blocks: their number, which as an estimate need not be whole.
        together: how many of them a multiprocessor runs at once.
    """
    return max(1.0, -(-blocks // (MULTIPROCESSORS * together)))


def fills(blocks: float, full: float = FULL) -> bool:
    """Whether blocks that are alike, one on a multiprocessor, keep the part `full` of the card busy in all rounds."""
    taken = blocks / MULTIPROCESSORS
    return taken >= full * math.ceil(taken)
