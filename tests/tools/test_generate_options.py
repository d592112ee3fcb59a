"""Every sampling field is an option, in `generate` and in `chat`, and reaches the wire."""

import dataclasses
import re

import pytest

from deepseek_backend import contract
from deepseek_triton_client import SamplingParams
from deepseek_triton_client.testing import FakeServer
from deepseek_triton_tools.cli.main import program_parser
from deepseek_triton_tools.cli.sampling_options import assigned, sampling_fields
from deepseek_triton_tools.tool_errors import ToolError
from support.commands import run_command

FIELDS = {field.name: field.metadata for field in dataclasses.fields(SamplingParams)}
RANGES = {each.name: each for each in (*contract.SAMPLING_FIELDS, *contract.REQUEST_FIELDS)}
UNLIMITED = {contract.INT32_MAX, -contract.INT32_MAX}


def example(name):
    """A value as it is typed for a field, and as it is sent."""
    metadata = FIELDS[name]
    option = f"--{name.replace('_', '-')}"
    if metadata["many"]:
        values = ["a b", "-c"] if metadata["datatype"] == "BYTES" else [5, 6]
        return [f"{option}={value}" for value in values], values
    if metadata["datatype"] == "BOOL":
        return [option], True
    values = {"FP32": ("0.5", 0.5), "BYTES": ('{"a": 1}', '{"a": 1}')}
    typed, sent = values.get(metadata["datatype"], ("2", 2))
    return [option, typed], sent


@pytest.mark.slow
def test_every_field_is_an_option(model_server):
    for name in FIELDS:
        argv, expected = example(name)
        run_command("generate", "--chat", "hi", "--url", model_server.url, "--no-stream", *argv)
        prefix = "" if FIELDS[name]["plain"] else "sampling_param_"
        assert model_server.bodies[-1][f"{prefix}{name}"] == expected


def test_a_flag_can_be_denied():
    parser = program_parser(["generate", "chat"])
    for name in [name for name, metadata in FIELDS.items() if metadata["datatype"] == "BOOL"]:
        assert sampling_fields(parser.parse_args(["generate", "hi", f"--no-{name.replace('_', '-')}"])) == {name: False}
    assert sampling_fields(parser.parse_args(["generate", "hi"])) == {}
    assert sampling_fields(parser.parse_args(["chat", "--temperature", "0"])) == {"temperature": 0.0}


def test_help_has_each_option_with_its_range():
    printed = run_command("generate", "--help").stdout
    for name in FIELDS:
        (text,) = re.findall(rf"\n  --(?:\[no-\])?{name.replace('_', '-')}[ \n]((?:.|\n(?!  -))*)", printed)
        text = " ".join(text.split())
        limits = RANGES.get(name)
        for limit in (limits.low, limits.high) if limits else ():
            if limit is not None and limit not in UNLIMITED:
                spelt = {-(2**63): "-2^63", 2**64 - 1: "2^64 - 1"}.get(limit, f"{limit:,}")
                assert spelt in text, name


def test_a_field_can_be_assigned():
    fields = {
        "temperature=0.5": ("temperature", 0.5),
        "max-tokens = 7": ("max_tokens", 7),
        "ignore_eos=on": ("ignore_eos", True),
        "ignore_eos=false": ("ignore_eos", False),
        'stop=["a", "b"]': ("stop", ["a", "b"]),
        "stop=a, b": ("stop", "a, b"),
        "stop_token_ids=[1]": ("stop_token_ids", [1]),
        "guided_regex=[0-9]+=": ("guided_regex", "[0-9]+="),
        "seed=": ("seed", None),
        "nonsense=1": ("nonsense", "1"),
    }
    assert {typed: assigned(typed) for typed in fields} == fields
    for typed in ("temperature", "temperature=warm", "stop=[a"):
        with pytest.raises(ToolError, match="expected"):
            assigned(typed)


def test_the_limits_are_given_in_seconds(model_server, monkeypatch):
    """All four limits reach the client."""
    from deepseek_triton_tools.cli import client_options

    made = []
    monkeypatch.setattr("deepseek_triton_client.Client", lambda url, **settings: made.append((url, settings)))
    argv = ["--timeout", "4", "--first-token-timeout", "3", "--token-timeout", "2", "--connect-timeout", "1"]
    args = program_parser(["generate", "chat"]).parse_args(
        ["chat", *argv, "--retries", "5", "--model", "m", "--model-version", "2"]
    )
    client_options.client_of(args)

    ((url, settings),) = made
    timeouts = settings["timeouts"]
    assert (timeouts.total, timeouts.first_token, timeouts.between_tokens, timeouts.connect) == (4, 3, 2, 1)
    assert settings["retries"].attempts == 6
    assert (url, settings["model_name"], settings["model_version"]) == ("http://localhost:8000", "m", "2")


def test_context_servers_compute_the_prompt():
    with FakeServer(["a", "b"]) as context, FakeServer(["a", "b"]) as generation:
        contexts = ["--context-url", "http://127.0.0.1:1", "--context-url", context.url]
        done = run_command("generate", "hi", "--url", generation.url, *contexts)
    assert done.stdout.strip() == "ab"
    assert [server.requests[0].request_type for server in (context, generation)] == ["context_only", "generation_only"]
