"""`deepseek-triton gateway`: its options, its file, and the settings they make."""

import re
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization as pem

from deepseek_triton_tools.cli.gateway import settings_of
from deepseek_triton_tools.cli.main import main, program_parser
from deepseek_triton_tools.gateway.guard import digest_of, new_key, parse_keys
from deepseek_triton_tools.gateway.settings import GatewaySettings, ModelSettings
from deepseek_triton_tools.tool_errors import ToolError

SERVER = ["--server", "http://node1:8000"]


def settings(*words):
    return settings_of(program_parser(["gateway"]).parse_args(["gateway", *words]))


def test_every_option_reaches_the_settings(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "keys").write_text(new_key("ann")[1])
    authority = trustme.CA()
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(tmp_path / "certificate")
    authority.cert_pem.write_to_path(tmp_path / "ca")

    given = settings(
        *("--server", "dns+http://triton:8000", "--model", "r1=http://a:1,http://b:1", "--model", "r1=file:list"),
        *("--triton-model", "deepseek", "--host", "0.0.0.0", "--port", "80", "--workers", "4"),
        *("--keys", str(tmp_path / "keys"), "--cors-origin", "https://chat.example.com", "--cors-origin", "*"),
        *("--tls-certificate", str(tmp_path / "certificate"), "--max-body", "1MB", "--drain-seconds", "60"),
        *("--reasoning-field", "reasoning", "--upstream-header", "key=a=b", "--upstream-ca", str(tmp_path / "ca")),
        *("--upstream-header", f"Authorization=@{tmp_path / 'token'}", "--metrics-port", "none", "--body-seconds", "9"),
        *("--access-log", "-", "--traces", "http://localhost:4318", "--metrics-need-key", "--no-page"),
    )

    assert settings(*SERVER) == GatewaySettings((ModelSettings(("http://node1:8000",)),))
    assert given == GatewaySettings(
        models=(
            ModelSettings(("dns+http://triton:8000",), "", "deepseek"),
            ModelSettings(("http://a:1", "http://b:1", "file:list"), "r1", "deepseek"),
        ),
        host="0.0.0.0",
        port=80,
        workers=4,
        tls_certificate=tmp_path / "certificate",
        keys_file=tmp_path / "keys",
        metrics_need_key=True,
        page=False,
        cors_origins=("https://chat.example.com", "*"),
        max_body_bytes=10**6,
        body_timeout_s=9,
        drain_s=60,
        reasoning_fields=("reasoning",),
        access_log="-",
        traces_url="http://localhost:4318",
        upstream_headers=(("key", "a=b"), ("Authorization", "secret")),
        upstream_ca=tmp_path / "ca",
        metrics_port=None,
    )
    assert "secret" not in repr(given)


def test_the_file_has_the_same_words_and_the_command_line_wins(tmp_path):
    (tmp_path / "gateway.yaml").write_text(
        "model: [r1=http://a:1, v3=http://b:1]\nport: 9001\nworkers: 2\nmax-body: 1MB\nno-page: true\n"
        "cors-origin: https://chat.example.com\nmetrics-port: none\n"
    )

    given = settings("--config", str(tmp_path / "gateway.yaml"), "--port", "9002", "--model", "v3=http://c:1")

    assert given.models == (ModelSettings(("http://c:1",), "v3"),)
    assert (given.port, given.workers, given.max_body_bytes, given.metrics_port) == (9002, 2, 10**6, None)
    assert (given.page, given.cors_origins) == (False, ("https://chat.example.com",))


WRONG_FILES = [
    ("prot: 9000", r"there is no option 'prot'; did you mean port\?"),
    ("--port: 9000", r"there is no option '--port'; did you mean port\?"),
    ("new-key: ann", "there is no option 'new-key'"),
    ("1: 2", "there is no option 1"),
    ("port: 99999", "port: expected a number from 1 to 65535, got '99999'"),
    ("port: true", "port: expected text or a number, got true or false"),
    ("model: a=http://a:1\nport: 1\nmodel: b=http://b:1", "model stands here 2 times; it takes a list"),
    ("port:", "port: expected text or a number, got nothing"),
    ("host: [a, b]", "host: expected text or a number"),
    ("metrics-need-key: 1", "metrics-need-key: expected true or false, got 1"),
    ("reasoning-field: thoughts", "reasoning-field: expected reasoning_content or reasoning, got 'thoughts'"),
    ("- port", "expected lines of OPTION: VALUE"),
    ("", "expected lines of OPTION: VALUE"),
    ("a: b: c", 'mapping values are not allowed here in ".*gateway.yaml", line 1'),
    ("server: 'http://a\x01'", "special characters are not allowed"),
    ("keys: gone", "gateway.yaml: keys gone: No such file"),
]


def test_a_wrong_file_is_refused(tmp_path, subtests):
    for text, message in WRONG_FILES:
        with subtests.test(text=text):
            (tmp_path / "gateway.yaml").write_text(text)
            with pytest.raises(ToolError, match=message) as refused:
                settings(*SERVER, "--config", str(tmp_path / "gateway.yaml"))
            assert refused.value.exit_code == 2
            assert "\n" not in str(refused.value)


