"""POST /tokenize and /detokenize, GET /tokenizer_info: as vLLM has them, and as evaluation programs ask for them."""

from __future__ import annotations

import msgspec

from deepseek_triton_tools.gateway.api_route import ApiRequest
from deepseek_triton_tools.gateway.chat_request import rendering
from deepseek_triton_tools.gateway.model_front import ModelFront
from deepseek_triton_tools.gateway.openai_fields import (
    a_list,
    boolean,
    given_fields,
    invalid,
    json_text,
    text,
    token_ids,
    wrong,
)

_TOKENIZE = frozenset({"model", "prompt", "messages", "add_special_tokens", "return_token_strs"})
_OF_MESSAGES = frozenset({"tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"})
_MOST_TEXTS = 1024
"""The model's server tells the text of one token at a time."""


async def tokenize(request: ApiRequest) -> None:
    given = given_fields(request.document)
    if unknown := given.keys() - _TOKENIZE - _OF_MESSAGES:
        raise invalid(f"unknown field {min(unknown)!r:.80}.", param=min(unknown)[:80], code="unknown_parameter")
    if ("prompt" in given) == ("messages" in given):
        raise invalid("expected prompt or messages, and one of them.", param="prompt")
    inputs: dict[str, object] = {"task": "tokenize", "text_input": text("prompt", given.get("prompt", ""))}
    if "messages" in given:
        inputs |= rendering(given, a_list("messages", given["messages"]), a_list("tools", given.get("tools", [])))
    elif useless := given.keys() & _OF_MESSAGES:
        raise invalid(f"{min(useless)}: expected beside messages only, got it beside prompt.", param=min(useless))
    if "add_special_tokens" in given:
        wanted = boolean("add_special_tokens", given["add_special_tokens"])
        inputs["sampling_parameters"] = json_text({"add_special_tokens": wanted})
    wants_texts = boolean("return_token_strs", given.get("return_token_strs", False))
    _, model = await request.model(text("model", given.get("model", "")))
    tokens = _ids((await model.ask(inputs)).get("output_ids"))
    info = await model.info()
    document = {
        "count": len(tokens),
        "max_model_len": info.max_seq_len,
        "tokens": tokens,
        "token_strs": await _texts(model, tokens) if wants_texts else None,
    }
    await request.exchange.respond(200, msgspec.json.encode(document))


async def detokenize(request: ApiRequest) -> None:
    given = given_fields(request.document)
    if unknown := given.keys() - {"model", "tokens"}:
        raise invalid(f"unknown field {min(unknown)!r:.80}.", param=min(unknown)[:80], code="unknown_parameter")
    tokens = token_ids("tokens", given.get("tokens"))
    _, model = await request.model(text("model", given.get("model", "")))
    prompt = (await model.texts_of([tokens]))[0] if tokens else ""
    await request.exchange.respond(200, msgspec.json.encode({"prompt": prompt}))


async def tokenizer_info(request: ApiRequest) -> None:
    _, model = await request.model("")
    info = await model.info()
    document = {
        "tokenizer_class": "LlamaTokenizerFast",
        "chat_template": info.chat_template,
        "bos_token": info.bos_token,
        "eos_token": info.eos_token,
        "pad_token": info.pad_token,
        "vocab_size": info.vocab_size,
        "model_max_length": info.max_seq_len,
    }
    await request.exchange.respond(200, msgspec.json.encode(document))


async def _texts(model: ModelFront, tokens: list[int]) -> list[str]:
    """The text of each token."""
    different = list(dict.fromkeys(tokens))
    if len(different) > _MOST_TEXTS:
        raise wrong("return_token_strs", f"a prompt of at most {_MOST_TEXTS} different tokens", len(different))
    texts = dict(zip(different, await model.texts_of([[token] for token in different]), strict=True))
    return [texts[token] for token in tokens]


def _ids(value: object) -> list[int]:
    """An output of ids: one value is the value itself."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return [int(str(each)) for each in ids]
