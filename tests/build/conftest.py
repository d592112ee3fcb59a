"""Shared by the tests of the generator."""

from functools import cache

import pytest
from google.protobuf import text_format

from deepseek_triton_build.check import scripts


@pytest.fixture(autouse=True, scope="session")
def _what_takes_long_in_a_check_is_done_once():
    """Most tests check the same config.pbtxt and start.sh; protobuf's parser and `bash -n` take half of a check."""
    parse, known_problems = text_format.Parse, cache(scripts._syntax_problems)
    known = cache(lambda text, kind: parse(text, kind()))

    def copied(text, message):
        message.CopyFrom(known(text, type(message)))
        return message

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_format, "Parse", copied)
        patch.setattr(scripts, "_syntax_problems", lambda text, file: [*known_problems(text, file)])
        yield
