"""The configuration of other programs in docs/gateway.md. tests/live and tests/conformance run what asks a gateway."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import yaml

from support.documents import Snippet, snippets

PAGE = "docs/gateway.md"
GATEWAY = "http://localhost:9000/v1"


def _litellm(document: dict[str, object]) -> None:
    """The keys are those of docs.litellm.ai, "Proxy Config"."""
    assert document == {
        "model_list": [
            {
                "model_name": "deepseek",
                "litellm_params": {"model": "openai/tiny", "api_base": GATEWAY, "api_key": "none"},
            }
        ]
    }


def _continue(document: dict[str, object]) -> None:
    """The keys are those of docs.continue.dev, "config.yaml Reference"; name, version and schema are required."""
    models = document.pop("models")
    assert document.keys() == {"name", "version", "schema"}
    assert isinstance(models, list)
    for model in models:
        assert model.keys() == {"name", "provider", "model", "apiBase", "apiKey", "roles"}
        assert (model["provider"], model["apiBase"]) == ("openai", GATEWAY)
        assert set(model["roles"]) <= {"chat", "autocomplete", "embed", "rerank", "edit", "apply", "summarize"}


READERS: dict[str, Callable[[dict[str, object]], None]] = {"model_list": _litellm, "models": _continue}


@pytest.mark.parametrize("snippet", snippets("yaml", page=PAGE), ids=str)
def test_a_configuration_has_the_keys_of_its_program(snippet: Snippet) -> None:
    document = yaml.safe_load(snippet.text)
    [reader] = [reader for key, reader in READERS.items() if key in document]
    reader(document)


def test_the_configuration_of_codex() -> None:
    """The keys are those of Codex's configuration reference. `responses` is the only wire_api that it takes."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    [snippet] = snippets("toml", page=PAGE)
    document = tomllib.loads(snippet.text)
    assert document.keys() == {"model", "model_provider", "model_providers"}
    provider = document["model_providers"][document["model_provider"]]
    assert provider.keys() == {"name", "base_url", "wire_api"}
    assert (provider["base_url"], provider["wire_api"]) == (GATEWAY, "responses")
