"""The configuration of other programs in docs/gateway.md. tests/live and tests/conformance run what asks a gateway."""

import re

import pytest
import yaml

from deepseek_triton_tools.gateway.protocol.chat_request import CHAT_FIELDS
from deepseek_triton_tools.gateway.protocol.completion_request import COMPLETION_FIELDS
from deepseek_triton_tools.gateway.protocol.openai_fields import INPUTS, REFUSED, SAMPLING, WITHOUT_EFFECT
from support.documents import ROOT, read, snippets

pytestmark = pytest.mark.documents
PAGE = "docs/gateway.md"
GATEWAY_SOURCES = sorted((ROOT / "tools/deepseek_triton_tools/gateway").rglob("*.py"))
GATEWAY = "http://localhost:9000/v1"


def _litellm(document):
    """The keys are those of docs.litellm.ai, "Proxy Config"."""
    assert document == {
        "model_list": [
            {
                "model_name": "deepseek",
                "litellm_params": {"model": "openai/tiny", "api_base": GATEWAY, "api_key": "none"},
            }
        ]
    }


def _continue(document):
    """The keys are those of docs.continue.dev, "config.yaml Reference"; name, version and schema are required."""
    models = document.pop("models")
    assert document.keys() == {"name", "version", "schema"}
    assert isinstance(models, list)
    for model in models:
        assert model.keys() == {"name", "provider", "model", "apiBase", "apiKey", "roles"}
        assert (model["provider"], model["apiBase"]) == ("openai", GATEWAY)
        assert set(model["roles"]) <= {"chat", "autocomplete", "embed", "rerank", "edit", "apply", "summarize"}


READERS = {"model_list": _litellm, "models": _continue}


@pytest.mark.parametrize("snippet", snippets("yaml", page=PAGE), ids=str)
def test_a_configuration_has_the_keys_of_its_program(snippet):
    document = yaml.safe_load(snippet.text)
    [reader] = [reader for key, reader in READERS.items() if key in document]
    reader(document)


def test_the_configuration_of_codex():
    """The keys are those of Codex's configuration reference. `responses` is the only wire_api that it takes."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    [snippet] = snippets("toml", page=PAGE)
    document = tomllib.loads(snippet.text)
    assert document.keys() == {"model", "model_provider", "model_providers"}
    provider = document["model_providers"][document["model_provider"]]
    assert provider.keys() == {"name", "base_url", "wire_api"}
    assert (provider["base_url"], provider["wire_api"]) == (GATEWAY, "responses")


def _rows(title):
    """The two cells of each row of the table below a title."""
    section = read(PAGE).split(f"### {title}\n")[1].partition("\n#")[0]
    return re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)


def test_the_page_has_every_field():
    named = [name for cell, _ in _rows("Honoured") for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted({*CHAT_FIELDS, *COMPLETION_FIELDS, *SAMPLING, *INPUTS})
    assert _rows("Accepted, without effect") == [(f"`{name}`", reason) for name, reason in WITHOUT_EFFECT.items()]
    assert _rows("Refused") == [(f"`{name}`", reason) for name, (reason, _) in REFUSED.items()]


def test_the_page_has_every_code_of_an_error():
    """Those of the Responses API are on another page."""
    sources = "".join(path.read_text() for path in GATEWAY_SOURCES if not path.name.startswith("responses"))
    codes = set(re.findall(r'code="([a-z_]+)"', sources))
    section = read(PAGE).split("## Errors and ends\n")[1].partition("\n## ")[0]
    assert len(codes) > 10
    assert {code for code in codes if f"`{code}`" not in section} == set()
