"""The launch plan of a kernel, read from TileLang's host module.

TileLang's host function holds everything a launcher must do: one `__tvm_tensormap_create_tiled` call for every TMA
operand and one call of the kernel with its arguments, grid, block and shared memory, all as expressions of the
program's dynamic sizes. Here they become JSON, expressions and all; jax_qla/launch.py evaluates them for the shapes of
a call.

An expression is an int, the name of a dynamic size or scalar parameter, or [operator, operand, ...].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Expression = int | str | list[Any]

_LAUNCH_SLOTS = {
    "blockIdx.x": ("grid", 0),
    "blockIdx.y": ("grid", 1),
    "blockIdx.z": ("grid", 2),
    "threadIdx.x": ("block", 0),
    "threadIdx.y": ("block", 1),
    "threadIdx.z": ("block", 2),
    "tir.cluster_dim_x": ("cluster", 0),
    "tir.cluster_dim_y": ("cluster", 1),
    "tir.cluster_dim_z": ("cluster", 2),
    "tirx.use_dyn_shared_memory": ("shared", 0),
}

_BINARY = {
    "Add": "+",
    "Sub": "-",
    "Mul": "*",
    "FloorDiv": "floordiv",
    "FloorMod": "floormod",
    "Div": "truncdiv",
    "Mod": "truncmod",
    "Min": "min",
    "Max": "max",
}

_DEVICE_CALLS = frozenset({"__tvm_set_device"})
"""What else a host module may call: XLA has chosen the device."""

_SHIFTS = {"tirx.shift_left": "<<", "tirx.shift_right": ">>"}

_OPERATORS = frozenset({*_BINARY.values(), *_SHIFTS.values()})


def extract_plan(artifact: Any, program: Any) -> dict[str, Any]:
    """The plan of a lowered program with one kernel.

    Args:
        artifact: what `tilelang.lower` returned.
        program: the prim_func, for the names, shapes and dtypes of its operands.

    Returns:
        {"name", "grid", "block", "cluster", "shared", "pdl", "operands", "scalars", "arguments"}; see the top of
        jax_qla/launch.py.

    Raises:
        NotImplementedError: the host module has something that a plan cannot hold.
    """
    kernels = [str(function.attrs["global_symbol"]) for function in artifact.device_mod.functions.values()]
    if len(kernels) != 1:
        raise NotImplementedError(f"a launch plan is of one kernel, the program has {', '.join(kernels) or 'none'}")
    (device,) = artifact.device_mod.functions.values()
    (host,) = artifact.host_mod.functions.values()
    name = str(device.attrs["global_symbol"])
    operands, scalars = _parameters(program)
    names = {operand["name"] for operand in operands}
    tensor_maps: list[tuple[Any, dict[str, Any]]] = []  # by variable: those of two maps of one operand share a name
    launch: list[Any] = []
    for call in _packed_calls(host.body):
        callee, *arguments = call.args
        if callee.value == "__tvm_tensormap_create_tiled":
            tensor_maps.append((arguments[0], _tensor_map(arguments)))
        elif callee.value == name:
            launch = arguments
        elif callee.value not in _DEVICE_CALLS:
            raise NotImplementedError(f"the host module calls {callee.value}, which a launch plan cannot hold")
    slots = [str(slot) for slot in device.attrs["tirx.kernel_launch_params"]]
    count = len(launch) - len(slots)
    passed = [
        _argument(parameter, value, names, tensor_maps)
        for parameter, value in zip(device.params, launch[:count], strict=True)
    ]
    plan: dict[str, Any] = {
        "name": name,
        "grid": [1, 1, 1],
        "block": [1, 1, 1],
        "cluster": [1, 1, 1],
        "shared": 0,
        "pdl": bool(device.attrs.get("has_cuda_pdl_sync", False)),
        "operands": [],
        "scalars": scalars,
        "arguments": passed,
    }
    for slot, value in zip(slots, launch[count:], strict=True):
        if slot not in _LAUNCH_SLOTS:
            raise NotImplementedError(f"the kernel {name} is launched with {slot}, which a launch plan cannot hold")
        kind, index = _LAUNCH_SLOTS[slot]
        if kind == "shared":
            plan["shared"] = _expression(value)
        else:
            plan[kind][index] = _expression(value)
    plan["operands"] = _operands_of_a_call(operands, plan)
    return plan


def _operands_of_a_call(operands: list[dict[str, Any]], plan: dict[str, Any]) -> list[dict[str, Any]]:
    """The operands that a call must have: those that the kernel touches, and those whose shapes alone give a size.

    What this configuration does nothing with is no part of a call.
    """
    wanted = {argument["operand"] for argument in plan["arguments"] if "operand" in argument}
    known = {scalar["name"] for scalar in plan["scalars"]}
    known |= {size for operand in operands if operand["name"] in wanted for size in _sizes_given(operand)}
    lacking = {name for part in ("grid", "block", "cluster", "shared") for name in _names(plan[part])} - known
    for argument in plan["arguments"]:
        for part in ("value", "dims", "strides", "box", "element_strides"):
            lacking |= _names(argument.get(part, 0)) - known
    for operand in operands:
        if given := lacking & _sizes_given(operand):
            wanted.add(operand["name"])
            lacking -= given
    return [operand for operand in operands if operand["name"] in wanted]


def _sizes_given(operand: dict[str, Any]) -> set[str]:
    """The sizes that stand by themselves in an operand's shape."""
    return {size for size in operand["shape"] if isinstance(size, str)}


