"""Rules D: multi-token prediction (MTP), and the sampling fields that work with it."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from deepseek_triton_build.data.own_files import contract
from deepseek_triton_build.data.releases import Release, load_release, sampler_of
from deepseek_triton_build.data.setting_types import DONE_BY_BACKEND
from deepseek_triton_build.data.spelling import spell
from deepseek_triton_build.rules.rule import Deployment, RuleTable, Violation

RULES = RuleTable()
_LAYERS = "speculative_config.num_nextn_predict_layers"
_DRAFT_LEN = "speculative_config.max_draft_len"
_RELAXED = "speculative_config.use_relaxed_acceptance_for_thinking"
_ADVANCED = "speculative_config.allow_advanced_sampling"
# TensorRT-LLM blog: How to get best performance on DeepSeek-R1, at batch 1.
_MOST_PUBLISHED_DRAFTS = 3


def _is_mtp(d: Deployment) -> bool:
    return bool(d.get("speculative_config.decoding_type") == "MTP")


@RULES.error("D001")
def _relaxed_model(d: Deployment) -> Iterator[Violation]:
    if d.get(_RELAXED) and d.variant is not None and not d.variant.relaxed_acceptance:
        message = f"relaxed acceptance is for DeepSeek-R1 only, not for {d.variant.name}"
        yield Violation(_RELAXED, message, "remove it")


@RULES.warning("D002")
def _relaxed_knobs(d: Deployment) -> Iterator[Violation]:
    for key in ("speculative_config.relaxed_topk", "speculative_config.relaxed_delta"):
        if d.settings.get(key) is not None and not d.get(_RELAXED):
            yield Violation(key, f"{key} has no effect without relaxed acceptance", f"set {_RELAXED}: true")


@RULES.error("D003")
def _draft_len_alone(d: Deployment) -> Iterator[Violation]:
    wanted = d.settings.get(_DRAFT_LEN)
    if _is_mtp(d) and not _has_moved(d) and _LAYERS not in d.settings and wanted is not None and wanted != 1:
        message = f"max_draft_len {wanted} has no effect: without num_nextn_predict_layers one token is drafted"
        yield Violation(_DRAFT_LEN, message, f"set {_LAYERS}: {wanted} instead")


@RULES.warning("D004")
def _draft_len_besides(d: Deployment) -> Iterator[Violation]:
    wanted, layers = d.settings.get(_DRAFT_LEN), d.settings.get(_LAYERS)
    if _is_mtp(d) and not _has_moved(d) and wanted is not None and layers is not None and wanted != layers:
        message = f"max_draft_len {wanted} is overwritten by num_nextn_predict_layers {layers}"
        yield Violation(_DRAFT_LEN, message, "remove max_draft_len")


def _has_moved(d: Deployment) -> bool:
    """Tell whether the release is known to count max_draft_len: there the two keys have changed places."""
    return d.release is not None and not d.is_before("1.3")


@RULES.warning("D013")
def _older_draft_len(d: Deployment) -> Iterator[Violation]:
    number = d.settings.get(_DRAFT_LEN)
    if _is_mtp(d) and _has_moved(d) and number is not None and d.release is not None:
        message = f"num_nextn_predict_layers {number}: in TensorRT-LLM {d.release.version} it "
        message += "is the number of MTP layers in the checkpoint, which is read from there"
        fix = "remove it" if _LAYERS in d.settings else f"set {_DRAFT_LEN}: {number} instead"
        yield Violation(_DRAFT_LEN, message, fix)


@RULES.note("D014")
def _penalties(d: Deployment) -> Iterator[Violation]:
    key = "speculative_config.enable_penalty"
    if _is_mtp(d) and _has_moved(d) and not d.get(key):
        message = "with MTP, requests that ask for a penalty of repetition, presence or frequency are refused"
        fix = f"set {key}: true, which takes memory, if clients ask for them"
        yield Violation("speculative_config.decoding_type", message, fix)


@RULES.error("D007")
def _guided_decoding(d: Deployment) -> Iterator[Violation]:
    if d.release is None or not d.release.has_samplers or d.settings.get("guided_decoding_backend") is None:
        return
    why = _refusals(d.release.version, _sampler(d, d.release)).get("guided_decoding")
    if _is_mtp(d) and not d.get(_ADVANCED) and why:
        message = f"guided decoding can't be used with MTP in TensorRT-LLM {d.release.version}: {why}"
        yield Violation("guided_decoding_backend", message, "turn one of the two off, or use 1.2 or newer")


@RULES.error("D008")
def _guided_overlap(d: Deployment) -> Iterator[Violation]:
    if d.settings.get("guided_decoding_backend") is None or d.get("disable_overlap_scheduler"):
        return
    if d.release is not None and d.supports("guided_decoding_with_overlap_scheduler") is False:
        message = f"guided decoding does not load beside the overlap scheduler in TensorRT-LLM {d.release.version}"
        yield Violation("guided_decoding_backend", message, "set disable_overlap_scheduler: true")


@RULES.error("D009")
def _default_sampling(d: Deployment) -> Iterator[Violation]:
    # A field that is a mapping has a key for each of its entries.
    defaults = {key.split(".")[1]: value for key, value in d.triton.items() if key.startswith("default_sampling.")}
    if d.release is None or not d.release.has_samplers or not defaults:
        return
    sampler = _sampler(d, d.release)
    fields = contract().SAMPLING_BY_NAME
    for name, value in defaults.items():
        if name not in fields or name in DONE_BY_BACKEND or value == fields[name].neutral:
            continue
        engine_field = "guided_decoding" if fields[name].guided else "logprobs" if name == "best_of" else name
        if why := _why_not(d, d.release, sampler, engine_field):
            message = f"default_sampling.{name} with the {sampler} of TensorRT-LLM {d.release.version}: {why}"
            fix = f"remove default_sampling.{name}, or select another sampler"
            yield Violation(f"triton_config.default_sampling.{name}", message, fix)


def _sampler(d: Deployment, release: Release) -> str:
    read = {key: value for key, value in d.settings.items() if key.startswith(("speculative_config", "sampler_type"))}
    return sampler_of(release, spell(read, release.version))


def _why_not(d: Deployment, release: Release, sampler: str, field: str) -> str | None:
    """Return why `sampler` does not honour a field of SamplingParams; None when it does."""
    for entry in release.record["sampler"]["needs"]:
        given = d.get(entry["llm_arg"])
        if field in entry["fields"] and (given != entry["value"] if "value" in entry else given is None):
            return str(entry["why"])
    section, refusals = release.record["sampler"], _refusals(release.version, sampler)
    if field not in refusals and field in (*section["always"], *section["samplers"][sampler]["honours"]["fields"]):
        return None
    return refusals.get(field, "not established")


@cache
def _refusals(version: str, sampler: str) -> Mapping[str, str]:
    """Return field of SamplingParams -> why that sampler does not honour it, as far as the record says it."""
    section: Mapping[str, Any] = load_release(version).record["sampler"]
    chosen = section["samplers"][sampler]
    entries = [*section["lacks"], *chosen.get("fails", ()), *chosen["ignores"]]
    return {field: entry["why"] for entry in entries for field in entry["fields"]}


@RULES.warning("D012")
def _many_drafts(d: Deployment) -> Iterator[Violation]:
    if d.num_draft_tokens > _MOST_PUBLISHED_DRAFTS:
        message = f"one MTP layer drafts {d.num_draft_tokens} tokens a step, "
        message += "each less likely accepted than the one before"
        fix = f"nobody has published more than {_MOST_PUBLISHED_DRAFTS}; measure the acceptance rate"
        yield Violation(_LAYERS, message, fix)
