"""CPU time of the backend's own path in-process, unit by unit: what it costs to accept a request and to answer it.

    python tests/bench/path.py [--rounds N] [--streams N]

Run by hand from the repository's root; prints, for each kind of request, each unit's median over the rounds, and the
least. The engine is a script and the replies drop what they get, so that what is left is the backend's own. All of it
is CPU time: of the calling thread for accepting, of the whole process for the rest.
"""

import argparse
import json
import platform
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1"))

from deepseek_backend.config import BackendConfig
from deepseek_backend.engines.base import Capabilities, Step
from deepseek_backend.errors import BackendError
from deepseek_backend.sequence_buffer import Outputs
from deepseek_backend.service import Service
from support.fakes import ScriptedEngine

Inputs = Mapping[str, npt.NDArray[Any]]

PROMPT = "Prove that the square root of two is irrational, in one paragraph."
TOKEN_TEXT = " token"
TOGETHER = 20
"""Steps of a stream that wait for one response."""


def tensor(value: bool | float | str, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """As Triton hands over an input with one value."""
    return np.array([value.encode() if isinstance(value, str) else value], dtype=dtype)


PLAIN: Inputs = {
    "text_input": tensor(PROMPT, np.object_),
    "sampling_param_max_tokens": tensor(200, np.int32),
    "streaming": tensor(True, np.bool_),
}
TEN_FIELDS: Inputs = {
    **PLAIN,
    "sampling_param_temperature": tensor(0.8, np.float32),
    "sampling_param_top_k": tensor(50, np.int32),
    "sampling_param_top_p": tensor(0.95, np.float32),
    "sampling_param_seed": tensor(7, np.uint64),
    "sampling_param_repetition_penalty": tensor(1.1, np.float32),
    "sampling_param_presence_penalty": tensor(0.5, np.float32),
    "sampling_param_frequency_penalty": tensor(0.25, np.float32),
    "sampling_param_min_tokens": tensor(2, np.int32),
    "sampling_param_stop": np.array([b"END", b"STOP"], dtype=np.object_),
}
BODY: Inputs = {"text_input": PLAIN["text_input"], "stream": PLAIN["streaming"]}
BODY_PARAMETERS = json.dumps({"max_tokens": 200, "temperature": 0.8, "top_p": 0.95})
"""The keys of a /generate body that are no inputs."""
REQUESTS = (
    ("plain", PLAIN, "{}"),
    ("ten sampling fields", TEN_FIELDS, "{}"),
    ("/generate body", BODY, BODY_PARAMETERS),
)
"""(name, inputs, parameters), the latter as Triton writes them where there are none."""


class Tally:
    """What the replies have got. Any thread may count; one waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_bytes = 0
        self._num_finals = 0
        self._wanted_bytes = 0
        self._wanted_finals = 0

    def count(self, num_bytes: int, *, final: bool) -> None:
        with self._changed:
            self._num_bytes += num_bytes
            self._num_finals += final
            if self._has_all():
                self._changed.notify()

    def await_more(self, *, tokens: int = 0, finals: int = 0) -> None:
        """Until so much more has come than was awaited before."""
        with self._changed:
            self._wanted_bytes += tokens * len(TOKEN_TEXT)
            self._wanted_finals += finals
            self._changed.wait_for(self._has_all)

    def _has_all(self) -> bool:
        return self._num_bytes >= self._wanted_bytes and self._num_finals >= self._wanted_finals


class DroppingReply:
    """Counts what it gets and drops it; waits where `gate` is closed, as a client does that does not read."""

    def __init__(self, tally: Tally, gate: threading.Event) -> None:
        self._tally = tally
        self._gate = gate

    def send(self, outputs: Outputs, *, final: bool) -> None:
        self._gate.wait()
        num_bytes = sum(len(value) for name, array in outputs if name == "text_output" for value in array)
        self._tally.count(num_bytes, final=final)

    def finish(self) -> None:
        self._tally.count(0, final=True)

    def send_error(self, error: BackendError) -> None:
        raise AssertionError(f"nothing fails here: {error}")

    def is_cancelled(self) -> bool:
        return False


class QuietEngine(ScriptedEngine):
    """Costs nothing itself."""

    def __init__(self) -> None:
        super().__init__()
        self._capabilities = super().capabilities

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities


class Route:
    """A service with fakes on both sides, and the streams that are open in it."""

    def __init__(self, num_streams: int) -> None:
        self._num_streams = num_streams
        self._engine = QuietEngine()
        self._service = Service(BackendConfig(engine="scripted"), self._engine)
        self._tally = Tally()
        self._gate = threading.Event()
        self._gate.set()

    def units(self) -> Iterator[tuple[str, float]]:
        """(unit, CPU seconds of one), measured one after the other."""
        self._service.start()
        for name, inputs, parameters in REQUESTS:
            yield f"{name}: accept", self._accept(inputs, parameters)
            yield f"{name}: one token, one by one", self._one_by_one()
            yield f"{name}: one token, {TOGETHER} of a stream together", self._together()
            yield f"{name}: one response, of steps that wait", self._response()
            yield f"{name}: final response, with its step", self._end()
        self._service.stop()

    def _accept(self, inputs: Inputs, parameters: str) -> float:
        """Of this thread: the others have nothing to do with it."""
        replies = [DroppingReply(self._tally, self._gate) for _ in range(self._num_streams)]
        self._engine.requests.clear()
        begun = time.thread_time()
        for reply in replies:
            self._service.accept(inputs, parameters, reply)
        return (time.thread_time() - begun) / self._num_streams

    def _one_by_one(self) -> float:
        begun = time.process_time()
        for _ in range(TOGETHER):
            self._step()
            self._tally.await_more(tokens=self._num_streams)
        return (time.process_time() - begun) / (TOGETHER * self._num_streams)

    def _together(self) -> float:
        self._gate.clear()
        begun = time.process_time()
        for _ in range(TOGETHER):
            self._step()
        self._gate.set()
        self._tally.await_more(tokens=TOGETHER * self._num_streams)
        return (time.process_time() - begun) / (TOGETHER * self._num_streams)

    def _response(self) -> float:
        self._gate.clear()
        self._step()
        begun = time.process_time()
        self._gate.set()
        self._tally.await_more(tokens=self._num_streams)
        return (time.process_time() - begun) / self._num_streams

    def _end(self) -> float:
        last = [(request, Step(finish_reason="length", num_input_tokens=12)) for request in self._engine.requests]
        begun = time.process_time()
        self._engine.step(last)
        self._tally.await_more(finals=self._num_streams)
        return (time.process_time() - begun) / self._num_streams

    def _step(self) -> None:
        """One iteration of the engine over every stream."""
        self._engine.step(
            [(request, Step(text=TOKEN_TEXT, token_ids=(7,), num_input_tokens=12)) for request in self._engine.requests]
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--streams", type=int, default=256, help="open at once, all in each iteration of the engine")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for unit, taken in Route(arguments.streams).units():
            seconds.setdefault(unit, []).append(taken)
    print(f"Python {platform.python_version()}, {platform.machine()}; {arguments.streams} streams")
    print(f"{'microseconds of CPU':56} median   least")
    for unit, taken_each in seconds.items():
        print(f"{unit:56} {statistics.median(taken_each) * 1e6:6.1f}  {min(taken_each) * 1e6:6.1f}")


if __name__ == "__main__":
    main()
