"""Says whether wheels are what is to be published: what they hold, what they need, for which machines, how large.

    python tests/wheel/contents.py dist/*.whl

Prints the list of each wheel's files and its size; exits with 1 and the reasons if anything is not as it must be. What
the wheel holds is compared with this working tree.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

from jax_qla import store
from jax_qla.kernels.packaged import PACKAGED

LARGEST = 25 * 2**20
NEEDED = {"jax", "jaxlib", "numpy"}
TREE = Path(__file__).parents[2]
CUBIN = re.compile(r"jax_qla/cubins/([0-9a-f]{64})\.cubin")
# One wheel for each kind of extension: without the stable ABI for 3.11, with it from 3.12 on.
NAME = re.compile(r"jax_qla-[^-]+-(cp311-cp311|cp312-abi3)-manylinux_2_\d+_x86_64(\.manylinux\w+)?\.whl")


def faults(path: Path) -> Iterator[str]:
    """What is wrong with a wheel, as sentences."""
    if not NAME.fullmatch(path.name):
        yield "its name is not that of a manylinux wheel for 3.11 or for the stable ABI of 3.12"
    if path.stat().st_size >= LARGEST:
        yield f"it has {path.stat().st_size} bytes, at most {LARGEST} are allowed"
    with zipfile.ZipFile(path) as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/")}
    (info,) = {name.split("/")[0] for name in files if name.split("/")[0].endswith(".dist-info")}
    yield from _record_faults(files, f"{info}/RECORD")
    yield from _metadata_faults(files[f"{info}/METADATA"].decode())
    yield from _source_faults(files)
    yield from _kernel_faults(files)


def _record_faults(files: dict[str, bytes], record: str) -> Iterator[str]:
    listed = {row[0]: row[1] for row in csv.reader(files[record].decode().splitlines())}
    if set(listed) != set(files):
        yield f"RECORD and the files differ by {sorted(set(listed) ^ set(files))}"
    for name, digest in listed.items():
        found = base64.urlsafe_b64encode(hashlib.sha256(files.get(name, b"")).digest()).decode().rstrip("=")
        if name != record and digest != f"sha256={found}":
            yield f"RECORD has another sha256 of {name}"


def _metadata_faults(metadata: str) -> Iterator[str]:
    requirements = HeaderParser().parsestr(metadata).get_all("Requires-Dist") or []
    always = {re.split(r"[^\w-]", text)[0] for text in requirements if "extra ==" not in text}
    if always != NEEDED:
        yield f"it needs {sorted(always)}, not {sorted(NEEDED)}"


def _source_faults(files: dict[str, bytes]) -> Iterator[str]:
    """The sources are this tree's, and nothing but them, the extension and the kernels is there."""
    package = {name for name in files if ".dist-info/" not in name}
    tree = {str(file.relative_to(TREE)) for file in (TREE / "jax_qla").rglob("*") if file.suffix in (".py", ".pyi")}
    tree.add("jax_qla/py.typed")
    kernels = {name for name in package if name.startswith("jax_qla/cubins/")}
    extensions = {name for name in package if re.fullmatch(r"jax_qla/_ffi\.[\w.-]*so", name)}
    if len(extensions) != 1:
        yield f"it has the extensions {sorted(extensions)}, not one"
    if missing := sorted(tree - package):
        yield f"it lacks {missing}"
    if other := sorted(package - tree - kernels - extensions):
        yield f"it has {other}, which do not belong there"
    for name in sorted(tree & package):
        if files[name] != (TREE / name).read_bytes():
            yield f"{name} is not that of the working tree"


def _kernel_faults(files: dict[str, bytes]) -> Iterator[str]:
    """All kernels of these sources are there, each under its sha256, and the extension vouches for their manifest."""
    manifest = files.get("jax_qla/cubins/manifest.json")
    if manifest is None:
        yield "it has no kernels: run `make kernels` first"
        return
    entries = json.loads(manifest)["kernels"]
    wanted = {store.key(name, config) for name, config in PACKAGED}
    if set(entries) != wanted:
        missing, old = len(wanted - set(entries)), len(set(entries) - wanted)
        yield f"{missing} of {len(wanted)} kernels are missing and {old} are of older sources: run `make kernels` first"
    if len(compilers := {json.dumps(entry["versions"], sort_keys=True) for entry in entries.values()}) > 1:
        yield f"its kernels were compiled by different compilers: {sorted(compilers)}"
    digests = {entry["sha256"] for entry in entries.values()}
    cubins = {match[1]: files[match[0]] for name in files if (match := CUBIN.fullmatch(name))}
    if set(cubins) != digests:
        yield f"manifest and cubins differ by {len(set(cubins) ^ digests)} files"
    wrong = [digest for digest, content in cubins.items() if hashlib.sha256(content).hexdigest() != digest]
    if wrong:
        yield f"the cubins {wrong} do not have the sha256 of their names"
    folder = {name for name in files if name.startswith("jax_qla/cubins/")} - {"jax_qla/cubins/manifest.json"}
    if strange := sorted(name for name in folder if not CUBIN.fullmatch(name)):
        yield f"it has {strange} among the cubins"
    vouched = hashlib.sha256(manifest).hexdigest().encode()
    if not any(vouched in content for name, content in files.items() if name.endswith(".so")):
        yield "its extension does not vouch for its manifest"


def main() -> int:
    wheels = [Path(argument) for argument in sys.argv[1:]]
    if not wheels:
        print("name the wheels to look at", file=sys.stderr)
        return 2
    wrong = 0
    for path in wheels:
        with zipfile.ZipFile(path) as wheel:
            for file in sorted(wheel.infolist(), key=lambda file: file.filename):
                print(f"{file.file_size:>9} {file.filename}")
            unpacked, count = sum(file.file_size for file in wheel.infolist()), len(wheel.infolist())
        print(f"{path.name}: {count} files, {path.stat().st_size} bytes, {unpacked} unpacked")
        for fault in faults(path):
            wrong += 1
            print(f"{path.name}: {fault}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
