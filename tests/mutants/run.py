"""Runs the tests once for each of a seeded sample of mutants, and prints what no test notices.

`python -m mutants.run` takes 400 of the whole product; `--within client/ --tests tests/client` is quicker. The tests
that come through the line of a mutant run in a fork (`plugin.py`). A fault in what runs at import, or in what only a
server's process comes to, is written into a copy of the checkout, in which the tests that `--beside` names run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mutants.sites import ROOT, Mutant, mutants_of, production_files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--within", nargs="+", default=["model_repository/", "build/", "client/", "tools/"], metavar="PATH"
    )
    parser.add_argument("--tests", nargs="+", default=["tests"], help="folders or files, for the forks")
    parser.add_argument("--marks", default="not (slow or nightly or documents)", help="which of them")
    parser.add_argument("--beside", nargs="*", default=[], help="tests for the mutants that no fork finds")
    parser.add_argument("--output", type=Path, default=Path(".cache/mutants"))
    chosen = parser.parse_args()
    folder: Path = chosen.output
    folder.mkdir(parents=True, exist_ok=True)
    mutants = sample(chosen.within, chosen.count, chosen.seed)
    (folder / "mutants.json").write_text(json.dumps([asdict(one) for one in mutants]))
    verdicts = folder / "verdicts.jsonl"
    verdicts.unlink(missing_ok=True)
    tests = [*chosen.tests, "-m", chosen.marks]
    lines = ["--lines", str(folder / "lines.json")]
    if _pytest([*tests, "--record", str(folder / "lines.json")]) not in (0, 1):
        sys.exit("the tests can't be run without a fault")
    _pytest([*tests, *lines, "--mutants", str(folder / "mutants.json"), "--verdicts", str(verdicts)])
    rows = [json.loads(line) for line in verdicts.read_text().splitlines()]
    if chosen.beside:
        left = [mutant for mutant, row in zip(mutants, rows, strict=True) if not row["killed"]]
        found = _on_disk(left, chosen.beside)
        rows = [row | found.get(row["mutant"], {}) for row in rows]
        verdicts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        if not row["killed"]:
            print(f"{row['mutant']}: {row['how']}")
    print(f"{sum(bool(row['killed']) for row in rows)} of {len(rows)} found")


def sample(within: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Return that many mutants, in the order of their places."""
    paths = [path for path in production_files(ROOT) if path.startswith(tuple(within))]
    everything = [mutant for path in paths for mutant in mutants_of(ROOT, path)]
    chosen = random.Random(seed).sample(everything, min(count, len(everything)))
    return sorted(chosen, key=lambda mutant: (mutant.path, mutant.start, mutant.new))


def _pytest(arguments: Sequence[str], root: Path = ROOT) -> int:
    path = [root / name for name in ("client", "build", "tools", "tests")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mutants.plugin", "--tb=no", *arguments]
    return subprocess.run(command, cwd=root, env=environment).returncode


def _on_disk(mutants: Sequence[Mutant], tests: Sequence[str]) -> dict[str, dict[str, object]]:
    """Run the tests on a copy of the checkout for each mutant, up to the first failure."""
    found: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "copy"
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in filter(None, names.stdout.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
        for mutant in mutants:
            (copy / mutant.path).write_text(mutant.source(ROOT))
            code = _pytest([*tests, "-x", "-m", "not (nightly or documents)"], copy)
            shutil.copy2(ROOT / mutant.path, copy / mutant.path)
            found[str(mutant)] = {"killed": code != 0, "how": f"on disk, pytest ends with {code}"}
    return found


if __name__ == "__main__":
    main()
