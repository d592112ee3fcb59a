"""Clients that exist elsewhere: what they send, to the letter of names, types and shapes, and how they read the answer.

Four families: those of TensorRT-LLM's llmapi model, those of Triton's vLLM backend, Triton's OpenAI front end in its
vLLM format, and the same in its TensorRT-LLM format, which has a batch dimension that this model has not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton

from deepseek_triton_tools.server.server_process import ServerProcess
from support.servers import url
from support.wire import (
    LONG_ANSWER,
    MODEL,
    PROMPT,
    WAYS,
    Array,
    Fields,
    Outcome,
    Sent,
    Tensors,
    Way,
    answered,
    ask,
    events,
    exchange,
    first,
    flag,
    generated,
    grpc_inputs,
    infer,
    joined,
    post,
    strings,
    texts_by_id,
)

# --- Clients of TensorRT-LLM's llmapi model: one-dimensional tensors, sampling_param_*, a stop request by id ---


@pytest.fixture(params=["tiny_server", "trtllm_server"])
def llmapi_server(request: pytest.FixtureRequest) -> ServerProcess:
    server: ServerProcess = request.getfixturevalue(request.param)
    return server


def llmapi_tensors(prompt: str = PROMPT, *, max_tokens: int = 16) -> dict[str, Array]:
    return {
        "text_input": strings(prompt),
        "sampling_param_max_tokens": np.array([max_tokens], dtype=np.int32),
        "sampling_param_temperature": np.array([0.0], dtype=np.float32),
    }


@pytest.mark.parametrize("more", [{}, {"sampling_param_return_perf_metrics": True}], ids=["plain", "metrics"])
def test_llmapi_curl(llmapi_server: ServerProcess, more: dict[str, bool]) -> None:
    """The lines in tensorrtllm_backend's README and docs/llmapi.md."""
    body = {"text_input": "The future of AI is", "sampling_param_max_tokens": 10, **more}

    answer = post(llmapi_server, "generate", body)

    assert answer.status_code == 200, answer.text
    assert answer.json()["text_output"]
    assert {"model_name", "model_version"} <= set(answer.json())


@pytest.mark.parametrize("streaming", [False, True])
def test_llmapi_client_tensors_with_its_parameter(llmapi_server: ServerProcess, streaming: bool) -> None:
    """It sends the flag as the request parameter "Streaming", capital and all; upstream reads no parameters."""
    sent = Sent(tensors=llmapi_tensors(), request_id="1", parameters={"Streaming": streaming})

    results = exchange(llmapi_server, sent).all()

    assert joined(results) == generated(llmapi_server)
    assert {result.get_response().id for result in results} == {"1"}


@pytest.mark.parametrize("how", ["tensor", "parameter"])
def test_llmapi_stream(llmapi_server: ServerProcess, how: str) -> None:
    tensors = llmapi_tensors(max_tokens=40)
    if how == "tensor":
        tensors["streaming"] = flag(True)
    parameters = {"streaming": True} if how == "parameter" else None

    sent = Sent(tensors=tensors, parameters=parameters, request_id="0", outputs=["text_output"])
    results = exchange(llmapi_server, sent).all()

    assert len(results) > 1
    assert joined(results) == generated(llmapi_server, max_tokens=40)
    assert first(results[0], "text_output")


def test_llmapi_stream_over_http(llmapi_server: ServerProcess) -> None:
    body = {"text_input": PROMPT, "streaming": True, "sampling_param_max_tokens": 40, "sampling_param_temperature": 0.0}

    chunks = list(events(post(llmapi_server, "generate_stream", body)))

    assert len(chunks) > 1
    assert "".join(chunk["text_output"] for chunk in chunks) == generated(llmapi_server, max_tokens=40)


