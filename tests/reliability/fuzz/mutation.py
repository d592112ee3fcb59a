"""Mutates inputs, as bytes and as JSON. The same random.Random gives the same mutant, so that a seed says all."""

import json
import random
from collections.abc import Sequence
from typing import Any

from deepseek_backend.contract import INPUTS, SAMPLING_FIELDS
from deepseek_triton_tools.gateway.chat_request import CHAT_FIELDS
from deepseek_triton_tools.gateway.openai_fields import REFUSED, SAMPLING

NAMES = sorted(
    {
        *(tensor.name for tensor in INPUTS),
        *(field.name for field in SAMPLING_FIELDS),
        *CHAT_FIELDS,
        *SAMPLING,
        *REFUSED,
        *("role", "content", "function", "arguments", "name", "type", "text", "prefix", "id", "tool_call_id"),
        *("reasoning_content", "tool_calls", "parameters", "strict", "json_schema", "schema", "input", "error"),
    }
)
"""Names that parsers of ours look for: the dictionary of the campaign too."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
TEXTS = (
    "",
    "\0",
    "\ufeff{}",
    "\ud83d",
    "\udcff",
    "é\u0301\u202e",
    "<think>",
    "</think>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>",
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="false">[1',
    "{{ 7 * 7 }}",
    "((((((((((a+)+)+)+)+)+)+)+)+)+)+$",
    'root ::= root "a"',
    "null",
    "NaN",
    "1e400",
    "9" * 5000,
    "[" * 2000,
    '{"a":' * 1200,
    "a" * 70_000,
)
NUMBERS = (
    0,
    -1,
    1,
    2,
    63,
    64,
    65,
    256,
    257,
    2**31 - 1,
    2**31,
    -(2**31) - 1,
    2**53 + 1,
    2**63,
    2**64,
    -(2**64),
    10**400,
    0.5,
    -0.0,
    1e300,
    1e-320,
)


def any_value(rng: random.Random, depth: int = 0) -> Any:
    """A value of JSON, most of them of the kind on which parsers stumble."""
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(TEXTS + _ROLES) if rng.random() < 0.7 else rng.choice(NAMES)
    if kind < 6:
        return rng.choice((None, True, False))
    if kind == 6:
        return [any_value(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 5, 66)))]
    if kind == 7:
        return {rng.choice(NAMES): any_value(rng, depth + 1) for _ in range(rng.choice((0, 1, 3)))}
    return nested(rng.choice((10, 90, 130, 500, 900, 985, 2000)), rng.choice(("list", "object")))


def nested(depth: int, kind: str = "list") -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


def mutated_value(value: Any, rng: random.Random) -> Any:
    """A copy of a value of JSON with one thing changed somewhere in it."""
    if rng.random() < 0.12:
        return any_value(rng)
    if isinstance(value, dict) and value:
        changed = dict(value)
        name = rng.choice(list(changed))
        match rng.randrange(8):
            case 0:
                del changed[name]
            case 1:
                changed[rng.choice(NAMES)] = any_value(rng)
            case 2:
                changed[rng.choice(NAMES)] = changed.pop(name)
            case 3:
                changed[name] = json.dumps(changed[name]) if not isinstance(changed[name], str) else [changed[name]]
            case _:
                changed[name] = mutated_value(changed[name], rng)
        return changed
    if isinstance(value, list) and value:
        at = rng.randrange(len(value))
        match rng.randrange(6):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value + [value[at]] * rng.choice((1, 64, 300))
            case 2:
                return [*value[:at], any_value(rng), *value[at:]]
            case _:
                return [*value[:at], mutated_value(value[at], rng), *value[at + 1 :]]
    if isinstance(value, str):
        document = _document(value)
        if isinstance(document, dict | list) and rng.random() < 0.7:  # JSON in a text, as the contract has it
            return json.dumps(mutated_value(document, rng))
        return mutated_bytes(value.encode("utf-8", "surrogatepass"), rng).decode("utf-8", "surrogateescape")
    return any_value(rng)


def _document(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


_PIECES = (
    *(name.encode() for name in NAMES),
    *(text.encode("utf-8", "surrogatepass") for text in TEXTS if len(text) < 100),
    *(b"\r\n", b"\n\n", b"data: ", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"{", b"[", b'"', b"\\u0000", b"\\ud800"),
    *(b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"&a", b"*a", b"<<: *a", b"!!python/object:a", b"!!bool x", b"2026-99-99"),
    *(
        b"1e999",
        b"-",
        b"Infinity",
        b"{" * 100,
        b"[" * 1000,
        b"9" * 4301,
        b"\x00\x00\x00\x00",
        b"\xff\xff\xff\xff\xff\xff\xff\x7f",
    ),
)


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return the data with one to four edits: bits, cuts, copies, pieces that mean something to a parser."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 1, 2, 4, 16, 64)))
        match rng.randrange(7):
            case 0:
                data = data[:at] + rng.choice(_PIECES) + data[at:]
            case 1:
                data = data[:at] + rng.choice(_PIECES) + data[end:]
            case 2:
                data = data[:at] + data[end:]
            case 3:
                data = data[:at]
            case 4:
                data = data[:end] + data[at:end] * rng.choice((1, 3, 40)) + data[end:]
            case 5 if at < len(data):
                data = data[:at] + bytes((data[at] ^ (1 << rng.randrange(8)),)) + data[at + 1 :]
            case _:
                data = data[:at] + rng.randbytes(rng.choice((1, 2, 8))) + data[at:]
    return data


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return a mutant of an input, changed as JSON where it is JSON, and as bytes where it isn't or for a change."""
    return mutated_json(data, rng) if rng.random() < 0.65 else mutated_bytes(data, rng)


def mutated_json(data: bytes, rng: random.Random) -> bytes:
    """Return a mutant that is changed as JSON, as far as it is JSON and can be written."""
    document = _document(data)
    if document is None:
        return mutated_bytes(data, rng)
    try:
        for _ in range(rng.choice((1, 1, 2, 3))):
            document = mutated_value(document, rng)
        return json.dumps(document, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    except (RecursionError, ValueError):  # a number too long to be written
        return mutated_bytes(data, rng)


def cuts(data: bytes, most: int = 6) -> Sequence[bytes]:
    """The data in pieces. The cuts depend on nothing but the data, so that a failure comes again."""
    rng = random.Random(len(data) * 257 + (data[0] if data else 0) + sum(data[-8:]))
    places = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(most)))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]
