#!/usr/bin/env bash
# Made by deepseek-triton @@{version}: checkpoint calibrate @@{checkpoint}
# Calibrates the inputs of the experts of @@{checkpoint} for W4AFP8 with NVIDIA's ModelOpt, as TensorRT-LLM's guide to DeepSeek describes it. It needs @@{gpus} GPUs of one node with @@{gpu_memory} each (8 H200), @@{disk} of disk beside the output, git, a python3 with a PyTorch for these GPUs, and the network: GitHub, Python's package index, and the Hugging Face hub for the texts of the calibration.
# A stage that is finished is not done again: after a failure, run the script again. It keeps its work in @@{output}.work, which can be removed afterwards.
set -euo pipefail

checkpoint=@@{checkpoint_quoted}
output=@@{output_quoted}
work="$output.work"
modelopt="$work/modelopt"
deepseek="$modelopt/examples/deepseek/DeepSeek-V3"

for program in git python3; do
  command -v "$program" >/dev/null || { echo "$program is not on PATH: install it" >&2; exit 1; }
done
python3 -c 'import torch; assert torch.cuda.device_count() >= @@{gpus}' ||
  { echo "python3: expected a PyTorch that finds @@{gpus} GPUs" >&2; exit 1; }
mkdir -p "$work"

stage() {  # stage NAME: run the function NAME once
  if [[ -e "$work/$1.done" ]]; then echo "$1: done before"; return; fi
  echo "$1: begins"
  "$1"
  touch "$work/$1.done"
}

# ModelOpt's ptq.py is an example in its sources. The package is built from the same sources, so that both fit. This
# release is the one whose options and files this script knows.
install_modelopt() {
  rm -rf "$modelopt"
  git clone --depth 1 --branch 0.39.0 https://github.com/NVIDIA/TensorRT-Model-Optimizer.git "$modelopt"
  python3 -m pip install "$modelopt[all]"
}

# ptq.py looks for DeepSeek's own model in this folder beside it. This commit is the one that it was written for.
get_deepseek() {
  rm -rf "$deepseek"
  git clone https://github.com/deepseek-ai/DeepSeek-V3.git "$deepseek"
  git -C "$deepseek" checkout 1398800
}

# A file for each GPU. What an earlier try left is overwritten.
convert() {
  python3 "$deepseek/inference/convert.py" --hf-ckpt-path "$checkpoint" --save-path "$work/converted" \
    --n-experts @@{experts} --model-parallel @@{gpus}
}

# Every rank writes amax_dict_rank*-mp@@{gpus}.pt: the largest magnitudes that it has seen.
calibrate() {
  rm -rf "$work/amax"
  (cd "$modelopt/examples/deepseek" && python3 -m torch.distributed.run --nproc-per-node @@{gpus} --master_port=12346 \
    ptq.py --model_path "$work/converted" --config "$deepseek/inference/configs/config_671B.json" \
    --quant_cfg FP8_DEFAULT_CFG --output_path "$work/amax")
}

publish() {
  mkdir -p "$(dirname "$output")"
  mv -T "$work/amax" "$output"
}

stage install_modelopt
stage get_deepseek
stage convert
stage calibrate
stage publish
printf 'calibrated: deepseek-triton checkpoint quantize %q --to w4afp8 --act-scales %q --output DIR\n' "$checkpoint" "$output"
printf 'no longer needed: rm -r %q\n' "$work"
