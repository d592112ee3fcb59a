"""The rules: what can't work, or is known not to work, each with its release range and source.

A rule looks at a Deployment (of vLLM: a VllmDeployment) and yields a Violation for each way in which it is broken.
A rule of disaggregation looks at a ServerPair or at the Orchestrator of one. Their words are in data/rules.yaml.
Published faults of an engine that no rule has are in data/known_issues.yaml.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain

from deepseek_triton_build.data.finding import Code, causes
from deepseek_triton_build.rules import (
    attention,
    disaggregation,
    environment,
    hardware,
    kv_cache,
    moe,
    orchestrator,
    size_limits,
    speculative,
    vllm,
    vllm_v4,
)
from deepseek_triton_build.rules.disaggregation import ServerPair
from deepseek_triton_build.rules.known_issues import issues_of, plain_rules
from deepseek_triton_build.rules.orchestrator import Orchestrator
from deepseek_triton_build.rules.rule import Deployment, Rule, UnknownFactError, Violation, VllmDeployment

_MODULES = (attention, speculative, environment, hardware, kv_cache, size_limits, moe)
_FOUND = chain(plain_rules("tensorrt_llm"), *(module.RULES for module in _MODULES))
RULES = tuple(sorted(_FOUND, key=lambda rule: rule.code))
"""Every rule of TensorRT-LLM, sorted by code."""
VLLM_RULES = tuple(sorted((*plain_rules("vllm"), *vllm.RULES, *vllm_v4.RULES), key=lambda rule: rule.code))
"""Every rule of vLLM, sorted by code."""
PAIR_RULES = (*disaggregation.RULES, *orchestrator.RULES)
"""Every rule about context and generation servers, and about what joins them, sorted by code."""


def target_violations(deployment: Deployment | VllmDeployment) -> Iterator[tuple[Rule, Violation]]:
    """Yield the rules that model, GPU and release break under any settings."""
    rules = RULES if isinstance(deployment, Deployment) else VLLM_RULES
    return _broken([rule for rule in rules if rule.target_only], deployment)


def violations(deployment: Deployment | VllmDeployment) -> Iterator[tuple[Code, Violation]]:
    """Yield every rule that `deployment` breaks, and the known issues: errors, warnings and notes."""
    typed = deployment.well_typed()
    rules = RULES if isinstance(deployment, Deployment) else VLLM_RULES
    return chain(_broken(rules, typed), issues_of(typed))


def disaggregation_violations(pair: ServerPair) -> Iterator[tuple[Rule, Violation]]:
    """Yield every rule that the servers of `pair` break together: errors, warnings and notes."""
    return _broken(disaggregation.RULES, pair.well_typed())


def orchestrator_violations(joins: Orchestrator) -> Iterator[tuple[Rule, Violation]]:
    """Yield every rule that the orchestrator of a pair breaks: errors and warnings."""
    return _broken(orchestrator.RULES, joins)


def _broken(
    rules: Sequence[Rule], deployment: Deployment | VllmDeployment | ServerPair | Orchestrator
) -> Iterator[tuple[Rule, Violation]]:
    found: list[tuple[Rule, Violation]] = []
    for rule in rules:
        with suppress(UnknownFactError):
            found.extend((rule, violation) for violation in rule.find_violations(deployment))
    yield from causes(found, lambda one: one[0].code)
