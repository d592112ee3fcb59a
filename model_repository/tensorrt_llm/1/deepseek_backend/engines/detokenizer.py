"""Makes text of token ids, one token at a time."""

from collections.abc import Iterable

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """The text of one sequence, in pieces that never end inside a character.

    All pieces together are `tokenizer.decode` of all ids. Where the bytes of a character lie in several tokens, the
    character comes with the last of them.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._num_characters = 0

    def add(self, token_id: int) -> str:
        """Return the new text after `token_id`; "" while a character is incomplete."""
        self._token_ids.append(token_id)
        text = self._stream.step(self._tokenizer, token_id) or ""
        self._num_characters += len(text)
        return text

    def hold(self, token_ids: Iterable[int]) -> None:
        """Add tokens whose text comes with `flush`. No call of `add` may follow."""
        self._token_ids.extend(token_ids)

    def flush(self) -> str:
        """Return the text that `add` held back, at the end of the sequence; an incomplete character becomes U+FFFD."""
        text = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)
        return text[self._num_characters :]
