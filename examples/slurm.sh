#!/usr/bin/env bash
# Write a Slurm job for DeepSeek-R1 (FP8) on two nodes with eight H100 each. Usage: slurm.sh [FOLDER]
# The folder must be visible on both nodes at the same path, like the checkpoint.
set -euo pipefail
folder="${1:-r1-slurm}"
mkdir -p "$folder"
deepseek-triton build deepseek-r1 --gpu h100 --gpus 16 --model /models/DeepSeek-R1 --output "$folder/r1x2"
deepseek-triton launch slurm "$folder/r1x2" --partition gpu --time 1-00:00:00 > "$folder/r1x2.sbatch"
echo "wrote $folder/r1x2.sbatch; submit it with: sbatch $folder/r1x2.sbatch"