@pytest.mark.parametrize("streaming", [False, True])
def test_llmapi_flags_put_the_reasons_on_every_response(llmapi_server: ServerProcess, streaming: bool) -> None:
    """end_to_end_test.py takes the first response it gets and wants all that it asked for in it; "None" will do."""
    wanted = ["finish_reason", "stop_reason"]
    tensors = llmapi_tensors() | {f"return_{name}": flag(True) for name in wanted} | {"streaming": flag(streaming)}

    results = exchange(llmapi_server, Sent(tensors=tensors, outputs=["text_output", *wanted])).all()

    reasons = [(first(result, "finish_reason"), first(result, "stop_reason")) for result in results]
    assert reasons == [("None", "None")] * (len(results) - 1) + [("length", "None")]


def test_the_curl_of_tensorrt_llms_ensemble(llmapi_server: ServerProcess) -> None:
    """The line in tensorrtllm_backend's README, whose lists of words are empty."""
    body = {"text_input": PROMPT, "max_tokens": 16, "bad_words": "", "stop_words": "", "temperature": 0}

    assert post(llmapi_server, "generate", body).raise_for_status().json()["text_output"] == generated(llmapi_server)


def test_a_client_that_fills_in_what_the_config_requires_sends_the_prompt(llmapi_server: ServerProcess) -> None:
    """triton_cli: for each input of the configuration that is not optional it makes a tensor, and for no other one."""
    config = httpx.get(f"{url(llmapi_server, 'http')}/v2/models/{MODEL}/config", timeout=20).json()
    required = [tensor["name"] for tensor in config["input"] if not tensor.get("optional")]
    assert required == ["text_input"]

    results = exchange(llmapi_server, Sent(tensors={"text_input": strings(PROMPT)}), empty_final=True).all()

    assert first(results[0], "text_output")


@pytest.mark.parametrize("prompt", [{"messages": '[{"role": "user", "content": "hi"}]'}, {"input_ids": [5, 6]}])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_an_empty_text_input_may_stand_beside_another_prompt(
    tiny_server: ServerProcess, way: Way, prompt: Fields
) -> None:
    """For clients that send all required inputs; without it the answer is the same."""
    body = {**prompt, "max_tokens": 8, "temperature": 0}

    assert ask(tiny_server, way, {**body, "text_input": ""}).answer() == ask(tiny_server, way, body).answer()


def test_llmapi_every_sampling_tensor(tiny_server: ServerProcess) -> None:
    tensors = llmapi_tensors() | {
        "sampling_param_best_of": np.array([1], dtype=np.int32),
        "sampling_param_temperature": np.array([0.8], dtype=np.float32),
        "sampling_param_top_k": np.array([40], dtype=np.int32),
        "sampling_param_top_p": np.array([0.95], dtype=np.float32),
        "sampling_param_frequency_penalty": np.array([0.1], dtype=np.float32),
        "sampling_param_presence_penalty": np.array([0.1], dtype=np.float32),
        "sampling_param_seed": np.array([7], dtype=np.uint64),
        "sampling_param_stop": strings("never said", "nor this"),
        "sampling_param_exclude_input_from_output": flag(False),
        "sampling_param_return_perf_metrics": flag(False),
        "return_finish_reason": flag(True),
        "return_cumulative_logprob": flag(True),
        "streaming": flag(False),
        "stop": flag(False),
    }

    (result,) = exchange(tiny_server, Sent(tensors=tensors)).all()

    assert first(result, "text_output").startswith(PROMPT)
    assert first(result, "finish_reason") == "length"
    assert result.as_numpy("cumulative_logprob")[0] < 0


def test_llmapi_stop_request_ends_the_one_with_its_id(simulated_server: ServerProcess) -> None:
    """The stop request has an empty text_input, and a stream of its own."""
    received: list[Any] = []
    stopped: list[Outcome] = []
    stop = Sent(tensors={"text_input": np.array([b""], dtype=np.bytes_), "stop": flag(True)}, request_id="42")

    def receive(result: Any, error: triton.InferenceServerException | None) -> None:
        assert error is None
        received.append(result)
        if len(received) == 1:
            stopped.append(exchange(simulated_server, stop))

    with triton.InferenceServerClient(f"127.0.0.1:{simulated_server.grpc_port}") as client:
        client.start_stream(receive, stream_timeout=120)
        tensors = llmapi_tensors(max_tokens=LONG_ANSWER) | {"streaming": flag(True)}
        client.async_stream_infer(MODEL, grpc_inputs(tensors), request_id="42")
        client.stop_stream()

    assert len(received) < LONG_ANSWER // 2
    assert first(received[-1], "finish_reason") == "cancelled"
    assert stopped[0].only_error().startswith("[E_CANCELLED] request cancelled by client")


