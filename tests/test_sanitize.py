"""tests/sanitize.py, which no test runs, begins where Python alone is told of it, and reads what the sanitizer says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("found", "code"), [("0 hazards", 0), ("1 hazard", 1)])
def test_what_the_sanitizer_finds(found: str, code: int, tmp_path: Path) -> None:
    """Of a sanitizer that computes nothing."""
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(f"#!/bin/sh\necho RACECHECK SUMMARY: {found}\n")
    sanitizer.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    script = Path(__file__).with_name("sanitize.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")
    assert f"short convolution: RACECHECK SUMMARY: {found}\n" in done.stdout
