#!/usr/bin/env bash
# Ask a model with curl alone. Usage: curl.sh [URL]
set -euo pipefail
model="${1:-http://localhost:8000}/v2/models/tensorrt_llm"

echo "--- one answer"
curl --fail-with-body -sS "$model/generate" -d '{"text_input": "Hello, my name is", "max_tokens": 16}'

echo; echo "--- a stream: each event carries new text"
curl --fail-with-body -sSN "$model/generate_stream" -d '{"text_input": "Hello, my name is", "stream": true, "max_tokens": 16}'

echo "--- two prompts, two answers"
curl --fail-with-body -sS "$model/generate" -d '{"text_input": ["Hello", "Good bye"], "max_tokens": 8}'

echo; echo "--- sampling fields; lists need the full name"
curl --fail-with-body -sS "$model/generate" -d '{
  "text_input": "Once upon a time", "max_tokens": 16,
  "temperature": 0.6, "top_p": 0.95, "seed": 1, "sampling_param_stop": ["\n\n"]}'

echo; echo "--- a chat: messages is a string that holds JSON"
curl --fail-with-body -sS "$model/generate" -d '{
  "messages": "[{\"role\": \"user\", \"content\": \"What is 6 x 7?\"}]", "max_tokens": 16, "separate_reasoning": true}'

echo; echo "--- start a long request in the background, then stop it by its id"
curl -sSN "$model/generate_stream" -d '{"text_input": "Hello", "stream": true, "max_tokens": 4000, "id": "job-7"}' > /dev/null &
sleep 1
curl -sS "$model/generate" -d '{"id": "job-7", "stop": true}' || true  # it may have ended by itself
wait
echo
