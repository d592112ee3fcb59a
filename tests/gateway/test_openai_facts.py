"""The recorded shapes of OpenAI's answers tell a right answer from a wrong one."""

from gateway.openai_facts import ANSWERS, faults

COMPLETION = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "tiny",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Paris", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
}


def test_a_wrong_answer_is_told_by_its_place():
    assert faults(COMPLETION, "CreateChatCompletionResponse") == []
    table = [
        ({"finish_reason": "timeout"}, "$.choices[0].finish_reason: 'timeout' is not one of"),
        ({"message": {"role": "assistant", "content": "Paris"}}, "'refusal' is a required property"),
        ({"message": {"role": "user", "content": "", "refusal": None}}, "'user' is not one of ['assistant']"),
        ({"index": "0"}, "$.choices[0].index: '0' is not of type 'integer'"),
    ]
    for change, fault in table:
        wrong = COMPLETION | {"choices": [COMPLETION["choices"][0] | change]}
        assert any(fault in line for line in faults(wrong, "CreateChatCompletionResponse"))
    assert all(faults({}, schema) for schema in ANSWERS)
