"""A kernel's CUDA source, run on a CPU.

TileLang lowers the program (kernels/lowering.py), tests/cuda_on_cpu.h stands for CUDA's and TileLang's headers, a
C++ compiler makes a library of it and of the machine behind it (tests/cuda_on_cpu.cc), and `Emulated` calls that with
NumPy arrays as the launch plan says. It is right where the kernel is, down to the rounding of every operand, whatever
the order in which warps and loads come. And it says which two accesses to shared memory nothing orders, or lack a proxy
fence (tests/happens_before.h); how fast the kernel is only a card says. Blocks of a cluster run together if they meet.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_qla import launch, store
from jax_qla.kernels import lowering

HERE = Path(__file__).parent
HEADER = HERE / "cuda_on_cpu.h"
OPTIONS = ("-std=c++20", "-w", "-fPIC", f"-I{HERE}")
INSTRUMENTED = ("-O1", "-fsanitize=thread")
"""Of the kernels and of their header, which GCC takes precompiled where it lies beside them: parsing it is a third of
the time that a kernel takes."""

INSTRUCTIONS = (
    "jax_qla_address",
    "jax_qla_exp2",
    "jax_qla_round",
    "jax_qla_with_squares",
    "jax_qla_load_matrices",
    "jax_qla_store_matrices",
    "jax_qla_transposed",
    "jax_qla_load_bytes",
    "jax_qla_store_word",
    "jax_qla_mma",
    "jax_qla_mma_eight",
    "jax_qla_mma_tf32",
    "jax_qla_forget",
    "jax_qla_begin_state",
    "jax_qla_take_state",
    "jax_qla_meet",
    "jax_qla_tell",
    "jax_qla_of_block",
    "jax_qla_read_of_block",
    "jax_qla_read_16",
    "jax_qla_write_16",
    "jax_qla_add_16",
    "jax_qla_publish",
    "jax_qla_await",
    "jax_qla_copy",
    "jax_qla_end_copies",
    "jax_qla_await_copies",
)
"""Functions made of PTX, which the header has too."""

MEMORY = 232448
"""Bytes of shared memory that a block may have. Its barriers lie behind them."""
BLOCK = 1 << 18
"""From the shared memory of a block to that of the next one of the cluster, as the header has it."""


def _once(name: str, make: Callable[[Path], None]) -> Path:
    """A file that `make` writes, unless another process of this run of pytest (conftest.py) has."""
    file = Path(os.environ["JAX_QLA_EMULATOR_FILES"], name)
    if not file.exists():
        mine = file.with_name(f"{os.getpid()}-{name}")
        make(mine)
        mine.replace(file)
    return file


def _compile(output: Path, *arguments: str | Path) -> None:
    command = [os.environ.get("CXX", "c++"), *OPTIONS, "-o", output, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[:4000])


def _machine() -> Path:
    """The object file of what runs the kernels. It is not instrumented itself."""
    return _once("machine.o", lambda file: _compile(file, "-O3", "-c", HERE / "cuda_on_cpu.cc"))


def _library(text: str) -> Path:
    """A translated kernel, compiled."""
    name = hashlib.sha256(text.encode()).hexdigest()[:16]

    def write(file: Path) -> None:
        _once("cuda_on_cpu.h.gch", lambda header: _compile(header, *INSTRUMENTED, "-x", "c++-header", HEADER))
        code, kernel = file.with_suffix(".cc"), file.with_suffix(".o")
        code.write_text(text)
        _compile(kernel, *INSTRUMENTED, "-c", code)
        _compile(file, "-shared", kernel, _machine())  # without the sanitizer: the machine has what it calls

    return _once(f"{name}.so", write)


class Emulated:
    """A kernel that runs on the CPU."""

    def __init__(self, source: str, plan: Mapping[str, Any]) -> None:
        self.plan = plan
        self._meets = "jax_qla_meet()" in source
        source = _with_barriers_in_memory(source)
        places = re.findall(r"void\* (\w+) = \(\(void\*\)\(\(char\*\)buf_dyn_shmem \+ (\d+)\)\);", source)
        self._buffers = [(name, int(begin)) for name, begin in places]
        self.library = ctypes.CDLL(str(_library(_translate(source, plan))))
        self._run = self.library.run
        self._run.restype = ctypes.c_char_p

    def __call__(
        self,
        arrays: Mapping[str, np.ndarray],
        scalars: Mapping[str, int | float],
        *,
        neighbours: int = 1,
        seed: int = 0,
        late: int = 30,
    ) -> None:
        """Runs all blocks; arrays that the kernel writes are changed. `neighbours`: launch.Step's."""
        step = launch.Step(self.plan["name"], None, scalars)
        shapes = {name: (x.shape, x.dtype.name) for name, x in arrays.items()}
        sizes = launch._bind(step, self.plan, shapes)

        def values(expressions: Any) -> list[int]:
            return [launch.evaluate(expression, sizes) for expression in expressions]

        words: list[int] = []
        for argument in self.plan["arguments"]:
            if argument["kind"] == "scalar":
                words.append(launch._scalar(argument["dtype"], argument["value"], sizes)[1])
                continue
            array = arrays[argument["operand"]]
            assert array.flags.c_contiguous
            words.append(array.ctypes.data)
            if argument["kind"] == "tensor_map":
                dims = values(argument["dims"])
                assert set(argument["element_strides"]) == {1}
                padded = [*dims, *[1] * (5 - len(dims))]
                words += [len(dims), array.dtype.itemsize, argument["swizzle"], *padded]
                for key, length in (("strides", len(dims) - 1), ("box", len(dims))):
                    found = values(argument[key])
                    assert len(found) == length
                    words += [*found, *[1] * (5 - length)]
        grid, block = values(self.plan["grid"]), values(self.plan["block"])
        if 0 in grid:
            return
        assert values(self.plan["cluster"]) == [1, 1, 1]
        assert launch.evaluate(self.plan["shared"], sizes) <= MEMORY
        blocks = neighbours if self._meets and grid[0] % neighbours == 0 else 1
        assert blocks == 1 or (blocks == 2 and block[0] % 128 == 0 and block[0] <= 512)
        packed = (ctypes.c_int64 * len(words))(*words)
        if failure := self._run(packed, *grid, block[0], blocks, seed, late):
            raise RuntimeError(f"{self.plan['name']}: {self._named(failure.decode())}")

    def _named(self, failure: str) -> str:
        """With the buffer's name for an address in shared memory."""
        found = re.search(r"shared memory at (\d+)", failure)
        if not found:
            return failure
        address = int(found[1]) % BLOCK
        name, begin = max((x for x in self._buffers if x[1] <= address), key=lambda x: x[1])
        return failure.replace(found[0], f"byte {address - begin} of {name}")


