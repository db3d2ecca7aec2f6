"""Which implementation computes a call, and why.

Three implementations follow one contract: "cuda" (Hopper kernels), "xla" (the chunked form in plain JAX) and
"reference" (the recurrence, token by token). The choice is made at trace time from what is known then: the operands'
shapes and dtypes, the options, this process's CUDA devices. The platform is not known then, so a choice has two halves,
one for programs lowered for CUDA and one for all others.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax

from jax_qla import driver, store
from jax_qla.checks import type_name
from jax_qla.refusal import on_cuda_only
from jax_qla.residuals import precision_of_kernels
from jax_qla.varying import match_varying

NAMES = ("cuda", "xla", "reference")
"""All implementations."""

_MODULES = {"cuda": "cuda.rule"}
"""Those of implementations that are not called like their module."""

_AUTOMATIC = ("cuda", "xla")
"""What `implementation=None` stands for."""

_ONLY_CUDA = "the kernels of 'cuda' run on NVIDIA Hopper GPUs only"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementations a call is lowered to, and why."""

    on_cuda: str
    """For programs lowered for CUDA."""
    elsewhere: str | None
    """For programs lowered for any other platform; None refuses them."""
    why_on_cuda: str
    why_elsewhere: str
    piece_rows: int | None = None
    """Rows of the pieces that "cuda" is to cut sequences into, 0 for whole sequences, None as `policy` says."""

    @property
    def same_everywhere(self) -> bool:
        """Whether the platform makes no difference."""
        return self.on_cuda == self.elsewhere


class RecurrentCall(NamedTuple):
    """What the choice for `recurrent_gated_delta_rule` depends on besides q, k and v."""

    packed: bool
    """Whether the batch is one row of several sequences."""
    state_dtype: str
    """Of the states."""


def load(name: str) -> ModuleType:
    """The module of an implementation of the gated delta rule, or `jax_qla.<name>` of kernels around it ("cuda.conv1d",
    "cuda.norm"); imported when first needed, for it may import this one."""
    return importlib.import_module(f"jax_qla.{_MODULES.get(name, name)}")


def by_platform(choice: Choice, function: Callable[[str], Callable[..., Any]], *operands: Any) -> Any:
    """function(name)(*operands), of arrays or trees of these, by the name that `choice` has for the platform that this
    is lowered for."""

    def by(name: str) -> Callable[..., Any]:
        # Both branches of a choice must agree in type, so in the manual mesh axes over which the results vary: those
        # over which any operand does.
        call = function(name)
        return lambda *operands: match_varying(call(*operands), operands)

    if choice.same_everywhere:
        return by(choice.on_cuda)(*operands)
    if choice.elsewhere is None:
        (first, *others), tree = jax.tree.flatten(operands)
        only_there = jax.tree.unflatten(tree, [on_cuda_only(first, choice.why_elsewhere), *others])
        return by(choice.on_cuda)(*only_there)
    return jax.lax.platform_dependent(*operands, cuda=by(choice.on_cuda), default=by(choice.elsewhere))


def choose(
    q: Any,
    k: Any,
    v: Any,
    *,
    implementation: str | Sequence[str] | None,
    precision: Any,
    recurrent: RecurrentCall | None = None,
    piece_rows: int | None = None,
) -> Choice:
    """Chooses by the first name that can take the operands, on CUDA and elsewhere.

    Args:
        q, k, v: arrays or ShapeDtypeStructs, already checked against each other.
        implementation: a name, a sequence of names in order of preference, or None for ("cuda", "xla").
        precision: the option of the same name; "cuda" has no 'highest'.
        recurrent: given for a call of `recurrent_gated_delta_rule`, where "xla" is the recurrence in plain JAX.
        piece_rows: the option of the same name, already checked; only "cuda" has it.

    Raises:
        TypeError, ValueError: `implementation` is not a known name or a sequence of such.
        NotImplementedError: no name can take the operands; the message says why for each.
    """
    names = _names(implementation)
    # An option that only "cuda" has leaves no other.
    alternatives = len(names) > 1 and piece_rows is None
    objections = {name: _objection(name, q, k, v, precision, recurrent, alternatives=alternatives) for name in names}
    if piece_rows is not None:
        other = f"piece_rows is an option of 'cuda' only, got piece_rows={piece_rows}"
        objections |= dict.fromkeys(objections.keys() - {"cuda"}, other)
    return _first_able(objections, implementation, piece_rows)


def choose_kernels(
    why_not: Callable[..., str | None], implementation: str | Sequence[str] | None, what: str = "this function"
) -> Choice:
    """As `choose`, for what surrounds the gated delta rule in a layer: by kernels, or "xla".

    Args:
        why_not: what the kernels object to, with the option `build` of `launch.why_not_launchable`.
        implementation: as in `choose`.
        what: what has no "reference".

    Raises:
        TypeError, ValueError, NotImplementedError: as `choose`.
    """

    def objection(name: str) -> str | None:
        if name != "cuda":
            return None if name == "xla" else f"{what} is 'cuda' or 'xla'"
        return _objection_of_kernels(why_not, alternatives=len(names) > 1)

    names = _names(implementation)
    return _first_able({name: objection(name) for name in names}, implementation, None)


def of_a_layer(implementation: str | Sequence[str] | None) -> tuple[str, ...]:
    """What surrounds the gated delta rule in a layer is to be computed by, with this implementation of the rule: by
    kernels if the rule may be, where they can, and else by "xla"."""
    names = _names(implementation)
    return _AUTOMATIC if "cuda" in names else ("xla",)


