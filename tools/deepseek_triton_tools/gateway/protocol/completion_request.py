"""A request to /v1/completions as requests to the model's server, one for each prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepseek_triton_tools.gateway.protocol.openai_errors import invalid
from deepseek_triton_tools.gateway.protocol.openai_fields import (
    COUNTS,
    MOST_INT32,
    a_list,
    between,
    boolean,
    check_names,
    choices,
    given_fields,
    model_inputs,
    stream_options,
    text,
    token_ids,
    wrong,
)
from deepseek_triton_tools.gateway.protocol.structured_output import GUIDE_FIELDS, guided_fields

COMPLETION_FIELDS = frozenset(
    {
        "model",
        "prompt",
        "suffix",
        "echo",
        "best_of",
        "logprobs",
        "stream",
        "stream_options",
        "prompt_cache_key",
        *GUIDE_FIELDS,
    }
)
"""Fields of completions alone that are no sampling fields."""
_MOST_PROMPTS = 256
_MOST_LOGPROBS = 20

_FIM_BEGIN, _FIM_HOLE, _FIM_END = "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"
"""DeepSeek's tokens around a text with a hole, which the model fills in."""

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request's facts for the gateway itself, and the inputs that it sends on.

    inputs: the body of Triton's generate endpoint, but for the prompt and `streaming`. logprobs: how many of the
    likeliest tokens are told; None for no log-probabilities. only_echo: nothing is to be generated, so the one token
    that a request must have is left out of the answer. most_tokens: of all answers together; None where the client gave
    no max_tokens.
    """

    model: str
    prompts: list[Prompt]
    inputs: dict[str, object]
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    num_choices: int = 1
    copies: int = 1
    """How many of a prompt's choices each answer is given as."""
    made_per_choice: float = 1.0
    """How many answers are made for each choice that is no copy: `best_of` / `n`."""
    most_tokens: int | None = None
    logprobs: int | None = None
    echo: bool = False
    only_echo: bool = False
    cache_key: str = ""

    def prompt_inputs(self, prompt: Prompt) -> dict[str, object]:
        """The whole body for one of the prompts."""
        form = {"text_input": prompt} if isinstance(prompt, str) else {"text_input": "", "input_ids": prompt}
        return {**form, **self.inputs}


def read_completion_request(document: object) -> CompletionRequest:
    """Raises OpenAIError, which names the field."""
    given = given_fields(document)
    check_names(given, COMPLETION_FIELDS)
    stream = boolean("stream", given.get("stream", False))
    include_usage, continuous_usage = stream_options(given)
    echo = boolean("echo", given.get("echo", False))
    prompts = _prompts(given)
    least = 0 if echo else 1
    max_tokens = between("max_tokens", given["max_tokens"], least, MOST_INT32) if "max_tokens" in given else None
    only_echo = echo and max_tokens == 0
    logprobs = between("logprobs", given["logprobs"], 0, _MOST_LOGPROBS) if "logprobs" in given else None
    sampling = guided_fields(given)
    if only_echo:
        sampling["max_tokens"] = 1
    if echo and stream and only_echo:
        raise invalid("echo with max_tokens 0 has nothing to stream: expected stream false.", param="stream")
    inputs_of_logprobs: dict[str, object] = {}
    if logprobs is not None:
        sampling["logprobs"] = logprobs
        inputs_of_logprobs["return_logprobs"] = True
        if echo:
            sampling["prompt_logprobs"] = logprobs
    num_choices, copies, num_answers, fields = choices(given)
    sampling |= fields
    inputs = model_inputs(given, sampling) | inputs_of_logprobs
    if continuous_usage:
        inputs |= COUNTS
    return CompletionRequest(
        model=text("model", given.get("model", "")),
        prompts=prompts,
        inputs=inputs,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        num_choices=num_choices,
        copies=copies,
        made_per_choice=num_answers * copies / num_choices,
        most_tokens=None if max_tokens is None else max_tokens * num_answers * len(prompts),
        logprobs=logprobs,
        echo=echo,
        only_echo=only_echo,
        cache_key=text("prompt_cache_key", given.get("prompt_cache_key", "")),
    )


def _prompts(given: Mapping[str, object]) -> list[Prompt]:
    """One text, one list of token ids, or a list of either."""
    value = given.get("prompt")
    if isinstance(value, str):
        prompts: list[Prompt] = [value]
    else:
        elements = a_list("prompt", value)
        if elements and all(isinstance(element, int) for element in elements):
            prompts = [token_ids("prompt", elements)]
        else:
            prompts = [
                element if isinstance(element, str) else token_ids(f"prompt[{at}]", element)
                for at, element in enumerate(elements)
            ]
    if not prompts or not all(prompts):
        raise invalid("prompt: expected text or token ids, got nothing.", param="prompt")
    if len(prompts) > _MOST_PROMPTS:
        raise wrong("prompt", f"at most {_MOST_PROMPTS} prompts", len(prompts))
    if given.get("suffix"):
        return [_with_hole(prompt, text("suffix", given["suffix"]), given) for prompt in prompts]
    return prompts


def _with_hole(prompt: Prompt, suffix: str, given: Mapping[str, object]) -> str:
    if not isinstance(prompt, str):
        raise invalid("suffix needs a prompt that is text, not token ids.", param="suffix")
    if given.get("echo"):
        raise invalid("echo and suffix are not possible together.", param="echo")
    return f"{_FIM_BEGIN}{prompt}{_FIM_HOLE}{suffix}{_FIM_END}"
