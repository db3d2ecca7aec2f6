"""What the environment has the policy choose. Read when a call is traced, so a call that is traced already stays as it
is (`jax.clear_caches()`)."""

from __future__ import annotations

import os

from jax_qla.kernels.common import CHUNK

OVERRIDE = "JAX_QLA_PIECE_ROWS"
"""Of calls that do not say it themselves: rows of a piece (a multiple of 64), or 0 for no pieces."""

GROUPS_OVERRIDE = "JAX_QLA_HEAD_GROUPS"
"""Groups of heads that a backward pass computes one after another; if so many do not divide its key heads, the next
number below that does."""

IN_ONE_OVERRIDE = "JAX_QLA_IN_ONE"
"""Whether kernels/backward.py computes a backward pass always (1), where it can, or never (0)."""


def rows_override() -> int | None:
    """What `OVERRIDE` says, None if nothing.

    Raises:
        ValueError: it is not what it may be.
    """
    override = os.environ.get(OVERRIDE)
    if not override:
        return None
    if not override.isdecimal() or int(override) % CHUNK:
        raise ValueError(f"{OVERRIDE} must be a multiple of {CHUNK}, or 0 for no pieces, got {override!r}")
    return int(override)


def groups_override() -> int | None:
    """What `GROUPS_OVERRIDE` says, None if nothing.

    Raises:
        ValueError: it is not what it may be.
    """
    override = os.environ.get(GROUPS_OVERRIDE)
    if not override:
        return None
    if not override.isdecimal() or int(override) == 0:
        raise ValueError(f"{GROUPS_OVERRIDE} must be a positive integer, got {override!r}")
    return int(override)


def in_one_override() -> bool | None:
    """What `IN_ONE_OVERRIDE` says, None if nothing.

    Raises:
        ValueError: it is not what it may be.
    """
    override = os.environ.get(IN_ONE_OVERRIDE)
    if not override:
        return None
    if override not in ("0", "1"):
        raise ValueError(f"{IN_ONE_OVERRIDE} must be 0 or 1, got {override!r}")
    return override == "1"
