"""What `soak.py` calls: every operation that has kernels, with random sizes, options and numbers.

An operation is one compiled call. `results` are what it returns and its gradients, by name, computed by any
implementation; where "xla" surrounds the gated delta rule, it does so in float32, so that only the kernels' roundings
are left.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import jax_qla
from jax_qla.causal_conv1d import in_parts
from jax_qla.convolution import cut
from jax_qla.cuda.conv1d import GRANULE
from jax_qla.nn.normalization import gated_rms_norm

CALLS = 4, 32
"""Least and most of a compiled operation, with other numbers; between them, as many as LARGE allows."""
LARGE = 2**18
"""Tokens times value heads of all calls of a compiled operation. Compiling takes longer than small calls."""
LIMITS = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 1e-4}
"""Largest relative error of a result of the gated delta rule, by the dtype of its operands."""
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Of one number: the largest relative error of what differs by its rounding alone."""
EPS = 1e-5
HEAD = 128
"""Elements that count as one value head of one token."""
STATES = 1024
"""Most states, of a value head each, that a call of the gated delta rule begins with; eight sequences may have more."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """One compiled call."""

    dtype: str
    batch: int
    tokens: int

    by_kernels_only: ClassVar[bool] = True
    """Whether there is but one way to compute it without them, which would be compared with itself."""

    @property
    def heads(self) -> int:
        """Size of a token, in value heads."""
        raise NotImplementedError

    @property
    def calls(self) -> int:
        """Sets of numbers that it is called with."""
        least, most = CALLS
        return min(most, max(least, LARGE // (self.batch * self.tokens * self.heads)))

    @property
    def kinds(self) -> tuple[str, ...]:
        """What it is counted as."""
        return (type(self).__name__, self.dtype)

    @property
    def alike(self) -> bool:
        """Whether a program that has it twice must give the same bits twice."""
        return True

    def operands(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        """Random ones, cotangents of the results included."""
        raise NotImplementedError

    def results(self, operands: Mapping[str, Any], implementation: str) -> dict[str, Any]:
        """Everything that is compared, by name."""
        raise NotImplementedError

    def limit(self, name: str) -> float:
        """Largest relative error of a result, in the Euclidean norm."""
        return LIMITS[self.dtype]

    def least(self, operands: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Sizes of what some results are sums of: by chance a sum can be far smaller than its terms. An error is
        relative to these at the least."""
        return {}


def draw(random: np.random.Generator, pair: Sequence[str], largest: int) -> Operation:
    """Any operation that both implementations take, with at most `largest` tokens times value heads."""
    kernels = "cuda" in pair
    kinds = [kind for kind in KINDS if kernels or not kind.by_kernels_only]
    weights = np.array([KINDS[kind] for kind in kinds], float)
    kind = kinds[int(random.choice(len(kinds), p=weights / weights.sum()))]
    drawn: Operation = kind.draw(random, kernels, largest)
    return drawn


