"""The configuration of other programs in docs/gateway.md. tests/live and tests/conformance run what asks a gateway."""

import re

import pytest

from deepseek_triton_tools.gateway.chat_request import CHAT_FIELDS
from deepseek_triton_tools.gateway.completions import COMPLETION_FIELDS
from deepseek_triton_tools.gateway.model_front import CODES
from deepseek_triton_tools.gateway.openai_fields import INPUTS, REFUSED, SAMPLING, WITHOUT_EFFECT
from support.documents import ROOT, read, snippets

pytestmark = pytest.mark.documents
PAGE = "docs/gateway.md"
GATEWAY_SOURCES = sorted((ROOT / "tools/deepseek_triton_tools/gateway").rglob("*.py"))


def test_the_configuration_of_other_programs_has_the_gateway_s_address():
    """The page's snippets for LiteLLM, Continue and Codex."""
    address = re.compile(r"^ *-? ?(?:api_base|apiBase|base_url)\W+(\S+?)[\"']?$", re.MULTILINE)
    found = [
        address.findall(snippet.text) for language in ("yaml", "toml") for snippet in snippets(language, page=PAGE)
    ]
    assert len(found) >= 3
    assert {url for urls in found for url in urls} == {"http://localhost:9000/v1"}
    assert all(found)


def _rows(title):
    """The two cells of each row of the table below a title."""
    section = read(PAGE).split(f"### {title}\n")[1].partition("\n#")[0]
    return re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)


def _names(title):
    section = read(PAGE).split(f"### {title}\n")[1].partition("\n#")[0]
    return re.findall(r"`(\w+)`", section)


def test_the_page_has_every_field():
    named = [name for cell, _ in _rows("Honoured") for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted({*CHAT_FIELDS, *COMPLETION_FIELDS, *SAMPLING, *INPUTS})
    assert _names("Accepted, without effect") == [*WITHOUT_EFFECT]
    assert _names("Refused") == [*REFUSED]


def test_the_page_has_every_code_of_an_error():
    sources = "".join(path.read_text() for path in GATEWAY_SOURCES)
    codes = {*re.findall(r'code="([a-z_]+)"', sources), "bad_gateway", *(code for _, code, _ in CODES.values() if code)}
    section = read(PAGE).split("## Errors and ends\n")[1].partition("\n## ")[0]
    assert len(codes) > 10
    assert {code for code in codes if f"`{code}`" not in section} == set()
