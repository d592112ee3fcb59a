"""A model without streams: one response for each request, with what it was asked."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.answer(request)]) for request in requests]

    def answer(self, request):
        prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
        for name in ("max_tokens", "temperature"):
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            prompt += "" if tensor is None else f" {name}={tensor.as_numpy()[0]}"
        return pb_utils.Tensor("text_output", np.array([prompt.encode()], dtype=np.object_))
