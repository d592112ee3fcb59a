"""Checks a history: every request has one end, and every answer is the one that it was told to give."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from reliability.history import NO_END, NOT_ASKED, Record
from reliability.jobs import CONTEXT, GATEWAY, HTTP, LEFT, REFUSALS, SERVER, Asked, make_job

LOST = "lost"
TORN = "torn by Triton"
"""A stream straight from tritonserver's HTTP front end that had begun and lacks its last events: under load the front
end loses them where its queues are short (docs/tritonserver.md, "HTTP streams under load"). They are counted."""
MOST_TORN = 1e-5
"""Of the requests, where the queues are short."""
FAILED = "failed"
"""An answer that had begun with status 200, and ended with an error."""
_SHOWN = 20
_EARLY = frozenset({"timeout", "cancelled", LEFT})
"""Outcomes of which the text is some beginning of the answer."""
_UNSEEN = frozenset({LEFT, LOST, NO_END, NOT_ASKED})
"""Outcomes of a request of which the client has not seen the end."""
_PURPOSES = {
    "deadline": "timeout",
    "left by its client": LEFT,
    "gateway: left by its client": LEFT,
    "stopped by id": "cancelled",
    "stop request": "stop",
}
"""Kinds that may also end as any other, and the outcome that they are there for."""
_LEAST_ON_PURPOSE = 0.1
_ENOUGH = 200
"""Requests of a kind, of which a share says something."""


@dataclass
class Verdict:
    """What the history shows: how many ended how, and what should not have been."""

    outcomes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Kind, protocol and outcome -> number of requests."""
    violations: list[str] = field(default_factory=list)
    num_violations: int = 0
    num_requests: int = 0
    num_refused: int = 0
    torn: Counter[str] = field(default_factory=Counter)
    """Number of streams that Triton has torn, by whom they were asked of."""
    server_tokens: int = 0
    """Output tokens that answers of the one server said they have."""
    server_open_tokens: int = 0
    """Output tokens at most of requests to it that nobody saw the end of."""

    def add(self, violation: str) -> None:
        self.num_violations += 1
        if len(self.violations) < _SHOWN:
            self.violations.append(violation)

    @property
    def num_torn(self) -> int:
        return self.torn.total()

    @property
    def refused_share(self) -> float:
        return self.num_refused / self.num_requests if self.num_requests else 0.0

    def table(self) -> str:
        lines = [f"{'kind':28} {'HTTP':>9} {'gRPC':>9}  outcomes"]
        for kind in dict.fromkeys(kind for kind, _, _ in sorted(self.outcomes)):
            those = {key: count for key, count in self.outcomes.items() if key[0] == kind}
            by_protocol: Counter[str] = Counter()
            by_outcome: Counter[str] = Counter()
            for (_, protocol, outcome), count in those.items():
                by_protocol[protocol] += count
                by_outcome[outcome] += count
            shown = ", ".join(f"{outcome} {count:,}" for outcome, count in by_outcome.most_common())
            lines.append(f"{kind:28} {by_protocol['HTTP']:9,} {by_protocol['gRPC']:9,}  {shown}")
        return "\n".join(lines)


Tolerated = Callable[[Asked, Record], Collection[str]]
"""Which outcomes a request may have beside those of its kind, because faults were injected."""


def check_history(
    records: Iterable[Record],
    seed: int,
    engine: str,
    jobs: Iterable[int],
    *,
    tolerated: Tolerated = lambda asked, record: (),
) -> Verdict:
    """Check all records of a run.

    :param jobs: the numbers of the jobs that were done.
    """
    verdict = Verdict()
    parts: defaultdict[int, list[Record]] = defaultdict(list)
    ids: Counter[str] = Counter()
    for record in records:
        parts[record.job].append(record)
    for number in jobs:
        job = make_job(seed, number, engine)
        seen = sorted(parts.pop(number, []), key=lambda record: record.part)
        if [record.part for record in seen] != list(range(len(job.asked))):
            verdict.add(f"job {number}: {len(job.asked)} requests were to be made, recorded were {len(seen)}")
            continue
        if job.stops_after_s is not None and is_cancelled_unasked(*seen):
            verdict.add(f"job {number}: it was cancelled, and its stop request was refused")
        for asked, record in zip(job.asked, seen, strict=True):
            outcome = outcome_of(record, asked.num_sequences)
            if is_torn(asked, record):
                outcome = TORN
                verdict.torn[asked.target] += 1
            verdict.num_requests += 1
            verdict.num_refused += outcome in REFUSALS
            verdict.outcomes[asked.kind, asked.protocol, outcome] += 1
            _count_tokens(verdict, asked, record, outcome)
            for problem in problems(asked, record, engine, tolerated(asked, record)):
                verdict.add(f"job {number} ({asked.kind}, {asked.protocol}, {asked.target}): {problem}")
            if asked.path:
                ids.update(record.ids)
    for number in parts:
        verdict.add(f"job {number}: it was recorded, and is none of this run")
    for name, count in ids.items():
        if count > 1:
            verdict.add(f"{count} answers of the gateway have the id {name}")
    _check_purposes(verdict)
    return verdict


