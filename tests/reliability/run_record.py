"""The committed summaries of long runs: what ran, for how long, and what was found."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepseek_triton_tools._version import __version__

RECORDS = Path(__file__).parent / "records"


def write_run_record(kind: str, content: Mapping[str, Any], folder: Path = RECORDS) -> Path:
    """Write the summary of a run of a kind, such as "soak", and return its path."""
    root = Path(__file__).parents[2]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
    )
    document = {
        "kind": kind,
        "version": __version__,
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **content,
    }
    folder.mkdir(parents=True, exist_ok=True)
    engine, seed = content.get("engine", "all"), content.get("seed", 0)
    path = folder / f"{kind}-{engine}-{seed}.json"
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
