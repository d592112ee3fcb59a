"""Token ids -> text, a piece at a time."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """The text of one sequence. All pieces joined are `tokenizer.decode` of all ids, and none ends inside a character.

    A character's bytes may lie in several tokens: the piece that holds it comes with the last of them.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._num_characters = 0

    def add(self, token_id: int) -> str:
        """What can be said after `token_id`; "" while a character is incomplete."""
        self._token_ids.append(token_id)
        text = self._stream.step(self._tokenizer, token_id) or ""
        self._num_characters += len(text)
        return text

    def flush(self) -> str:
        """What `add` held back, at the end of the sequence: bytes that never became a character are U+FFFD."""
        text = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)
        return text[self._num_characters :]
