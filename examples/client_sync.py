"""Use the blocking client. Usage: python client_sync.py [URL], where URL is http://... or grpc://..."""

import sys

from deepseek_triton_client import Client, InvalidRequest, SamplingParams, Timeouts


def main(url: str) -> None:
    with Client(url, timeouts=Timeouts(first_token=60)) as client:
        client.wait_until_ready(30)

        answer = client.generate("Hello, my name is", max_tokens=16)
        print(f"answer: {answer!r}")

        print("stream: ", end="")
        with client.stream("Once upon a time", max_tokens=16, temperature=0.6, seed=1) as stream:
            for chunk in stream:
                print(chunk, end="", flush=True)
        print()

        reply = client.chat("What is 6 x 7?", max_tokens=16)
        print(f"chat: {reply.text!r}, ended by {reply.finish_reason}")

        prompts = ["One.", "Two.", "Three."]
        completions = client.generate_many(prompts, concurrency=64, max_tokens=8)
        for prompt, completion in zip(prompts, completions, strict=True):
            print(f"batch: {prompt} -> {completion!r}")

        try:
            client.generate("Hello", SamplingParams(temperature=-1))
        except InvalidRequest as error:
            print(f"refused: {error}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000")
