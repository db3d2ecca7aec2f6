"""The extension module built from ffi/: the XLA FFI handler "jax_qla.launch.v1", which launches cubins."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypedDict

PyCapsule: TypeAlias = object

class BuildInfo(TypedDict):
    ffi_api: str
    compiler: str
    jaxlib: str
    manifest_sha256: str

def set_cubin_directories(directories: Sequence[str]) -> list[str]:
    """Sets the directories that are searched for `<sha256>.cubin` files, in this order, and returns the former ones."""

def registrations(platform: Literal["CUDA", "cpu"] = "CUDA") -> dict[str, dict[str, PyCapsule]]:
    """The targets, each with its stages, as `jax.ffi.register_ffi_target` takes them.

    `types(platform)` must be registered first, with `jax.ffi.register_ffi_type`. The platform "cpu" is for tests: its
    handler talks to the recording driver that $JAX_QLA_LIBCUDA names and to nothing else, and JAX's CPU backend must be
    initialised before it is registered (jaxlib hands over targets before types otherwise).

    Raises:
      ValueError: another platform.
    """

def types(platform: Literal["CUDA", "cpu"] = "CUDA") -> dict[str, Any]:
    """The types of the handler's state ("type_id", "type_info"), as `jax.ffi.register_ffi_type` takes them.

    Raises:
      ValueError: another platform.
    """

def build_info() -> BuildInfo:
    """What the extension was built with: FFI API version, compiler, jaxlib, and the sha256 of the cubins' manifest.

    `manifest_sha256` is "" where there was no manifest, and in an editable installation.
    """
