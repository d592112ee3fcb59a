#!/usr/bin/env bash
# Write the manifests for DeepSeek-R1 (FP8) on a node with eight H200. Usage: kubernetes.sh [FOLDER]
# The checkpoint lies on a PersistentVolumeClaim named "models"; the storage gives 2 GB/s.
set -euo pipefail
folder="${1:-r1-kubernetes}"
mkdir -p "$folder"
deepseek-triton build deepseek-r1 --gpu h200 --gpus 8 --model /models/DeepSeek-R1 --output "$folder/r1"
deepseek-triton launch kubernetes "$folder/r1" --claim models --rate 2GB --namespace deepseek > "$folder/r1.yaml"
echo "wrote $folder/r1.yaml; apply it with: kubectl apply --server-side -f $folder/r1.yaml"
