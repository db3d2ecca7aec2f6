"""What ptxas has made of a kernel: its instructions, as nvdisasm prints them, and what they do not wait for.

An instruction that takes long names a scoreboard, one of six counters of its warp, that others wait for who need its
result. An arrival at an mbarrier needs none: it does not wait by itself for loads of shared memory that come before it.
So a tile that TMA overwrites once the arrival is known may still be read (measured: benchmarks/arrivals.cu).
"""

from __future__ import annotations

import collections
import importlib.metadata
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = "nvidia-cuda-nvdisasm"

_LINE = re.compile(
    r'\s*//## File "(?P<file>[^"]*)", line (?P<line>\d+)(?: inlined at "(?P<at>[^"]*)", line (?P<into>\d+))?'
)
_INSTRUCTION = re.compile(r"\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<text>.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/")
_UPPER_HALF = re.compile(r"\s*/\* 0x(?P<bits>[0-9a-f]{16}) \*/")
_LABEL = re.compile(r"(?P<name>\.L_[\w.]+):")
_PREDICATE = re.compile(r"@!?U?P\w+\s+")

_WRITES, _WAITS = 110 - 64, 116 - 64
"""Where, in the upper half of an instruction, the number of its scoreboard is (7: none), and which it waits for."""

SCOREBOARDS = 6


@dataclass(frozen=True)
class Instruction:
    """`operation` is its text without the predicate; `after`: the numbers of those that may come next; `lines`: the
    lines of the source that it is of, the innermost function's first."""

    address: int
    operation: str
    writes: int
    waits: frozenset[int]
    lines: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def arrives(self) -> bool:
        """At an mbarrier."""
        return self.operation.startswith("SYNCS.ARRIVE")

    @property
    def loads(self) -> bool:
        """From shared memory, or what may be that."""
        return re.match(r"(LDS|LDSM|LD)\b", self.operation) is not None

    @property
    def waits_for_the_kernel_before(self) -> bool:
        return self.operation.startswith("ACQBULK")

    @property
    def loads_what_nobody_writes(self) -> bool:
        """From global memory, where by the source nobody writes while the kernel runs: the compiler may have such a
        load come before a wait for another kernel, and the first-level cache may have what was there before that."""
        return self.operation.startswith("LDG") and ".CONSTANT" in self.operation


def disassembler() -> Path | None:
    """nvdisasm, or None where its package is not installed."""
    try:
        files = importlib.metadata.files(_PACKAGE) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == "nvdisasm"), None)


def functions(cubin: bytes, source: str = "kernel.cu") -> dict[str, list[Instruction]]:
    """The instructions of a cubin's functions, by the functions' names; `source` ends the path of the file whose lines
    they are to be of, if the cubin knows them."""
    nvdisasm = disassembler()
    assert nvdisasm is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(nvdisasm), "--print-code", "--print-instruction-encoding", "--print-line-info-inline", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, list[Instruction]] = {}
    for part in re.split(r"^\.text\.", text, flags=re.MULTILINE)[1:]:
        name, _, body = part.partition(":\n")
        found[name] = function(body.splitlines(), source)
    return found


def function(text: Sequence[str], source: str = "kernel.cu") -> list[Instruction]:
    """The instructions of one, from what nvdisasm prints of it."""
    labels: dict[str, int] = {}
    read: list[tuple[int, str, tuple[int, ...]]] = []
    bits: list[int] = []
    lines: list[int] = []
    begins = True  # with the next line of the source, what is said of another instruction
    for line in text:
        if match := _LINE.match(line):
            if begins:
                lines, begins = [], False
            named = [(match["file"], match["line"]), (match["at"] or "", match["into"])]
            lines += [int(number) for file, number in named if file.endswith(source) and int(number) not in lines]
        elif match := _LABEL.match(line):
            labels[match["name"]] = len(read)
        elif match := _INSTRUCTION.match(line):
            read.append((int(match["address"], 16), match["text"], tuple(lines)))
            begins = True
        elif len(bits) < len(read) and (match := _UPPER_HALF.match(line)):
            bits.append(int(match["bits"], 16))
    assert len(bits) == len(read)
    return [_instruction(number, *read[number], bits[number], labels, len(read)) for number in range(len(read))]


def _instruction(
    number: int, address: int, text: str, lines: tuple[int, ...], bits: int, labels: Mapping[str, int], count: int
) -> Instruction:
    operation = _PREDICATE.sub("", text, count=1)
    conditional = operation != text
    name, *_ = operation.split()
    target = re.search(r"`\((\.L_[\w.]+)\)", operation)
    after = [number + 1]
    if name.startswith(("EXIT", "RET")) and not conditional:
        after = []
    if name.startswith("BRA"):
        assert target, operation
        # Some have their condition among the operands, of which the target is the only one else.
        stays = conditional or not operation.startswith(f"{name} `")
        after = [*after, labels[target[1]]] if stays else [labels[target[1]]]
    # CUDA's own functions, for divisions, neither load nor arrive, and return behind the call; nothing else jumps.
    assert not name.startswith(("BRX", "JM")), operation
    assert not name.startswith("CALL") or "$__cuda_sm" in operation, operation
    waits = frozenset(board for board in range(SCOREBOARDS) if bits >> _WAITS >> board & 1)
    writes, known = bits >> _WRITES & 7, tuple(place for place in after if place < count)
    return Instruction(address, operation, writes, waits, lines, known)


def under_way(code: Sequence[Instruction]) -> dict[Instruction, list[Instruction]]:
    """The loads of shared memory that may be under way when a warp arrives at an mbarrier, by the arrival: on some way
    there nothing has waited for them, nor was there a proxy fence, which waits for all."""
    Boards = tuple[frozenset[int], ...]
    nothing: Boards = (frozenset(),) * SCOREBOARDS
    before: dict[int, Boards] = {0: nothing}
    found: dict[int, frozenset[int]] = {}
    work = collections.deque([0])
    while work:
        number = work.popleft()
        instruction = code[number]
        boards = [frozenset() if n in instruction.waits else board for n, board in enumerate(before[number])]
        if match := re.match(r"DEPBAR\.LE SB(\d), 0x0\b", instruction.operation):
            boards[int(match[1])] = frozenset()
        if instruction.operation.startswith("FENCE.VIEW.ASYNC"):
            boards = list(nothing)
        if instruction.arrives:
            found[number] = frozenset().union(*boards)
        if instruction.loads and instruction.writes < SCOREBOARDS:
            boards[instruction.writes] |= {number}
        for place in instruction.after:
            joined = tuple(old | new for old, new in zip(before.get(place, nothing), boards, strict=True))
            if joined != before.get(place):
                before[place] = joined
                work.append(place)
    return {code[number]: [code[load] for load in sorted(loads)] for number, loads in sorted(found.items()) if loads}
