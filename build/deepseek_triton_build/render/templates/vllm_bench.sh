#!/usr/bin/env bash
@@{stamp}
# Measures @@{title} with vllm bench serve, in @@{image}, on the server of serve.sh, which is started with
#   --no-enable-prefix-caching for it. ISL and OSL are tokens in and out, NUM_PROMPTS how many requests are sent at once,
#   REQUEST_RATE how many a second; HOST and PORT say where the server is. The guide's workloads: prompt-heavy 8000 in
#   and 1000 out, decode-heavy 1000 in and 8000 out, balanced 1000 in and 1000 out; its numbers of requests: 1, 16, 32,
#   64, 128, 256, 512. Further arguments go to vllm bench serve.
set -euo pipefail

exec vllm bench serve \
  --model @@{model} \
  --host "${HOST:-localhost}" --port "${PORT:-8000}" \
  --dataset-name random \
  --random-input-len "${ISL:-@@{isl}}" \
  --random-output-len "${OSL:-@@{osl}}" \
  --request-rate "${REQUEST_RATE:-10000}" \
  --num-prompts "${NUM_PROMPTS:-@@{num_prompts}}" \
  --ignore-eos \
  "$@"
