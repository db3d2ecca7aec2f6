"""Launching kernels: plan and shapes in, one `jax.ffi.ffi_call` out.

A launch plan (jax_qla/kernels/plan.py extracts it, jax_qla/store.py keeps it) is JSON:

    name                  the kernel's name in its cubin
    grid, block, cluster  three expressions each
    shared                bytes of dynamic shared memory
    pdl                   whether it is launched with programmatic stream serialization behind another of its sequence
    operands              [{name, dtype, shape}], shapes as expressions
    scalars               [{name, dtype}]
    arguments             in the kernel's order: {kind: "pointer", operand}, {kind: "scalar", dtype, value} or
                          {kind: "tensor_map", operand, dtype, dims, strides, box, element_strides, interleave, swizzle,
                          l2, oob}

An expression is an int, the name of a dynamic size or scalar parameter, or [operator, operand, operand].
Shapes are static when a call is traced, so Python binds the dynamic sizes from the operands' shapes, evaluates the
expressions, and passes plain numbers; the C++ side never sees an expression. What the numbers mean is in ffi/plan.h.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_qla import overlap, store
from jax_qla.varying import match_varying

TARGET = "jax_qla.launch.v1"
"""The FFI target's name."""

EXPORT_SAFETY_CHECKS = (jax.export.DisabledSafetyCheck.custom_call(TARGET),)
"""For `jax.export.export(..., disabled_checks=...)`: the target's interface is versioned by its name."""

ON_THIS_SYSTEM = sys.platform == "linux"
"""Whether jax_qla has its extension here (pyproject.toml). JAX for CUDA is for Linux."""

_PLAN_VERSION = 1
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "floormod": lambda a, b: a % b,
    "truncdiv": lambda a, b: _truncated_quotient(a, b),
    "truncmod": lambda a, b: a - b * _truncated_quotient(a, b),
    "min": min,
    "max": max,
    "<<": lambda a, b: a << b,
    ">>": lambda a, b: a >> b,
}
_registration = threading.Lock()
_folders: list[str] = []  # where the extension looks for cubins, in order


@dataclasses.dataclass(frozen=True)
class Step:
    """One kernel of a sequence."""

    kernel: str
    """Module of jax_qla.kernels."""
    config: Any
    """Its Config."""
    scalars: Mapping[str, int | float]
    """Values of its scalar parameters."""
    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names of its operands in the call, where they differ from the parameters'."""
    shared_at_least: int = 0
    """Bytes of dynamic shared memory that a block has at the least, so that no more than fit share a multiprocessor."""
    neighbours: int = 1
    """Blocks with consecutive numbers that the device is to put side by side, if the grid is a multiple of them: as a
    cluster, though all but those of kernels/backward.py know nothing of each other."""

    def in_call(self, parameter: str) -> str:
        """Name in the call of the operand that a parameter takes."""
        return self.rename.get(parameter, parameter)


