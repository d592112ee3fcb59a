"""Behaves as TensorRT-LLM's model for its LLM API does. Two bytes of the prompt are a token of the answer.

Each response of a stream has the whole text so far, and numbers go as text whatever type is declared.
"""

import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        self.running = {}

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.serve, args=(request,)).start()

    def serve(self, request):
        sender, request_id = request.get_response_sender(), request.request_id()
        if value(request, "stop"):
            if request_id in self.running:
                self.running[request_id].set()
            cancelled = pb_utils.TritonError("Request cancelled by client", pb_utils.TritonError.CANCELLED)
            sender.send(pb_utils.InferenceResponse(error=cancelled), flags=FINAL)
            return
        stopped = self.running[request_id] = threading.Event()
        try:
            self.answer(request, sender, stopped)
        except Exception as error:
            failure = pb_utils.TritonError(f"Error generating request: {error}")
            sender.send(pb_utils.InferenceResponse([text("text_output", "N/A")], error=failure), flags=FINAL)
        finally:
            self.running.pop(request_id, None)

    def answer(self, request, sender, stopped):
        streaming = value(request, "streaming", False)
        if streaming and not self.decoupled:
            raise ValueError("Streaming is only supported in decoupled mode.")
        prompt = value(request, "text_input")
        start = b"" if value(request, "sampling_param_exclude_input_from_output", False) else prompt
        stops = [each.decode() for each in pb_utils_array(request, "sampling_param_stop")]
        most = value(request, "sampling_param_max_tokens", 32)
        for count in range(1, most + 1):
            so_far = (start + prompt[: 2 * count]).decode(errors="replace")
            found = next((each for each in stops if each in so_far[len(start) :]), None)
            reason = None
            if stopped.is_set() or sender.is_cancelled():
                reason = "cancelled"
            elif found is not None:
                so_far, reason = so_far[: so_far.index(found)], "stop"
            elif 2 * count >= len(prompt):
                reason = "stop"
            elif count == most:
                reason = "length"
            if streaming or reason:
                sender.send(response(request, so_far, reason, found), flags=FINAL if reason else 0)
            if reason:
                return
            time.sleep(0.005)


def response(request, so_far, reason, found):
    tensors = [text("text_output", so_far)]
    for name, said in (("finish_reason", reason), ("stop_reason", found), ("cumulative_logprob", -1.5)):
        if value(request, f"return_{name}", False):
            tensors.append(text(name, str(said)))
    if reason and value(request, "sampling_param_return_perf_metrics", False):
        tensors += [text("arrival_time_ns", "7"), text("kv_cache_hit_rate", "0.5")]
    return pb_utils.InferenceResponse(tensors)


def text(name, said):
    return pb_utils.Tensor(name, np.array([said.encode()], dtype=np.object_))


def pb_utils_array(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return [] if tensor is None else tensor.as_numpy()


def value(request, name, default=None):
    array = pb_utils_array(request, name)
    return array[0] if len(array) else default
