"""The steps of one sequence that the engine has made and nobody has taken yet."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from itertools import chain

from deepseek_backend.engines.base import Step

MAX_STEPS = 32
"""Most steps of one sequence that wait for the request's turn, or for the end of an answer that is not streamed."""


@dataclass(slots=True, eq=False)
class PendingSteps:
    """Steps of one sequence, in order. The step queue appends to `steps`; whoever holds `lock` takes them out."""

    index: int
    """Number of the sequence within its request."""
    is_watched: bool
    """A stop string may end the answer, so every step is taken at once and by itself."""
    is_eager: bool
    """Every step is looked at: a stop string may end the answer, or how much waits decides when it is sent."""
    steps: list[Step] = field(default_factory=list)
    is_noted: bool = False
    """Whoever serves the request next finds `steps`. Further ones need no look, as long as they are few."""
    first_s: float = 0.0
    """Time at which the sequence's first step came, by time.monotonic()."""
    last_s: float = 0.0
    """Time at which the sequence's last step so far came, by time.monotonic()."""
    taken_s: float = 0.0
    """Time at which the last step that has been taken came; 0 while none has been taken."""
    last_token_s: float | None = None
    """Time at which the last tokens that have been taken came. None: there were none."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while steps are taken and given to the request, so that they stay in order."""

    def take(self) -> list[tuple[float, Step]]:
        """Take out what waits, each step with the time at which it came.

        Steps are joined where that changes nothing; the sequence's first step stays by itself, because its time is
        measured. Steps that came together share the time between them.
        """
        self.is_noted = False  # first: a step that comes from now on is looked at
        steps = self.steps[:]
        del self.steps[: len(steps)]  # steps that the step queue has appended meanwhile stay
        if self.taken_s and steps and not self.is_watched and steps[-1].error is None:  # nearly always
            self.taken_s = self.last_s
            return [(self.last_s, joined(steps)[0])]
        first = [] if self.taken_s else steps[:1]
        taken = [(self.first_s, step) for step in first]
        rest, since_s = steps[len(first) :], self.taken_s or self.first_s
        if not self.is_watched:  # joined, a step after the one with the stop string would count as well
            rest = joined(rest)
        share = (self.last_s - since_s) / len(rest) if rest else 0.0
        taken += [(since_s + number * share, step) for number, step in enumerate(rest, start=1)]
        if taken:
            self.taken_s = taken[-1][0]
        return taken


def joined(steps: list[Step]) -> list[Step]:
    """Return one step that says what `steps` say one after the other; an error stays a step of its own."""
    if len(steps) < 2:
        return steps
    first, last = steps[0], steps[-1]
    if last.error is not None:
        return [*joined(steps[:-1]), last]
    return [
        Step(
            text="".join([step.text for step in steps]),
            token_ids=list(chain.from_iterable([step.token_ids for step in steps])),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            num_input_tokens=last.num_input_tokens or first.num_input_tokens,
            logprobs=list(chain.from_iterable([step.logprobs for step in steps])),
            prompt_logprobs=first.prompt_logprobs,
            num_cached_tokens=last.num_cached_tokens or first.num_cached_tokens,
            perf_metrics=last.perf_metrics,
            handover=last.handover,
        )
    ]
