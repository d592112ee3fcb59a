#!/usr/bin/env bash
@@{stamp}
# Measures the accuracy of @@{title} with trtllm-eval, in @@{image}. The first argument is the task: mmlu, gsm8k or
#   gpqa_diamond. Further arguments are the task's own. The dataset of GPQA needs a Hugging Face account with access.
set -euo pipefail

#include here.sh

task="${1:-}"
case "$task" in
  mmlu | gsm8k) options=() ;;
  # GPQA's questions are asked as a chat (TensorRT-LLM examples/models/core/deepseek_v3/README.md).
  gpqa_diamond) options=(--apply_chat_template) ;;
  *)
    echo "eval.sh: expected a task, mmlu, gsm8k or gpqa_diamond; got '$task'" >&2
    exit 2
    ;;
esac
shift

#include on_every_node.sh

@@{flag_comments}
exec @@{launcher}trtllm-eval --model @@{model} \
  @@{flags} \
  --extra_llm_api_options "$@@{folder}/extra-llm-api-config.yml" \
  "$task" "${options[@]}" "$@"