WRONG_WORDS = [
    (["--context-server", "http://a:1"], "^expected a URL or --model NAME=URL[^;]*$"),
    (["localhost"], "--server: expected HOST:PORT"),
    (["--model", "http://a:8000/x=1"], "--model: expected NAME=URL"),
    (["--model", "r1="], "--model: expected NAME=URL"),
    (["--model", "r1=http://a:1,"], "--model: expected HOST:PORT"),
    ([*SERVER, "--keys", "missing"], "--keys missing: No such file or directory"),
    ([*SERVER, "--metrics-need-key"], "--metrics-need-key: expected --keys too"),
    (["--config", "missing"], "^missing: No such file or directory$"),
    ([*SERVER, "--cors-origin", "https://a/b"], "--cors-origin: expected https://HOST, without a path"),
    ([*SERVER, "--tls-key", "empty"], "--tls-key: expected --tls-certificate too"),
    ([*SERVER, "--tls-certificate", "empty"], "--tls-certificate empty: .*expected PEM"),
    ([*SERVER, "--tls-certificate", "leaf"], "--tls-certificate leaf: no private key"),
    ([*SERVER, "--tls-certificate", "leaf", "--tls-key", "locked"], "--tls-key locked: no private key"),
    ([*SERVER, "--upstream-ca", "empty"], "--upstream-ca empty: .*expected certificates as PEM"),
    ([*SERVER, "--access-log", "no/log"], "--access-log no/log: No such file or directory"),
    ([*SERVER, "--traces", "localhost:4318"], "--traces: expected a URL such as http://localhost:4318"),
    ([*SERVER, "--upstream-header", "secret"], "--upstream-header: expected NAME=VALUE or NAME=@FILE"),
    ([*SERVER, "--upstream-header", "a b=secret"], "--upstream-header: expected NAME=VALUE"),
    ([*SERVER, "--upstream-header", "Host=secret"], "Host is the gateway's own to set"),
    ([*SERVER, "--upstream-header", "a-bin=secret"], "a-bin ends in -bin"),
    ([*SERVER, "--upstream-header", "a=sécret"], "a: expected a value of printable ASCII on one line"),
    ([*SERVER, "--upstream-header", "a=secret\nb"], "a: expected a value of printable ASCII on one line"),
    ([*SERVER, "--upstream-header", "a=@missing"], "--upstream-header a: missing: No such file"),
    ([*SERVER, "--upstream-header", "a=@empty"], "a: expected a value of printable ASCII on one line"),
    (["--server", "x", "--keys", "empty"], "expected HOST:PORT.*; --keys empty: it is empty"),
]


@pytest.mark.slow
def test_what_would_not_work_is_refused_without_the_secrets(tmp_path, monkeypatch, subtests, capsys):
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    issued = trustme.CA().issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path("leaf")
    for name, first, last in (("old", 1970, 2025), ("young", 2999, 3000)):
        dates = {"not_before": datetime(first, 1, 1), "not_after": datetime(last, 1, 1)}
        trustme.CA().issue_cert("localhost", **dates).private_key_and_cert_chain_pem.write_to_path(name)
        settings(*SERVER, "--tls-certificate", name)
        assert re.search(rf"^warning: .* {name}: .*from {first}0101000000Z", capsys.readouterr().err)
    key = pem.load_pem_private_key(issued.private_key_pem.bytes(), None)
    locked = key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.BestAvailableEncryption(b"pass"))
    Path("locked").write_bytes(locked)
    for words, message in WRONG_WORDS:
        with subtests.test(words=words):
            with pytest.raises(ToolError, match=message) as refused:
                settings(*words)
            assert refused.value.exit_code == 2
            assert not re.search("s[eé]cret", str(refused.value))


def test_a_new_key_is_printed_with_its_line(capsys):
    assert main(["gateway", "--new-key", "ann"]) == 0

    printed = capsys.readouterr()
    [key] = re.findall(r"sk-\S{43}", printed.err)
    assert parse_keys(printed.out)[digest_of(key)].name == "ann"
    for more in (["a b"], ["ann", "admin=yes"], ["ann", "--keys", "keys"], ["ann", "--no-page"]):
        assert main(["gateway", "--new-key", *more]) == 2


def test_a_port_that_is_taken_is_refused_with_its_holder(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert main(["gateway", *SERVER, "--port", str(listener.getsockname()[1])]) == 2
    told = capsys.readouterr().err
    assert re.search(r"can't listen on port \d+ of 127.0.0.1: Address already in use; process \d+", told)


@pytest.mark.slow
def test_without_the_extra_its_name_is_said():
    program = (
        "import sys\nsys.modules['uvicorn'] = None\nfrom deepseek_triton_tools.cli.main import main\n"
        "sys.exit(main(['gateway', '--server', 'http://a:1']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("deepseek-triton gateway: uvicorn is not installed; pip install '.[gateway]'")
