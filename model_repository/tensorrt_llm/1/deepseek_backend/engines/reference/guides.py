"""Guided decoding by llguidance, where that is installed."""

import json
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from deepseek_backend.contract import SAMPLING_FIELDS
from deepseek_backend.engines.generate_request import SamplingParams
from deepseek_backend.errors import RequestError

GUIDED = {field.name for field in SAMPLING_FIELDS if field.guided}
NO_TAGS = "the reference engine has no structural tags; TensorRT-LLM has, with guided_decoding_backend"
_NOT_INSTALLED = "the reference engine needs llguidance for it: pip install llguidance"

# As Python writes it. With free white space a small model writes nothing else.
_JSON: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def unsupported_guides() -> dict[str, str]:
    """Return each field of a guide that is not honoured here, with the reason."""
    reasons = dict.fromkeys(GUIDED, _NOT_INSTALLED) if find_spec("llguidance") is None else {}
    return {**reasons, "guided_structural_tag": NO_TAGS}


class Guides:
    """Makes the guides of requests, over one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_id: int) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_id = tokenizer, vocab_size, eos_token_id

    @cached_property
    def _tokens(self) -> Any:
        from llguidance import LLTokenizer

        # Text that spells a special token is made of its letters: llguidance would allow the token, and refuse it then.
        document = {**json.loads(self._tokenizer.to_str()), "added_tokens": []}
        return LLTokenizer(json.dumps(document), self._vocab_size, self._eos_token_id)

    def of(self, sampling: SamplingParams) -> "Guide | None":
        """Return the guide of a request; None for a request without one.

        :raises RequestError: for a guide that llguidance does not take.
        """
        name = next((name for name in GUIDED if getattr(sampling, name)), None)
        if name is None:
            return None
        from llguidance import LLMatcher, gbnf_to_lark

        value, tokens = getattr(sampling, name), self._tokens
        try:
            if name == "guided_regex":
                grammar = LLMatcher.grammar_from_regex(value)
            elif name == "guided_grammar":
                grammar = LLMatcher.grammar_from_lark(gbnf_to_lark.gbnf_to_lark(value))
            else:
                schema = {"type": "object"} if name == "guided_json_object" else json.loads(value)
                grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_JSON)
            matcher = LLMatcher(tokens, grammar)
            refused = matcher.get_error()
        except Exception as error:  # gbnf_to_lark raises no narrower class for a rule that is missing
            refused = str(error)
        if refused:
            raise RequestError(f"{name}: llguidance refused it: {' '.join(refused.split())}")
        return Guide(name, matcher, self._vocab_size, self._eos_token_id)


class Guide:
    """Which tokens a request may get next."""

    def __init__(self, name: str, matcher: Any, vocab_size: int, eos_token_id: int) -> None:
        self._name, self._matcher, self._eos_token_id = name, matcher, eos_token_id
        self._allowed = np.zeros((1, (vocab_size + 31) // 32), np.int32)
        self._has_ended = False

    def mask(self, logits: npt.NDArray[np.float32]) -> None:
        """Rule out in `logits` [vocab_size] what may not come next. Behind the end everything may."""
        from llguidance import numpy as masks

        if self._has_ended:
            return
        if self._matcher.is_stopped():  # the text is complete, and can't go on
            logits[np.arange(len(logits)) != self._eos_token_id] = -np.inf
            return
        masks.fill_next_token_bitmask(self._matcher, self._allowed, 0)
        masks.apply_token_bitmask_inplace(logits[None], self._allowed)

    @property
    def failure(self) -> str:
        """Why no further token can be chosen, or "". Behind its first line llguidance has its whole state."""
        problem, *_ = self._matcher.get_error().split("\n")
        return f"{self._name}: llguidance gave up: {problem}" if problem else ""

    def accept(self, token_id: int) -> None:
        self._has_ended |= token_id == self._eos_token_id
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)
