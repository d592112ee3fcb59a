"""Clients that exist elsewhere: what they send, to the letter of names, types and shapes, and how they read the answer.

Four families: those of TensorRT-LLM's llmapi model, those of Triton's vLLM backend, Triton's OpenAI front end in its
vLLM format, and the same in its TensorRT-LLM format, which has a batch dimension that this model has not.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton

from deepseek_triton_tools.server.server_process import ServerProcess
from support.servers import url
from support.wire import (
    MODEL,
    PROMPT,
    Array,
    Fields,
    Sent,
    Tensors,
    answered,
    events,
    exchange,
    first,
    flag,
    generated,
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


def test_the_curls_of_tensorrt_llms_readmes(llmapi_server):
    """The lines in tensorrtllm_backend's README and docs/llmapi.md; those of its ensemble have empty lists of words."""
    for more in ({}, {"sampling_param_return_perf_metrics": True}):
        body = {"text_input": "The future of AI is", "sampling_param_max_tokens": 10, **more}
        answer = post(llmapi_server, "generate", body).raise_for_status().json()
        assert answer["text_output"]
        assert {"model_name", "model_version"} <= answer.keys()

    body = {"text_input": PROMPT, "max_tokens": 16, "bad_words": "", "stop_words": "", "temperature": 0}
    assert post(llmapi_server, "generate", body).raise_for_status().json()["text_output"] == generated(llmapi_server)


def test_llmapi_client_tensors_with_its_parameter(llmapi_server):
    """It sends the flag as the request parameter "Streaming", capital and all; upstream reads no parameters."""
    for streaming in (False, True):
        sent = Sent(tensors=llmapi_tensors(), request_id="1", parameters={"Streaming": streaming})

        results = exchange(llmapi_server, sent).all()

        assert joined(results) == generated(llmapi_server)
        assert {result.get_response().id for result in results} == {"1"}


def test_llmapi_streams(llmapi_server):
    """By a tensor or a parameter, or over HTTP."""
    expected = generated(llmapi_server, max_tokens=40)
    tensors = llmapi_tensors(max_tokens=40)
    for sent in (
        Sent(tensors=tensors | {"streaming": flag(True), "stop": flag(False)}, request_id="0", outputs=["text_output"]),
        Sent(tensors=tensors, parameters={"streaming": True}, request_id="0", outputs=["text_output"]),
    ):
        results = exchange(llmapi_server, sent).all()
        assert len(results) > 1
        assert joined(results) == expected
        assert first(results[0], "text_output")

    body = {"text_input": PROMPT, "streaming": True, "sampling_param_max_tokens": 40, "sampling_param_temperature": 0.0}
    chunks = list(events(post(llmapi_server, "generate_stream", body)))
    assert len(chunks) > 1
    assert "".join(chunk["text_output"] for chunk in chunks) == expected


def test_llmapi_flags_put_the_reasons_on_every_response(llmapi_server):
    """end_to_end_test.py takes the first response it gets and wants all that it asked for in it; "None" will do."""
    wanted = ["finish_reason", "stop_reason"]
    for streaming in (False, True):
        tensors = llmapi_tensors() | {f"return_{name}": flag(True) for name in wanted} | {"streaming": flag(streaming)}

        results = exchange(llmapi_server, Sent(tensors=tensors, outputs=["text_output", *wanted])).all()

        reasons = [(first(result, "finish_reason"), first(result, "stop_reason")) for result in results]
        assert reasons == [("None", "None")] * (len(results) - 1) + [("length", "None")]


def test_a_client_that_fills_in_what_the_config_requires_sends_the_prompt(llmapi_server):
    """triton_cli: for each input of the configuration that is not optional it makes a tensor, and for no other one."""
    config = httpx.get(f"{url(llmapi_server, 'http')}/v2/models/{MODEL}/config", timeout=20).json()
    required = [tensor["name"] for tensor in config["input"] if not tensor.get("optional")]
    assert required == ["text_input"]

    results = exchange(llmapi_server, Sent(tensors={"text_input": strings(PROMPT)}), empty_final=True).all()

    assert first(results[0], "text_output")


def test_llmapi_request_id_header_is_no_request_id(tiny_server):
    """Upstream's README cancels by this header, which Triton does not read; "id" in the body is the way."""
    body = {"text_input": PROMPT, "sampling_param_max_tokens": 16, "sampling_param_temperature": 0.0}

    answer = post(tiny_server, "generate", body, headers={"triton-request-id": "my-req-1"})

    assert answer.json()["text_output"] == generated(tiny_server)
    assert "id" not in answer.json()


def test_unary_requests_are_refused_by_triton(tiny_server):
    """As by upstream's model with `decoupled: True`, which its streaming needs as well. `build --no-decoupled` makes a
    model that takes them (test_not_decoupled)."""
    for scheme in ("grpc", "http"):
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


