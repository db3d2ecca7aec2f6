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
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jax_qla import driver, store
from jax_qla.kernels.common import CHUNK, map_blocks_shape, state_tile_rows
from jax_qla.segments import state_count

NAMES = ("cuda", "xla", "reference")
"""All implementations."""

_AUTOMATIC = ("cuda", "xla")
"""What `implementation=None` stands for."""

Keep = Literal["nothing", "vd", "states"]
"""What the forward pass of "cuda" keeps for the backward pass of what that else computes again, besides what it keeps
anyway: nothing, Vd (`Residuals.vd`), or Vd and the states before all chunks (`Residuals.h`)."""

KEPT: Mapping[Keep, tuple[str, ...]] = {"nothing": (), "vd": ("vd",), "states": ("vd", "h")}
"""The fields of `Residuals` that these are."""


class Between(NamedTuple):
    """What `forward` keeps of the C cuts between the pieces of whole sequences, so that `backward` need not summarise
    these again. Each of the B rows of a dense batch has C / B cuts; in a packed one they lie as `segments.cut_table`
    says, and places that no sequence has hold anything.
    """

    entering: jax.Array
    """[C, Hv, K, V] float32, the state at each cut."""
    transition: jax.Array
    """As of `Pieces`, of the piece before each cut; anything of a sequence's first."""
    forgotten: jax.Array
    """As of `Pieces`, likewise, but 1 of a sequence's first."""

    @staticmethod
    def shapes(rows: int, heads: int, key_dim: int, value_dim: int) -> dict[str, jax.ShapeDtypeStruct]:
        """By field, of C = `rows` cuts."""
        return {
            "entering": jax.ShapeDtypeStruct((rows, heads, key_dim, value_dim), jnp.float32),
            "transition": jax.ShapeDtypeStruct((rows, heads, *map_blocks_shape(key_dim)), jnp.bfloat16),
            "forgotten": jax.ShapeDtypeStruct((rows, heads), jnp.int32),
        }


