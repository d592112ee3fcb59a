"""Use the asyncio client. Usage: python client_async.py [URL], where URL is http://... or grpc://..."""

import asyncio
import sys

from deepseek_triton_client import AsyncClient


async def read(client: AsyncClient, prompt: str) -> str:
    async with client.stream(prompt, max_tokens=32) as stream:
        return "".join([str(chunk) async for chunk in stream])


async def leave_early(client: AsyncClient) -> int:
    """Read three chunks and go: the server stops generating as soon as the block is left."""
    num_chunks = 0
    async with client.stream("Tell me a long story.", max_tokens=4000) as stream:
        async for _ in stream:
            num_chunks += 1
            if num_chunks == 3:
                break
    return num_chunks


async def main(url: str) -> None:
    async with AsyncClient(url) as client:
        await client.wait_until_ready(30)
        prompts = [f"Question {number}:" for number in range(8)]
        texts = await asyncio.gather(*(read(client, prompt) for prompt in prompts))
        for prompt, text in zip(prompts, texts, strict=True):
            print(f"{prompt} {text!r}")
        print(f"left after {await leave_early(client)} chunks")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"))
