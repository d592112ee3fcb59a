"""Behaves as Triton's vLLM backend does. Each character of the prompt is a token of the answer.

Streams are increments; sampling parameters are one JSON object, and one unknown name in it fails the request.
"""

import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
KNOWN = {"max_tokens", "temperature", "top_k", "n", "stop", "bad_words", "logprobs", "structured_outputs", "seed"}


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.serve, args=(request,)).start()

    def serve(self, request):
        sender = request.get_response_sender()
        try:
            self.answer(request, sender)
        except Exception as error:
            failure = pb_utils.TritonError(f"Error generating stream: {error}")
            sender.send(pb_utils.InferenceResponse([texts("text_output", ["N/A"])], error=failure), flags=FINAL)

    def answer(self, request, sender):
        prompt = value(request, "text_input").decode()
        parameters = json.loads(value(request, "sampling_parameters", b"{}"))
        if parameters.keys() - KNOWN:
            raise TypeError(f"unexpected keyword argument {min(parameters.keys() - KNOWN)!r}")
        stream = value(request, "stream", False)
        echo = not value(request, "exclude_input_in_output", stream)
        if echo and stream:
            raise ValueError("When streaming, `exclude_input_in_output` = False is not allowed.")
        said = "".join(each for each in prompt if each not in parameters.get("bad_words", []))
        said = json.loads(parameters["structured_outputs"])["regex"] if "structured_outputs" in parameters else said
        most, answers = parameters.get("max_tokens", 16), parameters.get("n", 1)
        reason = "length" if len(said) > most else "stop"
        said = said[:most]
        if not stream:
            whole = prompt * echo + said
            sender.send(self.response(request, [whole] * answers, [reason] * answers, len(said)), flags=FINAL)
            return
        for place, character in enumerate(said):
            if sender.is_cancelled():
                cancelled = pb_utils.TritonError("Request was cancelled", pb_utils.TritonError.CANCELLED)
                sender.send(pb_utils.InferenceResponse(error=cancelled), flags=FINAL)
                return
            last = place == len(said) - 1
            response = self.response(request, [character], [reason if last else None], 1)
            sender.send(response, flags=FINAL if last else 0)
            time.sleep(0.005)

    def response(self, request, said, reasons, num_tokens):
        tensors = [texts("text_output", said)]
        if value(request, "return_finish_reason", False):
            tensors.append(texts("finish_reason", [str(reason) for reason in reasons]))
        if value(request, "return_logprobs", False):
            token = {"7": {"logprob": -0.5, "rank": 1, "decoded_token": said[0][0]}}
            asked = "logprobs" in json.loads(value(request, "sampling_parameters"))
            tensors.append(texts("logprobs", [json.dumps([token] * num_tokens) if asked else "null"] * len(said)))
        if value(request, "return_num_input_tokens", False):
            count = np.asarray(len(value(request, "text_input").decode()), dtype=np.uint32)
            tensors.append(pb_utils.Tensor("num_input_tokens", count))
        if value(request, "return_num_output_tokens", False):
            tensors.append(pb_utils.Tensor("num_output_tokens", np.array([num_tokens] * len(said), dtype=np.uint32)))
        return pb_utils.InferenceResponse(tensors)


def texts(name, said):
    return pb_utils.Tensor(name, np.array([each.encode() for each in said], dtype=np.object_))


def value(request, name, default=None):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy()[0]
