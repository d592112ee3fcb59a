"""The tokens of an answer, in the words of OpenAI and of DeepSeek's own API."""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_triton_tools.gateway.triton.call import Part


@dataclass(slots=True)
class TokenCounts:
    """Tokens of all choices together. The prompt counts once."""

    num_input: int = 0
    num_output: int = 0
    num_cached: int = 0
    num_reasoning: int = 0

    def add(self, part: Part) -> None:
        self.num_output += part.num_output_tokens
        self.num_reasoning += part.num_reasoning_tokens
        if part.num_input_tokens:
            self.num_input = part.num_input_tokens
            self.num_cached = max(self.num_cached, part.num_cached_tokens)

    def plus(self, other: TokenCounts) -> TokenCounts:
        """The counts of two prompts together."""
        return TokenCounts(
            self.num_input + other.num_input,
            self.num_output + other.num_output,
            self.num_cached + other.num_cached,
            self.num_reasoning + other.num_reasoning,
        )

    def document(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.num_input,
            "completion_tokens": self.num_output,
            "total_tokens": self.num_input + self.num_output,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning},
            "prompt_cache_hit_tokens": self.num_cached,
            "prompt_cache_miss_tokens": self.num_input - self.num_cached,
        }
