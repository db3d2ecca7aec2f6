"""The Gated DeltaNet layer of Qwen3-Next and Qwen3.5 in Flax NNX. Needs the extra `jax_qla[flax]`."""

# mypy: disallow-subclassing-any=False
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

try:
    from flax import nnx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("jax_qla.nn.flax needs Flax: pip install 'jax_qla[flax]'", name=error.name) from error

from jax_qla.nn import mixer, parameters
from jax_qla.nn.cache import GatedDeltaNetCache, empty_cache
from jax_qla.nn.config import GatedDeltaNetConfig
from jax_qla.nn.projections import Projected, arrange, check_input, dot_general_of, sharding_like

__all__ = ["GatedDeltaNet"]


class GatedDeltaNet(nnx.Module):
    """Token mixing by the gated delta rule: [B, T, D] -> [B, T, D].

    The layer of Qwen3-Next and Qwen3.5: the same weights give the same outputs as in Hugging Face transformers. Source:
    Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464). D is the width of the model.

    Submodules and parameters have the names that they have in transformers. The projections of
    `config.input_projections` and `out_proj` are `nnx.Linear`s. `conv1d` [width, channels], `A_log` [Hv], `dt_bias`
    [Hv] and `norm` [V] are `nnx.Param`s.

    Parameters carry the logical axis names of `jax_qla.nn.LOGICAL_AXES` as their `out_sharding` metadata. These are
    annotations only and place nothing. `nnx.get_named_sharding` makes shardings of them, under `nnx.logical_axis_rules`
    that map the names to the axes of a mesh.

    Args:
        config: sizes and options.
        dtype: of the computation, outputs and cache: bfloat16, float16, float32 or float64. Gates, norms, the sums of
            the convolution and the state are always at least float32.
        param_dtype: of the parameters, a floating dtype; A_log and dt_bias are always float32.
        implementation: of the gated delta rule, as in `jax_qla.chunk_gated_delta_rule`. Where that may be "cuda", the
            convolution and the gated norm run by their kernels too if these can take them, else by "xla".
        piece_rows: how "cuda" cuts the sequences of `__call__` and `prefill`, as in `jax_qla.chunk_gated_delta_rule`.
        save_chunk_states: what `__call__` keeps for its gradient, as in `jax_qla.chunk_gated_delta_rule`.
        rngs: the stream "params" makes the initial parameters.

    Raises:
        TypeError: config, dtype, param_dtype, implementation, piece_rows or save_chunk_states is not what it may be.
        ValueError: implementation has an unknown name, or piece_rows is no multiple of 64.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jax_qla.nn import GatedDeltaNetConfig
        >>> from jax_qla.nn.flax import GatedDeltaNet
        >>> config = GatedDeltaNetConfig(32, num_key_heads=1, num_value_heads=2, key_head_dim=8, value_head_dim=8)
        >>> layer = GatedDeltaNet(config, rngs=nnx.Rngs(0))
        >>> x = jnp.ones((2, 10, 32))
        >>> y, cache = layer.prefill(x)
        >>> y.shape, cache.state.shape
        ((2, 10, 32), (2, 2, 8, 8))
    """

    def __init__(
        self,
        config: GatedDeltaNetConfig,
        *,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        implementation: str | Sequence[str] | None = None,
        piece_rows: int | None = None,
        save_chunk_states: bool | None = None,
        rngs: nnx.Rngs,
    ):
        parameters.check_dtypes(dtype, param_dtype)
        self.config = config
        self.dtype = jnp.dtype(dtype)
        options = mixer.checked_options(implementation, piece_rows, save_chunk_states)
        self.implementation, self.piece_rows, self.save_chunk_states = options
        shapes = parameters.parameter_shapes(config)

        def linear(name: str) -> nnx.Linear:
            return nnx.Linear(
                *shapes[name],
                use_bias=False,
                dot_general=dot_general_of(name),
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=nnx.with_partitioning(
                    nnx.initializers.lecun_normal(), parameters.LOGICAL_AXES[name], eager_sharding=False
                ),
                rngs=rngs,
            )

        def parameter(name: str, initial: Callable[..., jax.Array], dtype: Any) -> nnx.Param[jax.Array]:
            return nnx.Param(
                initial(rngs.params(), shapes[name], dtype),
                out_sharding=parameters.LOGICAL_AXES[name],
                eager_sharding=False,
            )

        for name in config.input_projections:
            setattr(self, name, linear(name))
        self.conv1d = parameter("conv1d", parameters.initial_conv1d, param_dtype)
        self.A_log = parameter("A_log", parameters.initial_a_log, jnp.float32)
        self.dt_bias = parameter("dt_bias", parameters.initial_dt_bias, jnp.float32)
        self.norm = parameter("norm", nnx.initializers.ones, param_dtype)
        self.out_proj = linear("out_proj")

    def __call__(self, x: jax.Array, *, segment_ids: jax.Array | None = None) -> jax.Array:
        """Mixes whole sequences in parallel, for training.

        Args:
            x: [B, T, D] of real numbers, cast to the layer's dtype.
            segment_ids: int32 [B, T]: keeps packed documents apart, in the convolution and in the state. A document is
                a maximal run of equal ids other than 0; tokens of id 0 are padding and give 0, where x is finite there.

        Returns:
            [B, T, D] in the layer's dtype.

        Raises:
            TypeError, ValueError, NotImplementedError: x or segment_ids is wrong, or as
                `jax_qla.chunk_gated_delta_rule`.
        """
        y = mixer.mix(
            self._project(x),
            self._weights(),
            self.config,
            segment_ids=segment_ids,
            implementation=self.implementation,
            piece_rows=self.piece_rows,
            save_chunk_states=self.save_chunk_states,
        )
        return self._output(y, x)

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
        return self._output(y, x), cache

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
        return self._output(y, x), cache

    def init_cache(self, batch_size: int) -> GatedDeltaNetCache:
        """The cache before the first token of `batch_size` sequences."""
        return empty_cache(self.config, batch_size, self.dtype)

    def get_weights(self) -> dict[str, jax.Array]:
        """The parameters by name, with the shapes of `jax_qla.nn.parameter_shapes`."""
        return {name: self._parameter(name)[...] for name in parameters.parameter_shapes(self.config)}

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Overwrites the parameters, keeping their dtypes and devices.

        A layer of shapes alone, as `nnx.eval_shape` returns it, gets its arrays in this way. Each goes where the
        sharding of its shape says, if it has one.

        Args:
            weights: all of `jax_qla.nn.parameter_shapes`, as `jax_qla.nn.load_gated_deltanet_weights` returns them.

        Raises:
            ValueError: a parameter is missing, does not belong to the layer, has another shape or is not floating. Then
                nothing is overwritten.
        """
        parameters.check_weights(weights, self.config)
        for name, value in weights.items():
            parameter = self._parameter(name)
            # The array as a whole: what is there may be a shape alone, or NumPy's and read-only.
            parameter.set_value(parameters.in_place_of(parameter.get_raw_value(), value))

    def _parameter(self, name: str) -> nnx.Param[jax.Array]:
        parameter = getattr(self, name)
        return parameter.kernel if isinstance(parameter, nnx.Module) else parameter

    def _project(self, x: jax.Array) -> Projected:
        check_input(x, self.config)
        x = x.astype(self.dtype)  # Once, so that it is kept once for the backward pass.
        return arrange({name: getattr(self, name)(x) for name in self.config.input_projections}, self.config)

    def _output(self, y: jax.Array, x: jax.Array) -> jax.Array:
        """The output projection of y, cut as the layer's input x where types say how."""
        sharding = sharding_like(x, y)
        return self.out_proj(y) if sharding is None else self.out_proj(y, out_sharding=sharding)

    def _weights(self) -> mixer.MixerWeights:
        return mixer.MixerWeights(self.conv1d[...], self.A_log[...], self.dt_bias[...], self.norm[...])
