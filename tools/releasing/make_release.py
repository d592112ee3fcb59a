"""Makes the files of a release in dist/: wheel, sdist, SBOM, pinned requirements and SHA256SUMS.

The same commit gives the same bytes with the same Python, zlib and hatchling, wherever it is built: the source is what
git has, and every time in the files is that of the commit.
Two builds, in two folders and with two umasks, have to agree before anything lies in dist/.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path("tools/docker/requirements.txt")
VERSION_FILE = Path("tools/deepseek_triton_tools/_version.py")
SUMS = "SHA256SUMS"
_UMASKS = (0o022, 0o077)
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)(?: *; *([^\\]+?))? *\\?$", re.MULTILINE)


class ReleaseError(Exception):
    """A release can't be made of this commit. The message names everything that is wrong."""


def make_release(root: Path) -> list[Path]:
    """Write the files into dist/ below `root`, and return them.

    :raises ReleaseError: with every problem; dist/ is then as it was.
    """
    if problems := list(_problems(root)):
        raise ReleaseError("; ".join(problems))
    version = version_of(root)
    epoch = int(_git(root, "log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory(prefix="deepseek-triton-release-") as name:
        builds = [_built(root, Path(name, str(number)), umask, epoch) for number, umask in enumerate(_UMASKS)]
        first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in builds)
        if differing := sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name)):
            raise ReleaseError(f"expected two builds to agree, and these differ: {', '.join(differing)}")
    text = (root / REQUIREMENTS).read_text("utf-8")
    files = first | {
        f"deepseek_triton-{version}-requirements.txt": text.encode(),
        f"deepseek_triton-{version}.cdx.json": sbom(text, version=version, epoch=epoch).encode(),
    }
    sums = "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files))
    return _put(root / "dist", files | {SUMS: sums.encode()})


def version_of(root: Path) -> str:
    """Return the version in _version.py."""
    text = (root / VERSION_FILE).read_text("utf-8")
    return text.partition('__version__ = "')[2].partition('"')[0]


def pins(requirements: str) -> list[tuple[str, str, str]]:
    """Return name, version and marker ("" for none) of each pinned requirement."""
    return [(name.lower(), version, marker) for name, version, marker in _PINNED.findall(requirements)]


def sbom(requirements: str, *, version: str, epoch: int) -> str:
    """Return the SBOM: what the pinned requirements install, as CycloneDX 1.6 in JSON.

    It depends on the arguments only, so that two people get the same.

    :param epoch: seconds since 1970, the time of the document.
    """
    own = f"pkg:pypi/deepseek-triton@{version}"
    components = [
        {
            "type": "library",
            "bom-ref": (purl := f"pkg:pypi/{name}@{pinned}"),
            "name": name,
            "version": pinned,
            "purl": purl,
            **({"properties": [{"name": "marker", "value": marker}]} if marker else {}),
        }
        for name, pinned, marker in pins(requirements)
    ]
    references = [str(component["bom-ref"]) for component in components]
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, own + requirements)}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": "deepseek-triton",
                "version": version,
                "purl": own,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            },
        },
        "components": components,
        # Which of them needs which is not in the requirements, so all are said to be the program's own.
        "dependencies": [{"ref": own, "dependsOn": references}, *({"ref": one} for one in references)],
    }
    return json.dumps(document, indent=2) + "\n"


def _problems(root: Path) -> list[str]:
    problems = []
    if changed := _git(root, "status", "--porcelain").splitlines():
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        names = ", ".join(line[3:] for line in changed[:3])
        problems.append(f"expected a clean tree, and these differ from the commit: {names}{more}; commit or stash them")
    version = version_of(root)
    newest = re.findall(r"^## \[?(\d[^\]\s]*)", (root / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)[:1]
    if newest != [version]:
        problems.append(
            f"expected CHANGELOG.md's newest version to be that of {VERSION_FILE}, {version}; got "
            f"{newest[0] if newest else 'none, only Unreleased'}: begin a section ## {version}, or change the file"
        )
    return problems


def _built(root: Path, folder: Path, umask: int, epoch: int) -> Path:
    """Build wheel and sdist of the commit in `folder`, and return the folder that has them."""
    source, built = folder / "source", folder / "built"
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=root, check=True, capture_output=True).stdout
    subprocess.run(
        ["tar", "--extract", "--no-same-permissions", "--directory", source], input=archive, check=True, umask=umask
    )
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", str(built)]
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=source, env=environment, umask=umask, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"hatchling: {' '.join((done.stderr or done.stdout).split()[-60:])}")
    return built


def _put(folder: Path, files: dict[str, bytes]) -> list[Path]:
    """Make `folder` anew with `files`, in one step."""
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".dist-"))
    try:
        scratch.chmod(0o755)
        for name, content in files.items():
            (scratch / name).write_bytes(content)
        if folder.exists():
            folder.rename(scratch / ".before")
        scratch.rename(folder)
        shutil.rmtree(folder / ".before", ignore_errors=True)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return [folder / name for name in files]


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.rstrip("\n")


def main(argv: Sequence[str] = ()) -> int:
    root = Path(argv[0]) if argv else ROOT
    try:
        files = make_release(root)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    for path in files:
        print(path.relative_to(root))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
