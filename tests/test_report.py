"""benchmarks/report.py and plots.py: what is said of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import plots
import pytest
import report
import rows
from measurement import Measurement


def compared(times: Mapping[str, Mapping[str, float]]) -> report.Report:
    """Of rows by name, milliseconds on the device by library."""
    libraries = dict.fromkeys((name for found in times.values() for name in found), "1.0")
    found = {rows.parse(name): x for name, x in times.items()}
    measured = {row: {name: Measurement(ms, 2 * ms) for name, ms in x.items()} for row, x in found.items()}
    return report.Report({"device": "a card"}, libraries, measured)


@pytest.mark.parametrize(
    ("name", "best", "goal", "moonshot"),
    [
        ("forward/16,32/4x8192", 0.4, 0.38, 1.4 * 0.2211),
        ("forward/16,64/1x8192", 0.36, 0.288, 2 * 0.1105),
        ("forward/2,8/8x1024", 0.05, 0.04, 0.04),
        ("backward/16,32/4x8192", 2.0, 1.4, 1.4 * 0.6533),
        ("backward/16,32/1x8192", 0.8, 0.4, 2 * 0.1633),
    ],
)
def test_goal_and_moonshot(name: str, best: float, goal: float, moonshot: float) -> None:
    assert report.aims(rows.parse(name), best) == pytest.approx((goal, moonshot), rel=1e-3)


def test_what_is_missing() -> None:
    """Beside the fastest peer; a row that no peer has says nothing, and another setting of jax_qla is no peer."""
    found = compared(
        {
            "forward/2,8/8x1024": {"jax_qla": 0.036, "slow": 0.09, "fast": 0.05},
            "forward/16,32/4x8192": {"jax_qla": 0.5, "jax_qla_saving": 0.1, "fast": 0.4},
            "forward/16,32/1x64": {"jax_qla": 0.5},
            "backward/16,32/1x64": {"fast": 0.5},
        }
    )
    assert found.goals()[2:] == [
        "| forward | 2,8 | 8x1024 | 0.036 | 0.040 | 0.90 |  | 0.040 | 0.90 |  |",
        "| forward | 16,32 | 4x8192 | 0.500 | 0.380 | 1.32 | 0.120 | 0.310 | 1.62 | 0.190 |",
    ]


def test_an_earlier_comparison(tmp_path: Path) -> None:
    found = compared({"forward/2,8/1x64": {"jax_qla": 0.02, "fast": 0.05}, "forward/2,8/3<=640": {"fast": 0.05}})
    found.write(tmp_path)
    again = report.Report.read(tmp_path / "comparison.json")
    assert list(again.rows) == list(found.rows)
    assert again.goals() == found.goals()
    assert "\n".join(found.goals()) in (tmp_path / "comparison.md").read_text()


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = {"jax_qla": 0.02, "fast": 0.05}
    found = compared(dict.fromkeys(("forward/2,8/1x64", "forward/2,8/2x64", "backward/2,8/1x128"), one))
    plots.draw(found, tmp_path / "alone")
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["comparison.png"]
    names = ("forward/2,8/1x640", "forward/2,8/1x64", "forward/1,8/1x64", "backward/2,8/1x64", "backward/2,8/1x128")
    found = compared({**dict.fromkeys(names, one), "forward/2,8/1x6400": {"jax_qla": 0.2}})
    tokens = {title: [row.tokens for row in x] for title, x in plots.panels_of(found).items()}
    assert tokens == {"forward, Hk 2, Hv 8": [64, 640, 6400], "backward, Hk 2, Hv 8": [64, 128]}
    plots.draw(found, tmp_path)
    assert (tmp_path / "comparison_over_tokens.png").read_bytes().startswith(b"\x89PNG")
