"""Makes text of token ids: in the two ways of TransformersTokenizer.decode_incrementally, or at once without a stream.

Both ways hold an incomplete character back. "HF", the default, is tokenizers' DecodeStream, which never gives out the
rest. "TRTLLM", which is also used for long stream intervals, gives it out in the last response.
"""

import functools
import os

from tensorrt_llm.tokenizer import StandinTokenizer

BACKEND = os.environ.get("TLLM_INCREMENTAL_DETOKENIZATION_BACKEND", "HF")
STREAM_INTERVAL_THRESHOLD = 24
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text of one request. A `stream_interval` of None means one response."""

    def __init__(self, params, stream_interval):
        self.text = ""
        self._skip_special_tokens = params.skip_special_tokens
        self._flushes = stream_interval is None or BACKEND == "TRTLLM" or stream_interval >= STREAM_INTERVAL_THRESHOLD
        self._pending = ()

    def add(self, token_ids, *, final):
        """Add tokens; return the text so far."""
        new, self._pending = _complete(self._pending, tuple(token_ids), self._skip_special_tokens)
        self.text += new
        if final and self._flushes:
            self.text += _decode(self._pending, self._skip_special_tokens)
            self._pending = ()
        return self.text


@functools.lru_cache(maxsize=1 << 14)  # answers repeat their phrase, so that most responses cost one look-up
def _complete(pending, token_ids, skip_special_tokens):
    """Return the text that `token_ids` complete, and the tokens of an incomplete character."""
    text = ""
    for token_id in token_ids:
        pending = (*pending, token_id)
        new = _decode(pending, skip_special_tokens)
        if not new.endswith(_INCOMPLETE):
            text += new
            pending = ()
    return text, pending


def _decode(token_ids, skip_special_tokens):
    return StandinTokenizer().decode(token_ids, skip_special_tokens)
