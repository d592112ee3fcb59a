"""This project's client at the gateway's /v1."""

import json

import pytest

from deepseek_triton_client import Client, InvalidRequest, ModelNotFound, Retries
from deepseek_triton_client._core.exceptions import BY_CODE
from deepseek_triton_tools.gateway.model_front import CODES
from gateway.asking import HELLO, LAST, MESSAGES
from support.raw_triton import INFO, RawTriton, answer, event, gateway_before, refusal


def test_the_client_asks_a_gateway():
    schema = '{"type":"object"}'
    raw = RawTriton()
    raw.info = {**INFO, "greedy_by_default": False, "decoupled": False}
    starting = gateway_before(urls=("http://127.0.0.1:9",))
    with raw.serving() as triton, gateway_before(triton) as address, Client(f"{address}/v1") as client:
        triton.script = answer(event(reasoning_output="hm"), HELLO, LAST)
        for ask, content, expected in (
            (client.chat, "Hi", {"messages": MESSAGES}),
            (client.generate, "Hi", {"text_input": "Hi"}),
            (client.generate, [5, 6], {"input_ids": [5, 6]}),
        ):
            fields = {"top_k": 2, "max_tokens": 9, "bad": ["x"], "guided_json": schema}
            completion = ask(content, **fields, add_special_tokens=False, request_id="job:1")
            sent = {name: json.loads(text) if name == "messages" else text for name, text in triton.asked[-1].items()}
            assert (sent.items() >= expected.items(), sent["id"][:6], sent["streaming"]) == (True, "job:1-", False)
            assert json.loads(sent["sampling_parameters"]) == fields | {"n": 1, "add_special_tokens": False}
            counts = [getattr(completion, f"num_{each}_tokens") for each in ("input", "output", "cached", "reasoning")]
            assert (completion.text, completion.finish_reason, *counts) == ("Hello", "stop", 5, 3, 4, 1)
            reasoning = {"reasoning_content": "hm"} if ask == client.chat else {}
            assert completion.message == {"role": "assistant", "content": "Hello", **reasoning}
        assert client.metrics().value("deepseek_triton_gateway_generated_tokens_total") == 9
        with starting as empty:
            lasting = (empty, *["loading"] * 3), (f"{address}/x", *["missing"] * 3)
            for url, *states in (address, "ready", "ready", "missing"), *lasting:
                for name, state in zip(("tensorrt_llm", "tiny", "other"), states, strict=True):
                    with Client(f"{url}/v1", model_name=name) as other:
                        told = other.readiness()[0]
                    assert (told.state, bool(told.detail)) == (state, state != "ready")
        for name, value in {"logprobs": 2, "separate_reasoning": False, "guided_json": "{"}.items():
            with pytest.raises(InvalidRequest, match=rf"(^|for ){name}:"):
                client.chat("Hi", **{name: value})
        for why in ("cancelled", "timeout"):
            end = {"finish_reason": why, "num_output_tokens": 1}
            triton.script = answer(HELLO, *(event(**end, sequence_index=each) for each in (0, 1)))
            with client.stream("Hi", timeout_ms=5, n=2) as stream:
                *_, last = stream
            made = stream.completion()
            counts = [each.num_output_tokens for each in (last, made, made.answers[0])]
            assert (last.finish_reason, made.finish_reason, *counts) == (why, why, 2, 2, None)
        assert (triton.asked[-1]["timeout_ms"], "sampling_param_temperature" in triton.asked[-1]) == (5, False)
        triton.script = answer(HELLO)  # it breaks off
        with pytest.raises(Exception, match="the model's server failed"):
            client.chat("Hi")
        for url, name in ((f"{address}/v1", "other"), (address, "tensorrt_llm"), (f"{address}/x/v1", "tensorrt_llm")):
            with Client(url, model_name=name, retries=Retries(attempts=1)) as other, pytest.raises(ModelNotFound):
                other.chat("Hi")
        for path in ("", "/v1/chat/completions"):
            with Client(address + path) as other, pytest.raises(ModelNotFound, match=f"write {address}/v1$"):
                other.ready()
        triton.deaf = True  # so that it stays down
        for code in sorted(CODES, key="E_UNAVAILABLE".__eq__):
            triton.script = refusal(400, f"[{code}] no")
            with Client(f"{address}/v1", retries=Retries(attempts=1)) as other, pytest.raises(BY_CODE[code]) as refused:
                other.chat("Hi")
            assert refused.value.code == (code if CODES[code][1] else None)
            assert client.readiness()[0].state == ("loading" if code == "E_UNAVAILABLE" else "ready"), code
