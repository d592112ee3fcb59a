"""Loads a checkpoint: the model, its tokenizer and chat template, and its begin and end tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from deepseek_backend.engines.base import timed
from deepseek_backend.engines.bounded_template import render_template
from deepseek_backend.engines.prompting import NO_CHAT_TEMPLATE, bos_token
from deepseek_backend.engines.reference.checkpoint_files import (
    TensorFiles,
    check_checksums,
    read_config,
    read_json,
    token_ids,
)
from deepseek_backend.engines.reference.deepseek_model import DeepseekModel
from deepseek_backend.errors import EngineError, describe

_FILE = "chat_template.jinja"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """The template in a checkpoint's chat_template.jinja, or else in its tokenizer_config.json.

    `apply_chat_template` has transformers' name for it, because `prompting.render_chat` also takes the tokenizer of
    TensorRT-LLM, which is transformers'.
    """

    def __init__(self, folder: Path) -> None:
        """Compile the template.

        :raises EngineError: when tokenizer_config.json can't be read.
        :raises TemplateFailure: when the template is wrong.
        """
        config = read_json(folder / "tokenizer_config.json")
        source = config.get("chat_template")
        if (folder / _FILE).is_file():
            source = (folder / _FILE).read_text(encoding="utf-8")
        if isinstance(source, list):  # several by name
            source = {one["name"]: one["template"] for one in source}.get("default")
        self.source: str | None = source
        if source is not None:
            render_template(source, None)
        tokens = {name: config.get(name) for name in _SPECIAL_TOKENS}
        # A configuration may also give an object with the token's flags.
        texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
        self.special_tokens = {name: str(text) for name, text in texts.items() if text}

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **template_kwargs: Any,
    ) -> str:
        """Return the conversation as a prompt. It is always text: `tokenize` is False.

        :raises ValueError: when there is no template, no message, or a tool that is not an object.
        :raises TemplateFailure: when it can't be rendered.
        """
        if self.source is None:
            raise ValueError(NO_CHAT_TEMPLATE)
        if not conversation:
            raise ValueError("expected at least one message, got an empty list")
        if not all(isinstance(message, Mapping) for message in conversation):
            raise TypeError("expected each message to be an object with a role and a content")
        if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
            raise ValueError("expected each of the tools to be an object, the JSON schema of a function")
        values = dict(
            **self.special_tokens,
            messages=conversation,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **template_kwargs,
        )
        return render_template(self.source, values)


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """A loaded model and its limits. It is the `ModelTokenizer` too, whose methods any thread may call."""

    model: DeepseekModel
    tokenizer: Tokenizer
    template: ChatTemplate
    bos_token: str
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_position_embeddings: int
    longest_token_bytes: int
    """Bytes of the longest token: no text has fewer tokens than its bytes divided by this."""
    load_seconds: Mapping[str, float]
    """Seconds that each phase of the load took."""

    @property
    def chat_template(self) -> str | None:
        return self.template.source

    @property
    def special_tokens(self) -> Mapping[str, str]:
        return self.template.special_tokens

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def load_checkpoint(name: str, *, version_dir: Path) -> LoadedCheckpoint:
    """Load the checkpoint in the folder `name`, which is relative to `version_dir`. Code in it is not run.

    :raises EngineError: with the cause in one line.
    """
    folder = version_dir / name
    if not folder.is_dir():
        raise EngineError(
            f"there is no checkpoint at {folder.absolute()}, where model.yaml's model: {name} points: give a folder, "
            "with an absolute path or beside model.yaml; the reference engine downloads nothing"
        )
    load_seconds: dict[str, float] = {}
    try:
        with timed(load_seconds, "checkpoint"):
            check_checksums(folder)
            config = read_config(folder)
            generation = folder / "generation_config.json"
            of_generation = read_json(generation).get("eos_token_id") if generation.is_file() else None
            eos_token_ids = token_ids(of_generation) or config.eos_token_ids
        with timed(load_seconds, "tokenizer"):
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            template = ChatTemplate(folder)
            bos = template.special_tokens.get("bos_token")
            # DeepSeek's own tokenizer.json does not put the token before a text, so that add_bos_token counts.
            if bos and read_json(folder / "tokenizer_config.json").get("add_bos_token"):
                bos_id = tokenizer.token_to_id(bos)
                if tokenizer.encode("a").ids[:1] != [bos_id]:
                    tokenizer.post_processor = TemplateProcessing(
                        single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, bos_id)]
                    )
        with timed(load_seconds, "weights"):
            model = DeepseekModel(config, TensorFiles(folder, config.weight_block_size))
    except Exception as error:
        # Tokenizers and jinja2 may raise anything.
        cause = str(error) if isinstance(error, EngineError) else describe(error)
        raise EngineError(f"can't load the checkpoint {name!r}: {cause}") from error
    return LoadedCheckpoint(
        model=model,
        tokenizer=tokenizer,
        template=template,
        bos_token=bos_token(
            lambda text, special: tokenizer.encode(text, add_special_tokens=special).ids,
            lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        ),
        eos_token_ids=eos_token_ids,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        longest_token_bytes=max(len(token.encode()) for token in tokenizer.get_vocab()),
        load_seconds=load_seconds,
    )
