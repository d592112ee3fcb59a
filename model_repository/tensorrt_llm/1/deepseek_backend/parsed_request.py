"""One Triton request, read and checked: its prompts, what to generate for them and how to answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepseek_backend.engines.generate_request import ContextHandover, Messages, RequestType, SamplingParams
from deepseek_backend.messages import NO_TOOLS, ToolUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt, in one of three forms. `messages` are rendered to text before an engine gets them."""

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    messages: Messages | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    task: str = "generate"
    """One of contract.TASKS. The others generate nothing, and most of what follows means nothing to them."""
    prompts: tuple[Prompt, ...] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_use: ToolUse = NO_TOOLS
    streaming: bool = False
    cumulative: bool = False
    """Each chunk of a stream carries the whole text so far."""
    stream_interval: int | None = None
    """Number of tokens for which a stream's text may wait, to leave together. None: no such number."""
    stream_interval_ms: int | None = None
    """Milliseconds for which a stream's text may wait. None: no such time. Text leaves as soon as either bound is
    reached, and at once where neither is given."""
    stop: bool = False
    """End the running request that has this request's id. Besides it only return_finish_reason counts."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 0
    request_type: RequestType = "context_and_generation"
    handover: ContextHandover | None = None
    """The end of the context phase, where another server did that."""
    priority: int = 0
    timeout_ms: int | None = None
    timeout_us: int = 0
    """Triton's own timeout in microseconds, where it came in the body; 0 means none."""
    echo: bool = False
    """Put the prompt before the text."""
    separate_reasoning: bool = False
    returned: frozenset[str] = frozenset()
    """Names of the outputs asked for, beyond those that every response has."""

    @property
    def is_shared(self) -> bool:
        """Another server does, or did, the other part of the request."""
        return self.request_type != "context_and_generation" or self.handover is not None

    @property
    def wants_few_chunks(self) -> bool:
        """A stream's text may wait for more, to leave in fewer chunks."""
        return self.stream_interval is not None or self.stream_interval_ms is not None

    @property
    def num_choices(self) -> int:
        """Number of answers to each prompt that are returned."""
        return self.sampling.n or 1

    @property
    def num_sequences_per_prompt(self) -> int:
        """Number of answers to each prompt that are generated."""
        return max(self.sampling.best_of or 1, self.num_choices)
