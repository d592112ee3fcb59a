"""A sink that keeps every step of an engine."""

import threading
from collections import defaultdict

from support.waiting import PATIENCE_S


class RecordingSink:
    """A sink that keeps every step. `then` runs in the engine's thread after each call, and may submit and abort."""

    def __init__(self, then=lambda: None):
        self.steps = defaultdict(list)
        self.calls = []
        self._then = then
        self._changed = threading.Condition()

    def on_steps(self, steps):
        with self._changed:
            self.calls.append([request.request_id for request, _ in steps])
            for request, step in steps:
                self.steps[request.request_id].append(step)
            self._changed.notify_all()
        self._then()

    def last_steps(self, request_id):
        return [step for step in self.steps[request_id] if step.finish_reason is not None or step.error is not None]

    def last(self, request_id):
        """Wait for the request's last step, and return it."""
        self.wait(lambda: self.last_steps(request_id))
        return self.steps[request_id][-1]

    def wait(self, condition):
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE_S), "nothing came"

    def text(self, request_id):
        return "".join(step.text for step in self.steps[request_id])

    def ids(self, request_id):
        return [token_id for step in self.steps[request_id] for token_id in step.token_ids]
