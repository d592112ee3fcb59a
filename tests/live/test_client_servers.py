"""Several servers, models and versions, and what a client learns of them, with all four kinds of client."""

import threading
from functools import partial
from typing import Any

import pytest

from deepseek_triton_client import ModelMetadata, ModelNotFound, Readiness, Retries, ServerUnavailable
from deepseek_triton_tools.server.server_process import ServeOptions, ServerProcess
from support import client_kinds
from support.client_kinds import SCHEMES, STYLES, ClientKind, Loop
from support.servers import twin
from support.wire import LONG_ANSWER, PROMPT

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
call = partial(client_kinds.call, content=PROMPT, **GREEDY)


def test_failover_takes_the_first_that_is_well(client_kind, dead_server, tiny_server, trtllm_server):
    urls = [f"{client_kind.scheme}://127.0.0.1:1", *map(client_kind.url, (dead_server, tiny_server, trtllm_server))]

    with client_kind.client(urls, retries=Retries(attempts=1)) as client:
        for verb in ("generate", "stream", "chat", "stream_chat", "generate"):
            assert call(client, verb).url == client_kind.url(tiny_server)
        assert client.metadata().name == "tensorrt_llm"
        assert client.ready() is True


def test_round_robin_takes_each_in_turn(client_kind, tiny_server, trtllm_server):
    urls = [client_kind.url(tiny_server), client_kind.url(trtllm_server)]

    with client_kind.client(urls, balance="round_robin") as client:
        assert [call(client, "generate").url for _ in range(4)] == urls * 2
        many = client.generate_many([PROMPT] * 6, concurrency=2, **GREEDY)
        assert sorted(completion.url for completion in many) == sorted(urls * 3)


def test_both_protocols_in_one_client(client_kind, tiny_server):
    urls = [tiny_server.http_url, f"grpc://127.0.0.1:{tiny_server.grpc_port}"]

    with client_kind.client(urls, balance="round_robin") as client:
        first, second = call(client, "generate"), call(client, "stream")

    assert [first.url, second.url] == urls
    assert first.text == second.text


def test_a_request_is_cancelled_on_whichever_server_it_runs(client_kind, tiny_server, simulated_server):
    with (
        client_kind.client(simulated_server) as client,
        client_kind.client([client_kind.url(tiny_server), client_kind.url(simulated_server)]) as stopper,
        client.stream("x", max_tokens=LONG_ANSWER, ignore_eos=True, request_id="job-3") as stream,
    ):
        stopper.cancel("job-3")
        assert stream.completion().finish_reason == "cancelled"


# --- Models and versions ---


def test_another_model_and_another_version(client_kind, small_server):
    """Version 2 streams cumulatively by itself: chunks are increments all the same."""
    texts = []
    for settings in ({"model_version": "1"}, {"model_version": "2"}, {"model_name": "other"}):
        with client_kind.client(small_server, **settings) as client:
            with client.stream(PROMPT, max_tokens=12) as stream:
                texts.append("".join(map(str, stream)))
            assert client.generate(PROMPT, max_tokens=12).text == texts[-1]
            assert client.metadata().name == settings.get("model_name", "tensorrt_llm")

    assert texts[0]
    assert texts == texts[:1] * 3


def test_metadata_and_metrics_are_the_servers(client_kind, tiny_server):
    with client_kind.client(tiny_server, metrics_url=tiny_server.metrics_url) as client:
        metadata: ModelMetadata = client.metadata()
        metrics = client.metrics()

    assert (metadata.name, metadata.versions, metadata.platform) == ("tensorrt_llm", ("1",), "python")
    with ClientKind("http", "sync", client_kind.loop).client(tiny_server) as reference:
        assert metadata == reference.metadata()
    assert {"text_input", "sampling_param_max_tokens"} <= {tensor.name for tensor in metadata.inputs}
    assert metrics.value("deepseek_triton_ready", model="tensorrt_llm") == 1
    with (
        client_kind.client(tiny_server, metrics_url="http://127.0.0.1:1/metrics") as client,
        pytest.raises(ServerUnavailable),
    ):
        client.metrics()


# --- Waiting ---


@pytest.fixture(scope="module")
def waited(tmp_path_factory: pytest.TempPathFactory, client_loop: Loop) -> dict[str, list[Readiness]]:
    """The states that each kind of client saw while a slow server loaded; all four wait from before its start."""
    told: dict[str, list[Readiness]] = {}
    repository = twin(tmp_path_factory.mktemp("slow") / "repository", engine_options={"load_seconds": 1.5})
    free: dict[str, Any] = {"http_port": "auto", "grpc_port": "auto", "metrics_port": "auto"}

    def wait(client_kind: ClientKind) -> None:
        with client_kind.client(server) as client:
            client.wait_until_ready(60, told.setdefault(str(client_kind), []).append)
            assert client.ready() is True
            assert call(client, "generate").num_output_tokens == 4

    with ServerProcess(ServeOptions(repository=repository, **free)) as server:
        server.start()
        kinds = [ClientKind(scheme, style, client_loop) for scheme in SCHEMES for style in STYLES]
        threads = [threading.Thread(target=wait, args=(client_kind,)) for client_kind in kinds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return told


def test_waiting_from_before_the_server_is_there(client_kind, waited: dict[str, list[Readiness]]):
    *before, last = waited[str(client_kind)]

    assert before
    assert {readiness.state for readiness in before} <= {"unreachable", "starting", "loading"}
    assert before[0].state == "unreachable"
    assert last.state == "ready"
    moments = [readiness.waited_s for readiness in (*before, last)]
    assert moments == sorted(moments)


def test_a_model_that_never_comes(client_kind, tiny_server):
    for settings in ({"model_name": "gpt"}, {"model_version": "9"}):
        told: list[Readiness] = []
        with (
            client_kind.client(tiny_server, **settings) as client,
            pytest.raises(ModelNotFound, match="is not found; the server has tensorrt_llm version 1"),
        ):
            client.wait_until_ready(None, told.append)
        assert [readiness.state for readiness in told] == ["missing"]


# --- A server that is told to exit ---


def test_a_draining_server_hands_new_requests_to_the_next(tmp_path, tiny_server, client_loop: Loop):
    """Whether they have a connection from before or not. One stream, of 25 s, holds the server's exit up."""
    repository = twin(tmp_path / "repository", "--preset", "h200x8-r1-fp8-min-latency", drain_s=4)
    kinds = [ClientKind(scheme, style, client_loop) for scheme in SCHEMES for style in STYLES]
    with ServerProcess.serving(repository) as draining:
        clients = [kind.client([kind.url(draining), kind.url(tiny_server)]) for kind in kinds]
        assert [call(client, "generate").url for client in clients] == [kind.url(draining) for kind in kinds]
        holder = ClientKind("grpc", "sync", client_loop).client(draining)
        with holder, holder.stream("x", max_tokens=LONG_ANSWER, ignore_eos=True) as stream:
            next(stream)
            draining.request_stop()
            for client_kind, client in zip(kinds, clients, strict=True):
                answered = ""
                while answered != client_kind.url(tiny_server):  # the backend looks for the exit every now and then
                    answered = call(client, "generate").url
                assert {call(client, "stream").url for _ in range(2)} == {client_kind.url(tiny_server)}
                client.close()
                with client_kind.client([client_kind.url(draining), client_kind.url(tiny_server)]) as newcomer:
                    assert call(newcomer, "generate").url == client_kind.url(tiny_server)
            assert stream.completion().finish_reason == "cancelled"
        assert draining.wait() == 0
