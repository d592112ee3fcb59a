"""The least that a decoupled model does for a stream, to compare with: a response a token, sent by one thread in order.

It drives the same simulated engine as the backend. Parameter `text` of config.pbtxt says what a response carries:
"delta", the new token, or "cumulative", the whole text so far.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from deepseek_backend.config import BackendConfig
from deepseek_backend.engines.base import Step
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from deepseek_backend.engines.simulated import SimulatedEngine


@dataclass(slots=True)
class Stream:
    sender: Any
    text: str = ""
    """So far; cumulative only."""


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        self._cumulative = parameters["text"]["string_value"] == "cumulative"
        options = json.loads(parameters["engine_options"]["string_value"])
        self._numbers = itertools.count()
        # Execute adds, the sending thread takes away: each is one step.
        self._streams: dict[str, Stream] = {}
        self._steps: queue.SimpleQueue[tuple[str, Step] | None] = queue.SimpleQueue()
        self._sending = threading.Thread(target=self._send_all)
        self._sending.start()
        self._engine = SimulatedEngine(BackendConfig(engine="simulated", engine_options=options))
        self._engine.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            request_id = str(next(self._numbers))
            self._streams[request_id] = Stream(request.get_response_sender())
            (prompt,) = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            (max_tokens,) = pb_utils.get_input_tensor_by_name(request, "sampling_param_max_tokens").as_numpy()
            generate = GenerateRequest(
                request_id=request_id,
                prompt=prompt.decode(),
                sampling=SamplingParams(max_tokens=int(max_tokens)),
                max_tokens=int(max_tokens),
            )
            self._engine.submit(generate, self)

    def on_steps(self, steps: Sequence[tuple[GenerateRequest, Step]]) -> None:
        for request, step in steps:
            self._steps.put((request.request_id, step))

    def finalize(self) -> None:
        self._engine.stop()
        self._steps.put(None)
        self._sending.join()

    def _send_all(self) -> None:
        while (item := self._steps.get()) is not None:
            self._send(*item)

    def _send(self, request_id: str, step: Step) -> None:
        stream = self._streams[request_id]
        text = step.text
        if self._cumulative:
            stream.text = text = stream.text + step.text
        tensor = pb_utils.Tensor("text_output", np.array([text.encode()], dtype=np.object_))
        response = pb_utils.InferenceResponse([tensor])
        if step.finish_reason is None and step.error is None:
            stream.sender.send(response)
            return
        stream.sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        del self._streams[request_id]
