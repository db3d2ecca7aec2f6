"""That no tile is overwritten while it is read, by the kernels' machine code: what ptxas orders, no other test sees."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import emulator
import machine_code
import pytest
from thorough import few, only_thorough

from jax_qla import store
from jax_qla.kernels import backward, lowering, toolchain
from jax_qla.kernels.packaged import PACKAGED

pytestmark = [
    pytest.mark.skipif(store.why_not_buildable() is not None, reason=str(store.why_not_buildable())),
    pytest.mark.skipif(machine_code.disassembler() is None, reason="nvidia-cuda-nvdisasm is not installed"),
]

SMALL = """
extern "C" __global__ void small(const int* x, int* y, int turns) {
  __shared__ int tile[256];
  __shared__ unsigned long long barrier;
  const unsigned at = __cvta_generic_to_shared(tile + threadIdx.x), full = __cvta_generic_to_shared(&barrier);
  for (int turn = 0; turn < turns; ++turn) {
    int a, b = 0;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(a) : "r"(at) : "memory");
    BEFORE
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(full) : "memory");
    y[turn * 128 + threadIdx.x] = a + b;
  }
}
"""


def _small(before: str) -> tuple[str, list[machine_code.Instruction]]:
    source = SMALL.replace("BEFORE", before)
    cubin, _ = toolchain.compile_cubin(source, lowering.headers(), lines=True)
    return source, machine_code.functions(cubin)["small"]


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ("", True),
        ("if (x[turn] > 3) b = x[turn + 1];", True),
        ("__syncwarp();", True),
        ('asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', False),
        ('asm volatile("st.shared.u32 [%0], %1;" ::"r"(at + 512), "r"(a) : "memory");', False),
    ],
    ids=["nothing", "a branch", "a meeting", "a fence", "used"],
)
def test_loads_under_way(before: str, found: bool) -> None:
    source, code = _small(before)
    assert any(instruction.arrives for instruction in code)
    under_way = machine_code.under_way(code)
    assert bool(under_way) is found
    lines = source.splitlines()
    for arrival, loads in under_way.items():
        assert "mbarrier.arrive" in lines[arrival.lines[-1] - 1]
        assert all("ld.shared" in lines[load.lines[-1] - 1] for load in loads)


@pytest.mark.parametrize("nobody_writes", [True, False])
def test_loads_of_what_nobody_writes(nobody_writes: bool) -> None:
    source = SMALL.replace("BEFORE", "b = x[turn];")
    if nobody_writes:
        source = source.replace("const int* x, int* y", "const int* __restrict__ x, int* __restrict__ y")
    cubin, _ = toolchain.compile_cubin(source, lowering.headers())
    code = machine_code.functions(cubin)["small"]
    assert any(instruction.loads_what_nobody_writes for instruction in code) == nobody_writes


NO_BOARD = 7


def _printed(operation: str, *, writes: int = NO_BOARD, waits: int = 0) -> list[str]:
    upper = writes << 46 | waits << 52
    return [f"        /*0000*/                   {operation} ;   /* 0x{0:016x} */", f"        /* 0x{upper:016x} */"]


@pytest.mark.parametrize("branch", ["BRA.DIV UR4, `(.L_x_0)", "@P0 BRA `(.L_x_0)", "BRA !P1, `(.L_x_0)"])
def test_ways_past_a_branch(branch: str) -> None:
    """Where a branch is taken the load is waited for, where it is not it may be under way."""
    text = [
        *_printed("LDS R0, [R1]", writes=2),
        *_printed(branch),
        ".L_x_1:",
        *_printed("SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ"),
        *_printed("EXIT"),
        ".L_x_0:",
        *_printed("NOP", waits=1 << 2),
        *_printed("BRA `(.L_x_1)"),
    ]
    ((arrival, loads),) = machine_code.under_way(machine_code.function(text)).items()
    assert (arrival.operation.split()[0], [load.operation for load in loads]) == (
        "SYNCS.ARRIVE.TRANS64.A1T0",
        ["LDS R0, [R1]"],
    )
    always = [line.replace(branch, "BRA `(.L_x_0)") for line in text]
    assert not machine_code.under_way(machine_code.function(always))


_LOAD = re.compile(r"(?:tl::tma_load\w*|jax_qla_fetch_inverse)(?:<[^>]*>)?\(.*?\(&\(\(\(\w+\*\)(\w+)\)")


def _awaited(source: str) -> set[tuple[str, str]]:
    """Of a kernel's CUDA source, barriers and the tiles that TMA overwrites once they are passed."""
    found, barrier = set(), None
    for line in source.splitlines():
        if "} else" in line:  # other warps, or another way
            barrier = None
        if match := re.search(r"(\w+)\[[^;]*\]\.wait\(", line):
            barrier = match[1]
        if barrier and (match := _LOAD.search(line)):
            found.add((barrier, match[1]))
    return found


def test_what_is_awaited() -> None:
    own = {(f"{name}_free", f"{name}_s") for name in ("do", "vd", "h", "a")}
    source, _ = emulator.lowered("backward", backward.Config())
    assert _awaited(source) == {*own, ("keys_free", "q_s"), ("keys_free", "k_s")}


def _forms() -> list[Any]:
    """Of every kernel a few configurations that have every value of every field between them."""
    configs: dict[str, list[Any]] = {}
    for name, config in PACKAGED:
        configs.setdefault(name, []).append(config)
    return [
        pytest.param(name, of_kernel[n], id=f"{name}-{n}")
        for name, of_kernel in configs.items()
        for n in few([dataclasses.asdict(config) for config in of_kernel])
    ]


@only_thorough
@pytest.mark.parametrize(("name", "config"), _forms())
def test_no_tile_is_read_when_it_is_free(name: str, config: Any) -> None:
    """A warp that arrives at the barrier behind which TMA overwrites a tile has what it loads of it. (What warps of its
    block store goes through the queue that the loads are in, and so comes later; not so what another block stores.)
    Nor does a kernel that may begin before the one before it has ended take what that writes for what nobody does."""
    source, _ = emulator.lowered(name, config)
    cubin, _ = toolchain.compile_cubin(source, lowering.headers(), lines=True)
    lines, awaited = source.splitlines(), _awaited(source)
    if getattr(config, "halve_long", False):
        awaited.remove(("free", "v_s"))  # the warpgroup whose half another block computes uses no V
    for code in machine_code.functions(cubin).values():
        assert any(instruction.arrives for instruction in code) == (".arrive()" in source)
        if any(instruction.waits_for_the_kernel_before for instruction in code):
            assert not any(instruction.loads_what_nobody_writes for instruction in code)
        for arrival, loads in machine_code.under_way(code).items():
            barrier = re.search(r"(\w+)\[[^;]*\]\.(arrive|expect_transaction)\(", lines[arrival.lines[-1] - 1])
            assert barrier, lines[arrival.lines[-1] - 1]  # at another block's, what is under way may be lost
            for load in loads:
                tiles = re.findall(r"\(\(\w+\*\)(\w+)\)", lines[load.lines[-1] - 1])
                assert tiles, lines[load.lines[-1] - 1]
                assert not [tile for tile in tiles if (barrier[1], tile) in awaited], (barrier[0], tiles, load)