def _first_able(
    objections: Mapping[str, str | None], implementation: str | Sequence[str] | None, piece_rows: int | None
) -> Choice:
    """The first names to which there is no objection, on CUDA and elsewhere.

    Raises:
        NotImplementedError: there is none.
    """
    names = tuple(objections)
    able = [name for name in names if objections[name] is None]
    if not able:
        reasons = [f"{name!r}: {objections[name]}" if len(names) > 1 else objections[name] for name in names]
        raise NotImplementedError(
            f"implementation={implementation!r} cannot take these inputs: {'; '.join(map(str, reasons))}"
        )

    def why(taken: str, objections: Mapping[str, str | None]) -> str:
        if before := _passed_over(objections, names[: names.index(taken)]):
            return "; ".join(before)
        return "it was asked for" if implementation is not None else "its kernels can take these inputs"

    portable = [name for name in able if name != "cuda"]
    if portable:
        besides = objections.get("cuda")
        not_cuda = _ONLY_CUDA if besides is None else f"{_ONLY_CUDA}, and even there {besides}"
        why_elsewhere = why(portable[0], {**objections, "cuda": not_cuda})
    else:
        if piece_rows is not None:  # which is what the others were passed over for
            asked, more = f"piece_rows={piece_rows}", ["leave it out to take 'xla' on other platforms"]
        else:
            asked, more = f"implementation={implementation!r}", _passed_over(objections, names)
            if "xla" not in names:
                more.append("use implementation=None to take 'xla' on other platforms")
        reason = f"{asked} was asked for, but the program is not lowered for CUDA, and {_ONLY_CUDA}"
        why_elsewhere = "; ".join([reason, *more])
    return Choice(
        on_cuda=able[0],
        elsewhere=portable[0] if portable else None,
        why_on_cuda=why(able[0], objections),
        why_elsewhere=why_elsewhere,
        piece_rows=piece_rows,
    )


def _passed_over(objections: Mapping[str, str | None], names: Sequence[str]) -> list[str]:
    """Why those of the names that cannot take the operands were not taken."""
    return [f"{name!r} was passed over: {objections[name]}" for name in names if objections[name] is not None]


def check_implementation(implementation: str | Sequence[str] | None) -> None:
    """Whether `implementation` is None, a known name or a sequence of such.

    Raises:
        TypeError, ValueError: it is not.
    """
    _names(implementation)


def _names(implementation: str | Sequence[str] | None) -> tuple[str, ...]:
    if implementation is None:
        return _AUTOMATIC
    names = (implementation,) if isinstance(implementation, str) else implementation
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"implementation must be None, a name or a sequence of names, got {implementation!r} of type "
            f"{type_name(implementation)}"
        )
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        raise ValueError(
            f"implementation must be None or be made of the names {', '.join(map(repr, NAMES))}, got {implementation!r}"
        )
    return tuple(dict.fromkeys(names))


def _objection(
    name: str, q: Any, k: Any, v: Any, precision: Any, recurrent: RecurrentCall | None, *, alternatives: bool
) -> str | None:
    """Why `name` cannot compute the call, or None."""
    if name == "cuda" and precision_of_kernels(precision) is None:
        return f"the precision of the kernels of 'cuda' is None, 'default' or 'high', got precision={precision!r}"
    if name == "reference" or (name == "xla" and recurrent is not None):
        return None
    try:
        module = load(name)
    except ImportError as error:
        return f"its modules cannot be imported ({error})"
    if name == "xla":
        return module.why_not(q, k, v)
    if recurrent is None:
        why_not = functools.partial(module.why_not, q, k, v, precision=precision)
    else:
        why_not = functools.partial(module.why_not_recurrent, q, k, v, call=recurrent)
    return _objection_of_kernels(why_not, alternatives=alternatives)


def _objection_of_kernels(why_not: Callable[..., str | None], *, alternatives: bool) -> str | None:
    """Why the kernels of "cuda" cannot compute a call, or None.

    Args:
        why_not: what they themselves object to, with the option `build` of `launch.why_not_launchable`.
        alternatives: whether another implementation may step in.
    """
    if not alternatives:
        return why_not()
    # A card that cannot run the kernels, and kernels that would have to be built where nothing runs them, count only
    # where another implementation may step in. Kernels asked for by name alone are built and lowered on any host, and
    # the extension refuses the card when it loads them.
    devices = cuda_devices()
    return _unsuitable(devices) or why_not(build=bool(devices)) or _too_old_a_driver(devices)


def cuda_devices() -> Sequence[Any]:
    """CUDA devices of this process; without any, a program may still be lowered for them (jax.export)."""
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:
        return ()


def _too_old_a_driver(devices: Sequence[Any]) -> str | None:
    """Why the driver of these CUDA devices cannot load the packaged kernels, or None."""
    compiler = store.packaged_cuda() if devices else None
    return driver.why_too_old(compiler) if compiler else None


def _unsuitable(devices: Sequence[Any]) -> str | None:
    """Which CUDA device is not a Hopper card, or None."""
    for device in devices:
        capability = getattr(device, "compute_capability", None)
        if capability != "9.0":
            return (
                f"{_ONLY_CUDA} (compute capability 9.0), and this process has a {device.device_kind} "
                f"(compute capability {capability})"
            )
    return None
