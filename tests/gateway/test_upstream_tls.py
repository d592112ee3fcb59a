"""Triton servers behind HTTPS, such as a proxy before them: certificates and headers."""

import re
import ssl
from urllib.parse import urlsplit

import httpx
import pytest
import trustme

from support.raw_triton import RawTriton, answer, event, gateway_before
from support.waiting import wait_for

PROMPT = {"prompt": "Hi"}


@pytest.fixture
def authority():
    return trustme.CA()


@pytest.fixture
def triton(authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with RawTriton().serving(tls=context) as triton:
        triton.script = answer(event(text_output="Hello"), event(finish_reason="stop", num_output_tokens=1))
        yield triton


def trusted(authority, folder):
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return folder / "ca.pem"


def reason(address):
    [model] = httpx.get(f"{address}/fleet").json()["models"]
    [server] = model["servers"]
    return str(server["reason"])


@pytest.mark.slow
def test_a_server_with_a_trusted_certificate_gets_requests_and_headers(triton, authority, tmp_path):
    headers = (("authorization", "Bearer secret"), ("triton-key", "restricted"))
    with gateway_before(triton, upstream_ca=trusted(authority, tmp_path), upstream_headers=headers) as address:
        asked = httpx.post(f"{address}/v1/completions", json=PROMPT)
    assert asked.json()["choices"][0]["text"] == "Hello"
    assert all(f"\r\n{name}: {value}" in head for head in triton.all_heads for name, value in headers)
    assert {head.split()[1] for head in triton.all_heads} == {
        "/v2/health/ready",
        "/v2/models/tensorrt_llm/ready",
        "/v2/models/tensorrt_llm/generate_stream",
    }


@pytest.mark.slow
def test_metrics_are_asked_for_without_the_secrets(triton, authority, tmp_path):
    """They are plain HTTP, also where a proxy serves the rest by HTTPS."""
    with RawTriton().serving() as metrics:
        server = f"{triton.url}#metrics={urlsplit(metrics.url).port}"
        headers = (("authorization", "Bearer secret"),)
        with gateway_before(urls=(server,), upstream_ca=trusted(authority, tmp_path), upstream_headers=headers):
            wait_for(lambda: metrics.all_heads)
    assert "secret" in triton.all_heads[0]
    assert not any("secret" in head for head in metrics.all_heads)


@pytest.mark.slow
def test_a_server_with_another_certificate_is_down_and_told_in_one_line(triton, authority, tmp_path):
    """Nobody vouches for it, or it has another name."""
    for settings in ({}, {"upstream_ca": trusted(trustme.CA(), tmp_path)}):
        with gateway_before(triton, **settings) as address:
            assert httpx.post(f"{address}/v1/completions", json=PROMPT).status_code == 503
            assert re.fullmatch(r"can't trust its certificate .*--upstream-ca.*", reason(address))
    assert triton.all_heads == []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("triton.example.com").configure_cert(context)
    with (
        RawTriton().serving(tls=context) as other,
        gateway_before(other, upstream_ca=trusted(authority, tmp_path)) as address,
    ):
        wait_for(lambda: "certificate is not valid for '127.0.0.1'" in reason(address), lambda: reason(address))