def launch(
    steps: Sequence[Step],
    inputs: Mapping[str, jax.Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    aliases: Mapping[str, str] | None = None,
    within: Mapping[str, str] | None = None,
) -> dict[str, jax.Array]:
    """Launches kernels one after the other in one FFI call.

    Args:
        steps: the kernels, in order.
        inputs: operands of the call by name; those that no kernel uses, nor `aliases` name, are left out of it.
        outputs: shapes and dtypes of its results, workspaces included; a kernel may read what an earlier one wrote.
        aliases: names of inputs, each with the name of the output of the same shape and dtype that takes its memory.
            XLA copies such an input first if anything else still needs it.
        within: names of workspaces among `outputs`, each with the name of the output in whose memory it lies, at its
            beginning, of which no element is to be written before what it replaces has been read for the last time.

    Returns:
        The results by name, without the workspaces within others.

    Raises:
        KernelNotFoundError: a kernel is not to be had.
        RuntimeError: the extension is missing; or, a bug, an operand does not fit a kernel.
    """
    register()
    kernels = [store.lookup(step.kernel, step.config) for step in steps]
    used = {
        step.in_call(operand["name"])
        for step, kernel in zip(steps, kernels, strict=True)
        for operand in kernel.plan["operands"]
    }
    inputs = {name: x for name, x in inputs.items() if name in used or name in (aliases or ())}
    within = within or {}
    operands: dict[str, jax.Array | jax.ShapeDtypeStruct] = {**inputs, **outputs}
    shapes = {name: (tuple(x.shape), x.dtype.name) for name, x in operands.items()}
    buffers = {name: index for index, name in enumerate(name for name in shapes if name not in within)}
    buffers |= {name: buffers[around] for name, around in within.items()}
    plan = [_PLAN_VERSION, len(steps)]
    early = overlap.early_starts(steps, [kernel.plan for kernel in kernels], outputs, aliases, within)
    for step, kernel, may_begin in zip(steps, kernels, early, strict=True):
        plan += _numbers(step, kernel.plan, shapes, buffers, early=may_begin)
    arrays = match_varying(list(inputs.values()), inputs)
    # A bare ShapeDtypeStruct would not vary over the manual axes of a surrounding shard_map, as the operands do.
    like = jax.typeof(arrays[0])
    outputs = {name: x for name, x in outputs.items() if name not in within}
    result_types = [like.update(shape=x.shape, dtype=x.dtype, weak_type=False) for x in outputs.values()]
    operand_index, result_index = ({name: i for i, name in enumerate(x)} for x in (inputs, outputs))
    in_place = {operand_index[source]: result_index[target] for source, target in (aliases or {}).items()}
    results = jax.ffi.ffi_call(TARGET, result_types, input_output_aliases=in_place)(
        *arrays,
        cubins=",".join(kernel.sha256 for kernel in kernels),
        functions=",".join(kernel.plan["name"] for kernel in kernels),
        plan=np.array(plan, np.int64),
    )
    return dict(zip(outputs, results, strict=True))


def why_not_launchable(kernels: Iterable[tuple[str, Any]], *, build: bool | None) -> str | None:
    """Why these kernels cannot be launched from this installation (on any machine), or None.

    Args:
        kernels: module of jax_qla.kernels and Config of each.
        build: whether those that are neither packaged nor cached may be built, where that is possible, when the call is
            traced. None leaves it to `launch`, which builds them or refuses.
    """
    if (reason := unavailable()) or build is None:
        return reason
    for name, config in kernels:
        if reason := store.why_not_at_hand(name, config, build=build):
            return f"its kernels are not built: {reason}"
    return None


def unavailable() -> str | None:
    """Why nothing can be launched from this installation (on any machine), or None. Asked anew each time: what it
    advises can be done within the process."""
    try:
        register()
    except RuntimeError as error:
        return str(error)
    return None


def register() -> None:
    """Registers the extension's handler with JAX, once, and says where kernels lie by now. Needs no GPU.

    Raises:
        RuntimeError: the extension is not for this system or cannot be imported, or a folder of kernels has no place
            (KernelNotFoundError) or a name that it cannot read.
    """
    with _registration:
        _register_once()
        _look_in_folders()


@functools.cache
def _register_once() -> None:
    if not ON_THIS_SYSTEM:
        raise RuntimeError(f"the kernels of 'cuda' need Linux, and this is {sys.platform}")
    try:
        from jax_qla import _ffi
    except ImportError as error:
        raise RuntimeError(
            f"the extension jax_qla._ffi cannot be imported ({error}); reinstall jax_qla from a wheel or with a C++ "
            "compiler"
        ) from error
    for name, types in _ffi.types("CUDA").items():
        jax.ffi.register_ffi_type(name, types, platform="CUDA")
    for name, stages in _ffi.registrations("CUDA").items():
        jax.ffi.register_ffi_target(name, stages, platform="CUDA")


def _look_in_folders() -> None:
    """Makes the extension look for cubins in the store's folders, and then in those of before, for the programs of
    before. Last, because they may have been left for being unreadable, and the search ends there."""
    from jax_qla import _ffi

    directories = store.directories()
    for directory in directories:
        try:
            directory.encode()
        except UnicodeEncodeError as error:
            raise RuntimeError(
                f"the folder of kernels {directory!r} has a name that is not UTF-8; set JAX_QLA_CACHE to another one"
            ) from error
    folders = list(dict.fromkeys([*directories, *_folders]))
    if folders != _folders:
        _ffi.set_cubin_directories(folders)
        _folders[:] = folders


def evaluate(expression: Any, sizes: Mapping[str, int | float]) -> int:
    """Value of a plan's expression."""
    if isinstance(expression, int):
        return expression
    if isinstance(expression, str):
        return int(sizes[expression])
    operator, *operands = expression
    return int(_OPERATORS[operator](*(evaluate(operand, sizes) for operand in operands)))


def _truncated_quotient(a: int, b: int) -> int:
    """a / b rounded towards zero, as in C."""
    return a // b if (a < 0) == (b < 0) else -(-a // b)


def _numbers(
    step: Step,
    plan: Mapping[str, Any],
    shapes: Mapping[str, tuple[tuple[int, ...], str]],
    buffers: Mapping[str, int],
    *,
    early: bool,
) -> list[int]:
    """The part of the attribute `plan` for one kernel, which may begin `early` if it is made for that; ffi/plan.h says
    what each number is."""
    sizes = _bind(step, plan, shapes)

    def values(expressions: Any) -> list[int]:
        return [evaluate(expression, sizes) for expression in expressions]

    grid, cluster = values(plan["grid"]), values(plan["cluster"])
    if cluster == [1, 1, 1] and grid[0] % step.neighbours == 0:
        cluster[0] = step.neighbours
    numbers = [*grid, *values(plan["block"]), *cluster]
    numbers += [
        max(evaluate(plan["shared"], sizes), step.shared_at_least),
        int(plan["pdl"] and early),
        len(plan["arguments"]),
    ]
    for argument in plan["arguments"]:
        kind = argument["kind"]
        if kind == "pointer":
            numbers += [0, buffers[step.in_call(argument["operand"])]]
        elif kind == "scalar":
            numbers += [1, *_scalar(argument["dtype"], argument["value"], sizes)]
        else:
            dims = values(argument["dims"])
            numbers += [2, buffers[step.in_call(argument["operand"])], argument["dtype"], len(dims), *dims]
            numbers += [*values(argument["strides"]), *values(argument["box"]), *values(argument["element_strides"])]
            numbers += [argument["interleave"], argument["swizzle"], argument["l2"], argument["oob"]]
    return numbers


def _scalar(dtype: str, expression: Any, sizes: Mapping[str, int | float]) -> tuple[int, int]:
    """Size in bytes and bits of a scalar argument: those of 4 bytes zero-extended, those of 8 as a signed number."""
    if dtype == "float32":
        return 4, int(np.float32(sizes[expression]).view(np.uint32))
    if dtype == "int32":
        return 4, int(np.int32(evaluate(expression, sizes)).view(np.uint32))
    if dtype == "int64":
        return 8, int(np.int64(evaluate(expression, sizes)))
    raise RuntimeError(f"a scalar parameter of a kernel is a {dtype}, expected float32, int32 or int64")


def _bind(
    step: Step, plan: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], str]]
) -> dict[str, int | float]:
    """Values of the dynamic sizes and scalar parameters."""
    sizes: dict[str, int | float] = dict(step.scalars)
    for operand in plan["operands"]:
        name = step.in_call(operand["name"])
        if name not in shapes:
            raise RuntimeError(
                f"the kernel {step.kernel} needs the operand {name}, which the call lacks; this is a bug of jax_qla"
            )
        shape, dtype = shapes[name]
        expected = operand["shape"]
        fits = dtype == operand["dtype"] and len(shape) == len(expected)
        for size, expression in zip(shape, expected, strict=False):
            if isinstance(expression, str):
                fits = fits and sizes.setdefault(expression, size) == size
            else:
                fits = fits and size == expression
        if not fits:
            raise RuntimeError(
                f"operand {operand['name']} of the kernel {step.kernel} must be {operand['dtype']}{expected} with "
                f"{sizes}, got {dtype}{list(shape)}; this is a bug of jax_qla"
            )
    missing = {scalar["name"] for scalar in plan["scalars"]} - sizes.keys()
    if missing:
        raise RuntimeError(f"the kernel {step.kernel} needs values for {sorted(missing)}; this is a bug of jax_qla")
    return sizes
