#!/usr/bin/env bash
# Ask the OpenAI gateway with curl alone. Usage: gateway.sh [URL]
set -euo pipefail

url=${1:-http://localhost:9000}

ask() {
  curl --silent --show-error --fail-with-body --no-buffer "$url$1" -H 'Content-Type: application/json' -d "$2"
  echo
}

echo "--- the models"
curl --silent --show-error --fail-with-body "$url/v1/models"
echo

echo "--- an answer"
ask /v1/chat/completions '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'

echo "--- a stream, with thinking, and its usage in the last chunk"
ask /v1/chat/completions '{"messages": [{"role": "user", "content": "What is 47 + 38?"}], "stream": true,
  "stream_options": {"include_usage": true}, "thinking": {"type": "enabled"}}'

echo "--- a call of a tool"
ask /v1/chat/completions '{"messages": [{"role": "user", "content": "What is the weather in Berlin?"}],
  "tools": [{"type": "function", "function": {"name": "get_weather", "description": "Get the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]}'

echo "--- an answer that goes on from a beginning"
ask /v1/chat/completions '{"messages": [{"role": "user", "content": "What is the capital of France?"},
  {"role": "assistant", "content": "The capital of", "prefix": true}]}'