class ChunkStates(NamedTuple):
    """What the backward pass of "cuda" recomputes of the forward one, for Hv value heads, unless that has kept it (the
    fields of `Residuals` with these names); the first part of it, which does not wait for the gradient of the state
    after the rows."""

    h: jax.Array
    """The state before each chunk, in v's dtype, in tiles of 64 rows of K, transposed; one [Hv, K / 64, V, 64] a chunk
    slot but the first, which no chunk has; [Hv, 2 K / 64, V, 64], its high and its low part, where operands are split.
    Where T is a multiple of 64, those of equal batches side by side are those of all of them."""
    vd: jax.Array
    """Vd [B, T, Hv, V] in v's dtype, what each token writes to the state; [B, T, Hv, 2 V], its high and its low part,
    where operands are split. Of rows of no sequence anything."""

    @staticmethod
    def shapes(
        pieces: int, v: jax.Array, key_dim: int, precision: Any, *, groups: int = 1
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """By field, of rows v [B, T, Hv, V] in `pieces` pieces altogether, for the heads of one of so many groups."""
        batch, length, all_heads, value_dim = v.shape
        heads = all_heads // groups
        count, parts = state_count(batch * length, pieces), 2 if splits(precision, v.dtype) else 1
        rows = state_tile_rows(key_dim)
        return {
            "h": jax.ShapeDtypeStruct((count, heads, key_dim // rows * parts, value_dim, rows), v.dtype),
            "vd": jax.ShapeDtypeStruct((batch, length, heads, value_dim * parts), v.dtype),
        }


class Lengths(NamedTuple):
    """What "cuda" multiplies by where it normalises q and k, [B, T, Hk] float32; of rows of no sequence anything."""

    of_keys: jax.Array
    """1 / |k|."""
    of_queries: jax.Array
    """1 / |q|."""

    @staticmethod
    def shapes(q: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """By field, of rows q [..., Hk, K]."""
        return dict.fromkeys(Lengths._fields, jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32))


class Residuals(NamedTuple):
    """What forward keeps for backward."""

    a: jax.Array
    """[Hv, B, T, 64] integers of the size of v's elements, whose bits they are: the gated inverse of every chunk, in
    blocks (kernels/inverse.py) that begin at the chunk's first row; what they leave of its rows is undefined. With 128
    columns its high and its low part, where operands are split (`splits`)."""
    gamma: jax.Array
    """[B, T, Hv] float32, the cumulative sum of g within the chunk."""
    vd: jax.Array | None = None
    """As of `ChunkStates`, unless backward is to compute it again; where operands are split, only with h."""
    between: Between | None = None
    """Where sequences have been cut into pieces, unless backward is to compute it again."""
    h: jax.Array | None = None
    """As of `ChunkStates`, where the caller wants it kept, of the same pieces or of whole sequences; with vd."""
    lengths: Lengths | None = None
    """Where "cuda" normalises q and k (`keeps_lengths`)."""

    @staticmethod
    def shapes(v: Any, precision: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Of a and gamma by field, of rows v [B, T, Hv, V]."""
        batch, tokens, heads, _ = v.shape
        columns = CHUNK * (2 if splits(precision, v.dtype) else 1)
        return {
            "a": jax.ShapeDtypeStruct((heads, batch, tokens, columns), f"int{8 * jnp.dtype(v.dtype).itemsize}"),
            "gamma": jax.ShapeDtypeStruct(v.shape[:-1], jnp.float32),
        }


def keeps_lengths(choice: Choice, dtype: Any, l2norm: bool) -> bool:
    """Whether residuals of q and k of this dtype have `Lengths`: where "cuda" may run, and normalises them itself."""
    return l2norm and choice.on_cuda == "cuda" and jnp.dtype(dtype).name in load("cuda").L2NORM_DTYPES


def precision_of_kernels(precision: Any) -> jax.lax.Precision | None:
    """What the option of the same name is to "cuda": DEFAULT or HIGH, or None: nothing that its kernels have."""
    try:
        named = jax.lax.Precision(precision)
    except ValueError:  # a pair, or an algorithm
        return None
    return None if named == jax.lax.Precision.HIGHEST else named


def splits(precision: Any, dtype: Any) -> bool:
    """Whether the kernels take what meets a chunk's inverse as the sum of two numbers (kernels/common.py): with HIGH
    precision in bfloat16. The numbers of float16 are an eighth as far apart as those of bfloat16, and are not split."""
    return precision_of_kernels(precision) == jax.lax.Precision.HIGH and jnp.dtype(dtype) == jnp.bfloat16


def keeping(save_chunk_states: bool | None, precision: Any, dtype: Any) -> Keep:
    """What the option of the public functions asks for, with q, k and v of this dtype: None is Vd, but nothing where
    operands are split, for no kernel computes h from it then."""
    if save_chunk_states is None:
        return "nothing" if splits(precision, dtype) else "vd"
    return "states" if save_chunk_states else "nothing"


class Pieces(NamedTuple):
    """What the pieces of B sequences do to the state before them (jax_qla/kernels/summaries.py), which `forward` and
    `backward` then need not compute again. P = B (count + 2): a sequence's pieces stand between two empty ones.
    """

    response: jax.Array
    """N [P, Hv, K, V] float32."""
    transition: jax.Array
    """M as the sum of two bfloat16 numbers, by blocks (kernels/specification.py), [P, Hv, K K / 128, 256]."""
    forgotten: jax.Array
    """int32 [P, Hv], 1 where M counts as zero and is not there."""

    @staticmethod
    def shapes(sequences: int, count: int, heads: int, key_dim: int, value_dim: int) -> dict[str, jax.ShapeDtypeStruct]:
        """By field, where a sequence has `count` pieces."""
        shapes = Between.shapes(sequences * (count + 2), heads, key_dim, value_dim)
        return {"response": shapes.pop("entering"), **shapes}


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
    """The module of "cuda" or "xla", imported when first needed: `jax_qla.cuda` needs the compiled extension."""
    return importlib.import_module(f"jax_qla.{name}")


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
        precision: the option of the same name; "reference" has none, and "cuda" no 'highest'.
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
        why_not: what the kernels object to, with the option `build` of `jax_qla.cuda.why_not`.
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
        before = [f"{name!r} was passed over: {objections[name]}" for name in names[: names.index(taken)]]
        if before:
            return "; ".join(before)
        return "it was asked for" if implementation is not None else "its kernels can take these inputs"

    portable = [name for name in able if name != "cuda"]
    if portable:
        besides = objections.get("cuda")
        not_cuda = _ONLY_CUDA if besides is None else f"{_ONLY_CUDA}, and even there {besides}"
        why_elsewhere = why(portable[0], {**objections, "cuda": not_cuda})
    else:
        asked = f"implementation={implementation!r}"
        advice = "use implementation=None to take 'xla' on other platforms"
        if piece_rows is not None:
            asked, advice = f"piece_rows={piece_rows}", "leave it out to take 'xla' on other platforms"
        why_elsewhere = f"{asked} was asked for, but the program is not lowered for CUDA, and {_ONLY_CUDA}; {advice}"
    return Choice(
        on_cuda=able[0],
        elsewhere=portable[0] if portable else None,
        why_on_cuda=why(able[0], objections),
        why_elsewhere=why_elsewhere,
        piece_rows=piece_rows,
    )


def _names(implementation: str | Sequence[str] | None) -> tuple[str, ...]:
    if implementation is None:
        return _AUTOMATIC
    names = (implementation,) if isinstance(implementation, str) else implementation
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"implementation must be None, a name or a sequence of names, got {implementation!r} of type "
            f"{type(implementation).__name__}"
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
    if name == "reference" and precision is not None:
        return f"precision is an option of 'cuda' and 'xla' only, got precision={precision!r}"
    if name == "cuda" and precision_of_kernels(precision) is None:
        return f"the precision of the kernels of 'cuda' is None, 'default' or 'high', got precision={precision!r}"
    if name == "reference" or (name == "xla" and recurrent is not None):
        return None
    try:
        module = load(name)
    except ImportError as error:
        return f"its modules cannot be imported ({error})"
    why_not = module.why_not
    if recurrent is not None:
        why_not = functools.partial(module.why_not_recurrent, call=recurrent)
    elif name == "cuda":
        why_not = functools.partial(why_not, precision=precision)
    if name != "cuda":
        return why_not(q, k, v)
    return _objection_of_kernels(functools.partial(why_not, q, k, v), alternatives=alternatives)


def _objection_of_kernels(why_not: Callable[..., str | None], *, alternatives: bool) -> str | None:
    """Why the kernels of "cuda" cannot compute a call, or None.

    Args:
        why_not: what they themselves object to, with the option `build` of `jax_qla.cuda.why_not`.
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
