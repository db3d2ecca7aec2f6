"""Times several checkouts of jax_qla in turn, on one card.

    python benchmarks/versions.py before=../before after=. --rows backward/16,32/1x8192 'forward/16,32/*'
    python benchmarks/versions.py a=. b=. --rows forward/1,2/1x64 --implementation xla --calls 1   # a CPU, to try it

NAME=FOLDER names a checkout, its extension and cubins in place. Each has a process of its own; they take turns, for a
card's clocks drift by more than what is looked for, every other round the other way round. What comes first after a
pause, while versions compile, is up to 10 % faster on a full card, and what comes next as much slower: it does not
count. Rows are those of benchmarks/compare.py. Prints device milliseconds
of every version (medians of the rounds), its time relative to the first one's (median of the rounds' ratios, and the
smallest and largest of them), and whether the numbers it samples of its results are the first one's bit for bit, and
if not, whether its operands were, which XLA makes in each process.

A full card is at its power limit a second after a pause, and its clock settles there. With --steady each turn begins
with 0.5 s of the version's own calls and times 0.7 s of them: a version is then within 1 % of itself, and the table has
its watts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from measurement import CALLS, SHORT_WARM_UP, STEADY_INTERVAL, STEADY_WARM_UP
from rows import Row, parse, select


class Version:
    """A checkout, in a process of its own."""

    def __init__(self, name: str, folder: Path, **options: Any) -> None:
        self.name = name
        command = [sys.executable, __file__, "--serve", str(folder), json.dumps(options)]
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )

    def ask(self, question: str) -> None:
        """Begins to answer: "begin ROW" (compiles it, and returns the bits of operands, and of sampled numbers), "time"
        (milliseconds) or "steady" (milliseconds and, where something counts them, watts)."""
        assert self._process.stdin
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """What was asked.

        Raises:
            RuntimeError: the version failed; it has said why.
        """
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} failed")
        return json.loads(line)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(folder: Path, **options: Any) -> None:
    """Answers what `Version.ask` asks, on the standard streams; `options` of `ours.JaxQla`."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # who prints meanwhile does not answer
    import inputs
    from ours import JaxQla
    from power import Meter

    import jax_qla

    if folder.resolve() not in Path(jax_qla.__file__).resolve().parents:
        sys.exit(f"jax_qla is imported from {jax_qla.__file__}, not from {folder}: is it installed as editable?")
    row: Row
    arguments: tuple[Any, ...] = ()
    for line in sys.stdin:
        question, _, name = line.strip().partition(" ")
        answer: Any
        if question == "begin":
            row, arguments = parse(name), ()
            library = JaxQla("", **options)
            library.prepare([row], memory=False)
            operands = inputs.make(row)
            arguments = library.arguments(row, operands)
            numbers = [x.tobytes().hex() for x in library.numbers(row, arguments)]
            answer = {"operands": inputs.fingerprint(operands), "numbers": numbers}
        elif question == "steady":
            library.device_time(row, arguments, STEADY_WARM_UP)
            meter = Meter()
            answer = [library.device_time(row, arguments, 0, STEADY_INTERVAL), meter.watts()]
        else:
            answer = library.device_time(row, arguments, SHORT_WARM_UP)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def measure(row: Row, versions: Sequence[Version], rounds: int, steady: bool = False) -> dict[str, Any]:
    """Milliseconds of each version, a list of rounds, if `steady` at a steady state and with watts, and which versions'
    operands, and numbers, are the first one's."""
    for version in versions:
        version.ask(f"begin {row.name}")  # all compile at once
    begun = {version.name: version.answer() for version in versions}
    times: dict[str, list[float]] = {version.name: [] for version in versions}
    watts: dict[str, list[float | None]] = {version.name: [] for version in versions}
    for turn in range(rounds + 1):
        for version in reversed(versions) if turn % 2 else versions:
            version.ask("steady" if steady else "time")
            milliseconds, power = version.answer() if steady else (version.answer(), None)
            if turn > 0:
                times[version.name].append(milliseconds)
                watts[version.name].append(power)
    first = begun[versions[0].name]
    same = {what: [name for name, x in begun.items() if x[what] == first[what]] for what in ("operands", "numbers")}
    return {"ms": times, "same": same} | ({"watts": watts} if steady else {})


def table(found: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """Rows of Markdown: milliseconds, watts if they were counted, ratios to the first version, their range; * where its
    numbers are others, and whether its operands are."""
    names = list(next(iter(found.values()))["ms"])
    yield "| row | " + " | ".join(names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for row, x in found.items():
        cells = []
        for name in names:
            times, first = x["ms"][name], x["ms"][names[0]]
            cell = f"{statistics.median(times):.4f}"
            if power := [watts for watts in x.get("watts", {}).get(name, ()) if watts is not None]:
                cell += f", {statistics.median(power):.0f} W"
            if name != names[0]:
                ratios = sorted(a / b for a, b in zip(times, first, strict=True))
                cell += f" = {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
                if name not in x["same"]["numbers"]:
                    cell += " *" if name in x["same"]["operands"] else " * (other operands)"
            cells.append(cell)
        yield f"| {row} | " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--rows", nargs="+", default=[], metavar="PATTERN", help="default: all rows of the table")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--implementation", default="cuda")
    parser.add_argument("--calls", type=int, default=CALLS, help="calls in one jitted function")
    saving = parser.add_mutually_exclusive_group()
    saving.add_argument("--saving", action="store_true", default=None, help="with save_chunk_states=True")
    saving.add_argument("--recomputing", action="store_false", dest="saving", help="with save_chunk_states=False")
    parser.add_argument("--differentiated", action="store_true", help="as in benchmarks/compare.py")
    parser.add_argument("--normalised", action="store_true", help="forward rows with use_qk_l2norm_in_kernel=True")
    parser.add_argument("--steady", action="store_true", help="turns of 1.2 s, and watts")
    parser.add_argument("--output", type=Path, default=Path("runs/versions"), metavar="DIR")
    options = parser.parse_args(arguments)
    pairs = [x.partition("=") for x in options.versions]
    for name, _, folder in pairs:
        if not (Path(folder) / "jax_qla" / "__init__.py").exists():
            parser.error(f"versions must be NAME=FOLDER with jax_qla in the folder, got {name}={folder}")
    try:
        rows = select(options.rows)
    except ValueError as error:
        parser.error(str(error))
    options.output.mkdir(parents=True, exist_ok=True)
    if options.normalised and (options.differentiated or options.saving is not None):
        parser.error("--normalised keeps nothing for a backward pass, so it goes without --saving and --differentiated")
    if options.normalised and any(row.direction != "forward" for row in rows):
        parser.error("--normalised is for forward rows")
    names = ("implementation", "calls", "saving", "differentiated", "normalised")
    of_all = {name: getattr(options, name) for name in names}
    versions = [Version(name, Path(folder), **of_all) for name, _, folder in pairs]
    found: dict[str, dict[str, Any]] = {}
    try:
        for row in rows:
            found[row.name] = measure(row, versions, options.rounds, options.steady)
            print([*table({row.name: found[row.name]})][-1], flush=True)
            (options.output / "versions.json").write_text(json.dumps(found, indent=1))
    finally:
        for version in versions:
            version.end()
    print("\n".join(table(found)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), **json.loads(sys.argv[3]))
    else:
        main()
