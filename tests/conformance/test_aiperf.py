"""AIPerf measures the gateway: all its requests succeed, and its counts of tokens are the gateway's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.running import TINY

TOKENIZER = TINY / "tensorrt_llm/1/tiny"
NUM_REQUESTS = 12
NUM_TOKENS = 20


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses"])
def test_a_measured_run(gateway_url: str, model_name: str, tmp_path: Path, endpoint: str) -> None:
    fields = {"temperature": 0} if endpoint == "responses" else {"temperature": 0, "ignore_eos": True}
    command = [Path(sys.executable).with_name("aiperf"), "profile", "--model", model_name, "--url", gateway_url]
    command += ["--endpoint-type", endpoint, "--streaming", "--tokenizer", TOKENIZER, "--ui", "none"]
    command += ["--request-count", NUM_REQUESTS, "--concurrency", 3, "--isl", 30, "--osl", NUM_TOKENS]
    command += ["--extra-inputs", json.dumps(fields), "--artifact-dir", tmp_path, "--random-seed", 1]
    command += ["--no-gpu-telemetry", "--no-server-metrics"]
    # Told to be offline, it looks for a local tokenizer in the hub's cache.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    run = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]

    found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == NUM_REQUESTS
    assert found["request_error_rate"]["avg"] == 0
    assert 0 < found["time_to_first_token"]["avg"] <= found["request_latency"]["avg"]
    assert found["usage_prompt_tokens"]["avg"] > found["input_sequence_length"]["avg"] > 0
    total = found["total_usage_completion_tokens"]["avg"]
    assert total == NUM_REQUESTS * NUM_TOKENS or endpoint == "responses"
    # Its own count is of the text, which another tokenization may cut into a token more or less.
    assert found["total_osl"]["avg"] == pytest.approx(total, rel=0.1)
