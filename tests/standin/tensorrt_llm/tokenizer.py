"""A tokenizer of bytes and three special tokens, so that it encodes any text and most characters have several tokens.

There are two classes, as in TensorRT-LLM: the tokenizer of transformers, and a wrapper that offers three methods only.
"""

from __future__ import annotations

SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
BOS, EOS, PAD = range(3)
_ROLES = {"user": "<｜User｜>{}", "assistant": "<｜Assistant｜>{}" + SPECIAL[EOS], "system": "{}"}


class StandinHfTokenizer:
    """The methods of transformers' PreTrainedTokenizer that the engine uses."""

    bos_token = SPECIAL[BOS]
    eos_token = SPECIAL[EOS]
    bos_token_id = BOS
    eos_token_id = EOS
    pad_token_id = PAD
    chat_template: str | None = "DeepSeek's, as apply_chat_template below has it"

    def __len__(self):
        return len(SPECIAL) + 256

    def get_vocab(self):
        """Return a vocabulary of one character per byte, like byte-level tokenizers, but of other characters."""
        return {token: number for number, token in enumerate([*SPECIAL, *map(chr, range(256, 512))])}

    def encode(self, text, add_special_tokens=True):
        """Encode a text. Special tokens in the text are encoded as bytes; BOS is added on request."""
        ids = [byte + len(SPECIAL) for byte in text.encode()]
        return [BOS, *ids] if add_special_tokens else ids

    def decode(self, token_ids, skip_special_tokens=True):
        """Decode tokens; U+FFFD stands for a character whose last bytes are missing."""
        out = bytearray()
        for token in token_ids:
            if token >= len(SPECIAL):
                out.append(token - len(SPECIAL))
            elif not skip_special_tokens:
                out += SPECIAL[token].encode()
        return out.decode("utf-8", errors="replace")

    def apply_chat_template(
        self, conversation, chat_template=None, add_generation_prompt=False, tokenize=True, **kwargs
    ):
        """Render in DeepSeek-V3.1's form. An unknown role is an error, like a template's raise_exception."""
        thinking = kwargs.pop("thinking", False)
        if kwargs:
            raise ValueError(f"no such arguments: {', '.join(kwargs)}")
        if self.chat_template is None:
            raise ValueError("Cannot use chat template functions because tokenizer.chat_template is not set")
        text = SPECIAL[BOS]
        for message in conversation:
            if message["role"] not in _ROLES:
                raise ValueError(f"no such role: {message['role']}")
            text += _ROLES[message["role"]].format(message["content"])
        if add_generation_prompt:
            text += f"<｜Assistant｜>{'<think>' if thinking else '</think>'}"
        return self.encode(text, add_special_tokens=False) if tokenize else text


class StandinTokenizer:
    """The wrapper, like TransformersTokenizer: all other methods are those of `tokenizer`."""

    def __init__(self):
        self.tokenizer = StandinHfTokenizer()

    def encode(self, text, *args, **kwargs):
        return self.tokenizer.encode(text, *args, **kwargs)

    def decode(self, token_ids, *args, **kwargs):
        return self.tokenizer.decode(token_ids, *args, **kwargs)

    def apply_chat_template(self, conversation, **kwargs):
        return self.tokenizer.apply_chat_template(conversation, **kwargs)