def test_llmapi_stop_request_for_nothing_leaves_the_server_well(tiny_server: ServerProcess) -> None:
    """For an id that never was, then for one that is done."""
    stop = Sent(tensors={"text_input": strings(""), "stop": flag(True)}, request_id="1")
    texts = []

    for _ in range(2):
        assert "[E_CANCELLED]" in exchange(tiny_server, stop).only_error()
        texts.append(joined(exchange(tiny_server, Sent(tensors=llmapi_tensors(), request_id="1")).all()))

    assert texts == [generated(tiny_server)] * 2


def test_llmapi_request_id_header_is_no_request_id(tiny_server: ServerProcess) -> None:
    """Upstream's README cancels by this header, which Triton does not read; "id" in the body is the way."""
    body = {"text_input": PROMPT, "sampling_param_max_tokens": 16, "sampling_param_temperature": 0.0}

    answer = post(tiny_server, "generate", body, headers={"triton-request-id": "my-req-1"})

    assert answer.json()["text_output"] == generated(tiny_server)
    assert "id" not in answer.json()


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_unary_requests_are_refused_by_triton(tiny_server: ServerProcess, scheme: str) -> None:
    """As by upstream's model with `decoupled: True`, which its streaming needs as well. `build --no-decoupled` makes a
    model that takes them (test_not_decoupled)."""
    with pytest.raises(triton.InferenceServerException, match="decoupled transaction policy"):
        infer(tiny_server, scheme, llmapi_tensors(), request_id="1")


# --- Clients of Triton's vLLM backend: stream, sampling_parameters as JSON, exclude_input_in_output, return_* ---

VLLM_SAMPLING = {"temperature": "0", "top_p": "0.95", "max_tokens": "24"}
"""The samples write numbers as strings."""

VLLM_FLAGS = {
    "return_finish_reason": "finish_reason",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_logprobs": "logprobs",
}


def vllm_tensors(prompt: str = PROMPT, *, stream: bool, sampling: Fields | None = None) -> dict[str, Array]:
    tensors = {"text_input": strings(prompt), "stream": flag(stream)}
    if sampling is not None:
        tensors["sampling_parameters"] = strings(json.dumps(sampling))
    return tensors


def test_vllm_curl(tiny_server: ServerProcess) -> None:
    body = {"text_input": PROMPT, "parameters": {"stream": False, "temperature": 0}}

    answer = post(tiny_server, "generate", body)

    assert answer.status_code == 200, answer.text
    assert answer.json()["text_output"] == generated(tiny_server, max_tokens=256)


def test_vllm_curl_streamed(tiny_server: ServerProcess) -> None:
    body = {"text_input": PROMPT, "parameters": {"stream": True, "temperature": 0, "max_tokens": 24}}

    chunks = list(events(post(tiny_server, "generate_stream", body)))

    assert len(chunks) > 1
    assert "".join(chunk["text_output"] for chunk in chunks) == generated(tiny_server, max_tokens=24)


