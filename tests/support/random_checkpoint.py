"""Makes a checkpoint for tests: all keys and tensor names of DeepSeek-V3, with four million random parameters.

Its text is nonsense, and never ends by itself. Its bytes are always the same: numpy's frozen RandomState draws the
weights, and the tokenizer is written down, not trained.
"""

import json

import numpy as np

from support.tensor_writing import as_float32, write_tensors
from tiny_checkpoint.architecture import CONFIG, SPECIAL_TOKENS
from tiny_checkpoint.tokenizer import GENERATION_CONFIG, SPLITS, byte_letters, tokenizer_config, tokenizer_json

SEED = 10
"""The smallest seed with which greedy decoding of the demo's prompts is the same on every machine and in every batch.

The tests hold each margin between a chosen token, expert or group and the next one above 1e-3. Differences of float32
between batch sizes and machines stay below 1e-4.
"""

# --- tokenizer --------------------------------------------------------------------------------------------------------

_MARKER_TOKENS = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
"""Single tokens that skip_special_tokens leaves in the text, as in DeepSeek's own tokenizers."""

# One block of words reads better than four hundred quoted strings.
_WORDS = """
a able about above across act add after again against age ago air all almost alone along already also although always am
among an and animal another answer any appear are area arm around art as ask at away back bad base be because become bed
been before began behind being believe below best better big bird black blue boat body book both break bring brought
build but buy by call came can car care carry case cat catch change child children city class clear close cold come
common cool copy country create cry cut dark day deep did do does dog done door down draw dry each earth east easy eat
end even ever every eye face fact fall family far farm fast father feel feet few field fill find fine fire first fish
five floor fly follow food foot for form found four free friend from front full game gave get girl give go gold gone
good got great green grow had half hand happy hard has have he head hear heat held help her here high him his hold home
hour house how idea if in inside into is island it its job joy just keep kind king knew know land language large last
late law lead learn leave left less let letter life light like line list little live long look lost love low machine
made make man many map mark may me mean men might mind model money moon more most mother move much music must my name
nature near need never new next night no not nothing now of off often old on once one only open or order other our out
over own page past picture place plan play point power president put question rain reach read ready real red right river
road room run said same say sea second see seven she show side sky slow small snow so some song soon sound space speak
stand star start state stay step still stone stop story study such sure take talk ten than that the their them then
there these they thing think this those three through time to today told too took top try turn two under until up us use
very walk want war warm was watch water way we week well went were west what when where which while white who whole why
wind with without word work world would write year yes yet you young your capital future France United States AI
""".split()  # noqa: SIM905
_STARTS = ("Hello", "The", "What", "How", "Why", "In", "It", "Once")
_CHINESE = ("我们", "你好", "世界", "模型", "语言", "时间", "今天", "中国", "学习", "山水")
_EMOJI = ("🙂", "🚀", "🌍", "🎉", "🌈", "🐢")
_PUNCTUATION = (",", ".")


def _letters(text):
    table = byte_letters()
    return "".join(table[byte] for byte in text.encode())


def _spoken():
    """Return the tokens that the model generates: words after a space, a few multi-byte ones, punctuation."""
    return [_letters(text) for text in (*(f" {word}" for word in _WORDS), *_CHINESE, *_EMOJI, *_PUNCTUATION)]


def _merges():
    """Return byte-pair merges that make each listed word one token.

    Every merge appends one byte to the beginning of a word, so that the merges of a word never compete for the same
    bytes. Words with a space come first: else the "an" of a word without one would split " than".
    """
    found = {}
    for text in (*_spoken(), *(_letters(text) for text in _STARTS)):
        for end in range(1, len(text)):
            found.setdefault((text[:end], text[end]))
    return list(found)


def build_tokenizer():
    """Return tokenizer.json: byte-level BPE that puts the begin-of-sentence token before a prompt."""
    merges = _merges()
    tokens = [*SPECIAL_TOKENS, *byte_letters(), *(left + right for left, right in merges), *_MARKER_TOKENS]
    ids = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    return tokenizer_json(
        ids, [list(merge) for merge in merges], splits=(r"\p{N}{1,3}", *SPLITS[1:]), markers=_MARKER_TOKENS
    )


CHAT_TEMPLATE = r"""
{%- if thinking is defined and thinking is not boolean -%}
  {{- raise_exception('thinking: expected true or false') -}}
{%- endif -%}
{{- bos_token -}}
{{- messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join('\n\n') -}}
{%- for message in messages -%}
  {%- if message.tool_calls -%}
    {{- raise_exception('tool_calls are not in this template') -}}
  {%- elif message.role == 'user' -%}
    {{- '<｜User｜>' + message.content -}}
  {%- elif message.role == 'assistant' -%}
    {{- '<｜Assistant｜></think>' + message.content.split('</think>', 1)[-1] + eos_token -}}
  {%- elif message.role != 'system' -%}
    {{- raise_exception('expected a role of system, user or assistant, got ' + message.role) -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') -}}
{%- endif -%}
"""
"""A chat template in DeepSeek-V3.1's form: system messages first, then the turns; the model reasons only when
`thinking` is true.

The reasoning of earlier answers is left out; the tag that ended it stays. Tool calls are refused.
"""

