from deepseek_backend.engines.base import Logprob, PerfMetrics, Step
from deepseek_backend.engines.generate_request import SamplingParams
from deepseek_backend.engines.tags import CALLS_BEGIN
from deepseek_backend.parsing import ParsedRequest
from deepseek_backend.sequence_buffer import SequenceBuffer


def buffer(*, prompt="p", stop=(), include_stop=False, **fields):
    sampling = SamplingParams(stop=stop, include_stop_str_in_output=include_stop)
    return SequenceBuffer(4, ParsedRequest(sampling=sampling, **fields), prompt)


def token(text="a", **fields):
    return Step(text=text, token_ids=[7], num_input_tokens=3, **fields)


NO_TAG, CLOSES, BEGINS_CALLS = 7, 8, 9
ENDS = {CLOSES: 1, BEGINS_CALLS: 0}


def counted(texts_and_ids, prompt="p", **fields):
    """Return num_reasoning_tokens after steps of these texts and ids."""
    sequence = SequenceBuffer(0, ParsedRequest(separate_reasoning=True, **fields), prompt, "", ENDS)
    for text, token_ids in texts_and_ids:
        sequence.add(Step(text=text, token_ids=token_ids))
    sequence.add(Step(finish_reason="stop"))
    return sequence.take(counted=True).num_reasoning_tokens


INSIDE = "p<think>\n"


COUNTS = [  # texts and ids of the steps, the prompt, and the number of reasoning tokens
    ([("Hello.", [7])], "p", 0),
    ([("<think>", [7]), ("Hm", [7]), ("</think>", [8]), ("Hi", [7])], "p", 3),
    ([("<think>Hm</think>Hi.", [7, 7, 8, 7, 7])], "p", 3),
    ([("Hm</think>Hi", [7, 8, 7])], INSIDE, 2),
    ([("</think>Hi", [8, 7])], INSIDE, 1),
    ([("Hm", [7, 7])], INSIDE, 2),
    ([(f"Hm{CALLS_BEGIN}f", [7, 9, 7])], INSIDE, 1),
    ([("Hm</th", [7, 7]), ("ink>", [7]), ("Hi", [7])], INSIDE, 3),  # a tag of several tokens
    ([("a</think>", [7, 8]), ("b", [7])], "p", 0),  # a tag in the answer
    ([("<think>a</think>", [7, 7, 8]), ("</think>", [8])], "p", 3),
]


def test_tokens_count_to_the_reasoning_up_to_its_end():
    assert [counted(steps, prompt) for steps, prompt, _ in COUNTS] == [expected for *_, expected in COUNTS]


def test_the_answers_beginning_and_an_echo_come_with_the_first_text():
    parsed = ParsedRequest(separate_reasoning=True, sampling=SamplingParams(stop=("begun",)))
    sequence = SequenceBuffer(0, parsed, "p<think></think>begun", "begun")
    assert texts_of(take_each(sequence, [" on"])) == [("", "begun on"), ("", "")]
    sequence = SequenceBuffer(0, ParsedRequest(echo=True), "prompt begun", "begun")
    assert texts_of(take_each(sequence, ["."])) == [("", "prompt begun."), ("", "")]


def take_each(sequence, texts):
    """A chunk after each step, and one after the end."""
    chunks = []
    for step in [*map(token, texts), token("", finish_reason="length")]:
        if not sequence.ended:
            sequence.add(step)
            chunks.append(sequence.take(counted=True))
    return chunks


def texts_of(chunks):
    return [(chunk.reasoning, chunk.text) for chunk in chunks]


def test_each_chunk_says_what_is_new_and_the_last_one_how_it_ended():
    chunks = take_each(buffer(), ["He", "llo"])
    assert [chunk.text for chunk in chunks] == ["He", "llo", ""]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "length"]
    assert {chunk.index for chunk in chunks} == {4}
    assert {chunk.num_input_tokens for chunk in chunks} == {3}


def test_reasoning_and_answer_are_told_apart_on_request():
    chunks = take_each(buffer(), ["<think>", "Hm.</think>a"])
    assert texts_of(chunks) == [("", "<think>"), ("", "Hm.</think>a"), ("", "")]
    chunks = take_each(buffer(separate_reasoning=True), ["<think>", "Hm.</th", "ink>\n\n", "a"])
    assert texts_of(chunks) == [("", ""), ("Hm.", ""), ("", ""), ("", "a"), ("", "")]
    chunks = take_each(buffer(prompt=INSIDE, separate_reasoning=True), ["Hm.", "</think>", "a"])
    assert texts_of(chunks) == [("Hm.", ""), ("", ""), ("", "a"), ("", "")]


def test_stop_strings_are_searched_in_the_answer_and_not_in_its_reasoning():
    for include_stop, answer in (False, "a"), (True, "aEND"):
        sequence = buffer(stop=("END", "</think>"), include_stop=include_stop, separate_reasoning=True)
        chunks = take_each(sequence, ["<think>Hm.E", "ND</think>a", "ENDb"])
        assert "".join(chunk.reasoning for chunk in chunks) == "Hm.END"
        assert "".join(chunk.text for chunk in chunks) == answer
        assert sequence.matched_stop
    (*_, held), (*_, cut) = (
        take_each(buffer(stop=("<thE",), separate_reasoning=True), texts) for texts in (["a<t", "h"], ["<th", "E"])
    )
    assert (held.text, held.stop_reason, cut.text, cut.stop_reason) == ("<th", None, "", "<thE")
    last = take_each(buffer(stop=("<th",), separate_reasoning=True), ["<th"])[-1]
    assert (last.text, last.finish_reason, last.stop_reason) == ("", "stop", "<th")  # held for <think>
    assert texts_of(take_each(buffer(stop=("END",)), ["abE", "N"])) == [("", "ab"), ("", ""), ("", "EN")]
    assert texts_of(take_each(buffer(stop=("</think>",)), ["<think>a</think>"])) == [("", "<think>a")]


