"""A model that sends one response to each request, as `build --no-decoupled` writes it and as upstream's is by default.

Requests have the shape of TensorRT-LLM's llmapi client: one-dimensional tensors, ModelInfer, the request parameter
"Streaming" with the value false, and a stop request by id.
"""

import json
import os
import queue
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from deepseek_backend.active_request import LARGE_BYTES
from deepseek_triton_client import InvalidRequest
from deepseek_triton_tools.server.server_process import ServerProcess
from support.scraping import scrape
from support.servers import STANDIN, build, change_yaml
from support.waiting import wait_for
from support.wire import (
    LONG_ANSWER,
    MODEL,
    PROMPT,
    Array,
    events,
    exchange,
    first,
    flag,
    generated,
    grpc_inputs,
    infer,
    post,
    sent,
    strings,
)

CROWD = "crowd"
"""A model beside MODEL: the simulated engine at the pace of a deployment that takes many requests at once."""
TRTLLM = "production"
"""Another one: the production path on the strict stand-in for TensorRT-LLM."""
SMALL_SHM = "5m"
"""Room for the stub and a request, and not for sixteen times its text."""
BOTH = pytest.mark.parametrize("scheme", ["grpc", "http"])


@pytest.fixture(scope="module")
def server(random_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("not_decoupled")
    repository = build(folder / "repository", "tiny", "--model", str(random_checkpoint), "--no-decoupled")
    crowd = ("tiny", "--engine", "simulated", "--preset", "h200x8-r1-fp8-max-throughput")
    for name, options in {CROWD: crowd, TRTLLM: ("deepseek-r1", "--gpu", "h200", "--gpus", "8")}.items():
        model = repository / name
        shutil.copytree(build(folder / name, *options, "--no-decoupled") / MODEL, model)
        config = model / "config.pbtxt"
        config.write_text(config.read_text().replace(f'name: "{MODEL}"', f'name: "{name}"'))
        change_yaml(model / "1/model.yaml", metrics_period_s=0.1)
    shutil.copytree(STANDIN, repository / TRTLLM / "1/tensorrt_llm", ignore=shutil.ignore_patterns("__pycache__"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STANDIN_TOKENS_PER_S", "100")
        with ServerProcess.serving(repository) as process:
            yield process


def tensors(prompt: str = PROMPT, *, max_tokens: int = 16) -> dict[str, Array]:
    """What llmapi_client.py sends."""
    return {"text_input": strings(prompt), "sampling_param_max_tokens": np.array([max_tokens], dtype=np.int32)}


UPSTREAM = {"Streaming": False}


@BOTH
@pytest.mark.parametrize("model", [MODEL, TRTLLM])
def test_infer_answers_as_generate_does(server, scheme, model):
    greedy = tensors() | {"sampling_param_temperature": np.array([0], dtype=np.float32)}

    result = infer(server, scheme, greedy, model=model, request_id="1", parameters=UPSTREAM)

    body = {"text_input": PROMPT, "max_tokens": 16, "temperature": 0}
    expected = post(server, "generate", body, model=model).json()
    assert first(result, "text_output") == expected["text_output"]
    assert first(result, "finish_reason") == expected["finish_reason"] == "length"
    assert result.as_numpy("num_output_tokens").tolist() == [16]
    assert result.as_numpy("num_input_tokens").tolist() == [expected["num_input_tokens"]]


@BOTH
def test_infer_takes_every_form_of_prompt(server, scheme):
    for prompt in (
        {"messages": strings(json.dumps([{"role": "user", "content": "hi"}]))},
        {"input_ids": np.array([5, 6, 7], dtype=np.int32)},
        {"text_input": strings("a", "b")},
    ):
        result = infer(server, scheme, prompt | {"sampling_param_max_tokens": np.array([4], dtype=np.int32)})
        assert result.as_numpy("num_output_tokens").tolist() == [4] * len(result.as_numpy("text_output"))


def test_generate_and_a_grpc_stream_carry_one_response_too(server):
    body = {"text_input": PROMPT, "max_tokens": 16, "temperature": 0}
    streamed = list(events(post(server, "generate_stream", body)))
    results = exchange(server, sent(body), empty_final=True).all()

    assert [chunk["text_output"] for chunk in streamed] == [generated(server)]
    assert [first(result, "text_output") for result in results] == [generated(server)]


@BOTH
def test_streams_and_bad_input_are_refused_with_the_field(server, scheme):
    """A stream must be: a second response ends tritonserver 2.51."""
    for name in ("streaming", "stream"):
        with pytest.raises(Exception, match=r"\[E_UNSUPPORTED\] streaming: .*Ask without streaming.*--no-decoupled"):
            infer(server, scheme, tensors() | {name: flag(True)})
        refusal = post(server, "generate_stream", {"text_input": PROMPT, name: True})
        assert "[E_UNSUPPORTED] streaming: " in refusal.text
    assert generated(server)

    with pytest.raises(triton.InferenceServerException, match="max_tokens: expected a number >= 1") as caught:
        infer(server, scheme, tensors(max_tokens=0))
    assert caught.value.status() == ("StatusCode.INVALID_ARGUMENT" if scheme == "grpc" else "400")


@BOTH
def test_a_large_response_comes_whole(server, scheme):
    """It is sent in two steps, of which the second has no response."""
    prompt = "a b " * (LARGE_BYTES // 4)
    fields = {
        "sampling_param_truncate_prompt_tokens": np.array([4], dtype=np.int32),
        "sampling_param_exclude_input_from_output": flag(False),
    }

    result = infer(server, scheme, tensors(prompt, max_tokens=1) | fields)

    assert first(result, "text_output").startswith(prompt)


def running(server: ServerProcess, model: str = CROWD, name: str = "engine_running_requests") -> float:
    return scrape(server)[name, frozenset({"model": model, "version": "1"}.items())]


def tokens_so_far(server: ServerProcess) -> float:
    return running(server, name="generated_tokens_total")


@pytest.mark.parametrize(("model", "gauge"), [(CROWD, "engine_running_requests"), (TRTLLM, "inflight_sequences")])
def test_many_at_once_are_one_batch_of_the_engine(server, model, gauge):
    """None waits for another: requests of both protocols are generated together."""
    schemes = ["grpc"] * 32 + ["http"] * 8
    long = tensors(max_tokens=LONG_ANSWER) | {"sampling_param_ignore_eos": flag(True)}
    with ThreadPoolExecutor(len(schemes)) as threads:
        asked = [threads.submit(infer, server, each, long, model=model, request_id="all") for each in schemes]
        wait_for(lambda: running(server, model, gauge) == len(schemes), lambda: f"{running(server, model, gauge)}")
        post(server, "generate", {"id": "all", "stop": True}, model=model)
        reasons = [first(each.result(), "finish_reason") for each in asked]

    assert reasons == ["cancelled"] * len(schemes)


@BOTH
def test_a_stop_request_for_nothing_is_answered_with_cancelled(server, scheme):
    """As TensorRT-LLM's own test has it."""
    stop = {"text_input": np.empty([1], dtype=np.bytes_), "stop": flag(True)}
    with pytest.raises(triton.InferenceServerException, match="cancelled by client") as caught:
        infer(server, scheme, stop, request_id="1", parameters=UPSTREAM)
    # tritonserver 2.51 answers every error of a model with 400 over HTTP.
    assert caught.value.status() == ("StatusCode.CANCELLED" if scheme == "grpc" else "400")


def test_a_running_request_is_stopped_by_its_id_or_cancelled(server):
    """As llmapi_client.py does with --stop-after-ms, by two calls of one client and one callback for both answers, and
    with --stop-via-request-cancel."""
    answers: queue.Queue[Any] = queue.Queue()
    stop = {"text_input": np.empty([1], dtype=np.bytes_), "stop": flag(True)}
    with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:

        def send(inputs: dict[str, Array]) -> Any:
            def answer(result: Any, error: Any) -> None:
                answers.put(error or result)

            return client.async_infer(CROWD, grpc_inputs(inputs), answer, request_id="1", parameters=UPSTREAM)

        before = tokens_so_far(server)
        send(tensors(max_tokens=LONG_ANSWER))
        # A running request may not have its first token yet. Then its answer has no text.
        wait_for(lambda: tokens_so_far(server) > before)
        send(stop)
        received = [answers.get(timeout=60) for _ in range(2)]

        call = send(tensors(max_tokens=LONG_ANSWER))
        wait_for(lambda: running(server) == 1)
        call.cancel()
        cancelled = answers.get(timeout=60)

    (error,) = [each for each in received if isinstance(each, triton.InferenceServerException)]
    (result,) = [each for each in received if each is not error]
    assert error.status() == cancelled.status() == "StatusCode.CANCELLED"
    assert first(result, "finish_reason") == "cancelled"
    assert first(result, "text_output")
    wait_for(lambda: running(server) == 0)


def test_our_client_asks_for_no_stream_and_ends_a_request_by_its_id(client_kind, server):
    """Over HTTP it would, to be seen when it leaves; and a stream is one chunk with the whole answer."""
    with client_kind.client(server) as client:
        fields = {"max_tokens": 16, "temperature": 0}
        assert client.generate(PROMPT, **fields).text == generated(server)
        with client.stream(PROMPT, **fields) as stream:
            assert [chunk.text for chunk in stream] == [generated(server)]
        assert client.chat("hi", **fields).num_output_tokens == 16
        with pytest.raises(InvalidRequest, match=r"stream_interval: .* without --no-decoupled"):
            client.generate(PROMPT, stream_interval=2)
    with client_kind.client(server, model_name=CROWD) as client, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(client.generate, PROMPT, max_tokens=LONG_ANSWER, request_id="job")
        wait_for(lambda: running(server) == 1)
        client.cancel("job")
        assert answer.result().finish_reason == "cancelled"


def test_a_response_that_cannot_be_sent_is_answered(random_checkpoint, tmp_path):
    """/dev/shm is too small for it. Such a model's sender takes no second response, so no error either."""
    repository = build(tmp_path / "repository", "tiny", "--model", str(random_checkpoint), "--no-decoupled")
    script = tmp_path / "full.py"
    script.write_text(_FULL)
    command = ["unshare", "--mount", sys.executable, str(script), str(repository)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if "unshare: " in done.stderr or "mount: " in done.stderr:
        pytest.skip(done.stderr)

    said = ["small: a response", "large: StatusCode.INTERNAL", "small: a response", "0"]
    assert done.stdout.splitlines() == said, done.stderr


_FULL = f"""\
import subprocess, sys
from pathlib import Path
import numpy as np
import tritonclient.grpc as triton
from deepseek_triton_tools.server.server_process import ServerProcess
from support.wire import flag, infer, strings

subprocess.run(["mount", "-t", "tmpfs", "-o", "size={SMALL_SHM}", "tmpfs", "/dev/shm"], check=True)
fields = {{
    "sampling_param_truncate_prompt_tokens": np.array([4], dtype=np.int32),
    "sampling_param_exclude_input_from_output": flag(False),
    "sampling_param_n": np.array([16], dtype=np.int32),
    "sampling_param_temperature": np.array([1], dtype=np.float32),
    "sampling_param_max_tokens": np.array([1], dtype=np.int32),
}}
with ServerProcess.serving(Path(sys.argv[1])) as server:
    for name, prompt in (("small", "a"), ("large", "a b " * 100_000), ("small", "a")):
        try:
            infer(server, "grpc", {{"text_input": strings(prompt), **fields}})
            print(f"{{name}}: a response")
        except triton.InferenceServerException as error:
            print(f"{{name}}: {{error.status()}}")
print(server.returncode)
"""
