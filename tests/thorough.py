"""Cases that `make thorough` runs and `make test` leaves out: they alone find little, and take minutes."""

from __future__ import annotations

import os
from typing import Any

import pytest

THOROUGH = os.environ.get("JAX_QLA_THOROUGH") == "1"

only_thorough = pytest.mark.skipif(not THOROUGH, reason="`make thorough` runs it")


def rarely(*values: Any) -> Any:
    """A parameter, or several of one test, that only `make thorough` takes."""
    return pytest.param(*values, marks=only_thorough)
