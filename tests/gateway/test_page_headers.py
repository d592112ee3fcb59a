"""How the pages are sent, and what they may load."""

import base64
import hashlib
import re

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from deepseek_triton_tools.gateway.application import page_routes

each_page = pytest.mark.parametrize("path", ["/", "/dashboard"])


@pytest.fixture(scope="module")
def client():
    return TestClient(Starlette(routes=page_routes()))


@each_page
def test_a_page_is_sent_once_and_then_confirmed(client, path):
    first = client.get(path)
    assert (first.status_code, first.headers["content-type"]) == (200, "text/html; charset=utf-8")
    tag = first.headers["etag"]
    for known in (tag, f"W/{tag}", f'"another", {tag}'):
        again = client.get(path, headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert client.get(path, headers={"If-None-Match": '"another"'}).content == first.content
    assert client.head(path).headers["etag"] == tag


@each_page
def test_a_page_may_only_run_itself(client, path):
    page = client.get(path)
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        contents = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", page.text, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in contents)
        assert policy[f"{tag}-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)


@each_page
def test_a_page_never_makes_html_of_text(client, path):
    """The policy would stop a script, and not a picture or a form that somebody else's text draws."""
    sinks = "innerHTML|outerHTML|insertAdjacentHTML|document\\.write|srcdoc|DOMParser|createContextualFragment|setHTML"
    assert re.findall(sinks, client.get(path).text) == []


@each_page
def test_a_page_names_no_other_machine(client, path):
    addresses = set(re.findall(r"https?://[^'\"\s]+", client.get(path).text))
    assert addresses == {"http://www.w3.org/2000/svg"}
