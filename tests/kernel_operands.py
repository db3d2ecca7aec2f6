"""Names of what kernels read and write, by their specifications."""

from __future__ import annotations

import functools
import importlib
import inspect

RESULTS = {
    "layout": ("segments", "pieces", "spans", "cuts", "chains"),
    "balance": ("balanced",),
    "prepare": ("a", "gamma", "lengths", "query_lengths"),
    "summaries": ("response", "transition", "forgotten"),
    "adjoint_summaries": ("adjoint_response",),
    "compose": ("entering",),
    "forward": ("o", "final_state", "vd", "h"),
    "states": ("h", "vd"),
    "states_from_vd": ("h",),
    "state_gradients": ("dh", "dv", "d_initial_state", "carried", "leaving"),
    "gradients": ("dq", "dk", "dv", "dg", "dbeta"),
    "backward": ("dq", "dk", "dv", "dg", "dbeta", "d_initial_state"),
    "recurrent": ("o", "final_state"),
}
"""What each specification returns, by the kernel's names for it."""


@functools.cache
def named(kernel: str) -> tuple[str, ...]:
    """Names of what a kernel reads and writes, of its specification."""
    signature = inspect.signature(importlib.import_module(f"jax_qla.kernels.{kernel}").specification)
    read = [name for name, x in signature.parameters.items() if x.kind != inspect.Parameter.KEYWORD_ONLY]
    unspecified = {"prepare": ["o"]} | {
        kernel: ["bounds"] for kernel in ("forward", "compose", "summaries", "states_from_vd")
    }
    return (*read, *unspecified.get(kernel, []), *RESULTS[kernel])
