"""Configuration of Sphinx; `make docs` builds docs/ into build/docs."""

from __future__ import annotations

import re
from typing import Any

import jax_qla

project = "jax_qla"
author = "the jax_qla authors"
version = release = jax_qla.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"jax_qla {release}"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_use_ivar = True
napoleon_custom_sections = ["Result"]
# Pages link to files of the repository, which are not part of the documentation.
suppress_warnings = ["myst.xref_missing"]


_SECTIONS = ("Args:", "Returns:", "Raises:", "Example:")


def _restructure(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Makes reStructuredText of what the docstrings of jax_qla have beside Google's sections.

    Code stands between single backticks, formulas are indented before the first section, and results that have names
    are listed as arguments are.
    """
    text: list[str] = []
    section = ""
    for number, line in enumerate(lines):
        section = line if line in _SECTIONS else section
        if not section and line.startswith("    ") and number and not lines[number - 1]:
            text += ["::", ""]
        if section == "Returns:":
            line = re.sub(r"^    (?=\S)", "    * ", line) if _names_results(lines) else line
            line = "Result:" if line == "Returns:" else line
            # Under a bullet, what continues it is indented by the bullet's width.
            line = re.sub(r"^        (?=\S)", "      ", line)
        text.append(line)
    joined = re.sub(r"`([^`]+)`(\w?)", lambda m: f"``{m[1]}``" + (f"\\ {m[2]}" if m[2] else ""), "\n".join(text))
    lines[:] = joined.replace("|", "\\|").splitlines()
    if what in ("attribute", "property"):
        lines.insert(0, "\\")  # nothing; of the first line napoleon takes for the type what precedes a colon


def _names_results(lines: list[str]) -> bool:
    """Whether the section after Returns: lists names with descriptions."""
    first = lines[lines.index("Returns:") + 1]
    return re.match(r"    [a-z_, ]+: ", first) is not None


def setup(app: Any) -> None:
    # Before napoleon, which rewrites the sections.
    app.connect("autodoc-process-docstring", _restructure, priority=100)