@dataclasses.dataclass(frozen=True)
class GatedDeltaRule(Operation):
    """`jax_qla.chunk_gated_delta_rule`, both passes."""

    form: str
    """"dense", "cu_seqlens" or "segment_ids"."""
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    sequences: int
    """Of a packed batch; slots of a row with segment_ids."""
    state: bool
    l2norm: bool
    precision: str | None = None
    """Of "cuda"."""
    saving: bool | None = None
    """The option `save_chunk_states`."""
    piece_rows: int | None = None
    """Of "cuda"."""

    by_kernels_only = False

    @classmethod
    def draw(cls, random: np.random.Generator, kernels: bool, largest: int) -> GatedDeltaRule:
        dims = (64, 128) if kernels else (8, 24, 64)
        key_heads, value_heads = _heads(random, kernels)
        form = str(random.choice(["dense", "cu_seqlens", "segment_ids"]))
        batch = 1 if form == "cu_seqlens" else int(random.integers(1, 5))
        return cls(
            dtype=str(random.choice(["bfloat16", "float16"] if kernels else ["float32"])),
            batch=batch,
            tokens=_up_to(random, largest // (value_heads * batch)),
            form=form,
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=int(random.choice(dims)),
            value_dim=int(random.choice(dims)),
            sequences=_places(random, max(8, STATES // (value_heads * batch))),
            state=bool(random.random() < 0.7),
            l2norm=bool(random.random() < 0.5),
            precision="high" if kernels and random.random() < 0.3 else None,
            saving=(None, None, True, False)[int(random.integers(4))],
            piece_rows=(None, None, None, 0, 64, 256)[int(random.integers(6))],
        )

    @property
    def heads(self) -> int:
        return self.value_heads

    @property
    def kinds(self) -> tuple[str, ...]:
        many = ("more than 8 sequences",) if self.form != "dense" and self.sequences > 8 else ()
        return (*super().kinds, self.form, f"K {self.key_dim}, V {self.value_dim}", *many)

    @property
    def alike(self) -> bool:
        # In float16 XLA normalises q and k, and need not compile that alike where a program has it twice.
        return not (self.l2norm and self.dtype == "float16")

    def operands(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        rows = self.batch, self.tokens
        lead = {"dense": (self.batch,), "cu_seqlens": (self.sequences,), "segment_ids": (self.batch, self.sequences)}
        state_shape = (*lead[self.form], self.value_heads, self.key_dim, self.value_dim)
        operands = _of_tokens(random, self)
        operands["do"] = random.standard_normal(operands["v"].shape).astype(jnp.dtype(self.dtype))
        operands["d_final_state"] = random.standard_normal(state_shape).astype(np.float32)
        if self.state:
            operands["initial_state"] = random.standard_normal(state_shape).astype(np.float32)
        if self.form == "cu_seqlens":
            operands["cu_seqlens"] = _cu_seqlens(random, self.tokens, self.sequences)
        if self.form == "segment_ids":
            runs = np.sort(random.integers(0, self.sequences + 1, rows), axis=1)
            operands["segment_ids"] = runs.astype(np.int32)
        return operands

    def results(self, operands: Mapping[str, Any], implementation: str) -> dict[str, Any]:
        given = {name: operands[name] for name in ("q", "k", "v", "g", "beta")}
        if self.state:
            given["initial_state"] = operands["initial_state"]
        options: dict[str, Any] = {name: operands[name] for name in ("cu_seqlens", "segment_ids") if name in operands}
        if self.form == "segment_ids":
            options["max_segments"] = self.sequences

        def rule(given: dict[str, Any]) -> Any:
            return jax_qla.chunk_gated_delta_rule(
                **given,
                **options,
                output_final_state=True,
                use_qk_l2norm_in_kernel=self.l2norm,
                implementation=implementation,
                precision=self.precision if implementation == "cuda" else None,
                piece_rows=self.piece_rows if implementation == "cuda" else None,
                save_chunk_states=self.saving,
            )

        (o, final_state), vjp = jax.vjp(rule, given)
        (gradients,) = vjp((operands["do"], operands["d_final_state"]))
        named = {f"d{name}" if name != "initial_state" else "d_initial_state": x for name, x in gradients.items()}
        return {"o": o, "final_state": final_state, **named}

    def least(self, operands: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> dict[str, float]:
        def rows(*names: str) -> np.ndarray:
            """Per token and head of `names`, the product of the lengths of an operand and of its gradient."""
            lengths = [np.linalg.norm(np.asarray(operands[name], np.float64), axis=-1) for name in names]
            return np.concatenate(
                [
                    (length * np.linalg.norm(right[f"d{name}"], axis=-1)).ravel()
                    for name, length in zip(names, lengths, strict=True)
                ]
            )

        return {"dg": float(np.linalg.norm(rows("q", "k"))), "dbeta": float(np.linalg.norm(rows("v")))}


@dataclasses.dataclass(frozen=True)
class Recurrence(Operation):
    """`jax_qla.recurrent_gated_delta_rule`, for few tokens; its derivatives are plain JAX."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    state_dtype: str | None
    """Of the initial state; None for none."""
    l2norm: bool

    by_kernels_only = False

    @classmethod
    def draw(cls, random: np.random.Generator, kernels: bool, largest: int) -> Recurrence:
        dims = (64, 128) if kernels else (8, 24)
        key_heads, value_heads = _heads(random, kernels)
        tokens = int(random.choice([1, 1, 2, 3, 7]))
        return cls(
            dtype=str(random.choice(["bfloat16", "float16"] if kernels else ["float32"])),
            batch=_up_to(random, min(largest, 2**12) // (value_heads * tokens)),
            tokens=tokens,
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=int(random.choice(dims)),
            value_dim=int(random.choice(dims)),
            state_dtype=(None, "float32", "bfloat16")[int(random.integers(3))],
            l2norm=bool(random.random() < 0.5),
        )

    @property
    def heads(self) -> int:
        return self.value_heads

    def operands(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        operands = _of_tokens(random, self)
        if self.state_dtype:
            state = random.standard_normal((self.batch, self.value_heads, self.key_dim, self.value_dim))
            operands["initial_state"] = state.astype(jnp.dtype(self.state_dtype))
        return operands

    def results(self, operands: Mapping[str, Any], implementation: str) -> dict[str, Any]:
        o, final_state = jax_qla.recurrent_gated_delta_rule(
            **operands,
            output_final_state=True,
            use_qk_l2norm_in_kernel=self.l2norm,
            implementation=implementation,
        )
        return {"o": o, "final_state": final_state}


@dataclasses.dataclass(frozen=True)
class Convolution(Operation):
    """`jax_qla.causal_conv1d`, with y in parts as a layer asks for it, both passes."""

    form: str
    parts: tuple[int, ...]
    sequences: int
    bias: bool
    tail: bool
    silu: bool
    weight_dtype: str

    @classmethod
    def draw(cls, random: np.random.Generator, kernels: bool, largest: int) -> Convolution:
        form = str(random.choice(["dense", "cu_seqlens", "segment_ids"]))
        batch = 1 if form == "cu_seqlens" else int(random.choice([1, 2, 3, 64]))
        count, most = int(random.integers(1, 4)), int(random.choice([2, 40, 400]))
        parts = tuple(GRANULE * int(random.integers(1, most)) for _ in range(count))
        dtype = str(random.choice(["bfloat16", "float16"]))
        return cls(
            dtype=dtype,
            batch=batch,
            tokens=_up_to(random, largest * HEAD // (sum(parts) * batch)),
            form=form,
            parts=parts,
            sequences=int(random.choice([1, 3, 30, 300])),
            bias=bool(random.random() < 0.5),
            tail=form == "dense" and bool(random.random() < 0.5),
            silu=bool(random.random() < 0.7),
            weight_dtype=str(random.choice([dtype, "float32"])),
        )

    @property
    def heads(self) -> int:
        return -(-sum(self.parts) // HEAD)

    @property
    def kinds(self) -> tuple[str, ...]:
        return (*super().kinds, f"{type(self).__name__}, {self.form}")

    def operands(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        """What x and the cotangents hold beside the sequences is NaN."""
        channels, low = sum(self.parts), jnp.dtype(self.dtype)
        rows = (self.batch, self.tokens)
        operands = {
            "x": random.standard_normal((*rows, channels)).astype(low),
            "weight": random.standard_normal((4, channels)).astype(jnp.dtype(self.weight_dtype)),
            "dy": random.standard_normal((*rows, channels)).astype(low),
            "d_tail": random.standard_normal((self.batch, 3, channels)).astype(low),
        }
        if self.bias:
            operands["bias"] = random.standard_normal(channels).astype(jnp.dtype(self.weight_dtype))
        if self.tail:
            operands["initial_tail"] = random.standard_normal((self.batch, 3, channels)).astype(low)
        inside = np.ones(rows, bool)
        if self.form == "cu_seqlens":
            bounds = _cu_seqlens(random, self.tokens, self.sequences)
            operands["cu_seqlens"] = bounds
            inside[:, bounds[-1] :] = False
        if self.form == "segment_ids":
            borders = random.random(rows) < min(1.0, self.sequences / self.tokens)
            names = random.choice([0, 1, 2, -5, 2**31 - 1], (self.batch, self.tokens + 1)).astype(np.int32)
            operands["segment_ids"] = np.take_along_axis(names, np.cumsum(borders, axis=1), axis=1)
            inside = operands["segment_ids"] != 0
        for name in ("x", "dy"):
            operands[name][~inside] = np.nan
        return operands

    def results(self, operands: Mapping[str, Any], implementation: str) -> dict[str, Any]:
        wide = implementation == "xla"
        names = [name for name in ("x", "weight", "bias", "initial_tail") if name in operands]
        given = {name: operands[name].astype(jnp.float32) if wide else operands[name] for name in names}
        packing = {name: operands[name] for name in ("cu_seqlens", "segment_ids") if name in operands}

        def convolve(given: dict[str, Any]) -> Any:
            activation = "silu" if self.silu else None
            y, tail = in_parts(
                **given,
                **packing,
                parts=self.parts,
                activation=activation,
                output_final_tail=self.form == "dense",
                implementation=implementation,
            )
            return (y, tail) if self.form == "dense" else (y,)

        primal, transpose = jax.vjp(convolve, given)
        cotangents = cut(operands["dy"], self.parts), operands["d_tail"]
        cotangents = jax.tree.map(lambda d, like: d.astype(like.dtype), cotangents[: len(primal)], primal)
        (gradients,) = transpose(cotangents)
        y = {f"y{n}": part for n, part in enumerate(primal[0])}
        return {**y, **{f"d_{name}": x for name, x in gradients.items()}}

    def limit(self, name: str) -> float:
        if name in ("d_weight", "d_bias"):
            return 2e-5 if self.weight_dtype == "float32" else ROUNDING[self.dtype]
        return ROUNDING[self.dtype]


@dataclasses.dataclass(frozen=True)
class GatedNorm(Operation):
    """The gated RMS norm of a layer, both passes."""

    value_heads: int
    value_dim: int

    @classmethod
    def draw(cls, random: np.random.Generator, kernels: bool, largest: int) -> GatedNorm:
        value_heads, batch = int(random.choice([1, 3, 8, 32])), int(random.integers(1, 5))
        return cls(
            dtype=str(random.choice(["bfloat16", "float16"])),
            batch=batch,
            tokens=_up_to(random, largest // (value_heads * batch)),
            value_heads=value_heads,
            value_dim=int(random.choice([64, 128])),
        )

    @property
    def heads(self) -> int:
        return self.value_heads

    def operands(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        """Rows of o have lengths from 0 to 100."""
        shape, low = (self.batch, self.tokens, self.value_heads, self.value_dim), jnp.dtype(self.dtype)
        o, z, dy = random.standard_normal((3, *shape))
        o *= 10.0 ** random.uniform(-3, 1, (*shape[:-1], 1)) * (random.random((*shape[:-1], 1)) < 0.99)
        weight = random.standard_normal(self.value_dim).astype(np.float32)
        return {"o": o.astype(low), "z": (3 * z).astype(low), "weight": weight, "dy": dy.astype(low)}

    def results(self, operands: Mapping[str, Any], implementation: str) -> dict[str, Any]:
        given = {name: operands[name] for name in ("o", "z", "weight")}
        if implementation == "xla":
            given = {name: x.astype(jnp.float32) for name, x in given.items()}
        y, transpose = jax.vjp(lambda given: gated_rms_norm(**given, eps=EPS, implementation=implementation), given)
        (gradients,) = transpose(operands["dy"].astype(y.dtype))
        return {"y": y, **{f"d_{name}": x for name, x in gradients.items()}}

    def limit(self, name: str) -> float:
        return 2e-5 if name == "d_weight" else ROUNDING[self.dtype]


KINDS: dict[Any, float] = {GatedDeltaRule: 6, Convolution: 3, GatedNorm: 1, Recurrence: 1}
"""How often each is drawn."""


def _heads(random: np.random.Generator, kernels: bool) -> tuple[int, int]:
    """Key heads and value heads."""
    key_heads = int(random.choice([1, 2, 3, 4, 8, 16] if kernels else [1, 2]))
    return key_heads, key_heads * int(random.choice([1, 2, 3, 4]))


def _up_to(random: np.random.Generator, most: int) -> int:
    """At least 1, and as often small as large."""
    return max(1, int(math.exp(random.uniform(0, math.log(max(1, most))))) + int(random.integers(0, 2)))


def _of_tokens(random: np.random.Generator, operation: GatedDeltaRule | Recurrence) -> dict[str, np.ndarray]:
    """q, k, v, g and beta."""
    rows, low = (operation.batch, operation.tokens), jnp.dtype(operation.dtype)
    heads = (*rows, operation.value_heads)
    return {
        "q": _unit(random, *rows, operation.key_heads, operation.key_dim).astype(low),
        "k": _unit(random, *rows, operation.key_heads, operation.key_dim).astype(low),
        "v": random.standard_normal((*heads, operation.value_dim)).astype(low),
        "g": _gates(random, heads).astype(np.float32),
        "beta": random.random(heads).astype(np.float32),
    }


def _unit(random: np.random.Generator, *sizes: int) -> np.ndarray:
    x = random.standard_normal(sizes)
    return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))


def _places(random: np.random.Generator, most: int) -> int:
    """For sequences: as often 8 or fewer as more."""
    return int(random.integers(1, 9)) if random.random() < 0.5 else min(most, 8 + _up_to(random, most))


def _cu_seqlens(random: np.random.Generator, tokens: int, sequences: int) -> np.ndarray:
    ends = np.sort(random.integers(0, tokens + 1, sequences))
    if random.random() < 0.3:  # few that are not empty, anywhere
        ends = np.sort(random.choice(random.choice(ends, _up_to(random, 8)), sequences))
    ends[-1] = tokens if random.random() < 0.8 else ends[-1]  # else a tail that belongs to nobody
    return np.array([0, *ends], np.int32)


def _gates(random: np.random.Generator, sizes: tuple[int, ...]) -> np.ndarray:
    g = -np.exp(1.5 * random.standard_normal(sizes) - 2)
    kind = random.integers(5)
    if kind == 1:
        g[..., :: int(random.integers(1, 4))] = 0
    elif kind == 2:
        g = np.where(random.random(sizes) < 0.1, -80 * random.random(sizes), g)
    elif kind == 3:
        g[random.random(sizes) < 0.02] = -np.inf
    elif kind == 4:
        g *= 1e-3
    return g
