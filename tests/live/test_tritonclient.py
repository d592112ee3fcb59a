"""NVIDIA's own SDK works with the model as it does with any other."""

import queue

import numpy as np
import pytest
import tritonclient.grpc as triton

from deepseek_triton_client import Client
from support.servers import url


@pytest.fixture
def sdk(tiny_server):
    with triton.InferenceServerClient(f"127.0.0.1:{tiny_server.grpc_port}") as client:
        yield client


def tensor(name, values, datatype):
    made = triton.InferInput(name, [len(values)], datatype)
    made.set_data_from_numpy(np.array(values, dtype=np.object_ if datatype == "BYTES" else None))
    return made


def stream(client, inputs, **kwargs):
    """Every response of one request, the final one last."""
    responses: queue.Queue = queue.Queue()
    client.start_stream(lambda result, error: responses.put((result, error)))
    client.async_stream_infer("tensorrt_llm", inputs, enable_empty_final_response=True, **kwargs)
    received = []
    while True:
        result, error = responses.get(timeout=60)
        if error is not None:
            client.stop_stream()
            raise error
        received.append(result)
        if result.get_response().parameters["triton_final_response"].bool_param:
            client.stop_stream()
            return received


def text(results):
    return b"".join(result.as_numpy("text_output")[0] for result in results).decode()


def test_a_stream_by_tensors_and_parameters(sdk, tiny_server):
    prompt = "The capital of France is"
    results = stream(
        sdk,
        [tensor("text_input", [prompt.encode()], "BYTES"), tensor("streaming", [True], "BOOL")],
        parameters={"max_tokens": 24, "temperature": 0},
        request_id="sdk-1",
    )

    with Client(url(tiny_server, "http")) as client:
        assert text(results) == client.generate(prompt, max_tokens=24).text
    last = results[-1]
    assert last.get_response().id == "sdk-1"
    assert last.as_numpy("finish_reason").tolist() == [b"length"]
    assert last.as_numpy("num_output_tokens").dtype == np.int32
    assert last.as_numpy("num_output_tokens").tolist() == [24]


def test_an_error_carries_its_code(sdk):
    with pytest.raises(triton.InferenceServerException, match=r"\[E_INVALID_ARGUMENT\] max_tokens: expected"):
        stream(sdk, [tensor("text_input", [b"x"], "BYTES")], parameters={"max_tokens": -1})
