"""The settings of a client are checked when it is made."""

from __future__ import annotations

import math

import pytest

from deepseek_triton_client._core.client_settings import Connection, Endpoint, Retries, Settings, Timeouts, Tls
from deepseek_triton_client._core.exceptions import InvalidRequest

SERVER = Endpoint("grpc", "localhost", 8001)


@pytest.mark.parametrize("field", ["connect", "first_token", "between_tokens", "total"])
@pytest.mark.parametrize("limit", [0, -1, math.nan, math.inf, 1e10, "1", True])
def test_a_limit_is_a_length_of_time(field, limit):
    with pytest.raises(InvalidRequest, match=rf"timeouts\.{field}"):
        Timeouts(**{field: limit})


@pytest.mark.parametrize("field", ["connect", "first_token", "between_tokens", "total"])
@pytest.mark.parametrize("limit", [None, 1, 0.001, 2_000_000])
def test_limits(field, limit):
    assert getattr(Timeouts(**{field: limit}), field) == limit


def test_a_whole_answer_has_no_limits_of_tokens():
    timeouts = Timeouts(connect=1, first_token=2, between_tokens=3, total=4)
    assert timeouts.for_whole_answers() == Timeouts(connect=1, total=4)


def test_all_problems_are_told_at_once():
    with pytest.raises(InvalidRequest, match=r"timeouts\.connect.*timeouts\.total"):
        Timeouts(connect=0, total=0)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"attempts": 0}, "attempts"),
        ({"attempts": True}, "attempts"),
        ({"attempts": 1.5}, "attempts"),
        ({"initial_s": 0}, "initial_s"),
        ({"max_s": math.inf}, "max_s"),
    ],
)
def test_retries_that_are_none(fields, name):
    with pytest.raises(InvalidRequest, match=rf"retries\.{name}"):
        Retries(**fields)


def test_delays_grow_up_to_the_limit():
    retries = Retries(initial_s=1, max_s=4)
    for failures, most in [(1, 1), (2, 2), (3, 4), (4, 4), (10_000, 4)]:
        delays = [retries.delay_s(failures) for _ in range(200)]
        assert 0 <= min(delays) < most / 2 < max(delays) <= most


@pytest.mark.parametrize("field", ["ca", "certificate", "key"])
def test_files_that_are_not_there(tmp_path, field):
    with pytest.raises(InvalidRequest, match=rf"tls\.{field}.*missing\.pem"):
        Tls(**{field: tmp_path / "missing.pem"})


@pytest.mark.parametrize("field", ["ca", "certificate", "key"])
def test_what_is_no_path(field):
    with pytest.raises(InvalidRequest, match=rf"tls\.{field}: expected a PEM file"):
        Tls(**{field: 7})


def test_verify_is_a_truth_value():
    with pytest.raises(InvalidRequest, match=r"tls\.verify: expected True or False, got 'no'"):
        Tls(verify="no")


def test_a_key_needs_its_certificate(tmp_path):
    (tmp_path / "key.pem").touch()
    with pytest.raises(InvalidRequest, match=r"tls\.certificate"):
        Tls(key=tmp_path / "key.pem")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"keepalive_s": 0}, "keepalive_s"),
        ({"ping_s": -1}, "ping_s"),
        ({"max_message_bytes": 0}, "max_message_bytes"),
        ({"max_message_bytes": 2**31}, "max_message_bytes"),
        ({"max_message_bytes": True}, "max_message_bytes"),
    ],
)
def test_connections_that_are_none(fields, name):
    with pytest.raises(InvalidRequest, match=rf"connection\.{name}"):
        Connection(**fields)


@pytest.mark.parametrize(
    ("url", "endpoint", "text"),
    [
        ("localhost", Endpoint("http", "localhost", 8000), "http://localhost:8000"),
        ("gpu1:9000", Endpoint("http", "gpu1", 9000), "http://gpu1:9000"),
        ("grpc://gpu1", Endpoint("grpc", "gpu1", 8001), "grpc://gpu1:8001"),
        ("grpcs://gpu1", Endpoint("grpcs", "gpu1", 443), "grpcs://gpu1:443"),
        ("https://gpu1/triton/", Endpoint("https", "gpu1", 443, "/triton"), "https://gpu1:443/triton"),
        ("grpc://[::1]:7", Endpoint("grpc", "::1", 7), "grpc://[::1]:7"),
        ("[fe80::1%eth0]", Endpoint("http", "fe80::1%eth0", 8000), "http://[fe80::1%eth0]:8000"),
        ("münchen.example", Endpoint("http", "münchen.example", 8000), "http://münchen.example:8000"),
        ("gpu_1", Endpoint("http", "gpu_1", 8000), "http://gpu_1:8000"),
    ],
)
def test_endpoints(url, endpoint, text):
    assert Endpoint.parse(url) == endpoint
    assert str(endpoint) == text


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://gpu1",
        "http://",
        "http://gpu1:x",
        "http://gpu1:99999",
        "http://gpu1:0",
        "http://gpu 1:80",
        "http://gpu1\r\nX: y:80",
        "http://gpu1\ud800",
        "http://gpu1%41",
        "http://[::1",
        "grpc://gpu1/p",
        "http://a?b",
        b"http://gpu1",
        7,
        None,
    ],
)
def test_urls_that_are_none(url):
    with pytest.raises(InvalidRequest, match=r"^url: "):
        Endpoint.parse(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://me:secret@gpu1",
        "me:secret@gpu1:8000",
        "http://me:secret@gpu1:x",
        "http://me:secr/et@gpu1",
        "http://me:80/secr@gpu1",
        "http://me:se@cr#et@gpu1",
        "http://me:secr?et@[gpu1",
        b"http://me:secret@gpu1",
    ],
)
def test_a_password_in_a_url_is_refused_and_not_repeated(url):
    """The secret is not shown in the cause of the error either."""
    for refusal in (Endpoint.parse, lambda url: Settings(endpoints=(SERVER,), model_name="m", metrics_url=url)):
        with pytest.raises(InvalidRequest, match="url: expected") as caught:
            refusal(url)
        assert "secr" not in str(caught.value)
        assert caught.value.__cause__ is caught.value.__context__ is None


