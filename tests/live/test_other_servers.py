"""Models that others serve, through every client_kind of the client: tests/other_models behaves as they do."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepseek_triton_client import InvalidRequest, Logprob, PerfMetrics, ServerError
from deepseek_triton_tools.server.server_process import ServerProcess

MODELS = Path(__file__).resolve().parents[1] / "other_models"
PROMPT = "一二 three 四五😀 six"
"""Two bytes at a time, some of it ends within a character."""
REFUSED = (InvalidRequest, ServerError)
"""Triton's HTTP front end answers 400 to whatever error comes first, its gRPC stream has no status at all."""
LONG = "x" * 100_000
"""Takes minutes."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """All of them; beside llmapi the same as upstream configures it."""
    folder = tmp_path_factory.mktemp("others") / "repository"
    shutil.copytree(MODELS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(folder / "llmapi", folder / "not_decoupled")
    config = folder / "not_decoupled/config.pbtxt"
    text = config.read_text().replace("decoupled: true", "decoupled: false")
    config.write_text(text.replace('name: "llmapi"', 'name: "not_decoupled"'))
    with ServerProcess.serving(folder) as process:
        yield process


def both(client: Any, prompt: str, **fields: Any) -> tuple[str, str]:
    """The answer whole and streamed."""
    with client.stream(prompt, **fields) as stream:
        chunks = "".join(chunk.text for chunk in stream)
        assert stream.completion().text == chunks
    return client.generate(prompt, **fields).text, chunks


@pytest.mark.parametrize("model", ["llmapi", "vllm"])
def test_an_answer_is_the_same_whole_and_streamed(client_kind, server, model):
    """And whoever leaves a stream leaves the server usable."""
    with client_kind.client(server, model_name=model) as client:
        with client.stream(LONG, max_tokens=90_000) as stream:
            assert next(iter(stream)).text
        assert both(client, PROMPT, max_tokens=50) == (PROMPT, PROMPT)
        assert both(client, "ha ha ha", max_tokens=50) == ("ha ha ha", "ha ha ha")


def test_llmapi_streams_in_increments_with_an_outcome(client_kind, server):
    with client_kind.client(server, model_name="llmapi") as client:
        with client.stream(PROMPT) as stream:
            chunks = [chunk.text for chunk in stream]
        assert len(chunks) > 5
        assert not any("\ufffd" in text for text in chunks)
        fields = {"stop": ["cd", "x"], "return_cumulative_logprob": True, "return_perf_metrics": True}
        with client.stream("abcdef", **fields) as stream:
            streamed = stream.completion()
        for completion in (streamed, client.generate("abcdef", **fields)):
            assert (completion.text, completion.finish_reason, completion.stop_reason) == ("ab", "stop", "cd")
            assert completion.answers[0].cumulative_logprob == -1.5
            assert completion.perf_metrics == PerfMetrics(arrival_time_ns=7, kv_cache_hit_rate=0.5)
        assert client.generate(PROMPT, max_tokens=2).finish_reason == "length"


def test_what_comes_is_what_the_caller_says(client_kind, server):
    """Told that they are increments, the client joins texts that hold all so far."""
    with (
        client_kind.client(server, model_name="llmapi", stream_mode="delta") as client,
        client.stream("abcdef") as stream,
    ):
        assert stream.completion().text == "ab" + "abcd" + "abcdef"


def test_the_prompt_is_put_before_the_text_where_that_is_asked_for(client_kind, server):
    with client_kind.client(server, model_name="llmapi") as client:
        assert both(client, "天天", exclude_input_from_output=False) == ("天天天天", "天天天天")
    with client_kind.client(server, model_name="vllm") as client:
        assert client.generate("天", exclude_input_from_output=False).text == "天天"


def test_llmapi_as_upstream_configures_it_has_no_streams(client_kind, server):
    with client_kind.client(server, model_name="not_decoupled") as client:
        assert client.generate("hello").text == "hello"
        with pytest.raises(REFUSED, match="only supported in decoupled mode"), client.stream("hello"):
            pass


def test_vllm_counts_tokens_and_takes_its_own_parameters(client_kind, server):
    with client_kind.client(server, model_name="vllm") as client:
        completion = client.generate("abcb", bad="b", max_tokens=5, top_k=0, logprobs=1)
        assert (completion.text, completion.finish_reason) == ("ac", "stop")
        assert (completion.num_input_tokens, completion.num_output_tokens) == (4, 2)
        (place, _) = completion.answers[0].logprobs
        assert place == (Logprob(7, -0.5, 1, "a"),)
        with client.stream("abcdef", max_tokens=3, return_logprobs=True) as stream:
            assert [chunk.text for chunk in stream] == ["a", "b", "c"]
            completion = stream.completion()
        assert (completion.num_input_tokens, completion.num_output_tokens) == (6, 3)
        assert (completion.finish_reason, len(completion.answers[0].logprobs)) == ("length", 3)
        assert client.generate("a", guided_regex="[0-9]+").text == "[0-9]+"


def test_vllm_gives_several_whole_answers(client_kind, server):
    with client_kind.client(server, model_name="vllm") as client:
        completion = client.generate("ab", n=3)
        assert [answer.text for answer in completion.answers] == ["ab"] * 3
        assert (completion.num_input_tokens, completion.num_output_tokens) == (2, 6)
        with pytest.raises(InvalidRequest, match="n: model 'vllm'"), client.stream("ab", n=3):
            pass


def test_what_a_model_has_no_input_for_is_refused_by_name(client_kind, server):
    with client_kind.client(server, model_name="llmapi") as client:
        with pytest.raises(InvalidRequest, match=r"model 'llmapi' \(llmapi\) has no input for min_p, logprobs: "):
            client.generate("a", min_p=0.5, logprobs=1)
        with pytest.raises(InvalidRequest, match="no input for messages"):
            client.chat("a")
    with client_kind.client(server, model_name="vllm") as client:
        with pytest.raises(InvalidRequest, match="input_ids, best_of"):
            client.generate([1, 2], best_of=2)
        with pytest.raises(REFUSED, match="ignore_eos"):  # by the model itself
            client.generate("a", ignore_eos=True)


def test_a_running_request_is_ended_by_its_id(client_kind, server):
    llmapi = client_kind.client(server, model_name="llmapi")
    with llmapi, llmapi.stream(LONG, max_tokens=90_000, request_id="to be ended") as stream:
        next(iter(stream))
        llmapi.cancel("to be ended")
        assert stream.completion().finish_reason == "cancelled"
    with (
        client_kind.client(server, model_name="vllm") as client,
        pytest.raises(InvalidRequest, match="close its stream"),
    ):
        client.cancel("of somebody")
