"""The program that runs on another host, or by another Python.

It reads what the repository expects from the zip, runs all checks, and prints their report on one line.
"""

from __future__ import annotations

import sys
import zipfile

from deepseek_triton_tools.doctor.machine.examine import examine, report_to_json
from deepseek_triton_tools.doctor.machine.expected import expected_from_json
from deepseek_triton_tools.doctor.machine.machine import Machine

EXPECTED_FILE = "expected.json"
REPORT_PREFIX = "deepseek-triton diagnosis "
"""Begins the line of the report: a login script may print other lines before it."""


def main() -> None:
    # packing.BOOTSTRAP has put the zip first.
    with zipfile.ZipFile(sys.path[0]) as packed:
        expected = expected_from_json(packed.read(EXPECTED_FILE).decode())
    print(f"\n{REPORT_PREFIX}{report_to_json(examine(Machine(), expected))}", flush=True)
