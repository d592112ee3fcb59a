"""Lists of servers: what may be written, and what is found while files and names change."""

import asyncio
import socket
from contextlib import suppress

import pytest

from deepseek_triton_tools.gateway.settings import ServerAddress, SourceError, parse_address, parse_source

GOOD = "http://a:8000\nhttp://b:8000\n"


def read(source):
    return [address.url for address in asyncio.run(source.read())]


def test_an_address():
    table = {
        "http://a:8000": ("http://a:8000", None),
        "http://a": ("http://a:8000", None),
        "a:8001": ("http://a:8001", None),
        "grpc://a#metrics=18002": ("grpc://a:8001", 18002),
        "HTTP://A:8000/": ("http://a:8000", None),
        "https://a:443/triton/": ("https://a:443/triton", None),
        "http://[::1]:8000": ("http://[::1]:8000", None),
        "http://a:18000#metrics=18002": ("http://a:18000", 18002),
    }
    assert {text: parse_address(text) for text in table} == {text: ServerAddress(*of) for text, of in table.items()}


def test_what_is_no_source():
    wrong = ["", "a", "a:port", "grpc://a:8001/x", "http://", "http://a:port", "http://a:99999", "http://u:secret@a:80"]
    wrong += ["http://a:8000?x=1", "http://a:8000#8002", "http://a:8000#metrics=", "http://a\n:8000"]
    wrong += ["a:8000/v2"]
    for text in (*wrong, "dns+https://a:443", "dns+"):
        with pytest.raises(SourceError, match="expected") as caught:
            parse_source(text)
        assert "secret" not in str(caught.value)


# --- Names ---


def test_each_address_of_a_name_is_a_server(monkeypatch):
    assert "http://127.0.0.1:8123" in read(parse_source("dns+http://localhost:8123"))
    assert "grpc://127.0.0.1:8124" in read(parse_source("dns+grpc://localhost:8124"))

    def lookup(host, port, *_, **__):
        if host != "pods.example":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        addresses = [("10.0.0.2", port), ("10.0.0.1", port), ("10.0.0.2", port), ("fd00::1", port, 0, 0)]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    found = read(parse_source("dns+http://pods.example:8000"))
    assert found == ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000"]
    with pytest.raises(SourceError, match=r"nothing.example.*Name or service not known"):
        read(parse_source("dns+http://nothing.example:8000"))


# --- Files ---


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "servers"
    path.write_text(GOOD)
    return path


@pytest.fixture
def source(path):
    return parse_source(f"file:{path}")


def test_comments_and_blank_lines(path, source):
    path.write_text("# ours\n\nhttp://a#metrics=9002  # the old one\n  http://b:8000  \n#http://c\n")
    assert asyncio.run(source.read()) == [ServerAddress("http://a:8000", 9002), ServerAddress("http://b:8000")]


def test_a_new_list_counts_when_it_has_been_seen_twice(path, source):
    assert read(source) == ["http://a:8000", "http://b:8000"]
    path.write_text("http://a:80")
    assert read(source) == ["http://a:8000", "http://b:8000"]
    path.write_text("http://a:8000\nhttp://c:8000\n")
    assert read(source) == ["http://a:8000", "http://b:8000"]
    assert read(source) == ["http://a:8000", "http://c:8000"]


def test_a_bad_file_is_said_and_the_next_good_one_is_taken(path, source):
    path.unlink()
    with pytest.raises(SourceError, match="can't be read"):
        read(source)
    path.write_text(GOOD)
    assert read(source) == ["http://a:8000", "http://b:8000"]
    wrong = b"http://a:8000\nnonsense\nhttp://b:8000?x\n"
    lines = r"line 2: .*'nonsense'.*line 3: .*b:8000\?x"
    for content, words in ((b"", None), (b"# nobody\n", None), (b"\xff\xfe", None), (wrong, lines)):
        path.write_bytes(content)
        with suppress(SourceError):
            read(source)
        with pytest.raises(SourceError, match=words) as caught:
            read(source)
        assert str(path) in str(caught.value)
        path.write_text("http://c:8000\n")
        assert [read(source) for _ in range(2)][1] == ["http://c:8000"]
