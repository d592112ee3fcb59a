"""LangChain's own standard tests of chat models, with ChatOpenAI on the gateway.

obedient_triton.py answers them. What ChatOpenAI or the model can't do by its nature is left out by the tests' own
properties: images, audio and PDF.
"""

from functools import reduce
from operator import add

import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from conformance.asked import FRANCE, PARIS, SUM, THINKING
from conformance.running import NAMES


class TestChatOpenAI(ChatModelIntegrationTests):
    """The 41 standard tests."""

    base_url: str

    @pytest.fixture(autouse=True)
    def _at(self, obedient_url):
        type(self).base_url = obedient_url

    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        return {"model": NAMES[0], "base_url": self.base_url, "api_key": "none", "stream_usage": True}

    @property
    def model_override_value(self):
        return NAMES[1]

    @property
    def supports_json_mode(self):
        return True

    @property
    def supported_usage_metadata_details(self):
        details = ["reasoning_output", "cache_read_input"]
        return {"invoke": details, "stream": details}

    def invoke_with_reasoning_output(self, *, stream=False):
        return self._last(SUM[0]["content"], stream, extra_body=THINKING)

    def invoke_with_cache_read_input(self, *, stream=False):
        return self._last(FRANCE[0]["content"], stream)

    def _last(self, text, stream, **fields):
        model = ChatOpenAI(**self.standard_chat_model_params | self.chat_model_params | fields)
        if not stream:
            return model.invoke(text)
        return reduce(add, model.stream(text))


@pytest.mark.sample
def test_the_real_model_answers(base_url, model_name):
    model = ChatOpenAI(model=model_name, base_url=base_url, api_key="none", temperature=0, max_retries=0)
    assert model.invoke(FRANCE).content == PARIS
    assert "".join(str(chunk.content) for chunk in model.stream(FRANCE)) == PARIS
