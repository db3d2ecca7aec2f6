"""Plots of a comparison: bars, row by row, and device time over the tokens of one sequence.

python benchmarks/plots.py runs/comparison/comparison.json docs      # of an earlier one, into a folder
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

from report import Report
from rows import Row

COLUMNS = 4
"""Panels side by side."""


def draw(report: Report, folder: Path) -> None:
    """Writes comparison.png and, where rows differ in the tokens of one sequence alone, comparison_over_tokens.png."""
    folder.mkdir(parents=True, exist_ok=True)
    bars(report, folder / "comparison.png")
    if panels := panels_of(report):
        over_tokens(report, panels, folder / "comparison_over_tokens.png")


def bars(report: Report, path: Path) -> None:
    """Bars of device time over the limit, row by row; lower is better, 1 is the limit."""
    pyplot = _pyplot()
    rows = list(report.rows)
    width = 0.8 / len(report.libraries)
    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.55 * len(rows) + 2), 5), layout="constrained")
    for i, (name, version) in enumerate(report.libraries.items()):
        at = [x for x, row in enumerate(rows) if name in report.rows[row]]
        times = [report.rows[rows[x]][name].device for x in at]
        heights = [time / rows[x].limit for x, time in zip(at, times, strict=True)]
        positions = [x + (i - (len(report.libraries) - 1) / 2) * width for x in at]
        drawn = axes.bar(positions, heights, width, label=f"{name} {version}")
        axes.bar_label(drawn, [f"{time:.3f}" for time in times], rotation=90, padding=2, fontsize=7)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--", label="limit of the card")
    if any(report.rows.values()):
        axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set_xticks(range(len(rows)), [row.name.replace("/", "\n") for row in rows], fontsize=7)
    axes.set_ylabel("device time / limit (labels: ms)")
    axes.set_title(f"Gated delta rule {_where(report)}: less is better")
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def panels_of(report: Report) -> dict[str, list[Row]]:
    """Rows of one sequence that differ in its tokens alone, two or more, by what they have in common."""

    def common(row: Row) -> tuple[Any, ...]:
        return row.direction != "forward", row.key_heads, row.value_heads

    single = sorted((row for row in report.rows if row.sequences == 1), key=lambda row: (*common(row), row.tokens))
    groups = [list(rows) for _, rows in itertools.groupby(single, common)]
    return {f"{x[0].direction}, Hk {x[0].key_heads}, Hv {x[0].value_heads}": x for x in groups if len(x) > 1}


def over_tokens(report: Report, panels: dict[str, list[Row]], path: Path) -> None:
    """Device time over tokens, both logarithmic, in a panel each; the dashed line is the limit."""
    pyplot = _pyplot()
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    size = (3.4 * columns, 3.0 * lines + 0.6)
    figure, grid = pyplot.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, rows) in zip(grid.flat, panels.items(), strict=False):
        for name, version in report.libraries.items():
            timed = [row for row in rows if name in report.rows[row]]
            times = [report.rows[row][name].device for row in timed]
            axes.loglog([row.tokens for row in timed], times, marker="o", label=f"{name} {version}")
        tokens = [row.tokens for row in rows]
        axes.loglog(tokens, [row.limit for row in rows], "k--", linewidth=0.8, label="limit of the card")
        axes.set_xticks(tokens, [str(n) for n in tokens], fontsize=7)
        axes.tick_params(axis="y", labelsize=7)
        axes.minorticks_off()
        axes.set_title(title, fontsize=9)
    grid[0, 0].legend(fontsize=7)
    figure.supxlabel("tokens of one sequence", fontsize=9)
    figure.supylabel("device time, ms", fontsize=9)
    figure.suptitle(f"Gated delta rule {_where(report)}", fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _where(report: Report) -> str:
    about = [f"{name} {report.environment[name]}" for name in ("jax", "date") if name in report.environment]
    return f"on {report.environment.get('device', 'this device')} ({', '.join(about)})"


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    draw(Report.read(Path(sys.argv[1])), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
