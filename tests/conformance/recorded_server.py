"""A server that gives recorded answers, as a model with the log-probabilities of prompts or without."""

import json
import threading

from deepseek_triton_client.testing import FakeServer

NO_LOGPROBS = "TensorRT-LLM 1.2.1 shifts them by one token"


class RecordedServer(FakeServer):
    def __init__(self, answer_to, name="deepseek-r1", **said):
        """:param answer_to: prompt or last message -> answer.

        :param said: outputs of every answer, such as finish_reason.
        """
        super().__init__()
        self._answer_to = answer_to
        self.hold = threading.Event()
        """For answers that wait until the test sets it."""
        self._said = {"finish_reason": "stop", "num_input_tokens": 5, "num_output_tokens": 3, **said}
        self.info = {"name": name, "checkpoint": name, "engine": "tensorrt_llm", "engine_version": "1.2.1"}
        self.answer = self._answered

    @property
    def prompts(self):
        return [_asked(request) for request in self.requests if "task" not in request.body]

    def _answered(self, request):
        if request.body.get("task") == "describe":
            info = self.info | {"fields": {"prompt_logprobs": NO_LOGPROBS}, "chat_template": "{{ messages }}"}
            yield {"model_info": json.dumps(info), "finish_reason": "stop"}
        else:
            yield {"text_output": self._answer_to(_asked(request)), **self._said}


def _asked(request):
    return str(request.messages[-1]["content"] if request.messages else request.prompt)
