"""What runs on another host, or by another Python: it reads what is expected from the zip, and prints one line."""

from __future__ import annotations

import sys
import zipfile

from deepseek_triton_tools.doctor.machine.examine import examine, report_to_json
from deepseek_triton_tools.doctor.machine.expected import from_json
from deepseek_triton_tools.doctor.machine.real_machine import RealMachine

EXPECTED = "expected.json"
MARK = "deepseek-triton diagnosis "
"""Before the report, on its line: a login script may print what it likes."""


def main() -> None:
    # The bootstrap has put the zip first.
    with zipfile.ZipFile(sys.path[0]) as packed:
        expected = from_json(packed.read(EXPECTED).decode())
    print(f"\n{MARK}{report_to_json(examine(RealMachine(), expected))}", flush=True)
