#!/usr/bin/env bash
@@{stamp}
# Serves @@{title} with trtllm-serve, in @@{image}. HOST and PORT set the address it listens on. Further arguments go to
#   trtllm-serve.
set -euo pipefail

#include here.sh

#include on_every_node.sh

@@{flag_comments}
exec @@{launcher}trtllm-serve @@{model} \
  --host "${HOST:-localhost}" --port "${PORT:-@@{port}}" \
  @@{flags} \
#if reasoning_parser
  --reasoning_parser deepseek-r1 \
#end
  --extra_llm_api_options "$@@{folder}/extra-llm-api-config.yml" \
  "$@"