@functools.cache
def lowered(name: str, config: Any) -> tuple[str, dict[str, Any]]:
    """CUDA source and launch plan of a kernel of jax_qla.kernels, for each of which TileLang takes seconds."""

    def write(file: Path) -> None:
        module = importlib.import_module(f"jax_qla.kernels.{name}")
        file.write_text(json.dumps(lowering.lower_program(lambda: module.program(config), module.PASS_CONFIGS)))

    source, plan = json.loads(_once(f"{store.key(name, config)}.json", write).read_text())
    return source, plan


@functools.cache
def emulated(name: str, config: Any) -> Emulated:
    """A kernel of jax_qla.kernels."""
    return Emulated(*lowered(name, config))


def _with_barriers_in_memory(source: str) -> str:
    """With the mbarriers behind the other buffers, each block's in its memory."""
    end = MEMORY

    def placed(found: re.Match[str]) -> str:
        nonlocal end
        begin, end = end, end + 8 * int(found[2])
        return f"void* {found[1]} = ((void*)((char*)buf_dyn_shmem + {begin}));"

    source = re.sub(r"__shared__ __align__\(16\) uint64_t (\w+)\[(\d+)\];", placed, source)
    assert end <= BLOCK
    source = source.replace("extern __shared__ __align__(1024) uchar buf_dyn_shmem[];", "")
    # A buffer without others beside it.
    return re.sub(
        r"extern __shared__ __align__\(1024\) (\w+) (\w+)\[\];",
        r"auto* \2 = reinterpret_cast<\1*>(buf_dyn_shmem);",
        source,
    )


def _translate(source: str, plan: Mapping[str, Any]) -> str:
    text = re.sub(r"^\s*#\s*(include|pragma|if|ifdef|ifndef|else|endif|elif|define|undef).*$", "", source, flags=re.M)
    for name in INSTRUCTIONS:
        text = _without(text, name)
    text = re.sub(
        r'asm volatile\("ld\.global\.v2\.f32 [^"]*" : "=f"\((.*?)\), "=f"\((.*?)\) : "l"\((.*?)\) : "memory"\);',
        r"{ const float* p = \3; \1 = p[0]; \2 = p[1]; }",
        text,
    )
    text = re.sub(
        r'asm volatile\("st\.global\.v2\.f32 [^"]*" ::"l"\((.*?)\), "f"\((.*?)\), "f"\((.*?)\) : "memory"\);',
        r"{ float* p = \1; p[0] = \2; p[1] = \3; }",
        text,
    )
    if left := [line for line in text.splitlines() if "asm" in line and 'asm volatile("" :' not in line]:
        raise NotImplementedError(f"PTX that tests/cuda_on_cpu.h does not know: {left[0]}")
    signature = re.search(rf"\b{plan['name']}\(([^)]*)\)", text)
    assert signature
    parameters = [parameter.strip() for parameter in signature[1].split(",")]
    read = []
    for index, (parameter, argument) in enumerate(zip(parameters, plan["arguments"], strict=True)):
        kind = parameter.replace("__grid_constant__", "").replace("__restrict__", "").rsplit(None, 1)[0]
        if argument["kind"] == "pointer":
            read.append(f"  const auto x{index} = reinterpret_cast<{kind}>(*words++);")
        elif argument["kind"] == "scalar":
            read.append(f"  {kind} x{index}; std::memcpy(&x{index}, words++, sizeof x{index});")
        else:
            read.append(f"  CUtensorMap x{index}; std::memcpy(&x{index}, words, sizeof x{index});")
            read.append("  words += sizeof(CUtensorMap) / 8;")
    given = ", ".join(f"x{index}" for index in range(len(parameters)))
    run = (
        'extern "C" const char* run(',
        "    const int64_t* words, int x, int y, int z, int threads, int blocks, int seed, int late) {",
        *read,
        f"  const auto kernel = [&] {{ {plan['name']}({given}); }};",
        "  const auto call = [](const void* x) { (*static_cast<decltype(&kernel)>(x))(); };",
        "  return emulator::run(x, y, z, threads, blocks, seed, late, call, &kernel);",
        "}",
    )
    return "\n".join(['#include "cuda_on_cpu.h"', text, *run, ""])


def _without(text: str, name: str) -> str:
    """Without a function's definition."""
    found = re.search(r"(template <[^>]*>\n)?__device__ __forceinline__ [^\n(]*\b" + name + r"\(", text)
    if not found:
        return text
    end = text.index("{", found.end())
    depth = 1
    while depth:
        end += 1
        depth += {"{": 1, "}": -1}.get(text[end], 0)
    return text[: found.start()] + text[end + 1 :]
