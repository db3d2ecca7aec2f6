"""The documentation does what it says: its Python runs, and it names what there is."""

from __future__ import annotations

import builtins
import inspect
import re
import runpy
from pathlib import Path
from types import ModuleType

import pytest

import jax_qla.nn
from jax_qla.residuals import Between

sybil = pytest.importorskip("sybil", reason="needs the test extra")
pytest.importorskip("flax", reason="the pages use the flax extra")
pytest.importorskip("equinox", reason="the pages use the equinox extra")
pytest.importorskip("transformers", reason="the pages use the test extra")

from sybil.parsers.markdown import PythonCodeBlockParser

import jax_qla.nn.equinox
import jax_qla.nn.flax

ROOT = Path(__file__).resolve().parents[1]
PAGES = {str(page.relative_to(ROOT)): page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {
    "README.md": {"python", "sh", ""},
    "docs/getting_started.md": {"python", "sh"},
    "docs/porting.md": {"python"},
}
RUN_ELSEWHERE = {"docs/sharding.md": {"python", "sh", ""}}  # tests/test_sharding_behaviour.py
FOLDERS = ("jax_qla", "ffi", "examples", "tests", "benchmarks", "docs")
FILE = re.compile(r"\b[\w-]+\.(?:py|md|h|cc|cu|cpp|png)\b")
WORD = re.compile(r"\w+")
NOT_HERE = {"NAME.py", "TARGETS.md"}
"""Files that pages name and that are not here: one that the reader adds, and one that is said not to be here."""


@pytest.mark.parametrize("name", LANGUAGES)
def test_python_of_the_page_runs(name: str) -> None:
    document = sybil.Sybil([PythonCodeBlockParser()], path=str(ROOT)).parse(PAGES[name])
    examples = list(document.examples())
    assert len(examples) == sum(language == "python" for language, _ in FENCED.findall(PAGES[name].read_text()))
    assert examples
    for example in examples:
        example.evaluate()


@pytest.mark.parametrize("name", PAGES)
def test_blocks_are_of_known_languages(name: str) -> None:
    """A block in a language that no test runs or checks would be a block that nobody has tried."""
    languages = {language for language, _ in FENCED.findall(PAGES[name].read_text())}
    assert languages <= (LANGUAGES | RUN_ELSEWHERE).get(name, {"", "sh"})


@pytest.mark.parametrize("name", PAGES)
def test_shell_commands_name_what_there_is(name: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    for language, block in FENCED.findall(PAGES[name].read_text()):
        if language != "sh":
            continue
        commands = [line.partition("#")[0] for line in block.splitlines()]
        for command in commands:
            for target in re.findall(r"^make ([\w-]+)", command):
                assert target in targets, command
            for script in re.findall(r"python ([\w/]+\.py)", command):
                assert (ROOT / script).is_file(), command
            for chosen in re.findall(r"\.\[([\w,]+)\]", command):
                for extra in chosen.split(","):
                    assert re.search(rf"^{extra} = ", extras, re.MULTILINE), command


def test_bytes_that_are_kept_of_a_cut() -> None:
    said = r"keeps (\d+) KiB a cut .* (\d+) to (\d+) bytes a token and value head with pieces of (\d+) to (\d+)"
    found = re.search(said, PAGES["docs/getting_started.md"].read_text())
    assert found
    kib, least, most, longest, shortest = map(int, found.groups())
    kept = sum(x.size * x.dtype.itemsize for x in Between.shapes(1, 1, 128, 128).values())
    assert (kib, least, most) == (kept // 2**10, kept // longest, kept // shortest)


@pytest.mark.parametrize("name", [*PAGES, "CONTRIBUTING.md", "SECURITY.md"])
def test_pages_name_what_there_is(name: str) -> None:
    """Files, whatever folder is said, the targets of links, tests, and constants with more than one word."""
    page = (ROOT / name).read_text()
    files = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix)]
    assert {*FILE.findall(page)} - {path.name for path in files} <= NOT_HERE
    for target in re.findall(r"\]\(([^)#:]+)\)", page):
        assert (ROOT / name).parent.joinpath(target).exists(), target
    words = {word for path in files if path.suffix in (".py", ".h", ".cc") for word in WORD.findall(path.read_text())}
    words |= {path.stem for path in files} | {*WORD.findall((ROOT / "Makefile").read_text())}
    assert {*re.findall(r"\btest_\w+", page), *re.findall(r"`\$?([A-Z]+_[A-Z_]+)\b", page)} <= words


def test_the_reference_has_all_that_is_public() -> None:
    page = (ROOT / "docs" / "api.rst").read_text()
    public = [f"{module.__name__}.{name}" for module in (jax_qla, jax_qla.nn) for name in module.__all__]
    assert [name for name in public if not re.search(rf"{re.escape(name)}$", page, re.MULTILINE)] == []


@pytest.mark.parametrize("module", [jax_qla, jax_qla.nn, jax_qla.nn.flax, jax_qla.nn.equinox], ids=lambda x: x.__name__)
def test_docstrings_say_of_each_argument_and_error_by_name(module: ModuleType) -> None:
    """Sphinx takes any other sentence there for a name, and B. for the second of a list."""
    for name in module.__all__:
        thing = getattr(module, name)
        methods = [x for key, x in vars(thing).items() if key[0] != "_"] if inspect.isclass(thing) else []
        for function in filter(callable, [thing, *methods]):
            of = function.__init__ if inspect.isclass(function) else function
            known = {*inspect.signature(of).parameters, "others"}
            for section, names in (("Args", known), ("Raises", {*vars(builtins)})):
                text = (inspect.getdoc(function) or "").partition(f"\n{section}:\n")[2].partition("\n\n")[0]
                entries = re.findall(r"^    (?! )(.*)", text, re.MULTILINE)
                assert {x for entry in entries for x in entry.partition(": ")[0].split(", ")} <= names, name
                assert not [entry for entry in entries if not re.search(r": (?![A-Z]\.).+", entry)], name


def test_the_reference_has_what_precedes_a_colon_in_its_place() -> None:
    napoleon = pytest.importorskip("sphinx.ext.napoleon", reason="needs the docs extra")
    restructure = runpy.run_path(str(ROOT / "docs" / "conf.py"))["_restructure"]
    lines = ["[B, T] in the layer's dtype: the inputs."]
    restructure(None, "attribute", "x", None, None, lines)
    found = str(napoleon.GoogleDocstring(lines, napoleon.Config(), what="attribute", name="x"))
    assert "[B, T] in the layer's dtype: the inputs." in found
    assert ":type:" not in found