def is_cancelled_unasked(stopped: Record, stop: Record) -> bool:
    """Tell whether a request was cancelled, although the server told its stop request that it is not there."""
    return ["cancelled"] in stopped.reasons.values() and outcome_of(stop, 1) == "E_INVALID_ARGUMENT"


def _check_purposes(verdict: Verdict) -> None:
    """Add kinds that never or hardly ever ended as they are there for: then deadlines, or stopping, do nothing."""
    for kind, purpose in _PURPOSES.items():
        counts: Counter[str] = Counter()
        for (each, _, outcome), count in verdict.outcomes.items():
            counts[outcome] += count * (each == kind)
        if counts.total() >= _ENOUGH and counts[purpose] < _LEAST_ON_PURPOSE * counts.total():
            verdict.add(f"{kind}: {counts[purpose]} of {counts.total()} ended as {purpose}, which is hardly any")


def outcome_of(record: Record, num_sequences: int) -> str:
    """Return the one end that the client saw, or that there was none, or several. An error ends a request of which some
    sequences have ended before."""
    if record.left and not record.errors:
        return LEFT
    if record.lost:
        return next((outcome for outcome in (NO_END, NOT_ASKED) if record.lost.startswith(outcome)), LOST)
    ends = [*record.errors, *(reason for reasons in record.reasons.values() for reason in reasons)]
    if not ends:
        return NO_END
    if record.errors:
        num_ended = len([reasons for reasons in record.reasons.values() if reasons])
        if len(record.errors) > 1 or num_ended >= num_sequences:
            return f"{len(ends)} ends"
        if code := re.match(r"\[(E_\w+)\]", record.errors[0]):
            return code[1]
        return {0: "an error without a code", 200: FAILED}.get(record.status, f"status {record.status}")
    if any(len(reasons) > 1 for reasons in record.reasons.values()):
        return f"{len(ends)} ends"
    return record.reasons[min(record.reasons)][0]


def is_torn(asked: Asked, record: Record) -> bool:
    """Tell whether Triton's front end lost the end of this stream. All that came must be right."""
    is_from_front_end = asked.protocol == HTTP and not asked.path and asked.streaming and record.status == 200
    has_an_end = bool(record.errors) or len(record.reasons) == asked.num_sequences or record.left
    is_as_documented = record.closed or record.lost.startswith(NO_END)
    return is_from_front_end and record.responses > 0 and not has_an_end and is_as_documented


def problems(asked: Asked, record: Record, engine: str, tolerated: Collection[str] = ()) -> Iterator[str]:
    """Yield what is wrong with one request."""
    outcome = outcome_of(record, asked.num_sequences)
    if is_torn(asked, record) and TORN not in tolerated:
        yield from _early_texts(asked, record, engine)
        return
    if outcome not in asked.outcomes and outcome not in tolerated:
        detail = (record.errors or [record.lost])[0][:300]
        yield f"ended as {outcome}, expected {', '.join(sorted(asked.outcomes))} {detail}"
        return
    if record.late:
        yield f"{record.late} responses came behind its end"
    if record.finals is not None and outcome not in _UNSEEN and record.finals != 1:
        yield f"{record.finals} final responses"
    if not (record.closed or record.left) and outcome not in _UNSEEN | {FAILED}:  # a stream that fails has no [DONE]
        yield f"ended as {outcome}, and the answer was not closed"
    if asked.request_id and set(record.ids) - {asked.request_id}:
        yield f"responses have the ids {record.ids}"
    if asked.path and len(record.ids) > 1:
        yield f"its chunks have {len(record.ids)} ids"
    if not asked.words or record.errors or outcome in {*REFUSALS, NO_END}:
        if record.errors and not all(error.strip() for error in record.errors):
            yield "an error without a text"
        yield from _early_texts(asked, record, engine)
        return
    yield from _texts(asked, record, engine, outcome)
    if outcome not in _UNSEEN:
        yield from _ends(asked, record, {*asked.outcomes, *tolerated})
        yield from _usage(asked, record)


def _ends(asked: Asked, record: Record, allowed: Collection[str]) -> Iterator[str]:
    """Yield sequences that have no end, or one that the request may not have, and an answer that does not say whose it
    is."""
    if missing := set(range(asked.num_sequences)) - record.reasons.keys():
        yield f"the sequences {sorted(missing)} have no end"
    if wrong := [reasons for reasons in record.reasons.values() if not allowed >= set(reasons)]:
        yield f"sequences ended with {wrong}, expected {', '.join(sorted(asked.outcomes))}"
    if not record.ids:
        yield "no response has an id"


