"""The client's FakeServer, for tests whose answers are functions of a request's body."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deepseek_triton_client.testing import FakeServer, Item, Pause, ReceivedRequest, repeat_prompt

Body = Mapping[str, Any]
END = {"finish_reason": "stop", "num_input_tokens": 3, "num_cached_tokens": 0}
WAIT = Pause()
"""In an answer: nothing more is sent until the test sets `release`, or the client leaves."""


class ModelServer(FakeServer):
    """Answers with the prompt in capitals, until the test sets `answer` to another function of the body."""

    def __init__(self) -> None:
        super().__init__()
        self.gone = self.client_left
        self.template: str | None = None
        """The model's chat template."""
        self.answer = echo

    @property
    def answer(self) -> Callable[[ReceivedRequest], Iterator[Item]]:
        return self._answer

    def _answer(self, request: ReceivedRequest) -> Iterator[Item]:
        if request.body.get("task") == "describe":
            info = {"name": "deepseek-r1", "chat_template": self.template, "tool_form": None}
            return iter([{"text_output": "", "model_info": json.dumps(info), **END}])
        return self._of_body(request.body)

    @answer.setter
    def answer(self, of_body: Callable[[Body], Iterator[Item]]) -> None:
        self._of_body = of_body

    @property
    def bodies(self) -> list[Body]:
        """Of all requests but those for what the model is."""
        return [request.body for request in self.requests if "task" not in request.body]

    @property
    def headers(self) -> list[Mapping[str, str]]:
        return [request.headers for request in self.requests if "task" not in request.body]


def saying(*pieces: str, **outputs: Any) -> Callable[[Body], Iterator[Item]]:
    """Answer everything alike, with a response for each piece."""

    def answer(_: Body) -> Iterator[Item]:
        for piece in pieces[:-1]:
            yield {"text_output": piece}
        yield {"text_output": pieces[-1], **END, "num_output_tokens": len(pieces), **outputs}

    return answer


def echo(body: Body) -> Iterator[Item]:
    """Send the prompt or the last message back, in capitals."""
    for said in repeat_prompt(ReceivedRequest("", {}, body)):
        yield {"text_output": str(said).upper(), **END, "num_output_tokens": 2}
