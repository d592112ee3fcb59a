"""Token ids are bytes after three special tokens, so that any text has one and most characters have several."""

from __future__ import annotations

from collections.abc import Sequence

SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
BOS, EOS, PAD = range(3)


class StandinTokenizer:
    bos_token_id = BOS
    eos_token_id = EOS
    pad_token_id = PAD
    vocab_size = len(SPECIAL) + 256

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [byte + len(SPECIAL) for byte in text.encode()]
        return [BOS, *ids] if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text up to now; U+FFFD stands for a character whose last bytes are missing."""
        out = bytearray()
        for token in token_ids:
            if token >= len(SPECIAL):
                out.append(token - len(SPECIAL))
            elif not skip_special_tokens:
                out += SPECIAL[token].encode()
        return out.decode("utf-8", errors="replace")
