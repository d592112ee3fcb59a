"""One Triton request, read and checked: its prompts, what to generate for them and how to answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepseek_backend.engines.generate_request import Messages, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt, in one of three forms. `messages` become `text` before an engine sees them."""

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    messages: Messages | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """One Triton request, read and checked: what to generate and how to answer."""

    prompts: tuple[Prompt, ...] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    streaming: bool = False
    cumulative: bool = False
    """Chunks of a stream carry the whole text so far."""
    stream_interval: int | None = None
    """Tokens that a stream's text may wait for, to leave together; None: see the next."""
    stream_interval_ms: int | None = None
    """How long it may wait. With neither it leaves at once, and else with whichever comes first."""
    stop: bool = False
    """End the request with this request's id; nothing else in this call counts."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 0
    priority: int = 0
    timeout_ms: int | None = None
    timeout_us: int = 0
    """Triton's own parameter, where it came in the body; 0 is none."""
    echo: bool = False
    """Put the prompt before the text."""
    separate_reasoning: bool = False
    returned: frozenset[str] = frozenset()
    """Outputs asked for beyond those every response has."""

    @property
    def wants_few_chunks(self) -> bool:
        """The request, or model.yaml for it, lets a stream's text wait for more."""
        return self.stream_interval is not None or self.stream_interval_ms is not None

    @property
    def num_choices(self) -> int:
        """Answers to each prompt that are returned."""
        return self.sampling.n or 1

    @property
    def num_sequences_per_prompt(self) -> int:
        """Answers to each prompt that are generated."""
        return max(self.sampling.best_of or 1, self.num_choices)