def test_several_urls():
    one, two = Endpoint("http", "a", 8000), Endpoint("grpc", "b", 8001)
    assert Endpoint.parse_all("a") == (one,)
    assert Endpoint.parse_all(["a", "grpc://b"]) == Endpoint.parse_all(iter(("a", "grpc://b"))) == (one, two)


@pytest.mark.parametrize("urls", [None, 7, b"a", {"a": "b"}, ["a", 7], [None]])
def test_what_is_no_list_of_urls(urls):
    with pytest.raises(InvalidRequest, match=r"^url: expected"):
        Endpoint.parse_all(urls)


def test_settings_tell_all_their_problems():
    with pytest.raises(InvalidRequest) as caught:
        Settings(
            endpoints=(),
            model_name="",
            model_version=1,
            timeouts=5,
            retries=3,
            tls=True,
            connection="keep-alive",
            metrics_url="nonsense",
            balance="x",
            stream_mode="y",
            headers={"a b": "1", "x": " 1"},
            token="a\nb",
        )
    names = ("url", "model_name", "model_version", "balance", "stream_mode", "headers", "headers['x']", "token")
    names += ("timeouts", "retries", "tls", "connection", "metrics_url")
    problems = [problem.partition(": ")[0] for problem in caught.value.message.split("; ")]
    assert sorted(problems) == sorted(names)


def test_a_setting_of_another_type_is_told_with_what_to_write():
    with pytest.raises(InvalidRequest, match=r"^timeouts: expected Timeouts, such as Timeouts\(total=5\), got 30$"):
        Settings(endpoints=(SERVER,), model_name="m", timeouts=30)


@pytest.mark.parametrize("name", ["model_name", "model_version"])
def test_names_that_can_not_be_sent(name):
    with pytest.raises(InvalidRequest, match=f"^{name}: "):
        Settings(**{"endpoints": (SERVER,), "model_name": "m", name: "\ud800"})


@pytest.mark.parametrize(
    "url",
    [
        *("nonsense", "", "ftp://a/", "a:8002", "http://", "http://a b/", "http://a:0/", "http://a:x/", 7),
        *("http://a:99999/", "http://me:hunter2@a/"),
    ],
)
def test_metrics_at_what_is_no_address(url):
    with pytest.raises(InvalidRequest, match=r"^metrics_url: expected") as caught:
        Settings(endpoints=(SERVER,), model_name="m", metrics_url=url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("headers", [["a"], [("a", "b")], "a: b", 7])
def test_headers_that_are_no_mapping(headers):
    with pytest.raises(InvalidRequest, match=r"^headers: expected a mapping of names to values"):
        Settings(endpoints=(SERVER,), model_name="m", headers=headers)


@pytest.mark.parametrize("token", ["", " a", "ä", "a\nb", b"x", 7])
def test_tokens_that_are_none(token):
    with pytest.raises(InvalidRequest, match=r"^token: "):
        Settings(endpoints=(SERVER,), model_name="m", token=token)


def test_headers_that_the_caller_changes_later_stay_as_they_were():
    headers = {"x-team": "red"}
    settings = Settings(endpoints=(SERVER,), model_name="m", headers=headers)
    headers["x-evil"] = "a\r\nb"
    assert settings.request_headers() == [("x-team", "red")]


def test_grpc_always_verifies():
    with pytest.raises(InvalidRequest, match=r"tls\.verify"):
        Settings(endpoints=(Endpoint("grpcs", "gpu1", 443),), model_name="m", tls=Tls(verify=False))


def test_secrets_are_not_shown():
    settings = Settings(endpoints=(SERVER,), model_name="m", token="secret", headers={"x": "secret"})
    assert "secret" not in repr(settings)


def test_the_headers_of_a_request():
    tokens = iter("ab")
    settings = Settings(endpoints=(SERVER,), model_name="m", token=lambda: next(tokens), headers={"X-Team": "red"})
    assert settings.request_headers() == [("x-team", "red"), ("authorization", "Bearer a")]
    assert settings.request_headers() == [("x-team", "red"), ("authorization", "Bearer b")]


@pytest.mark.parametrize("token", [None, "", "a\nb", b"x"])
def test_a_token_that_can_not_be_sent(token):
    settings = Settings(endpoints=(SERVER,), model_name="m", token=lambda: token)
    with pytest.raises(InvalidRequest, match="token"):
        settings.request_headers()
