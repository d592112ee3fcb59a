"""Makes the inputs of bad_input.py: mutants of good requests, wrong framing and tensors, and requests that cost much.

The number of an input and the seed decide all of it.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench._load import infer_message

from reliability.fuzz.gateway_targets import ROUTES
from reliability.fuzz.mutation import mutated_bytes, mutated_json, mutated_value
from reliability.fuzz.targets import inputs_of

MODEL = "tensorrt_llm"
MIB = 1 << 20


@dataclass(frozen=True)
class BadInput:
    """kind: for the counts. where: "server", "gateway" or "grpc". data: all bytes of the connection, or of the message.

    whole: the bytes are a whole request by HTTP's own rules, so that there must be an answer. pieces: in how many the
    data is sent. stream: a gRPC stream.
    """

    kind: str
    where: str
    data: bytes
    whole: bool = True
    pieces: int = 1
    stream: bool = True


def http_request(path: str, body: bytes, *headers: str, length: int | None = None, method: str = "POST") -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: h",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def make(number: int, seed: int) -> BadInput:
    """The input of this number."""
    rng = random.Random(f"{seed} {number}")
    (kind,) = rng.choices(list(_MAKERS), [weight for weight, _ in _MAKERS.values()])
    return _MAKERS[kind][1](kind, rng)


_LIMITED = {"max_tokens": 4, "timeout_ms": 2000}
"""In the good requests, so that a mutant that is still good does not take long. model.yaml limits the others."""


def _bodies() -> list[dict[str, Any]]:
    found = [json.loads(data) for data in inputs_of("backend_request")[:2]]
    return [
        *({**body, **_LIMITED} for body in found),
        {"text_input": "Hi", **_LIMITED, "sampling_param_seed": 5, "streaming": True, "return_num_output_tokens": True},
        {"text_input": ["a", "b"], **_LIMITED, "n": 2, "temperature": 1.0, "sampling_param_stop": ["x", "yz"]},
        {"input_ids": [1, 2, 3], "text_input": "", **_LIMITED, "sampling_param_logit_bias": '{"5": 1}'},
        {"task": "tokenize", "text_input": "Hi"},
        {"text_input": "", "stop": True, "id": "nobody"},
    ]


_BODIES = _bodies()
_VERBS = ("generate", "generate_stream")
_GATEWAY = [
    (ROUTES[data[0]], {**json.loads(data[1:]), "model": "m"} if data[0] != 5 else json.loads(data[1:]))
    for data in inputs_of("gateway_app")[:7]
]


def _path(rng: random.Random) -> str:
    return f"/v2/models/{MODEL}/{rng.choice(_VERBS)}"


def _mutants(where: str, mutate: Callable[[bytes, random.Random], bytes]) -> Callable[[str, random.Random], BadInput]:
    def make_it(kind: str, rng: random.Random) -> BadInput:
        path, body = (_path(rng), rng.choice(_BODIES)) if where == "server" else rng.choice(_GATEWAY)
        return BadInput(kind, where, http_request(path, mutate(json.dumps(body).encode(), rng)))

    return make_it


def _framing(where: str) -> Callable[[str, random.Random], BadInput]:
    def make_it(kind: str, rng: random.Random) -> BadInput:
        if where == "server":
            path, body = _path(rng), json.dumps({"text_input": "Hi", **_LIMITED}).encode()
        else:
            path, body = (
                ROUTES[0],
                json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}).encode(),
            )
        good = http_request(path, body)
        head = good.partition(b"Content-Length")[0]
        chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
        size = b"%x\r\n" % len(body)
        wrong: list[bytes] = [
            good[: rng.randrange(len(good))],
            http_request(path, body, length=len(body) + rng.choice((1, 100, 10**6))),
            http_request(path, body, length=rng.randrange(len(body))),
            http_request(path, body, length=-1),
            http_request(path, body).replace(b"Content-Length: ", b"Content-Length: 9999999999999999999999"),
            http_request(path, body, f"Content-Length: {len(body) + 3}"),
            http_request(path, body, "Transfer-Encoding: chunked"),
            chunked + size + body + b"\r\n0\r\n\r\n",
            chunked + b"zz\r\n" + body + b"\r\n0\r\n\r\n",
            chunked + b"ffffffffffffffff\r\n" + body,
            chunked + b"-1\r\n" + body,
            chunked + size + body,
            chunked + b"1;" + b"a" * 9000 + b"\r\n{\r\n0\r\n\r\n",
            http_request(path, body, "X-Long: " + "a" * rng.choice((1000, 9000, 70_000))),
            http_request(path, body, *(f"X-{number}: a" for number in range(rng.choice((100, 2000))))),
            http_request(path + "?" + "a" * rng.choice((1000, 70_000)), body),
            http_request(path, body, "X-A: b\0c"),
            http_request(path, body, "X A: b"),
            http_request(path, body, " folded: b"),
            http_request(path, body, method=rng.choice(("GET", "PUT", "A" * 300, "post", "\0"))),
            good.replace(b"HTTP/1.1", rng.choice((b"HTTP/9.9", b"HTTP/1.", b"", b"HTTP/2.0"))),
            good.replace(b"\r\n", b"\n"),
            good.replace(b"Connection: close\r\n", b"") + good,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            rng.randbytes(rng.choice((1, 30, 3000))),
            http_request(path, body, "Expect: 100-continue"),
            http_request(path, body, "Content-Encoding: gzip"),
            http_request(path, body, "Inference-Header-Content-Length: " + rng.choice(("-1", "5", "a", "99999999999"))),
            mutated_bytes(good, rng),
        ]
        return BadInput(kind, where, rng.choice(wrong), whole=False, pieces=rng.choice((1, 1, 2, 5)))

    return make_it


def _grpc_tensors(kind: str, rng: random.Random) -> BadInput:
    """A message whose tensors are wrong: type, shape, bytes, number, name."""
    body = {name: value for name, value in rng.choice(_BODIES).items() if name != "id"}
    message = infer_message(MODEL, body)
    message.id = "a"
    for _ in range(rng.choice((1, 1, 2))):
        tensor = rng.choice(list(message.inputs)) if message.inputs else message.inputs.add(name="text_input")
        at = rng.randrange(max(1, len(message.raw_input_contents)))
        match rng.randrange(12):
            case 0:
                tensor.datatype = rng.choice(
                    ("BYTES", "INT32", "FP32", "BOOL", "UINT64", "FP16", "", "X" * 1000, "BF16")
                )
            case 1:
                del tensor.shape[:]
                tensor.shape.extend(rng.choice(([], [0], [-1], [2**62], [1, 1], [3], [2**31, 2**31, 4], [0, 5])))
            case 2 | 3 if message.raw_input_contents:
                message.raw_input_contents[at] = mutated_bytes(message.raw_input_contents[at], rng)
            case 4:
                message.raw_input_contents.append(rng.randbytes(rng.choice((0, 4, 100))))
            case 5 if message.raw_input_contents:
                del message.raw_input_contents[at]
            case 6:
                tensor.name = rng.choice(("", "nothing", "text_input", "stop", "a" * 70_000, "sampling_param_n", "\0"))
            case 7:
                message.inputs.add().CopyFrom(tensor)
            case 8:
                message.parameters[
                    rng.choice(("timeout", "priority", "max_tokens", "a\0", "b" * 10_000))
                ].string_param = rng.choice(("", "9" * 5000, "\0", "a" * 70_000))
            case 9:
                message.parameters[rng.choice(("timeout", "sequence_id", "n", "temperature"))].int64_param = rng.choice(
                    (-1, 2**62, -(2**63), 0)
                )
            case 10:
                message.model_name, message.model_version = rng.choice(
                    (("", ""), ("a" * 5000, ""), (MODEL, "99"), ("\0", "a"))
                )
            case _:
                tensor.contents.bytes_contents.append(rng.randbytes(9))
                message.outputs.add(name=rng.choice(("text_output", "nothing", "")))
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    return BadInput(kind, "grpc", message.SerializeToString(), stream=rng.random() < 0.9)


def _grpc_fields(kind: str, rng: random.Random) -> BadInput:
    """A message that Triton can read, whose values are wrong."""
    body = {name: value for name, value in rng.choice(_BODIES).items() if name != "id"}
    name = rng.choice(list(body))
    try:
        mutant: dict[str, Any] = {**body, name: mutated_value(body[name], rng)}
        message = infer_message(MODEL, {name: _for_grpc(value) for name, value in mutant.items()})
    except (TypeError, ValueError, OverflowError, StopIteration, AttributeError, RecursionError):
        return _grpc_tensors(kind, rng)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    return BadInput(kind, "grpc", message.SerializeToString())


def _for_grpc(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict) or value is None else value


def _grpc_bytes(kind: str, rng: random.Random) -> BadInput:
    good = _grpc_fields(kind, random.Random(rng.randrange(50)))
    return BadInput(kind, "grpc", mutated_bytes(good.data, rng), stream=rng.random() < 0.9)


_MAKERS: Mapping[str, tuple[int, Callable[[str, random.Random], BadInput]]] = {
    "server: JSON": (24, _mutants("server", mutated_json)),
    "server: bytes": (10, _mutants("server", mutated_bytes)),
    "server: framing": (8, _framing("server")),
    "gRPC: values": (10, _grpc_fields),
    "gRPC: tensors": (10, _grpc_tensors),
    "gRPC: bytes": (6, _grpc_bytes),
    "gateway: JSON": (20, _mutants("gateway", mutated_json)),
    "gateway: bytes": (5, _mutants("gateway", mutated_bytes)),
    "gateway: framing": (7, _framing("gateway")),
}
"""Kind -> (share in percent, what makes one)."""


def expensive() -> Iterator[BadInput]:
    """Requests that are large, or look as if they took long. Each comes once, most of them both ways."""
    user = [{"role": "user", "content": "Hi"}]
    deep_reference: dict[str, Any] = {"$ref": "#/a"}
    for _ in range(100):
        deep_reference = {"allOf": [deep_reference]}
    fields: dict[str, Any] = {
        "a million stop strings": {"stop": ["a"] * 1_000_000},
        "a million different stop strings": {"stop": [str(number) for number in range(1_000_000)]},
        "stop strings that overlap": {"stop": ["a" * 1023 + chr(98 + number) for number in range(25)]},
        "a million biased tokens": {"logit_bias": {str(number): 1 for number in range(1_000_000)}},
        "a long regex": {"guided_regex": "(a+)+" * 13_000},
        "a nested regex": {"guided_regex": "(" * 30_000 + "a" + ")" * 30_000},
        "a regex that explodes": {"guided_regex": "(a|a)*" * 1000 + "b"},
        "a long grammar": {"guided_grammar": "root ::= " + " | ".join(f'"{number}"' for number in range(8000))},
        "a schema with references": {"guided_json": {"a": deep_reference, "$ref": "#/a"}},
        "a schema of itself": {"guided_json": {"$ref": "#", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
        "a schema of 10,000 properties": {
            "guided_json": {"type": "object", "properties": {str(number): {} for number in range(10_000)}}
        },
        "a huge n": {"n": 2**31 - 1},
        "64 answers": {"n": 64, "temperature": 1.0},
        "a number of 100,000 digits": {"seed": 10**4000},
        "100,000 unknown fields": {f"unknown_{number}": 1 for number in range(100_000)},
        "a million bad words": {"bad_words": ["a"] * 1_000_000},
    }
    for name, more in fields.items():
        yield _of_server(name, {"text_input": "Hi", "sampling_parameters": json.dumps(more)})
        yield _of_gateway(name, {"messages": user, **_in_openai_words(more)})
    for size in (1, 16, 60):
        yield _of_server(f"a prompt of {size} MiB", {"text_input": "word " * (size * MIB // 5)})
        yield _of_gateway(
            f"a prompt of {size} MiB", {"messages": [{"role": "user", "content": "word " * (size * MIB // 5)}]}
        )
        yield _raw(f"{size} MiB of brackets", "gateway", b'{"model": "m", "messages": ' + b"[" * (size * MIB))
        pairs = b",".join([b"[]"] * (size * MIB // 3))
        yield _raw(f"{size} MiB of empty lists", "server", b'{"text_input": "a", "b": [%b]}' % pairs)
        yield _raw(f"{size} MiB of empty lists", "gateway", b'{"model": "m", "messages": [%b]}' % pairs)
        yield _raw(
            f"{size} MiB of token ids",
            "server",
            b'{"text_input": "", "input_ids": [%b]}' % b",".join([b"1"] * (size * MIB // 2)),
        )
        yield _of_server(
            f"{size} MiB of sampling_parameters", {"text_input": "a", "sampling_parameters": " " * (size * MIB) + "{}"}
        )
    # More would end tritonserver itself: RapidJSON goes down as deep as the request says. docs/reliability.md tells.
    yield _raw("10,000 brackets", "server", b'{"text_input": "a", "b": ' + b"[" * 10_000)
    yield _raw("a number of 1 MiB", "server", b'{"text_input": "a", "max_tokens": %b}' % (b"9" * MIB))
    yield _raw("a number of 1 MiB", "gateway", b'{"model": "m", "messages": [], "max_tokens": %b}' % (b"9" * MIB))
    many = [{"role": ("user", "assistant")[number % 2], "content": "a"} for number in range(10_001)]
    calls = [{"id": str(number), "type": "function", "function": {"name": "f"}} for number in range(4999)]
    results = [{"role": "tool", "content": "", "tool_call_id": str(number)} for number in reversed(range(4999))]
    empty = [{"role": "user", "content": ""}] * 140_000
    for name, messages in {
        "10,000 messages": many[:10_000],
        "10,001 messages": many,
        "140,000 messages": empty,
        "5,000 calls": [{"role": "assistant", "content": None, "tool_calls": calls}, *results],
        "a content of 100,000 parts": [{"role": "user", "content": [{"type": "text", "text": ""}] * 100_000}],
    }.items():
        yield _of_server(name, {"text_input": "", "messages": json.dumps(messages)})
        yield _of_gateway(name, {"messages": messages})
    tools = [{"type": "function", "function": {"name": f"f{number}", "parameters": {}}} for number in range(100_000)]
    yield _of_server("100,000 tools", {"text_input": "", "messages": json.dumps(user), "tools": json.dumps(tools)})
    yield _of_gateway("100,000 tools", {"messages": user, "tools": tools})
    yield _of_server("100,000 prompts", {"text_input": ["a"] * 100_000})
    yield _of_server("256 prompts of 64 answers", {"text_input": ["a"] * 256, "n": 64, "temperature": 1.0})
    # tritonserver itself takes more than two minutes for 100,000, in which the model's process does next to nothing.
    yield _raw(
        "10,000 keys",
        "server",
        json.dumps({"text_input": "a", **{f"k{number}": 1 for number in range(10_000)}}).encode(),
    )
    yield _raw(
        "100,000 keys",
        "gateway",
        json.dumps({"model": "m", "messages": user, **{f"k{number}": 1 for number in range(100_000)}}).encode(),
    )
    for where, path in (("server", f"/v2/models/{MODEL}/generate"), ("gateway", ROUTES[0])):
        head = f"POST {path} HTTP/1.1\r\nHost: h\r\n".encode()
        yield BadInput("expensive: a header of 32 MiB", where, head + b"X: " + b"a" * (32 * MIB), whole=False)
        yield BadInput("expensive: headers without end", where, head + b"X-A: b\r\n" * (4 * MIB), whole=False)


def _of_server(name: str, fields: Mapping[str, Any]) -> BadInput:
    return _raw(name, "server", json.dumps({**fields, "max_tokens": 2}, ensure_ascii=False).encode())


def _of_gateway(name: str, fields: Mapping[str, Any]) -> BadInput:
    return _raw(name, "gateway", json.dumps({"model": "m", "max_tokens": 2, **fields}, ensure_ascii=False).encode())


def _raw(name: str, where: str, body: bytes) -> BadInput:
    path = f"/v2/models/{MODEL}/generate" if where == "server" else ROUTES[0]
    return BadInput(f"expensive: {name}", where, http_request(path, body))


def _in_openai_words(fields: Mapping[str, Any]) -> dict[str, Any]:
    if "guided_json" in fields:
        return {
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": fields["guided_json"]}}
        }
    return dict(fields)