def _names(expression: Any) -> set[str]:
    """The sizes and scalar parameters in an expression, or in a list of them."""
    if isinstance(expression, str):
        return {expression} - _OPERATORS
    return {name for part in expression for name in _names(part)} if isinstance(expression, list) else set()


def _parameters(program: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Operands (tensors) and scalar parameters of a prim_func, in its order."""
    operands, scalars = [], []
    for parameter in program.params:
        buffer = program.buffer_map.get(parameter)
        if buffer is None:
            scalars.append({"name": parameter.name, "dtype": str(parameter.dtype)})
        else:
            shape = [_expression(size) for size in buffer.shape]
            operands.append({"name": buffer.name, "dtype": str(buffer.dtype), "shape": shape})
    return operands, scalars


def _packed_calls(body: Any) -> list[Any]:
    from tvm import tirx

    calls: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.Call) and getattr(node.op, "name", "") == "tirx.tvm_call_packed":
            calls.append(node)

    tirx.stmt_functor.post_order_visit(body, visit)
    return calls


def _tensor_map(arguments: list[Any]) -> dict[str, Any]:
    """A tensor map, from (descriptor, dtype, rank, pointer, dims, strides, box, element strides, modes)."""
    _, dtype, rank_, pointer, *rest = arguments
    rank = int(rank_)
    values = [_expression(value) for value in rest]
    dims, strides, box, element_strides = (values[i * rank : (i + 1) * rank] for i in range(4))
    interleave, swizzle, l2, oob = values[4 * rank :]
    return {
        "kind": "tensor_map",
        "operand": pointer.name,
        "dtype": int(dtype),
        "dims": dims,
        "strides": strides[1:],  # the first is the element's size; the driver takes it as given
        "box": box,
        "element_strides": element_strides,
        "interleave": interleave,
        "swizzle": swizzle,
        "l2": l2,
        "oob": oob,
    }


def _argument(
    parameter: Any, value: Any, operands: set[str], tensor_maps: Sequence[tuple[Any, dict[str, Any]]]
) -> dict[str, Any]:
    for variable, tensor_map in tensor_maps:
        if value.same_as(variable):
            return tensor_map
    name = getattr(value, "name", None)
    if name in operands:
        return {"kind": "pointer", "operand": name}
    return {"kind": "scalar", "dtype": str(parameter.dtype), "value": _expression(value)}


def _expression(value: Any) -> Expression:
    from tvm import tirx

    if isinstance(value, (int, tirx.IntImm)):
        return int(value)
    if isinstance(value, tirx.Var):
        return value.name
    if isinstance(value, tirx.Cast):
        return _expression(value.value)
    kind = type(value).__name__
    if kind in _BINARY:
        return [_BINARY[kind], _expression(value.a), _expression(value.b)]
    if isinstance(value, tirx.Call) and getattr(value.op, "name", "") in _SHIFTS:
        return [_SHIFTS[value.op.name], *(_expression(argument) for argument in value.args)]
    raise NotImplementedError(f"the host module has an expression that a launch plan cannot hold: {value} ({kind})")
