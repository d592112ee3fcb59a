#!/usr/bin/env bash
# Answer every prompt of prompts.jsonl, in order, many at a time. Usage: batch.sh [URL] [OUTPUT]
# Run it again after an interruption: --resume goes on behind the last row.
set -euo pipefail
url="${1:-http://localhost:8000}"
output="${2:-answers.jsonl}"
deepseek-triton generate --url "$url" --input "$(dirname "${BASH_SOURCE[0]}")/prompts.jsonl" --output "$output" \
  --concurrency 64 --max-tokens 32 --resume
cat "$output"
