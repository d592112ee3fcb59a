"""The parsers of the client: what a server, or whoever answers in its place, sends."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from tritonclient.grpc import service_pb2 as pb

from deepseek_triton_client._core.client_settings import Endpoint
from deepseek_triton_client._core.exceptions import DeepseekTritonError, InvalidRequest, ProtocolError
from deepseek_triton_client._core.response_reader import (
    Cumulative,
    Deltas,
    ModelInfoReader,
    ResponseReader,
    read_model_info,
)
from deepseek_triton_client._core.results import Metrics
from deepseek_triton_client._core.wire import decode, decode_json, json_object
from deepseek_triton_client._grpc.grpc_transport import _is_final, _outputs, _parsed
from deepseek_triton_client._http.http_connection import Http11Protocol
from deepseek_triton_client._http.http_errors import EXCHANGE_ERRORS, query_error, status_error
from deepseek_triton_client._http.http_transport import _metadata
from deepseek_triton_client._http.sse import SseDecoder
from reliability.fuzz.mutation import cuts
from reliability.fuzz.refusals import may_refuse

_MOST_BYTES = 4096
_DATATYPES = ("BYTES", "BOOL", "INT32", "INT64", "UINT64", "FP16", "FP32", "FP64", "NONE")


@contextmanager
def _server_tells_errors() -> Iterator[None]:
    """Errors whose text is the server's own, as long as that is."""
    with suppress(DeepseekTritonError):
        yield


def server_events(data: bytes) -> None:
    """The body of an event stream. The events do not depend on where it is cut, and neither does the refusal."""
    whole, in_pieces, by_bytes = (
        _events(pieces) for pieces in ([data], cuts(data), [data[at : at + 1] for at in range(len(data))])
    )
    assert whole[0] == in_pieces[0] == by_bytes[0] or "refused" in (whole[1], in_pieces[1], by_bytes[1])
    assert all(len(event) <= _MOST_BYTES for event in whole[0])


def _events(pieces: Sequence[bytes]) -> tuple[list[bytes], object]:
    decoder = SseDecoder(_MOST_BYTES)
    events: list[bytes] = []
    with may_refuse(ProtocolError):
        for piece in pieces:
            events += decoder.feed(piece)
        return events, decoder.pending
    return events, "refused"


def http_answer(data: bytes) -> None:
    """All bytes of a connection, as the transport reads them: head, body, events, outputs, chunks."""
    protocol = Http11Protocol()
    protocol.request("POST", b"/v2/models/m/generate_stream", [(b"host", b"h"), (b"content-length", b"2")], b"{}")
    pieces = [*(piece for piece in cuts(data) if piece), b""]
    try:
        while (head := protocol.head()) is None:
            protocol.feed(pieces.pop(0))
        body = []
        while True:
            part = protocol.body()
            if part == b"":
                break
            if part is None:
                protocol.feed(pieces.pop(0))
            else:
                body.append(part)
    except EXCHANGE_ERRORS:
        return
    except IndexError:  # h11 waits although the connection has ended
        raise AssertionError("an answer without an end") from None
    assert isinstance(protocol.is_idle, bool)
    status, headers = head
    if status != 200:
        str(status_error(status, headers, b"".join(body)))
        str(query_error("http://h", status, headers, b"".join(body)))
        return
    reader, decoder = ResponseReader(2, Cumulative, says_end=False), SseDecoder(_MOST_BYTES)
    with _server_tells_errors(), may_refuse(ProtocolError):
        for part in body:
            for event in decoder.feed(part):
                reader.chunks(decode_json(event))
        reader.end()


def responses(data: bytes) -> None:
    """Outputs of responses, a JSON object in each line."""
    readers = [
        ResponseReader(2, Deltas, says_end=True),
        ResponseReader(1, Cumulative, says_end=False),
        ResponseReader(64, Deltas, says_end=False),
        ModelInfoReader(1, Deltas, says_end=False),
    ]
    for reader in readers:
        with _server_tells_errors(), may_refuse(ProtocolError):
            for line in data.split(b"\n"):
                for chunk in reader.chunks(decode_json(line)):
                    (chunk.text + chunk.reasoning).encode()
            reader.end()


def tensor(data: bytes) -> None:
    """One tensor; the first byte says of which type."""
    with may_refuse(ProtocolError):
        values = decode("text_output", _DATATYPES[data[0] % len(_DATATYPES)] if data else "BYTES", data[1:])
        assert values is None or isinstance(values, list)


def grpc_response(data: bytes) -> None:
    with _server_tells_errors(), may_refuse(ProtocolError):
        answer = _parsed(pb.ModelStreamInferResponse, data)
        outputs = _outputs(answer)
        _is_final(answer)
        for chunk in ResponseReader(1, Deltas, says_end=False).chunks(outputs):
            repr(chunk)


def grpc_seed() -> bytes:
    message = pb.ModelStreamInferResponse()
    response = message.infer_response
    response.model_name, response.id = "tensorrt_llm", "r1"
    response.parameters["triton_final_response"].bool_param = True
    for name, datatype, content in (
        ("text_output", "BYTES", b"\x02\0\0\0Hi"),
        ("finish_reason", "BYTES", b"\x04\0\0\0stop"),
        ("num_output_tokens", "INT32", b"\x02\0\0\0"),
        ("cumulative_logprob", "FP32", b"\0\0\0\xbf"),
    ):
        response.outputs.add(name=name, datatype=datatype, shape=[1])
        response.raw_output_contents.append(content)
    data: bytes = message.SerializeToString()
    return data


def model_info(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    with may_refuse(ProtocolError):
        read_model_info(text)


def model_metadata(data: bytes) -> None:
    with may_refuse(ProtocolError):
        _metadata(json_object(data))


def client_metrics(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    with may_refuse(ProtocolError):
        metrics = Metrics.parse(text)
        for sample in metrics.samples[:3]:
            metrics.value(sample.name)


def server_url(data: bytes) -> None:
    """A server's address, as users and load balancers write it."""
    with may_refuse(InvalidRequest):
        str(Endpoint.parse(data.decode("utf-8", "replace")))