def _early_texts(asked: Asked, record: Record, engine: str) -> Iterator[str]:
    for index, text in record.texts.items():
        words = asked.words[index] if index < len(asked.words) else ()
        if not _is_beginning(text, "".join(words)):
            yield f"sequence {index} said {text[-80:]!r} before its error"


def _texts(asked: Asked, record: Record, engine: str, outcome: str) -> Iterator[str]:
    for index, words in enumerate(asked.words):
        text, whole = record.texts.get(index, ""), "".join(words)
        [reason] = record.reasons.get(index) or [outcome]
        tokens = record.tokens.get(index)
        if reason in _EARLY or reason in _UNSEEN:
            if not _is_beginning(text, whole):
                yield f"sequence {index} said {text[-80:]!r}, which is no beginning of {whole[:80]!r}"
            continue
        if reason == "tool_calls":
            if text != whole or json.loads(record.call) != {"word": "".join(words).strip()}:
                yield f"said {text!r} and called with {record.call!r}"
            continue
        expected = _expected(asked, whole, words, reason, engine, asked.target)
        if text not in expected:
            yield f"sequence {index} ended with {reason} and said {text!r}, expected {' or '.join(map(repr, expected))}"
        elif tokens is not None:
            least, most = _token_bounds(asked, text, whole, words, reason, engine)
            if not least <= tokens <= most:
                yield f"sequence {index} has {tokens} tokens, expected {least} to {most} ({reason})"
    if extra := record.texts.keys() - range(len(asked.words)):
        yield f"there are sequences {sorted(extra)}"
    if "logprobs" in asked.body and outcome in ("stop", "length") and record.logprobs != sum(record.tokens.values()):
        yield f"{record.logprobs} log-probabilities of {sum(record.tokens.values())} tokens"


def _is_beginning(text: str, whole: str) -> bool:
    """Tell whether a text is a beginning; its last character may be one of which bytes are missing."""
    return whole.startswith((text, text.rstrip("\N{REPLACEMENT CHARACTER}")))


def _expected(asked: Asked, whole: str, words: Sequence[str], reason: str, engine: str, target: str) -> Sequence[str]:
    """Return the texts that may have come with "stop" or "length"."""
    # The stop string that is complete first ends the text; the longest, where several are.
    found = [(at + len(stop), at) for stop in asked.stops if (at := whole.find(stop)) >= 0]
    stopped_at = min(found)[1] if found else None
    limit = asked.max_tokens
    if target == CONTEXT:
        limit = 1
    if engine == "simulated":
        cuts = ["".join(words[:limit])] if reason == "length" else [whole]
    else:
        data = whole.encode()[:limit] if reason == "length" else whole.encode()
        # A character that the limit cuts in the middle is shown as one that can't be read, or not at all.
        cuts = [data.decode(errors="replace"), data.decode(errors="ignore")]
    if target == CONTEXT:  # its text goes as far as it is certain
        return [*cuts, ""]
    if reason == "stop" and stopped_at is not None:
        return [whole[:stopped_at]]
    return cuts


def _token_bounds(
    asked: Asked, text: str, whole: str, words: Sequence[str], reason: str, engine: str
) -> tuple[int, int]:
    units = len(words) if engine == "simulated" else len(whole.encode())
    limit = 1 if asked.target == CONTEXT else asked.max_tokens
    if reason == "length":
        return limit, limit
    if text != whole:  # a stop string: the engine may have gone on
        shown = text.count(" ") if engine == "simulated" else len(text.encode())
        return min(shown, limit), limit
    return units, min(units + 1, limit) if asked.target != CONTEXT else 1


def _usage(asked: Asked, record: Record) -> Iterator[str]:
    if not asked.path and record.tokens.keys() != set(range(len(asked.words))):
        yield f"numbers of tokens of the sequences {sorted(record.tokens)}, there are {len(asked.words)}"
    if record.total_tokens is not None and record.total_tokens != record.prompt_tokens[0] + record.tokens[0]:
        yield f"{record.total_tokens} tokens in all, {record.prompt_tokens[0]} + {record.tokens[0]} by parts"
    if asked.path and (not asked.streaming or record.closed) and record.total_tokens is None:
        yield "no usage came"
    if not record.prompt_tokens or min(record.prompt_tokens) < 0:
        yield f"numbers of prompt tokens: {record.prompt_tokens}"


def _count_tokens(verdict: Verdict, asked: Asked, record: Record, outcome: str) -> None:
    if asked.target not in (SERVER, GATEWAY):
        return
    if outcome in _UNSEEN or outcome == TORN:
        verdict.server_open_tokens += asked.max_tokens * asked.num_sequences
    else:
        verdict.server_tokens += sum(record.tokens.values())
