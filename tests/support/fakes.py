"""Fakes that implement the backend's real interfaces: an engine that plays a script, a reply that keeps a list."""

import contextlib
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deepseek_backend.config import parse_config
from deepseek_backend.contract import SAMPLING_FIELDS
from deepseek_backend.engines.base import Capabilities, EngineHealth, EngineStats
from deepseek_backend.engines.simulated.filler_text import FillerTokenizer
from deepseek_backend.errors import BackendError
from deepseek_backend.service import Service
from support.waiting import PATIENCE_S


@dataclass
class ListReply:
    """A reply that keeps what was sent. A test sets `cancelled` where the client would go."""

    sent: list[tuple[dict[str, Any], bool]] = field(default_factory=list)
    errors: list[BackendError] = field(default_factory=list)
    cancelled: bool = False
    broken: bool = False
    """Every response fails."""
    failures: int = 0
    """Number of further responses that fail."""
    lost: bool = False
    """A final response failed: there is no way left to answer."""
    unaskable: bool = False
    """Asking whether it is cancelled fails."""
    finals: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    def send(self, outputs, *, final):
        self._fail(final=final)
        self.sent.append(({name: _plain(array) for name, array in outputs}, final))
        self._count(final)

    def finish(self):
        self._fail(final=True)
        self._count(True)

    def send_error(self, error):
        self._fail(final=True)
        self.errors.append(error)
        self._count(True)

    def is_cancelled(self):
        if self.finals:
            raise AssertionError("asked after the final response: a real server would crash")
        if self.unaskable:
            raise RuntimeError("no answer")
        return self.cancelled

    def _fail(self, *, final):
        """Fail as Triton's sender does: after a final response was tried, sent or not, nothing more is taken."""
        self.failures -= 1
        if self.lost or self.broken or self.failures >= 0:
            self.lost = self.lost or final
            raise RuntimeError("the stream is gone")

    @property
    def text(self):
        return "".join(outputs["text_output"] for outputs, _ in self.sent)

    @property
    def last(self):
        return self.sent[-1][0]

    def _count(self, final):
        if self.finals:
            raise AssertionError("a response after the final one")
        if final:
            self.finals += 1
            self.done.set()


def _plain(array):
    """Return the one value of an output, or the list of several."""
    values = [value.decode() if isinstance(value, bytes) else value for value in array.tolist()]
    return values[0] if len(values) == 1 else values


class ScriptedEngine:
    """An engine that does nothing by itself: the test sends the steps with `step`."""

    MAX_PROMPT_BYTES = 1000
    BOS = "<s>"
    HANDOVER_FORM = ""

    def __init__(self):
        self.requests = []
        self.aborted = []
        self.dropped = []
        self.alive = True
        self.whole_answers = False
        self.worked_at_s = 0.0
        self.stopped = False
        self.call_form = ""
        self._sink = None

    def start(self): ...

    @property
    def tokenizer(self):
        return FillerTokenizer()

    @property
    def load_seconds(self):
        return {"script": 0.0}

    def render_chat(self, messages, template_kwargs):
        said = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return self.BOS + said + ("<think>" if template_kwargs.get("thinking") else "")

    @property
    def capabilities(self):
        fields = frozenset(f.name for f in SAMPLING_FIELDS) - {"min_p", "guided_regex"}
        return Capabilities(
            sampling_fields=fields,
            max_seq_len=4096,
            max_prompt_bytes=self.MAX_PROMPT_BYTES,
            bos_token=self.BOS,
            whole_answers=self.whole_answers,
            call_form=self.call_form,
            handover_form=self.HANDOVER_FORM,
            unsupported={"guided_regex": "no grammar in a script"},
        )

    def submit(self, request, sink):
        self.requests.append(request)
        self._sink = sink

    def step(self, steps):
        assert self._sink is not None
        self._sink.on_steps(steps)

    def abort(self, request_id):
        self.aborted.append(request_id)

    def drop(self, request_id):
        self.dropped.append(request_id)

    def health(self):
        return EngineHealth(alive=self.alive, worked_at_s=self.worked_at_s)

    def stats(self):
        return EngineStats(num_running=len(self.requests), num_waiting=0)

    def stop(self):
        self.stopped = True


def configured(**ours):
    ours = {"cancellation_check_period_ms": 5, **ours}
    return parse_config({"model": "m", "triton_config": ours}, version_dir=Path())


@contextlib.contextmanager
def serving(engine, ours=None, **kwargs):
    served = Service(configured(**(ours or {})), engine, **kwargs)
    served.start()
    try:
        yield served
    finally:
        served.stop()


def array(*values):
    return np.array([value.encode() if isinstance(value, str) else value for value in values], dtype=np.object_)


def send(service, *prompts, client_id="", inputs=None, timeout_us=0, reply=None, **parameters):
    """Send a request; return the reply to it."""
    reply = reply or ListReply()
    inputs = {"text_input": array(*(prompts or ["hello"]))} if inputs is None else inputs
    service.accept(inputs, json.dumps(parameters), reply, client_id=client_id, timeout_us=timeout_us)
    return reply


def wait(reply):
    assert reply.done.wait(PATIENCE_S), "no final response"
    return reply
