"""Reads arrays from a checkpoint in the safetensors format, one at a time, without loading the rest.

A file is the length of its header (8 bytes, little endian), the header (JSON: for each name its dtype, shape and byte
range), and the bytes (https://huggingface.co/docs/safetensors). NumPy can map it as it is; bfloat16, which the package
safetensors does not hand to NumPy, is ml_dtypes', which JAX brings along.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
}


class Checkpoint:
    """The arrays of a safetensors checkpoint: one file, or many with an index.

    Args:
        path: a file, or a folder with `model.safetensors` or with `model.safetensors.index.json` and its files.

    Raises:
        FileNotFoundError: there is no such file or folder, or a file that the index names is missing.
        ValueError: a file is not of the safetensors format, or the index is damaged.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._entries: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        files, places = _files(self.path)
        for file in files:
            start, header = _header(file)
            for name, entry in header.items():
                if places.get(name, file) == file:
                    self._entries[name] = (file, start, entry)

    @property
    def names(self) -> list[str]:
        """The names of all arrays."""
        return list(self._entries)

    def read(self, name: str) -> np.ndarray:
        """The array of this name, mapped from its file, read-only.

        Raises:
            KeyError: there is none of this name.
            ValueError: its dtype is not a floating-point one of at least 16 bits, or the header contradicts itself.
        """
        file, start, entry = self._entries[name]
        if entry["dtype"] not in _DTYPES:
            raise ValueError(
                f"{name} in {file} must be of dtype {', '.join(_DTYPES)}, got {entry['dtype']}; quantised weights "
                "cannot be loaded"
            )
        dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if end - begin != math.prod(shape) * dtype.itemsize or start + end > file.stat().st_size:
            raise ValueError(f"{file} is damaged: {name} of shape {shape} does not fill its bytes [{begin}, {end})")
        if begin == end:
            return np.zeros(shape, dtype)
        raw = np.memmap(file, np.uint8, mode="r", offset=start + begin, shape=(end - begin,))
        return raw.view(dtype).reshape(shape)


def _files(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files that make up the checkpoint, and in which of them the index says that an array is, if there is one."""
    if path.is_file():
        return [path], {}
    if (path / INDEX).is_file():
        try:
            index = json.loads((path / INDEX).read_text())
            places = {name: path / file for name, file in index["weight_map"].items()}
            files = sorted(set(places.values()))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path / INDEX} is damaged ({error!r})") from error
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise FileNotFoundError(f"{path} lacks {', '.join(missing)}, which its {INDEX} names")
        return files, places
    if (path / SINGLE).is_file():
        return [path / SINGLE], {}
    raise FileNotFoundError(f"{path} is neither a safetensors file nor a folder with {SINGLE} or {INDEX}")


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where the bytes of the arrays start, and what the header says of each array."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(f"{file} is not a safetensors file: its header would have {length} bytes of {size}")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not a safetensors file: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise ValueError(f"{file} is not a safetensors file: its header is a {type(header).__name__}")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if not _is_entry(entry):
            raise ValueError(f"{file} is damaged: of {name} its header says {entry}")
    return 8 + length, header


def _is_entry(entry: Any) -> bool:
    """Whether this says what a header must of an array: a dtype, a shape and a byte range."""
    match entry:
        case {"dtype": str(), "shape": [*shape], "data_offsets": [begin, end]}:
            return all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    return False
