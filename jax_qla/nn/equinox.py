"""The Gated DeltaNet layer of Qwen3-Next and Qwen3.5 in Equinox. Needs the extra `jax_qla[equinox]`."""

# mypy: disallow-subclassing-any=False
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

try:
    import equinox as eqx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "jax_qla.nn.equinox needs Equinox: pip install 'jax_qla[equinox]'", name=error.name
    ) from error

from jax_qla.nn import mixer, parameters
from jax_qla.nn.cache import GatedDeltaNetCache, empty_cache
from jax_qla.nn.config import GatedDeltaNetConfig
from jax_qla.nn.projections import Projected, arrange, check_input, dot_general_of, sharding_like

__all__ = ["GatedDeltaNet", "logical_axes"]


class GatedDeltaNet(eqx.Module):
    """Token mixing by the gated delta rule: [B, T, D] -> [B, T, D].

    The layer of Qwen3-Next and Qwen3.5: the same weights give the same outputs as in Hugging Face transformers. Source:
    Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464). D is the width of the model.

    Unlike most Equinox layers it takes a batch, as `jax_qla.chunk_gated_delta_rule` does. Under `jax.vmap`, give it
    batches of one.

    Args:
        config: sizes and options.
        dtype: of the computation, outputs and cache: bfloat16, float16, float32 or float64. Gates, norms, the sums of
            the convolution and the state are always at least float32.
        param_dtype: of the parameters, a floating dtype; A_log and dt_bias are always float32.
        implementation: of the gated delta rule, as in `jax_qla.chunk_gated_delta_rule`. Where that may be "cuda", the
            convolution and the gated norm run by their kernels too if these can take them, else by "xla".
        piece_rows: how "cuda" cuts the sequences of `__call__` and `prefill`, as in `jax_qla.chunk_gated_delta_rule`.
        save_chunk_states: what `__call__` keeps for its gradient, as in `jax_qla.chunk_gated_delta_rule`.
        key: of `jax.random`, makes the initial parameters.

    Raises:
        TypeError: config, dtype, param_dtype, implementation, piece_rows or save_chunk_states is not what it may be.
        ValueError: implementation has an unknown name, or piece_rows is no multiple of 64.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax_qla.nn import GatedDeltaNetConfig
        >>> from jax_qla.nn.equinox import GatedDeltaNet
        >>> config = GatedDeltaNetConfig(32, num_key_heads=1, num_value_heads=2, key_head_dim=8, value_head_dim=8)
        >>> layer = GatedDeltaNet(config, key=jax.random.key(0))
        >>> x = jnp.ones((2, 10, 32))
        >>> y, cache = layer.prefill(x)
        >>> y.shape, cache.state.shape
        ((2, 10, 32), (2, 2, 8, 8))
    """

    in_proj_qkv: eqx.nn.Linear | None
    in_proj_z: eqx.nn.Linear | None
    in_proj_b: eqx.nn.Linear | None
    in_proj_a: eqx.nn.Linear | None
    """These four with split projections, else None."""
    in_proj_qkvz: eqx.nn.Linear | None
    in_proj_ba: eqx.nn.Linear | None
    """These two with fused projections, else None."""
    conv1d: jax.Array
    """[width, channels]"""
    A_log: jax.Array
    """float32 [Hv]"""
    dt_bias: jax.Array
    """float32 [Hv]"""
    norm: jax.Array
    """[V]"""
    out_proj: eqx.nn.Linear
    config: GatedDeltaNetConfig = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)
    implementation: str | tuple[str, ...] | None = eqx.field(static=True)
    piece_rows: int | None = eqx.field(static=True)
    save_chunk_states: bool | None = eqx.field(static=True)

    def __init__(
        self,
        config: GatedDeltaNetConfig,
        *,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        implementation: str | Sequence[str] | None = None,
        piece_rows: int | None = None,
        save_chunk_states: bool | None = None,
        key: jax.Array,
    ):
        parameters.check_dtypes(dtype, param_dtype)
        self.config = config
        self.dtype = jnp.dtype(dtype)
        options = mixer.checked_options(implementation, piece_rows, save_chunk_states)
        self.implementation, self.piece_rows, self.save_chunk_states = options
        shapes = parameters.parameter_shapes(config)
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))

        def linear(name: str) -> eqx.nn.Linear | None:
            if name not in shapes:
                return None
            return eqx.nn.Linear(*shapes[name], use_bias=False, dtype=param_dtype, key=keys[name])

        self.in_proj_qkv = linear("in_proj_qkv")
        self.in_proj_z = linear("in_proj_z")
        self.in_proj_b = linear("in_proj_b")
        self.in_proj_a = linear("in_proj_a")
        self.in_proj_qkvz = linear("in_proj_qkvz")
        self.in_proj_ba = linear("in_proj_ba")
        self.conv1d = parameters.initial_conv1d(keys["conv1d"], shapes["conv1d"], param_dtype)
        self.A_log = parameters.initial_a_log(keys["A_log"], shapes["A_log"])
        self.dt_bias = parameters.initial_dt_bias(keys["dt_bias"], shapes["dt_bias"])
        self.norm = jnp.ones(shapes["norm"], param_dtype)
        self.out_proj = linear("out_proj")

    def __call__(
        self, x: jax.Array, *, segment_ids: jax.Array | None = None, key: jax.Array | None = None
    ) -> jax.Array:
        """Mixes whole sequences in parallel, for training.

        Args:
            x: [B, T, D] of real numbers, cast to the layer's dtype.
            segment_ids: int32 [B, T]: keeps packed documents apart, in the convolution and in the state. A document is
                a maximal run of equal ids other than 0; tokens of id 0 are padding and give 0, where x is finite there.
            key: not read; `eqx.nn.Sequential` gives one to each of its layers.

        Returns:
            [B, T, D] in the layer's dtype.

        Raises:
            TypeError, ValueError, NotImplementedError: x or segment_ids is wrong, or as
                `jax_qla.chunk_gated_delta_rule`.
        """
        del key
        y = mixer.mix(
            self._project(x),
            self._weights(),
            self.config,
            segment_ids=segment_ids,
            implementation=self.implementation,
            piece_rows=self.piece_rows,
            save_chunk_states=self.save_chunk_states,
        )
        return self._apply("out_proj", y, x)

    def prefill(
        self, x: jax.Array, cache: GatedDeltaNetCache | None = None, *, segment_ids: jax.Array | None = None
    ) -> tuple[jax.Array, GatedDeltaNetCache]:
        """Reads a part of a text in parallel, and returns the cache after it.

        A text may be read in any number of parts, each with the cache after the one before.

        Args:
            x: [B, T, D] of real numbers, cast to the layer's dtype.
            cache: of what precedes x; None if nothing does.
            segment_ids: int32 [B, T], for prompts of different lengths: equal ids at the tokens of each row's prompt, 0
                at the padding before or behind it. Not together with `cache`.

        Returns:
            [B, T, D] in the layer's dtype, and the cache after x, or after each row's prompt.

        Raises:
            TypeError, ValueError: x is wrong, cache and segment_ids are both given, or the cache is of another layer or
                batch.
            NotImplementedError: as `jax_qla.chunk_gated_delta_rule`.
        """
        y, cache = mixer.mix_prefill(
            self._project(x),
            self._weights(),
            self.config,
            cache=cache,
            segment_ids=segment_ids,
            implementation=self.implementation,
            piece_rows=self.piece_rows,
        )
        return self._apply("out_proj", y, x), cache

    def step(self, x: jax.Array, cache: GatedDeltaNetCache) -> tuple[jax.Array, GatedDeltaNetCache]:
        """Reads the next token, or a few one by one, for generation.

        The returned cache has the structure, shapes and dtypes of the one given, as `jax.lax.scan` needs.

        Args:
            x: [B, 1, D], or [B, T, D] with a small T; of real numbers, cast to the layer's dtype.
            cache: of what precedes x.

        Returns:
            [B, T, D] in the layer's dtype, and the cache after x.

        Raises:
            TypeError, ValueError: x is wrong, or the cache is of another layer or batch.
            NotImplementedError: as `jax_qla.recurrent_gated_delta_rule`.
        """
        y, cache = mixer.mix_step(
            self._project(x), self._weights(), self.config, cache, implementation=self.implementation
        )
        return self._apply("out_proj", y, x), cache

    def init_cache(self, batch_size: int) -> GatedDeltaNetCache:
        """The cache before the first token of `batch_size` sequences."""
        return empty_cache(self.config, batch_size, self.dtype)

    def get_weights(self) -> dict[str, jax.Array]:
        """The parameters by name, with the shapes of `jax_qla.nn.parameter_shapes`."""
        weights = {}
        for name in parameters.parameter_shapes(self.config):
            array = _leaf(self, name)
            weights[name] = array.T if _is_linear(name) else array
        return weights

    def with_weights(self, weights: Mapping[str, Any]) -> GatedDeltaNet:
        """This layer with other parameters, in the dtypes and on the devices of its own.

        A layer of shapes alone, as `jax.eval_shape` returns it, gets its arrays in this way. Each goes where the
        sharding of its shape says, if it has one.

        Args:
            weights: all of `jax_qla.nn.parameter_shapes`, as `jax_qla.nn.load_gated_deltanet_weights` returns them.

        Raises:
            ValueError: a parameter is missing, does not belong to the layer, has another shape or is not floating.
        """
        parameters.check_weights(weights, self.config)
        names = list(parameters.parameter_shapes(self.config))
        arrays = [
            parameters.in_place_of(_leaf(self, name), weights[name].T if _is_linear(name) else weights[name])
            for name in names
        ]
        return eqx.tree_at(lambda layer: [_leaf(layer, name) for name in names], self, arrays)

    def _apply(self, name: str, x: jax.Array, like: jax.Array | None = None) -> jax.Array:
        """A linear layer at every token, in the layer's dtype; with `like`, cut as that where types say how."""
        linear = getattr(self, name)
        linear = jax.tree.map(lambda leaf: leaf.astype(self.dtype) if eqx.is_inexact_array(leaf) else leaf, linear)
        x = x.astype(self.dtype)
        # What a caller has put there instead stands for itself.
        if type(linear) is not eqx.nn.Linear or linear.bias is not None:
            return jax.vmap(jax.vmap(linear))(x)
        out_sharding = None if like is None else sharding_like(like, x, linear.weight)
        product = dot_general_of(name)
        return product(x, linear.weight.T, (((2,), (0,)), ((), ())), out_sharding=out_sharding)

    def _project(self, x: jax.Array) -> Projected:
        hint = "; the layer takes the batch itself, with no jax.vmap around it" if getattr(x, "ndim", 0) == 2 else ""
        check_input(x, self.config, hint)
        x = x.astype(self.dtype)  # Once, so that it is kept once for the backward pass.
        outputs = {name: self._apply(name, x) for name in self.config.input_projections}
        return arrange(outputs, self.config)

    def _weights(self) -> mixer.MixerWeights:
        return mixer.MixerWeights(self.conv1d, self.A_log, self.dt_bias, self.norm)


def logical_axes(layer: GatedDeltaNet) -> GatedDeltaNet:
    """The names of the axes of every parameter, for sharding rules.

    Args:
        layer: only its structure matters; its arrays may be shapes.

    Returns:
        The layer with a `jax.sharding.PartitionSpec` of logical names (`jax_qla.nn.LOGICAL_AXES`) in place of every
        parameter. Linear layers have the orientation in which Equinox stores them, [outputs, inputs].
    """
    names = list(parameters.parameter_shapes(layer.config))
    specs = [
        PartitionSpec(*(reversed(axes) if _is_linear(name) else axes))
        for name, axes in ((name, parameters.LOGICAL_AXES[name]) for name in names)
    ]
    return eqx.tree_at(lambda layer: [_leaf(layer, name) for name in names], layer, specs)


def _is_linear(name: str) -> bool:
    return name.startswith("in_proj") or name == "out_proj"


def _leaf(layer: GatedDeltaNet, name: str) -> Any:
    """The parameter of this name as Equinox stores it."""
    leaf = getattr(layer, name)
    return leaf.weight if _is_linear(name) else leaf
