"""Shared by the tests of the generator."""

from functools import cache

import pytest
from google.protobuf import text_format


@pytest.fixture(autouse=True, scope="session")
def _pbtxt_is_parsed_once():
    """Most tests check the same config.pbtxt, and protobuf's parser takes a third of a check."""
    parse = text_format.Parse
    known = cache(lambda text, kind: parse(text, kind()))

    def copied(text, message):
        message.CopyFrom(known(text, type(message)))
        return message

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_format, "Parse", copied)
        yield