def test_the_first_outcome_stays():
    sequence = buffer(stop=("END",))
    sequence.add(token("abENDc", finish_reason="length", stop_reason=1))
    chunk = sequence.take(counted=True)
    assert (chunk.text, chunk.finish_reason, chunk.stop_reason) == ("ab", "stop", "END")
    sequence = buffer(stop=("END",))
    sequence.add(token("abE"))
    sequence.end("timeout")
    sequence.end("stop", "END")
    chunk = sequence.take(counted=True)
    assert (chunk.text, chunk.finish_reason, chunk.stop_reason) == ("abE", "timeout", None)
    assert not sequence.has_news()
    assert sequence.take(counted=True).text == ""


def test_the_echoed_prompt_comes_with_the_first_step_and_is_neither_searched_nor_split():
    prompt = "END<think>\n"
    chunks = take_each(buffer(prompt=prompt, echo=True, stop=("END",), separate_reasoning=True), ["Hm.</think>a"])
    assert texts_of(chunks) == [("Hm.", f"{prompt}a"), ("", "")]
    opened = buffer(echo=True)
    assert not opened.has_news()
    opened.add(Step(num_input_tokens=7))
    assert opened.has_news()
    assert opened.take(counted=True).num_input_tokens == 7
    assert not buffer(echo=True, prompt="").has_news()


def test_a_cumulative_chunk_has_the_whole_text():
    sequence = buffer(cumulative=True, echo=True, separate_reasoning=True)
    chunks = take_each(sequence, ["<think>Hm", ".</think>", "a", "b"])
    assert texts_of(chunks) == [("Hm", "p"), ("Hm.", "p"), ("Hm.", "pa"), ("Hm.", "pab"), ("Hm.", "pab")]
    assert sum(chunk.num_output_tokens for chunk in chunks) == 5


def test_there_is_news_when_there_is_text_or_an_end():
    sequence = buffer(stop=("END",))
    news = []
    for step in (token(""), token("E"), token("x"), token("", finish_reason="stop", stop_reason=7)):
        sequence.add(step)
        news.append(sequence.has_news())
        sequence.take(counted=True)
    assert news == [False, False, True, True]


def test_what_is_not_taken_adds_up_and_counts_are_of_the_tokens_since():
    sequence = buffer(returned=frozenset({"output_ids"}))
    for text in ("a", "", "b"):
        sequence.add(token(text))
    chunk = sequence.take(counted=True)
    assert (chunk.text, chunk.token_ids, chunk.num_output_tokens) == ("ab", [7, 7, 7], 3)
    assert sequence.take(counted=True).token_ids == []
    sequence = buffer()
    counts = []
    for counted in (False, True, False, True):
        sequence.add(token())
        counts.append(sequence.take(counted=counted).num_output_tokens)
    assert counts == [1, 2, 1, 2]
    assert sequence.num_output_tokens == 4


def test_of_tokens_only_what_was_asked_for_is_kept():
    sampled, other = Logprob(7, -0.5, rank=1), Logprob(8, -1.0, rank=2)
    kept = {
        "output_ids": [7, 7],
        "logprobs": [[sampled, other], [sampled]],
        "prompt_logprobs": [None, [other]],
        "cumulative_logprob": -1.0,
    }
    for name in kept:
        sequence = buffer(returned=frozenset({name}))
        sequence.add(token(logprobs=[[sampled, other]], prompt_logprobs=[None, [other]]))
        sequence.add(token(logprobs=[[sampled]]))
        chunk = sequence.take(counted=True)
        found = (chunk.token_ids, chunk.logprobs, chunk.prompt_logprobs, chunk.cumulative_logprob)
        assert found == tuple(kept[key] if key in (name, "cumulative_logprob") else [] for key in kept)


def test_the_last_chunk_has_what_the_engine_knows_at_the_end():
    sequence = buffer()
    metrics = PerfMetrics(total_draft_tokens=2)
    sequence.add(token(num_cached_tokens=2))
    sequence.add(Step(finish_reason="stop", stop_reason=9, perf_metrics=metrics))
    chunk = sequence.take(counted=True)
    assert (chunk.stop_reason, chunk.num_input_tokens, chunk.num_cached_tokens) == (9, 3, 2)
    assert chunk.perf_metrics == metrics


def test_a_cumulative_stream_sends_no_more_than_a_multiple_of_its_text():
    buffer = SequenceBuffer(0, ParsedRequest(streaming=True, cumulative=True), "")
    sent = length = chunks = 0
    for _ in range(40_000):
        buffer.add(Step(text="word ", token_ids=[1]))
        if buffer.has_news():
            length = len(buffer.take(counted=True).text)
            sent, chunks = sent + length, chunks + 1
    buffer.end("length")
    assert len(buffer.take(counted=True).text) == 200_000
    assert chunks > 500
    assert sent < 20 * 200_000 + 2**20
