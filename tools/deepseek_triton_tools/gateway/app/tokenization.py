"""POST /tokenize and /detokenize, GET /tokenizer_info: as vLLM has them, and as evaluation programs ask for them."""

from __future__ import annotations

import msgspec

from deepseek_triton_tools.gateway.app.api_route import ApiRequest
from deepseek_triton_tools.gateway.protocol.openai_errors import invalid
from deepseek_triton_tools.gateway.protocol.openai_fields import (
    a_list,
    an_object,
    boolean,
    given_fields,
    text,
    token_ids,
)

_TOKENIZE = frozenset({"model", "prompt", "messages", "tools", "chat_template_kwargs", "add_special_tokens"})
_ACCEPTED = frozenset({"add_generation_prompt", "return_token_strs", "continue_final_message"})


async def tokenize(request: ApiRequest) -> None:
    given = given_fields(request.document)
    if unknown := given.keys() - _TOKENIZE - _ACCEPTED:
        raise invalid(f"unknown field {min(unknown)!r:.80}.", param=min(unknown)[:80], code="unknown_parameter")
    if ("prompt" in given) == ("messages" in given):
        raise invalid("expected prompt or messages, and one of them.", param="prompt")
    inputs: dict[str, object] = {"task": "tokenize", "text_input": text("prompt", given.get("prompt", ""))}
    if "messages" in given:
        inputs["messages"] = _json(a_list("messages", given["messages"]))
    for name, read in (("tools", a_list), ("chat_template_kwargs", an_object)):
        if name in given:
            inputs[name] = _json(read(name, given[name]))
    if "add_special_tokens" in given:
        wanted = boolean("add_special_tokens", given["add_special_tokens"])
        inputs["sampling_parameters"] = _json({"add_special_tokens": wanted})
    _, model = await request.model(text("model", given.get("model", "")))
    outputs = await model.ask(inputs)
    tokens = _ids(outputs.get("output_ids"))
    strings = None
    if given.get("return_token_strs"):
        strings = [str((await model.ask(_detokenize([token])))["text_output"]) for token in tokens]
    info = await model.info()
    document = {"count": len(tokens), "max_model_len": info.max_seq_len, "tokens": tokens, "token_strs": strings}
    await request.exchange.respond(200, msgspec.json.encode(document))


async def detokenize(request: ApiRequest) -> None:
    given = given_fields(request.document)
    if unknown := given.keys() - {"model", "tokens"}:
        raise invalid(f"unknown field {min(unknown)!r:.80}.", param=min(unknown)[:80], code="unknown_parameter")
    tokens = token_ids("tokens", given.get("tokens"))
    _, model = await request.model(text("model", given.get("model", "")))
    prompt = str((await model.ask(_detokenize(tokens)))["text_output"]) if tokens else ""
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


def _detokenize(tokens: list[int]) -> dict[str, object]:
    return {"task": "detokenize", "text_input": "", "input_ids": tokens}


def _ids(value: object) -> list[int]:
    """An output of ids: one value is the value itself."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return [int(str(each)) for each in ids]


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