def test_vllm_curls(tiny_server):
    fields = {"temperature": 0, "max_tokens": 24}
    expected = generated(tiny_server, max_tokens=24)
    answer = post(tiny_server, "generate", {"text_input": PROMPT, "parameters": {"stream": False, **fields}})
    streamed = post(tiny_server, "generate_stream", {"text_input": PROMPT, "parameters": {"stream": True, **fields}})

    chunks = list(events(streamed))

    assert answer.raise_for_status().json()["text_output"] == expected
    assert len(chunks) > 1
    assert "".join(chunk["text_output"] for chunk in chunks) == expected


def test_vllm_sample_client(tiny_server):
    """samples/client.py: many prompts on one stream, told apart by id; the sampling fields sent twice, as strings."""
    prompts = ["Hello, my name is", PROMPT]
    answers = [generated(tiny_server, prompt, max_tokens=24) for prompt in prompts]
    for stream, exclude, sampling in ((False, False, VLLM_SAMPLING), (False, True, None), (True, True, VLLM_SAMPLING)):
        requests = [
            Sent(
                tensors=vllm_tensors(prompt, stream=stream, sampling=sampling)
                | {"exclude_input_in_output": flag(exclude)},
                parameters=VLLM_SAMPLING,
                request_id=str(number),
                outputs=["text_output"],
            )
            for number, prompt in enumerate(prompts)
        ]

        texts = texts_by_id(exchange(tiny_server, *requests).all())

        wanted = [("" if exclude else prompt) + answer for prompt, answer in zip(prompts, answers, strict=True)]
        assert texts == {str(number): text for number, text in enumerate(wanted)}


def test_vllm_sample_client_goes_on_after_an_error(tiny_server):
    good = vllm_tensors(stream=True, sampling=VLLM_SAMPLING)
    bad = vllm_tensors(stream=True, sampling=VLLM_SAMPLING | {"temperature": "hot"})

    sent = [Sent(tensors=tensors, request_id=str(number)) for number, tensors in enumerate((good, bad, good))]
    outcome = exchange(tiny_server, *sent)

    assert texts_by_id(outcome.results) == dict.fromkeys("02", generated(tiny_server, max_tokens=24))
    (error,) = outcome.errors
    assert error.message().startswith("[E_INVALID_ARGUMENT] temperature: ")


@pytest.mark.parametrize("stream", [True, False])
def test_vllm_flags_put_their_outputs_on_every_response(tiny_server, stream):
    """The reason is "None" until the end, and the counts of a stream add up."""
    flags = {name: flag(True) for name in VLLM_FLAGS}
    results = exchange(tiny_server, Sent(tensors=vllm_tensors(stream=stream, sampling=VLLM_SAMPLING) | flags)).all()

    assert len(results) > 1 if stream else len(results) == 1
    for name in VLLM_FLAGS.values():
        assert [result.as_numpy(name).shape for result in results] == [(1,)] * len(results)
    assert [first(result, "finish_reason") for result in results] == ["None"] * (len(results) - 1) + ["length"]
    assert sum(int(result.as_numpy("num_output_tokens")[0]) for result in results) == 24
    assert len({int(result.as_numpy("num_input_tokens")[0]) for result in results}) == 1
    assert all(isinstance(json.loads(first(result, "logprobs")), list | None) for result in results)  # null there

    flags = {name: flag(False) for name in VLLM_FLAGS}
    results = exchange(tiny_server, Sent(tensors=vllm_tensors(stream=stream, sampling=VLLM_SAMPLING) | flags)).all()
    assert joined(results) == generated(tiny_server, max_tokens=24)
    for name in ("logprobs", "cumulative_logprob"):
        assert all(result.as_numpy(name) is None for result in results)


@pytest.mark.parametrize(("stream", "many"), [(True, 0), (True, 2), (False, "2")])
def test_vllm_logprobs_are_json(tiny_server, stream, many):
    """Each token's likeliest, and itself, by token id as a string; as many tokens as the response counts. The
    cumulative one is the sum so far."""
    flags = {f"return_{name}": flag(True) for name in ("logprobs", "num_output_tokens", "cumulative_logprob")}
    tensors = vllm_tensors(stream=stream, sampling=VLLM_SAMPLING | {"logprobs": many}) | flags

    results = exchange(tiny_server, Sent(tensors=tensors)).all()

    text, total = "", 0.0
    for result in results:
        positions = json.loads(first(result, "logprobs"))
        assert len(positions) == int(result.as_numpy("num_output_tokens")[0])
        for position in positions:
            _check_position(position, int(many))
            likeliest = next(entry for entry in position.values() if entry["rank"] == 1)
            text += likeliest["decoded_token"]
            total += likeliest["logprob"]
        so_far = result.as_numpy("cumulative_logprob")
        assert so_far.dtype == np.float32
        assert so_far.tolist() == pytest.approx([total], rel=1e-4)
    assert text == joined(results)


def _check_position(position: Mapping[str, Mapping[str, object]], many: int) -> None:
    """One token of a greedy answer. json.loads gives every key as a string; the id must be the decimal number."""
    assert max(many, 1) <= len(position) <= many + 1
    assert all(token_id.isdecimal() for token_id in position)
    for entry in position.values():
        types = {name: type(value) for name, value in entry.items()}
        assert types == {"logprob": float, "rank": int, "decoded_token": str}
    assert [entry["rank"] for entry in position.values()].count(1) == 1


