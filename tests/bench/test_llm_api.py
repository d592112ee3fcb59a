import re

from bench.llm_api import SWITCH_INTERVAL_S, CountingSink

from deepseek_backend.engines.base import Step
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from deepseek_backend.errors import EngineError
from deepseek_triton_build import model_repository


def test_the_switch_interval_is_that_of_model_py():
    text = (model_repository() / "tensorrt_llm/1/model.py").read_text()  # importing it takes Triton
    (number,) = re.findall(r"^SWITCH_INTERVAL_S = (\S+)$", text, re.MULTILINE)
    assert float(number) == SWITCH_INTERVAL_S


def test_an_error_is_an_end():
    requests = [
        GenerateRequest(request_id=name, prompt="p", sampling=SamplingParams(), max_tokens=1) for name in ("a", "b")
    ]
    error = EngineError("no room")
    sink = CountingSink(len(requests))
    sink.on_steps([(requests[0], Step(error=error))])
    assert not sink.done.is_set()
    sink.on_steps([(requests[1], Step(finish_reason="length"))])
    assert sink.done.is_set()
    assert sink.error is error
