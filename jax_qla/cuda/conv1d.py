"""The short causal convolution on Hopper: what its two kernels can take, and how they are called.

One FFI call each way: `convolution`, and `convolution_gradients`, which computes z again, so that nothing but the
operands is kept between the passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_qla import launch, policy
from jax_qla.checks import why_not_static
from jax_qla.convolution import Gradients, Rows
from jax_qla.kernels import convolution as convolution_kernel
from jax_qla.kernels import convolution_gradients as gradients_kernel
from jax_qla.kernels.convolution import TAPS, WARPS
from jax_qla.launch import Step, why_not_launchable

DTYPES = ("bfloat16", "float16")
"""Dtypes of x that kernels exist for."""

GRANULE = math.lcm(convolution_kernel.CHANNELS, gradients_kernel.CHANNELS)
"""Channels come in multiples of this, and so do those of each part of y."""

_PARTS = ("first", "second", "third")
"""The kernels' names of the arrays that y may come as."""
_LONGEST_STRETCH = 256
"""Rows of a thread, at most."""
_BLOCKS_AT_ONCE = 4
"""Of a multiprocessor."""


def why_not(x: Any, weight: Any, parts: Sequence[int], *, build: bool | None = None) -> str | None:
    """Why the kernels cannot take x [B, T, D] and weight [W, D] (arrays or ShapeDtypeStructs), or None.

    Args:
        parts: channels of the arrays that y is to be.
        build: as in `launch.why_not_launchable`.
    """
    if x.dtype.name not in DTYPES:
        return f"x must be bfloat16 or float16 for the kernels of 'cuda', got {x.dtype.name}"
    if weight.shape[0] != TAPS:
        return f"the filter must have W = {TAPS} for the kernels of 'cuda', got W = {weight.shape[0]}"
    if len(parts) > len(_PARTS) or any(part % GRANULE for part in parts):
        return f"D must be a multiple of {GRANULE} for the kernels of 'cuda', got D = {' + '.join(map(str, parts))}"
    if reason := why_not_static("x", x):
        return reason
    modules = (("convolution", convolution_kernel), ("convolution_gradients", gradients_kernel))
    kernels = [(name, module.Config(x.dtype.name, marked)) for marked in (False, True) for name, module in modules]
    return why_not_launchable(kernels, build=build)


def forward(given: Rows, *, parts: Sequence[int], silu: bool) -> tuple[jax.Array, ...]:
    """y [B, T, D] in x's dtype, as one array for each of `parts`, which add up to D.

    Of at least one row and channel, and of dtypes and sizes to which `why_not` has no objection.
    """
    call = _Call(given, parts, convolution_kernel.CHANNELS)
    batch, length, _ = given.x.shape
    outputs = {
        name: jax.ShapeDtypeStruct((batch, length, groups, call.channels), given.x.dtype)
        for name, groups in zip(_PARTS, call.parts, strict=True)
    }
    config = convolution_kernel.Config(given.x.dtype.name, given.ids is not None)
    results = launch.launch([Step("convolution", config, call.scalars(silu))], call.inputs, outputs)
    found = (results[name].reshape(batch, length, -1) for name in outputs)
    return tuple(y for y, _ in zip(found, parts, strict=False))


def backward(given: Rows, dys: Sequence[jax.Array], *, silu: bool) -> Gradients:
    """Gradients from those of the parts of y, in x's dtype; of rows as `forward` takes them."""
    call = _Call(given, [dy.shape[2] for dy in dys], gradients_kernel.CHANNELS)
    batch, length, channels = given.x.shape
    empty = jnp.zeros((batch, length, 0, call.channels), given.x.dtype)
    dys = [dy.reshape(batch, length, -1, call.channels) for dy in dys] + [empty] * (len(_PARTS) - len(dys))
    scalars = call.scalars(silu)
    summands = batch * scalars["blocks_of_rows"]
    of_filter = (summands, TAPS + 1, channels // call.channels, call.channels)
    config = gradients_kernel.Config(given.x.dtype.name, given.ids is not None)
    results = launch.launch(
        [Step("convolution_gradients", config, scalars)],
        call.inputs | dict(zip(_PARTS, dys, strict=True)),
        {
            "d_x": jax.ShapeDtypeStruct(call.inputs["x"].shape, given.x.dtype),
            "d_before": jax.ShapeDtypeStruct(call.inputs["before"].shape, given.x.dtype),
            "d_filter": jax.ShapeDtypeStruct(of_filter, jnp.float32),
        },
    )
    d_filter = results["d_filter"].reshape(batch, -1, TAPS + 1, channels).sum(axis=1)
    return Gradients(
        results["d_x"].reshape(given.x.shape),
        d_filter[:, :TAPS],
        None if given.bias is None else d_filter[:, TAPS],
        None if given.before is None else results["d_before"].reshape(given.before.shape),
    )


class _Call:
    """Operands as the kernels take them: channels in groups of those of a thread, and an empty array for None."""

    def __init__(self, given: Rows, parts: Sequence[int], channels: int) -> None:
        self.channels = channels
        self.parts = [part // channels for part in parts] + [0] * (len(_PARTS) - len(parts))
        batch, length, _ = given.x.shape
        self._sizes = batch, length, sum(self.parts)

        def grouped(x: jax.Array | None, *like: int) -> jax.Array:
            if x is None:
                return jnp.zeros((0, *like, channels), given.x.dtype)
            return x.reshape(*x.shape[:-1], -1, channels)

        self.inputs = {
            "x": grouped(given.x),
            "weight": grouped(given.weight).astype(jnp.float32),
            "bias": grouped(given.bias).astype(jnp.float32),
            "before": grouped(given.before, TAPS - 1, sum(self.parts)),
        }
        if given.ids is not None:
            none = jnp.zeros((0, TAPS - 1), jnp.int32)
            self.inputs |= {"ids": given.ids, "ids_before": none if given.ids_before is None else given.ids_before}

    def scalars(self, silu: bool) -> dict[str, int]:
        """Values of the kernels' scalar parameters."""
        batch, length, groups = self._sizes
        return {**_stretches(length, batch * -(-groups // 32)), "silu": int(silu)}


def _stretches(length: int, columns: int) -> dict[str, int]:
    """How `length` rows are cut, where as many blocks as `columns` stand side by side at every row: in as few waves of
    blocks as stretches of bearable length allow, and these full."""
    at_once = policy.MULTIPROCESSORS * _BLOCKS_AT_ONCE
    shortest = -(-length // (WARPS * _LONGEST_STRETCH))
    waves = -(-shortest * columns // at_once)
    blocks = max(waves * at_once // columns, 1)
    rows = -(-length // (WARPS * blocks))
    rows += -rows % TAPS
    return {"rows": rows, "blocks_of_rows": -(-length // (WARPS * rows))}
