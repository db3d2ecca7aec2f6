"""What a comparison found, as data (JSON) and as tables (Markdown); benchmarks/plots.py draws it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
from measurement import Measurement
from rows import Row

OURS = "jax_qla"

NEAR, FULL = 2.5, 128
"""A row is full if its best peer takes at most so many times the limit (forward), or from so many heads times sequences
on (backward)."""
GOALS = {("forward", True): 0.95, ("forward", False): 0.8, ("backward", True): 0.7, ("backward", False): 0.5}
"""Of the best peer's time, by pass and whether the row is full: what jax_qla is to take at most."""
FULL_MOONSHOT, MOONSHOT, SHORTEST = 1.4, 2.0, 0.04
"""Of the limit, of full rows and of others, and milliseconds that the latter may take whatever their limit."""


@dataclass
class Report:
    """All that was found so far."""

    environment: Mapping[str, str]
    libraries: Mapping[str, str]
    """Versions by name."""
    rows: dict[Row, dict[str, Measurement]] = field(default_factory=dict)
    failures: dict[Row, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Report:
        """From comparison.json, which has times and memory, but not the samples that `differences` compares."""
        data = json.loads(path.read_text())
        report = cls(data["environment"], data["libraries"])
        for found in data["rows"]:
            row = Row(**{field.name: found[field.name] for field in fields(Row) if field.name in found})
            report.rows[row] = {name: Measurement(**x) for name, x in found["milliseconds"].items()}
            if found["failures"]:
                report.failures[row] = found["failures"]
        return report

    def write(self, directory: Path) -> None:
        """Writes comparison.json and comparison.md."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "comparison.json").write_text(json.dumps(self._data(), indent=1))
        lines = [f"- {name}: {value}" for name, value in self.environment.items()]
        lines += ["", "Milliseconds of one call: on the device / as a user sees it.", "", *self.table()]
        lines += ["", "What is missing of the goals, milliseconds on the device.", "", *self.goals()]
        (directory / "comparison.md").write_text("\n".join(lines) + "\n")

    def table(self) -> list[str]:
        """The Markdown table, line by line."""
        header = ["pass", "Hk,Hv", "sequences", "limit", *self.libraries]
        header += ["limit reached", "of the best peer", "difference", "temporary memory"]
        lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        return lines + ["| " + " | ".join(self._cells(row)) + " |" for row in self.rows]

    def goals(self) -> list[str]:
        """The Markdown table of what jax_qla takes of its goal and of its moonshot, which 1.00 or less reaches, and of
        the milliseconds that are missing."""
        header = ["pass", "Hk,Hv", "sequences", OURS, "goal", "of it", "missing", "moonshot", "of it", "missing"]
        lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        for row, found in self.rows.items():
            best = self._best_peer(row)
            if OURS not in found or best is None:
                continue
            ours = found[OURS].device
            cells = [row.direction, f"{row.key_heads},{row.value_heads}", row.batch, f"{ours:.3f}"]
            for aim in aims(row, best):
                cells += [f"{aim:.3f}", f"{ours / aim:.2f}", f"{ours - aim:.3f}" if ours > aim else ""]
            lines.append("| " + " | ".join(cells) + " |")
        return lines

    def line(self, row: Row) -> str:
        """One row for reading along: name, then what `table` has for it."""
        _, _, _, limit, *times = self._cells(row)[: 4 + len(self.libraries)]
        reached, ratio, difference, memory = self._cells(row)[4 + len(self.libraries) :]
        timed = "  ".join(f"{name} {time}" for name, time in zip(self.libraries, times, strict=True))
        return (
            f"{row.name:24s} limit {limit}  {timed}  reached {reached}  of the best peer {ratio}  "
            f"difference {difference}  memory {memory}"
        )

    def _best_peer(self, row: Row) -> float | None:
        """Milliseconds of the fastest other library."""
        return min((x.device for name, x in self.rows[row].items() if not name.startswith(OURS)), default=None)

    def _cells(self, row: Row) -> list[str]:
        found = self.rows[row]
        cells = [row.direction, f"{row.key_heads},{row.value_heads}", row.batch]
        cells.append(f"{row.limit:.3f}")
        for name in self.libraries:
            cells.append(f"{found[name].device:.3f} / {found[name].call:.3f}" if name in found else "-")
        ours = found.get(OURS)
        cells.append(f"{row.limit / ours.device:.0%}" if ours else "-")
        best = self._best_peer(row)
        cells.append(f"{ours.device / best:.2f}" if ours and best else "-")
        differences = self.differences(row)
        cells.append(f"{max(differences.values()):.1e}" if differences else "-")
        cells.append(_memory(ours.memory) if ours and ours.memory else "-")
        return cells

    def differences(self, row: Row) -> dict[str, float]:
        """Per result, the largest |x - y| / |y| over the other libraries x, y being the first one that ran."""
        if len(self.rows[row]) < 2:
            return {}
        first, *others = self.rows[row].values()
        return {name: max(_difference(x.samples[name], y) for x in others) for name, y in first.samples.items()}

    def _data(self) -> dict[str, object]:
        def data(row: Row) -> dict[str, object]:
            timed = {
                name: {key: value for key, value in asdict(x).items() if key != "samples"}
                for name, x in self.rows[row].items()
            }
            return {
                **asdict(row),
                "limit": row.limit,
                "milliseconds": timed,
                "differences": self.differences(row),
                "failures": self.failures.get(row, {}),
            }

        return {
            "environment": dict(self.environment),
            "libraries": dict(self.libraries),
            "rows": [data(row) for row in self.rows],
        }


def aims(row: Row, best: float) -> tuple[float, float]:
    """Goal and moonshot of a row whose fastest peer takes `best`; all are milliseconds."""
    heads = row.value_heads * row.sequences
    full = best <= NEAR * row.limit if row.direction == "forward" else heads >= FULL
    moonshot = FULL_MOONSHOT * row.limit if full else max(MOONSHOT * row.limit, SHORTEST)
    return GOALS[row.direction, full] * best, moonshot


def _difference(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.linalg.norm(x - y) / max(float(np.linalg.norm(y)), 1e-30))


def _memory(memory: Mapping[str, int]) -> str:
    return f"{memory['temporary'] / 2**20:.0f} MiB, {share_of_memory(memory):.2f} of operands and results"


def share_of_memory(memory: Mapping[str, int]) -> float:
    """Temporary memory over operands and results."""
    return memory["temporary"] / (memory["arguments"] + memory["results"])


def joined(names: Sequence[str]) -> str:
    """Names for a message."""
    return ", ".join(names) or "none"