# --- configuration and weights ----------------------------------------------------------------------------------------


PRODUCTION_HEADS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""Sizes of attention that GPUs have kernels for."""


def build_config(vocab_size):
    """Return config.json: smaller than the tiny checkpoint's, and without quantization and MTP."""
    kept = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    return kept | {
        "kv_lora_rank": 64,
        "moe_intermediate_size": 128,
        "n_shared_experts": 1,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 96,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "torch_dtype": "float32",
        "v_head_dim": 32,
        "vocab_size": vocab_size,
    }


ROUTER_GAIN = 8.0
"""Spread of the routing logits, so wide that near-ties between experts are rare."""

_GOLOMB_RULER = (0, 1, 4, 9, 15, 22, 32, 34)
"""Numbers of which no two pairs have the same sum."""

CORRECTION_BIAS_SPREAD = 0.4
"""The experts' e_score_correction_bias are the ruler's numbers, scaled to [0, this] and shuffled. Where several experts
all score nearly 1 (or 0), the biases still separate them, and also the sums of two that rank the groups."""

LOGIT_SPREAD = 10.0
"""Standard deviation of the logits of generated tokens; other tokens (bytes, parts of words, EOS) have a tenth of
it."""


def build_weights(config, spoken_ids):
    """Return the float32 arrays, drawn from SEED, by their tensor names in DeepSeek's own checkpoints."""
    random = np.random.RandomState(SEED)
    return dict(_tensors(config, spoken_ids, random))


def _tensors(config, spoken_ids, random):
    hidden, vocab_size = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", _matrix(random, vocab_size, hidden, std=1.0)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", _ones(hidden)
        yield f"{prefix}.post_attention_layernorm.weight", _ones(hidden)
        yield from _attention(config, f"{prefix}.self_attn", random)
        if layer < config["first_k_dense_replace"]:
            yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"], random)
        else:
            yield from _experts(config, f"{prefix}.mlp", random)
    yield "model.norm.weight", _ones(hidden)
    lm_head = _matrix(random, vocab_size, hidden, std=LOGIT_SPREAD / hidden**0.5)
    quiet = np.setdiff1d(np.arange(vocab_size), spoken_ids)
    lm_head[quiet] *= 0.1
    yield "lm_head.weight", lm_head


def _attention(config, prefix, random):
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    if q_rank is None:
        yield f"{prefix}.q_proj.weight", _matrix(random, heads * (nope + rope), hidden)
    else:
        yield f"{prefix}.q_a_proj.weight", _matrix(random, q_rank, hidden)
        yield f"{prefix}.q_a_layernorm.weight", _ones(q_rank)
        yield f"{prefix}.q_b_proj.weight", _matrix(random, heads * (nope + rope), q_rank)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", _matrix(random, kv_rank + rope, hidden)
    yield f"{prefix}.kv_a_layernorm.weight", _ones(kv_rank)
    yield f"{prefix}.kv_b_proj.weight", _matrix(random, heads * (nope + value), kv_rank)
    yield f"{prefix}.o_proj.weight", _matrix(random, hidden, heads * value)


def _experts(config, prefix, random):
    hidden, width, num_experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    ruler = np.array(_GOLOMB_RULER[:num_experts])
    bias = random.permutation(ruler / ruler[-1] * CORRECTION_BIAS_SPREAD)
    yield f"{prefix}.gate.weight", _matrix(random, num_experts, hidden, std=ROUTER_GAIN / hidden**0.5)
    yield f"{prefix}.gate.e_score_correction_bias", bias.astype(np.float32)
    for expert in range(num_experts):
        yield from _mlp(f"{prefix}.experts.{expert}", hidden, width, random)
    yield from _mlp(f"{prefix}.shared_experts", hidden, width * config["n_shared_experts"], random)


def _mlp(prefix, hidden, width, random):
    yield f"{prefix}.gate_proj.weight", _matrix(random, width, hidden)
    yield f"{prefix}.up_proj.weight", _matrix(random, width, hidden)
    yield f"{prefix}.down_proj.weight", _matrix(random, hidden, width)


def _ones(size):
    return np.ones(size, np.float32)


def _matrix(random, rows, columns, std=None):
    """Return a random matrix [rows, columns]; None for `std` keeps the variance of its input."""
    scale = columns**-0.5 if std is None else std
    return (random.standard_normal((rows, columns)) * scale).astype(np.float32)


# --- files ------------------------------------------------------------------------------------------------------------


def write_checkpoint(folder, sizes=None):
    """Write all files of the checkpoint into the existing `folder`.

    :param sizes: values of config.json in place of the usual ones.
    """
    tokenizer = build_tokenizer()
    vocab = tokenizer["model"]["vocab"]
    config = build_config(len(vocab)) | dict(sizes or {})
    documents = {
        "config.json": config,
        "generation_config.json": GENERATION_CONFIG,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config(chat_template=CHAT_TEMPLATE),
    }
    for name, document in documents.items():
        text = json.dumps(document, ensure_ascii=False, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    weights = build_weights(config, [vocab[token] for token in _spoken()])
    write_tensors(folder / "model.safetensors", {name: as_float32(values) for name, values in weights.items()})
