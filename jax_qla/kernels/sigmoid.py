"""1 / (1 + exp(-z)) for the kernels of a layer's convolution and gated norm."""

__all__ = ["SIGMOID_PRELUDE"]

SIGMOID_PRELUDE = r"""
__device__ __forceinline__ float jax_qla_sigmoid(float z) { return __fdividef(1.f, 1.f + __expf(-z)); }
"""