@pytest.mark.parametrize(("stream", "exclude"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("as_tensor", [True, False], ids=["tensor and parameters", "parameters alone"])
def test_vllm_sample_client(tiny_server: ServerProcess, stream: bool, exclude: bool, as_tensor: bool) -> None:
    """samples/client.py: many prompts on one stream, told apart by id; the sampling fields sent twice, as strings."""
    prompts = ["Hello, my name is", PROMPT, "The future of AI is"]
    requests = [
        Sent(
            tensors=vllm_tensors(prompt, stream=stream, sampling=VLLM_SAMPLING if as_tensor else None)
            | {"exclude_input_in_output": flag(exclude)},
            parameters=VLLM_SAMPLING,
            request_id=str(number),
            outputs=["text_output"],
        )
        for number, prompt in enumerate(prompts)
    ]

    texts = texts_by_id(exchange(tiny_server, *requests).all())

    expected = [("" if exclude else prompt) + generated(tiny_server, prompt, max_tokens=24) for prompt in prompts]
    assert [texts[str(number)] for number in range(len(prompts))] == expected


def test_vllm_sample_client_goes_on_after_an_error(tiny_server: ServerProcess) -> None:
    good = vllm_tensors(stream=True, sampling=VLLM_SAMPLING)
    bad = vllm_tensors(stream=True, sampling=VLLM_SAMPLING | {"temperature": "hot"})

    sent = [Sent(tensors=tensors, request_id=str(number)) for number, tensors in enumerate((good, bad, good))]
    outcome = exchange(tiny_server, *sent)

    assert texts_by_id(outcome.results) == dict.fromkeys("02", generated(tiny_server, max_tokens=24))
    (error,) = outcome.errors
    assert error.message().startswith("[E_INVALID_ARGUMENT] temperature: ")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", VLLM_FLAGS)
def test_vllm_flag_puts_its_output_on_every_response(tiny_server: ServerProcess, stream: bool, name: str) -> None:
    sampling: Fields = VLLM_SAMPLING | ({"logprobs": 2} if name == "return_logprobs" else {})
    tensors = vllm_tensors(stream=stream, sampling=sampling) | {name: flag(True)}

    results = exchange(tiny_server, Sent(tensors=tensors)).all()

    assert len(results) > 1 if stream else len(results) == 1
    assert [result.as_numpy(VLLM_FLAGS[name]).shape for result in results] == [(1,)] * len(results)


@pytest.mark.parametrize("stream", [True, False])
def test_vllm_finish_reason_is_none_until_the_end(tiny_server: ServerProcess, stream: bool) -> None:
    tensors = vllm_tensors(stream=stream, sampling=VLLM_SAMPLING) | {"return_finish_reason": flag(True)}

    results = exchange(tiny_server, Sent(tensors=tensors)).all()

    assert [first(result, "finish_reason") for result in results] == ["None"] * (len(results) - 1) + ["length"]


@pytest.mark.parametrize("stream", [True, False])
def test_vllm_counts_add_up(tiny_server: ServerProcess, stream: bool) -> None:
    flags = {"return_num_input_tokens": flag(True), "return_num_output_tokens": flag(True)}
    tensors = vllm_tensors(stream=stream, sampling=VLLM_SAMPLING) | flags

    results = exchange(tiny_server, Sent(tensors=tensors)).all()

    counts = [int(result.as_numpy("num_output_tokens")[0]) for result in results]
    assert sum(counts) == 24
    assert len({int(result.as_numpy("num_input_tokens")[0]) for result in results}) == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("many", [0, 2, "2"])
def test_vllm_logprobs_are_json(tiny_server: ServerProcess, stream: bool, many: int | str) -> None:
    """Each token's likeliest, and itself, by token id as a string; as many tokens as the response counts."""
    flags = {"return_logprobs": flag(True), "return_num_output_tokens": flag(True)}
    tensors = vllm_tensors(stream=stream, sampling=VLLM_SAMPLING | {"logprobs": many}) | flags

    results = exchange(tiny_server, Sent(tensors=tensors)).all()

    tokens = []
    for result in results:
        positions = json.loads(first(result, "logprobs"))
        assert len(positions) == int(result.as_numpy("num_output_tokens")[0])
        for position in positions:
            _check_position(position, int(many))
            tokens += [entry["decoded_token"] for entry in position.values() if entry["rank"] == 1]
    assert "".join(tokens) == joined(results)


def _check_position(position: Mapping[str, Mapping[str, object]], many: int) -> None:
    """One token of a greedy answer. json.loads gives every key as a string; the id must be the decimal number."""
    assert max(many, 1) <= len(position) <= many + 1
    assert all(token_id.isdecimal() for token_id in position)
    for entry in position.values():
        types = {name: type(value) for name, value in entry.items()}
        assert types == {"logprob": float, "rank": int, "decoded_token": str}
    assert sorted(str(entry["rank"]) for entry in position.values()).count("1") == 1


@pytest.mark.parametrize("stream", [True, False])
def test_vllm_logprobs_where_no_number_was_asked_for(tiny_server: ServerProcess, stream: bool) -> None:
    """null there; here a list may stand too, for who expects null looks at nothing more."""
    tensors = vllm_tensors(stream=stream, sampling=VLLM_SAMPLING) | {"return_logprobs": flag(True)}

    results = exchange(tiny_server, Sent(tensors=tensors)).all()

    assert all(isinstance(json.loads(first(result, "logprobs")), list | None) for result in results)


def test_vllm_cumulative_logprob_is_the_sum_so_far(tiny_server: ServerProcess) -> None:
    flags = {"return_cumulative_logprob": flag(True), "return_logprobs": flag(True)}
    tensors = vllm_tensors(stream=True, sampling=VLLM_SAMPLING | {"logprobs": 0}) | flags

    total = 0.0
    for result in exchange(tiny_server, Sent(tensors=tensors)).all():
        positions = json.loads(first(result, "logprobs"))
        total += sum(entry["logprob"] for position in positions for entry in position.values())
        so_far = result.as_numpy("cumulative_logprob")
        assert so_far.dtype == np.float32
        assert so_far.tolist() == pytest.approx([total], rel=1e-4)


@pytest.mark.parametrize("stream", [True, False])
def test_vllm_flags_that_are_false_ask_for_nothing(tiny_server: ServerProcess, stream: bool) -> None:
    tensors = vllm_tensors(stream=stream, sampling=VLLM_SAMPLING) | {name: flag(False) for name in VLLM_FLAGS}

    results = exchange(tiny_server, Sent(tensors=tensors)).all()

    assert joined(results) == generated(tiny_server, max_tokens=24)
    assert all(result.as_numpy("logprobs") is None for result in results)
    assert all(result.as_numpy("cumulative_logprob") is None for result in results)


# --- Triton's OpenAI front end, vLLM format: it is in one process with the server; here the same goes over gRPC ---


@dataclass(frozen=True, kw_only=True)
class FrontEndAnswer:
    """What the front end makes of Triton's responses."""

    text: str
    finish_reason: str | None
    """Its own: "stop" with the final response, whatever the model says."""
    usage: tuple[int, int] | None
    tokens: list[str]
    text_offsets: list[int]


COMPLETION = {"frequency_penalty": 0, "ignore_eos": False, "n": 1, "presence_penalty": 0, "temperature": 0, "top_p": 1}
"""A completion's sampling fields where the user gave a temperature of 0: the front end writes out its defaults."""

CHAT = COMPLETION | {"temperature": 0.7, "seed": 7}


def front_end_tensors(
    server: ServerProcess, sampling: Fields, *, stream: bool, echo: bool = False, logprobs: int = 0
) -> dict[str, Array]:
    """As releases 25.12 to 26.08 build them."""
    fields = {**sampling, **({"logprobs": logprobs} if logprobs else {})}
    return {
        "return_logprobs": flag(bool(logprobs)),
        "text_input": strings(PROMPT),
        "stream": flag(stream),
        echo_tensor(server): flag(not echo),
        "sampling_parameters": strings(json.dumps(fields)),
        "return_num_input_tokens": flag(True),
        "return_num_output_tokens": flag(True),
    }


def echo_tensor(server: ServerProcess) -> str:
    """The first input of the model's configuration that is one of the two."""
    names = ("exclude_input_in_output", "sampling_param_exclude_input_from_output")
    config = httpx.get(f"{url(server, 'http')}/v2/models/{MODEL}/config", timeout=20).json()
    return next(str(tensor["name"]) for tensor in config["input"] if tensor["name"] in names)


def front_end(server: ServerProcess, tensors: Tensors) -> FrontEndAnswer:
    """Every response counts, an empty final one too: not streamed there may be that one besides the text's own."""
    results = exchange(server, Sent(tensors=tensors), empty_final=True).all()
    assert [_is_final(result) for result in results] == [False] * (len(results) - 1) + [True]
    if tensors["stream"][0]:
        return _read_stream(results)
    assert len(results) <= 2
    return _read_stream(results[:1])


def _read_stream(results: Sequence[Any]) -> FrontEndAnswer:
    text, tokens, offsets = "", [], []
    usages = [usage for usage in map(_read_usage, results) if usage]
    for result in results:
        at = len(text)
        for token in _read_tokens(result):
            tokens.append(token)
            offsets.append(at)
            at += len(token)
        text += _read_text(result)
    return FrontEndAnswer(
        text=text,
        finish_reason="stop",
        usage=(usages[0][0], sum(output for _, output in usages)) if usages else None,
        tokens=tokens,
        text_offsets=offsets,
    )


def _is_final(result: Any) -> bool:
    final: bool = result.get_response().parameters["triton_final_response"].bool_param
    return final


def _read_text(result: Any) -> str:
    """Exactly one string, where the output is there at all; a final response may do without."""
    texts = result.as_numpy("text_output")
    if texts is None:
        return ""
    assert texts.size == 1
    decoded: str = texts.reshape(-1)[0].decode()
    return decoded


def _read_usage(result: Any) -> tuple[int, int] | None:
    """Only where both are there, as the first number of 32 bits, signed or not; others are passed over in silence."""
    counts = [result.as_numpy(name) for name in ("num_input_tokens", "num_output_tokens")]
    if any(count is None for count in counts):
        return None
    assert {count.dtype for count in counts} <= {np.dtype(np.int32), np.dtype(np.uint32)}
    return int(counts[0].reshape(-1)[0]), int(counts[1].reshape(-1)[0])


def _read_tokens(result: Any) -> list[str]:
    """The lowest rank is taken for the token itself. JSON's null, and no output, are no tokens."""
    texts = result.as_numpy("logprobs")
    if texts is None:
        return []
    assert texts.size == 1
    positions = json.loads(texts.reshape(-1)[0]) or []
    ranked = [sorted(position.values(), key=lambda entry: entry.get("rank", 2**63)) for position in positions]
    assert all(isinstance(entry["logprob"], float) for entries in ranked for entry in entries)
    return [str(entries[0]["decoded_token"]) for entries in ranked]


@pytest.mark.parametrize("stream", [False, True])
def test_front_end_completion(llmapi_server: ServerProcess, stream: bool) -> None:
    answer = front_end(llmapi_server, front_end_tensors(llmapi_server, COMPLETION | {"max_tokens": 24}, stream=stream))

    plain = answered(llmapi_server, max_tokens=24)
    assert answer.text == plain["text_output"]
    assert answer.usage == (plain["num_input_tokens"], plain["num_output_tokens"])
    assert answer.tokens == []


def test_front_end_streams_in_increments(tiny_server: ServerProcess) -> None:
    """It passes each text on as it is; what is not an increment would come out twice."""
    tensors = front_end_tensors(tiny_server, COMPLETION | {"max_tokens": 40}, stream=True)

    results = exchange(tiny_server, Sent(tensors=tensors), empty_final=True).all()

    texts = [_read_text(result) for result in results]
    assert len([text for text in texts if text]) > 4
    assert "".join(texts) == generated(tiny_server, max_tokens=40)


def test_front_end_chat_is_the_same_streamed_and_not(tiny_server: ServerProcess) -> None:
    whole, streamed = (
        front_end(tiny_server, front_end_tensors(tiny_server, CHAT | {"max_tokens": 24}, stream=stream))
        for stream in (False, True)
    )

    assert whole == streamed


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_list", [False, True])
def test_front_end_stop_strings(tiny_server: ServerProcess, stream: bool, as_list: bool) -> None:
    """`stop` in the JSON is what the user wrote: one string, or a list."""
    text = generated(tiny_server, max_tokens=24)
    stop = text[len(text) // 2 :][:4]
    sampling = COMPLETION | {"max_tokens": 24, "stop": [stop] if as_list else stop}

    answer = front_end(tiny_server, front_end_tensors(tiny_server, sampling, stream=stream))

    assert answer.text == text[: text.index(stop)]


def test_front_end_echo(tiny_server: ServerProcess) -> None:
    tensors = front_end_tensors(tiny_server, COMPLETION | {"max_tokens": 8}, stream=False, echo=True)

    assert front_end(tiny_server, tensors).text == PROMPT + generated(tiny_server, max_tokens=8)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("many", [1, 5])
def test_front_end_logprobs(tiny_server: ServerProcess, stream: bool, many: int) -> None:
    sampling = COMPLETION | {"max_tokens": 24}

    answer = front_end(tiny_server, front_end_tensors(tiny_server, sampling, stream=stream, logprobs=many))

    assert "".join(answer.tokens) == answer.text == generated(tiny_server, max_tokens=24)
    assert len(answer.tokens) == 24
    for at, token in zip(answer.text_offsets, answer.tokens, strict=True):
        assert answer.text[at:].startswith(token)


@pytest.mark.parametrize("extra", [{"best_of": 1}, {"logprobs": False}], ids=["completion", "chat"])
def test_front_end_of_older_releases(tiny_server: ServerProcess, extra: dict[str, object]) -> None:
    """Four tensors until 25.06; a completion's best_of until 25.12, and chat's `logprobs: false` until 25.11."""
    tensors = {
        "text_input": strings(PROMPT),
        "stream": flag(True),
        "exclude_input_in_output": flag(True),
        "sampling_parameters": strings(json.dumps(COMPLETION | {"max_tokens": 24} | extra)),
    }

    assert front_end(tiny_server, tensors).text == generated(tiny_server, max_tokens=24)


@pytest.mark.parametrize("stream", [False, True])
def test_front_end_gets_an_error_instead_of_a_response(tiny_server: ServerProcess, stream: bool) -> None:
    """It raises what Triton raises: status 500 with this message, or a stream that breaks off."""
    tensors = front_end_tensors(tiny_server, COMPLETION | {"max_tokens": 0}, stream=stream)

    message = exchange(tiny_server, Sent(tensors=tensors)).only_error()

    assert message.startswith("[E_INVALID_ARGUMENT] max_tokens: ")


# --- The TensorRT-LLM format: a batch dimension, and the plain names as inputs. Refused before the backend sees it ---


def trtllm_format(**more: Array) -> dict[str, Array]:
    return {
        "text_input": np.array([[PROMPT.encode()]], dtype=np.object_),
        "stream": np.array([[False]]),
        **more,
    }


def test_front_end_trtllm_format_is_refused(tiny_server: ServerProcess) -> None:
    """The front end's choice for a Python backend; `--backend vllm` is what its users need."""
    tensors = trtllm_format(
        max_tokens=np.array([[16]], dtype=np.int32),
        temperature=np.array([[0.0]], dtype=np.float32),
        return_num_input_tokens=np.array([[True]]),
        return_num_output_tokens=np.array([[True]]),
    )

    message = exchange(tiny_server, Sent(tensors=tensors)).only_error()

    assert re.search(r"unexpected inference input '(max_tokens|temperature)' for model 'tensorrt_llm'", message)


def test_a_batch_dimension_is_refused(tiny_server: ServerProcess) -> None:
    """inflight_batcher_llm's clients, with no more than the two names that this model has too."""
    message = exchange(tiny_server, Sent(tensors=trtllm_format())).only_error()

    assert "unexpected shape for input" in message
    assert "got [1,1]" in message
