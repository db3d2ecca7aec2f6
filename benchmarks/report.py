"""What a comparison found: as data (JSON), as a table (Markdown) and as a plot.

python benchmarks/report.py runs/comparison/comparison.json docs/comparison.png      # the plot of an earlier one
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
from measurement import Measurement
from rows import Row

OURS = "jax_qla"


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
        (directory / "comparison.md").write_text("\n".join(lines) + "\n")

    def table(self) -> list[str]:
        """The Markdown table, line by line."""
        header = ["pass", "Hk,Hv", "sequences", "limit", *self.libraries]
        header += ["limit reached", "of the best peer", "difference", "temporary memory"]
        lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        return lines + ["| " + " | ".join(self._cells(row)) + " |" for row in self.rows]

    def line(self, row: Row) -> str:
        """One row for reading along: name, then what `table` has for it."""
        _, _, _, limit, *times = self._cells(row)[: 4 + len(self.libraries)]
        reached, ratio, difference, memory = self._cells(row)[4 + len(self.libraries) :]
        timed = "  ".join(f"{name} {time}" for name, time in zip(self.libraries, times, strict=True))
        return (
            f"{row.name:24s} limit {limit}  {timed}  reached {reached}  of the best peer {ratio}  "
            f"difference {difference}  memory {memory}"
        )

    def plot(self, path: Path) -> None:
        """Bars of device time over the limit, row by row; lower is better, 1 is the limit."""
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot

        rows = list(self.rows)
        width = 0.8 / len(self.libraries)
        figure, axes = pyplot.subplots(figsize=(max(6.0, 0.55 * len(rows) + 2), 5), layout="constrained")
        for i, (name, version) in enumerate(self.libraries.items()):
            at = [x for x, row in enumerate(rows) if name in self.rows[row]]
            times = [self.rows[rows[x]][name].device for x in at]
            heights = [time / rows[x].limit for x, time in zip(at, times, strict=True)]
            positions = [x + (i - (len(self.libraries) - 1) / 2) * width for x in at]
            bars = axes.bar(positions, heights, width, label=f"{name} {version}")
            axes.bar_label(bars, [f"{time:.3f}" for time in times], rotation=90, padding=2, fontsize=7)
        axes.axhline(1, color="black", linewidth=0.8, linestyle="--", label="limit of the card")
        if any(self.rows.values()):
            axes.set_yscale("log")
        axes.margins(y=0.15)
        axes.set_xticks(range(len(rows)), [row.name.replace("/", "\n") for row in rows], fontsize=7)
        axes.set_ylabel("device time / limit (labels: ms)")
        about = [f"{name} {self.environment[name]}" for name in ("jax", "date") if name in self.environment]
        device = self.environment.get("device", "this device")
        axes.set_title(f"Gated delta rule on {device}: less is better ({', '.join(about)})")
        axes.legend()
        figure.savefig(path, dpi=150)
        pyplot.close(figure)

    def _cells(self, row: Row) -> list[str]:
        found = self.rows[row]
        cells = [row.direction, f"{row.key_heads},{row.value_heads}", row.batch]
        cells.append(f"{row.limit:.3f}")
        for name in self.libraries:
            cells.append(f"{found[name].device:.3f} / {found[name].call:.3f}" if name in found else "-")
        ours = found.get(OURS)
        peers = {name: x for name, x in found.items() if not name.startswith(OURS)}
        cells.append(f"{row.limit / ours.device:.0%}" if ours else "-")
        best = min((x.device for x in peers.values()), default=None)
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


def _difference(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.linalg.norm(x - y) / max(float(np.linalg.norm(y)), 1e-30))


def _memory(memory: Mapping[str, int]) -> str:
    share = memory["temporary"] / (memory["arguments"] + memory["results"])
    return f"{memory['temporary'] / 2**20:.0f} MiB, {share:.2f} of operands and results"


def joined(names: Sequence[str]) -> str:
    """Names for a message."""
    return ", ".join(names) or "none"


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    Report.read(Path(sys.argv[1])).plot(Path(sys.argv[2]))


if __name__ == "__main__":
    main()