# --- Triton's OpenAI front end, vLLM format: it is in one process with the server; here the same goes over gRPC ---


@dataclass(frozen=True, kw_only=True)
class FrontEndAnswer:
    """What the front end makes of Triton's responses. Its finish reason is "stop" whatever the model says."""

    text: str
    num_texts: int
    usage: tuple[int, int] | None
    tokens: list[str]
    text_offsets: list[int]


COMPLETION = {"frequency_penalty": 0, "ignore_eos": False, "n": 1, "presence_penalty": 0, "temperature": 0, "top_p": 1}
"""A completion's sampling fields where the user gave a temperature of 0: the front end writes out its defaults."""


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
    finals = [result.get_response().parameters["triton_final_response"].bool_param for result in results]
    assert finals == [False] * (len(results) - 1) + [True]
    if not tensors["stream"][0]:
        assert len(results) <= 2
        results = results[:1]
    text, tokens, offsets = "", [], []
    for result in results:
        at = len(text)
        for token in _read_tokens(result):
            tokens.append(token)
            offsets.append(at)
            at += len(token)
        text += _read_text(result)
    usages = [usage for usage in map(_read_usage, results) if usage]
    return FrontEndAnswer(
        text=text,
        num_texts=len([result for result in results if _read_text(result)]),
        usage=(usages[0][0], sum(output for _, output in usages)) if usages else None,
        tokens=tokens,
        text_offsets=offsets,
    )


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


def test_front_end_completion(llmapi_server):
    """It passes each text on as it is, so that what is no increment would come out twice."""
    whole, streamed = (
        front_end(llmapi_server, front_end_tensors(llmapi_server, COMPLETION | {"max_tokens": 40}, stream=stream))
        for stream in (False, True)
    )

    plain = answered(llmapi_server, max_tokens=40)
    assert whole.text == streamed.text == plain["text_output"]
    assert whole.usage == streamed.usage == (plain["num_input_tokens"], plain["num_output_tokens"])
    assert whole.tokens == streamed.tokens == []
    assert whole.num_texts == 1
    assert streamed.num_texts > 4


def test_front_end_stop_strings(tiny_server):
    """`stop` in the JSON is what the user wrote: one string, or a list."""
    text = generated(tiny_server, max_tokens=24)
    stop = text[len(text) // 2 :][:4]
    for stream, stops in ((True, stop), (False, [stop])):
        sampling = COMPLETION | {"max_tokens": 24, "stop": stops}

        answer = front_end(tiny_server, front_end_tensors(tiny_server, sampling, stream=stream))

        assert answer.text == text[: text.index(stop)]


def test_front_end_echo(tiny_server):
    tensors = front_end_tensors(tiny_server, COMPLETION | {"max_tokens": 8}, stream=False, echo=True)

    assert front_end(tiny_server, tensors).text == PROMPT + generated(tiny_server, max_tokens=8)


@pytest.mark.parametrize(("stream", "many"), [(False, 1), (True, 5)])
def test_front_end_logprobs(tiny_server, stream, many):
    sampling = COMPLETION | {"max_tokens": 24}

    answer = front_end(tiny_server, front_end_tensors(tiny_server, sampling, stream=stream, logprobs=many))

    assert "".join(answer.tokens) == answer.text == generated(tiny_server, max_tokens=24)
    assert len(answer.tokens) == 24
    for at, token in zip(answer.text_offsets, answer.tokens, strict=True):
        assert answer.text[at:].startswith(token)


def test_front_end_of_older_releases(tiny_server):
    """Four tensors until 25.06; a completion's best_of until 25.12, and chat's `logprobs: false` until 25.11."""
    for extra in ({"best_of": 1}, {"logprobs": False}):
        tensors = {
            "text_input": strings(PROMPT),
            "stream": flag(True),
            "exclude_input_in_output": flag(True),
            "sampling_parameters": strings(json.dumps(COMPLETION | {"max_tokens": 24} | extra)),
        }

        assert front_end(tiny_server, tensors).text == generated(tiny_server, max_tokens=24)


# --- The TensorRT-LLM format: a batch dimension, and the plain names as inputs. Refused before the backend sees it ---


def test_front_end_trtllm_format_is_refused(tiny_server):
    """The front end's choice for a Python backend; `--backend vllm` is what its users need. The clients of
    inflight_batcher_llm, with no more than the two names that this model has too, are refused for the shape."""
    two_names = {"text_input": np.array([[PROMPT.encode()]], dtype=np.object_), "stream": np.array([[False]])}
    tensors = {
        **two_names,
        "max_tokens": np.array([[16]], dtype=np.int32),
        "temperature": np.array([[0.0]], dtype=np.float32),
        "return_num_input_tokens": np.array([[True]]),
        "return_num_output_tokens": np.array([[True]]),
    }

    message = exchange(tiny_server, Sent(tensors=tensors)).only_error()
    assert re.search(r"unexpected inference input '(max_tokens|temperature)' for model 'tensorrt_llm'", message)
    message = exchange(tiny_server, Sent(tensors=two_names)).only_error()
    assert "unexpected shape for input" in message
    assert "got [1,1]" in message
