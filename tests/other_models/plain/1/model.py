"""Has a batch dimension and says nothing but its text: its version, then each word of the prompt is a token."""

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.version = args["model_version"]

    def execute(self, requests):
        for request in requests:
            self.serve(request, request.get_response_sender())

    def serve(self, request, sender):
        words = [f"v{self.version}", *values(request, "text_input")[0].decode().split()]
        stops = [each.decode() for each in values(request, "stop_words")]
        words = words[: values(request, "max_tokens")[0]]
        words = words[: next((place for place, word in enumerate(words) if word in stops), None)]
        stream = values(request, "stream")
        pieces = (
            [f"{word} " for word in words] if len(stream) and stream[0] else ["".join(f"{word} " for word in words)]
        )
        for piece in pieces:
            tensor = pb_utils.Tensor("text_output", np.array([[piece.encode()]], dtype=np.object_))
            sender.send(pb_utils.InferenceResponse([tensor]))
        sender.send(flags=FINAL)


def values(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return [] if tensor is None else tensor.as_numpy()[0]
