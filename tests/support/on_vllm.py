"""Which of the live tests hold on vLLM, and why the others of their files do not."""

import pytest

FILES = frozenset(
    {
        *("test_bad_input.py", "test_contract.py", "test_existing_clients.py"),
        *("test_generate.py", "test_metrics.py", "test_tiny_model.py"),
    }
)
"""Files whose tests are about the contract, and not about an engine."""
SAMPLE = frozenset(
    {
        *(
            "test_the_same_request_gives_the_same_text_however_it_is_sent",
            "test_eight_at_once_get_the_texts_they_get_one_by_one",
        ),
        *("test_tokens_are_those_of_the_reference_engine", "test_an_abort_ends_with_the_text_so_far"),
    }
)
"""Tests that .ci/run runs of it: in a server, and in the test's process."""
OTHER_SERVERS = frozenset({"trtllm_server", "trtllm", "r1_server", "small_server", "dead_server"})

_ITS_OWN_PROGRAM = "it serves a repository of its own, with another engine"
_TWIN = "the simulated engine's own words"
_HAS_GUIDES = "vLLM has guided decoding, which tests/with_vllm tests"
LEFT_OUT = {
    "test_thinking_is_told_from_the_answer": _TWIN,
    "test_what_an_engine_lacks_is_refused_by_name": _HAS_GUIDES,
    "test_performance_is_measured_on_the_final_response": "vLLM does not count the KV blocks of a request",
    "test_a_server_without_metrics_serves": _ITS_OWN_PROGRAM,
    "test_a_model_that_is_loaded_over_itself_keeps_its_metrics": _ITS_OWN_PROGRAM,
    "test_transformers_answers_as_the_page_shows": "it is about transformers",
}
"""Name of a test in FILES -> why it does not run on vLLM."""


def select(items, config):
    """Keep the tests that hold on vLLM."""
    chosen = [item for item in items if item.path.name in FILES and not _uses(item) & OTHER_SERVERS]
    chosen += [item for item in items if item.path.parent.name == "with_vllm"]
    for item in chosen:
        if getattr(item, "originalname", item.name) in SAMPLE:
            item.add_marker(pytest.mark.sample)
        if reason := LEFT_OUT.get(getattr(item, "originalname", item.name)):
            item.add_marker(pytest.mark.skip(reason=f"not on vLLM: {reason}"))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def _uses(item):
    """Return the names of its fixtures, those that a parameter names too."""
    parameters = getattr(item, "callspec", None)
    named = [value for value in parameters.params.values() if isinstance(value, str)] if parameters else []
    return {*getattr(item, "fixturenames", ()), *named}
