"""The production path: what `build deepseek-r1` writes, under a real tritonserver, on the strict stand-in."""

from concurrent.futures import ThreadPoolExecutor


def test_generate_and_stream_agree(trtllm):
    completion = trtllm.generate("The capital of France is", max_tokens=60, temperature=0)
    with trtllm.stream("The capital of France is", max_tokens=60, temperature=0) as stream:
        chunks = list(stream)

    assert "".join(chunk.text for chunk in chunks) == completion.text
    assert len(chunks) > 1
    assert completion.num_output_tokens == 60
    assert "�" not in completion.text


def test_many_at_once_are_answered(trtllm):
    def ask(number):
        return trtllm.generate(f"prompt {number}", max_tokens=20, temperature=0).text

    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(ask, range(64)))

    assert together == [ask(number) for number in range(64)]


def test_stop_strings_are_found_on_this_engine_too(trtllm):
    whole = trtllm.generate("stop me", max_tokens=60, temperature=0).text
    stop = whole[20:26]

    assert trtllm.generate("stop me", max_tokens=60, temperature=0, stop=[stop]).text == whole[: whole.index(stop)]
