"""The settings of a client are checked when it is made."""

import math

import pytest

from deepseek_triton_client._core.client_settings import Connection, Endpoint, Retries, Settings, Timeouts, Tls
from deepseek_triton_client._core.exceptions import InvalidRequest

SERVER = Endpoint("grpc", "localhost", 8001)


def settings(**given):
    return Settings(**{"endpoints": (SERVER,), "model_name": "m", **given})


def named(make, *args, **fields):
    """Return the field that the refusal names."""
    with pytest.raises(InvalidRequest) as caught:
        make(*args, **fields)
    return caught.value.message.partition(": ")[0]


def test_a_limit_is_a_length_of_time():
    for field in ("connect", "first_token", "between_tokens", "total"):
        for limit in (0, -1, math.nan, math.inf, 1e10, "1", True):
            assert named(Timeouts, **{field: limit}) == f"timeouts.{field}", limit
        for limit in (None, 1, 0.001, 2_000_000):
            assert getattr(Timeouts(**{field: limit}), field) == limit


def test_fields_that_are_wrong(tmp_path):
    missing = tmp_path / "missing.pem"
    files = {name: [7, missing] for name in ("ca", "certificate", "key")}
    sizes = {"max_message_bytes": [0, 2**31, True]}
    for kind, wrong in (
        (Retries, {"attempts": [0, True, 1.5], "attempts_when_full": [0, -1], "initial_s": [0], "max_s": [math.inf]}),
        (Tls, {**files, "verify": ["no"]}),
        (Connection, {"keepalive_s": [0], "ping_s": [-1], **sizes}),
    ):
        for field, values in wrong.items():
            for value in values:
                assert named(kind, **{field: value}) == f"{kind.__name__.lower()}.{field}", value
    (tmp_path / "key.pem").touch()
    with pytest.raises(InvalidRequest, match=r"tls\.certificate"):
        Tls(key=tmp_path / "key.pem")


def test_delays_grow_up_to_the_limit():
    retries = Retries(initial_s=1, max_s=4)
    for failures, most in [(1, 1), (2, 2), (3, 4), (4, 4), (10_000, 4)]:
        delays = [retries.delay_s(failures, 5) - 5 for _ in range(200)]
        assert 0 <= min(delays) < most / 2 < max(delays) <= most


ENDPOINTS = {
    "localhost": (Endpoint("http", "localhost", 8000), "http://localhost:8000"),
    "gpu1:9000": (Endpoint("http", "gpu1", 9000), "http://gpu1:9000"),
    "grpc://gpu1": (Endpoint("grpc", "gpu1", 8001), "grpc://gpu1:8001"),
    "grpcs://gpu1": (Endpoint("grpcs", "gpu1", 443), "grpcs://gpu1:443"),
    "https://gpu1/triton/": (Endpoint("https", "gpu1", 443, "/triton"), "https://gpu1:443/triton"),
    "grpc://[::1]:7": (Endpoint("grpc", "::1", 7), "grpc://[::1]:7"),
    "[fe80::1%eth0]": (Endpoint("http", "fe80::1%eth0", 8000), "http://[fe80::1%eth0]:8000"),
    "münchen.example": (Endpoint("http", "münchen.example", 8000), "http://münchen.example:8000"),
    "gpu_1": (Endpoint("http", "gpu_1", 8000), "http://gpu_1:8000"),
}


def test_endpoints():
    assert {url: (found := Endpoint.parse(url), str(found)) for url in ENDPOINTS} == ENDPOINTS
    one, two = Endpoint("http", "a", 8000), Endpoint("grpc", "b", 8001)
    assert Endpoint.parse_all("a") == (one,)
    assert Endpoint.parse_all(["a", "grpc://b"]) == Endpoint.parse_all(iter(("a", "grpc://b"))) == (one, two)


def test_urls_that_are_none():
    for url in (
        *("", "ftp://gpu1", "http://", "http://gpu1:x", "http://gpu1:99999", "http://gpu1:0", "http://gpu 1:80"),
        *(
            "http://gpu1\r\nX: y:80",
            "http://gpu1\ud800",
            "http://gpu1%41",
            "http://[::1",
            "grpc://gpu1/p",
            "http://a?b",
            "http://a/x/v2/models/b/generate",
        ),
        *(b"http://gpu1", 7, None),
    ):
        assert named(Endpoint.parse, url) == "url", url
    for urls in (None, 7, b"a", {"a": "b"}, ["a", 7], [None]):
        assert named(Endpoint.parse_all, urls) == "url", urls


def test_a_password_in_a_url_is_refused_and_not_repeated():
    """The secret is not shown in the cause of the error either."""
    for url in (
        *("http://me:secret@gpu1", "me:secret@gpu1:8000", "http://me:secret@gpu1:x", "http://me:secr/et@gpu1"),
        *("http://me:80/secr@gpu1", "http://me:se@cr#et@gpu1", "http://me:secr?et@[gpu1", b"http://me:secret@gpu1"),
    ):
        for refusal in (Endpoint.parse, lambda url: settings(metrics_url=url)):
            with pytest.raises(InvalidRequest, match="url: expected") as caught:
                refusal(url)
            assert "secr" not in str(caught.value)
            assert caught.value.__cause__ is caught.value.__context__ is None


def test_settings_tell_all_their_problems():
    wrong = {"endpoints": (), "model_name": "", "model_version": 1, "timeouts": 5, "retries": 3, "tls": True}
    wrong |= {"connection": "keep-alive", "metrics_url": "nonsense", "balance": "x", "stream_mode": "y"}
    with pytest.raises(InvalidRequest) as caught:
        Settings(**wrong, headers={"a b": "1", "x": " 1"}, token="a\nb")
    problems = [problem.partition(": ")[0] for problem in caught.value.message.split("; ")]
    assert sorted(problems) == sorted(["url", *wrong.keys() - {"endpoints"}, "headers", "headers['x']", "token"])
    with pytest.raises(InvalidRequest, match=r"timeouts\.connect.*timeouts\.total"):
        Timeouts(connect=0, total=0)


def test_settings_that_are_wrong():
    wrong = {
        "model_name": ["\ud800"],
        "model_version": ["\ud800"],
        "metrics_url": ["nonsense", "", "ftp://a/", "a:8002", "http://", "http://a b/", "http://a:0/", "http://a:x/"],
        "headers": [["a"], [("a", "b")], "a: b", 7],
        "token": ["", " a", "ä", "a\nb", b"x", 7],
    }
    wrong["metrics_url"] += [7, "http://a:99999/"]
    for field, values in wrong.items():
        for value in values:
            assert named(settings, **{field: value}) == field, value
    assert named(settings, endpoints=(Endpoint("grpcs", "gpu1", 443),), tls=Tls(verify=False)) == "tls.verify"  # gRPC


def test_the_headers_of_a_request():
    """Headers that the caller changes later stay as they were; a token is asked for each time."""
    assert "secret" not in repr(settings(token="secret", headers={"x": "secret"}))
    tokens, headers = iter("ab"), {"X-Team": "red"}
    made = settings(token=lambda: next(tokens), headers=headers)
    headers["x-evil"] = "a\r\nb"
    assert made.request_headers() == [("x-team", "red"), ("authorization", "Bearer a")]
    assert made.request_headers() == [("x-team", "red"), ("authorization", "Bearer b")]
    for token in (None, "", "a\nb", b"x"):
        assert "token" in named(settings(token=lambda token=token: token).request_headers)
