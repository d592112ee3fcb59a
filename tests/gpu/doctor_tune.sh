#!/bin/bash
# Shows the settings of this GPU machine with `doctor --tune`, and keeps what nvidia-smi says: doctor_tune.sh OUTPUT
# It needs python3 and this repository only, installs nothing and changes no setting. The exit status says whether the
# GPUs' settings could be read.
set -u
if [ $# != 1 ]; then
    echo "usage: $0 OUTPUT" >&2
    exit 2
fi
output=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$output"
nvidia-smi -q -x > "$output/nvidia-smi.xml" 2>&1
nvidia-smi boost-slider -l > "$output/boost-slider.txt" 2>&1

# The command line needs packages, the part that travels to other hosts does not.
PYTHONPATH=$root/tools python3 - "$output/settings.json" << 'PROGRAM'
import json
import sys
from dataclasses import asdict

from deepseek_triton_tools.doctor.findings import Expected
from deepseek_triton_tools.doctor.machine import Machine
from deepseek_triton_tools.doctor.tuning import read_settings

settings = read_settings(Machine(), Expected(release="1.2.1", tune=True))
for setting in settings:
    print(f"{setting.state:<10}  {setting.title}: {setting.found}")
    for command in setting.commands:
        print(f"            {command}")
with open(sys.argv[1], "w") as file:
    json.dump([asdict(setting) for setting in settings], file, indent=1)
gpus = {setting.id: setting.state for setting in settings}
sys.exit(any(gpus[name] == "unknown" for name in ("persistence", "clocks", "power", "compute-mode")))
PROGRAM
