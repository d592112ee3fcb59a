"""A program with a Triton server inside, as Triton's OpenAI front end is one: by the C API of libtritonserver.

It serves one repository. Requests are lines of JSON on stdin, and every response is a line on stdout. Like the front
end's web server, it listens on a port until SIGTERM, waits for its open requests, and stops the server.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

_BYTES, _CPU, _FINAL, _RELEASE_ALL = 13, 0, 1, 1
"""TRITONSERVER_TYPE_BYTES, TRITONSERVER_MEMORY_CPU, TRITONSERVER_RESPONSE_COMPLETE_FINAL, and release all of it."""
_POINTER, _TEXT, _SIZE, _INT, _INT64 = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64

_Allocate = ctypes.CFUNCTYPE(
    *(_POINTER, _POINTER, _TEXT, _SIZE, _INT, _INT64, _POINTER),
    *(ctypes.POINTER(each) for each in (_POINTER, _POINTER, _INT, _INT64)),
)
_FreeBuffer = ctypes.CFUNCTYPE(_POINTER, _POINTER, _POINTER, _POINTER, _SIZE, _INT, _INT64)
_Respond = ctypes.CFUNCTYPE(None, _POINTER, ctypes.c_uint32, _POINTER)
_Release = ctypes.CFUNCTYPE(None, _POINTER, ctypes.c_uint32, _POINTER)


class _Server:
    """libtritonserver's C API, as far as one model with string inputs and outputs needs it."""

    def __init__(self, library: str, backends: str, repository: str) -> None:
        self._lib = ctypes.CDLL(library)
        self._buffers: dict[int, object] = {}
        self._open: dict[int, object] = {}
        self.all_answered = threading.Condition()
        options, self._server, self._allocator = _POINTER(), _POINTER(), _POINTER()
        self._call("ServerOptionsNew", ctypes.byref(options))
        self._call("ServerOptionsSetModelRepositoryPath", options, repository.encode())
        self._call("ServerOptionsSetBackendDirectory", options, backends.encode())
        prefix = f"deepseek_triton_{os.getpid()}_"
        self._call("ServerOptionsSetBackendConfig", options, b"python", b"shm-region-prefix-name", prefix.encode())
        self._call("ServerNew", ctypes.byref(self._server), options)
        self._callbacks = (
            _Allocate(self._allocate),
            _FreeBuffer(self._free),
            _Respond(self._respond),
            _Release(self._release),
        )
        allocate, free, *_ = self._callbacks
        self._call("ResponseAllocatorNew", ctypes.byref(self._allocator), allocate, free, None)

    def infer(self, model: str, inputs: dict[str, str], parameters: dict[str, int]) -> None:
        request, shape = _POINTER(), (_INT64 * 1)(1)
        self._call("InferenceRequestNew", ctypes.byref(request), self._server, model.encode(), _INT64(-1))
        kept: list[object] = [inputs]
        for name, text in inputs.items():
            data = len(text.encode()).to_bytes(4, "little") + text.encode()
            kept.append(data)
            self._call("InferenceRequestAddInput", request, name.encode(), _BYTES, shape, ctypes.c_uint64(1))
            self._call(
                "InferenceRequestAppendInputData", request, name.encode(), data, _SIZE(len(data)), _CPU, _INT64(0)
            )
        for name, value in parameters.items():
            kind, number = ("Bool", ctypes.c_bool(value)) if isinstance(value, bool) else ("Int", _INT64(value))
            self._call(f"InferenceRequestSet{kind}Parameter", request, name.encode(), number)
        *_, respond, release = self._callbacks
        self._call("InferenceRequestSetReleaseCallback", request, release, None)
        self._call("InferenceRequestSetResponseCallback", request, self._allocator, None, respond, request)
        self._open[request.value or 0] = kept
        self._call("ServerInferAsync", self._server, request, None)

    @property
    def has_open(self) -> bool:
        return bool(self._open)

    def stop(self) -> None:
        self._call("ServerStop", self._server)

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._lib, f"TRITONSERVER_{name}")
        function.restype = _POINTER
        if error := function(*arguments):
            raise RuntimeError(f"{name}: {self._message(error)}")

    def _message(self, error: int) -> str:
        self._lib.TRITONSERVER_ErrorMessage.restype = _TEXT
        message: bytes = self._lib.TRITONSERVER_ErrorMessage(_POINTER(error))
        return message.decode()

    def _allocate(
        self, _1: Any, _2: Any, size: int, _4: Any, _5: Any, _6: Any, out: Any, user: Any, kind: Any, of: Any
    ) -> int:
        buffer = ctypes.create_string_buffer(max(1, size))
        address = ctypes.addressof(buffer)
        self._buffers[address] = buffer
        out[0], user[0], kind[0], of[0] = address, None, _CPU, 0
        return 0

    def _free(self, _1: Any, address: int, *_: Any) -> int:
        self._buffers.pop(address, None)
        return 0

    def _release(self, request: int, flags: int, _: Any) -> None:
        if flags & _RELEASE_ALL:
            self._call("InferenceRequestDelete", _POINTER(request))

    def _respond(self, response: int | None, flags: int, request: int) -> None:
        said: dict[str, object] = {"final": bool(flags & _FINAL)}
        if response:
            self._lib.TRITONSERVER_InferenceResponseError.restype = _POINTER
            if error := self._lib.TRITONSERVER_InferenceResponseError(_POINTER(response)):
                said["error"] = self._message(error)
            else:
                said |= self._strings(_POINTER(response))
            self._call("InferenceResponseDelete", _POINTER(response))
        print(json.dumps(said), flush=True)
        if said["final"]:
            with self.all_answered:
                self._open.pop(request)
                self.all_answered.notify()

    def _strings(self, response: Any) -> dict[str, str]:
        count = ctypes.c_uint32()
        self._call("InferenceResponseOutputCount", response, ctypes.byref(count))
        found = {}
        for index in range(count.value):
            name, shape, base, user = _TEXT(), _POINTER(), _POINTER(), _POINTER()
            kind, where, dims, size, of = _INT(), _INT(), ctypes.c_uint64(), _SIZE(), _INT64()
            out = (ctypes.byref(each) for each in (name, kind, shape, dims, base, size, where, of, user))
            self._call("InferenceResponseOutput", response, ctypes.c_uint32(index), *out)
            if kind.value == _BYTES:
                found[(name.value or b"").decode()] = ctypes.string_at(base, size.value)[4:].decode()
        return found


def _main(library: str, backends: str, repository: str) -> None:
    server = _Server(library, backends, repository)
    listener = socket.create_server(("127.0.0.1", 0))
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: stop.append(signum))

    def read() -> None:
        for line in sys.stdin:
            request = json.loads(line)
            server.infer("tensorrt_llm", {"text_input": request.pop("text_input")}, request)

    threading.Thread(target=read, daemon=True).start()
    print(json.dumps({"ready": True}), flush=True)
    while not stop:
        threading.Event().wait(0.3)
        time.sleep(0.7)  # one after the other: what the main thread of tritonserver does when it is told to exit
    listener.close()
    with server.all_answered:
        server.all_answered.wait_for(lambda: not server.has_open)
    server.stop()
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
