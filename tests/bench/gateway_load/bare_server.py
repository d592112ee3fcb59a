"""The least that an OpenAI server under uvicorn can do: prepared chunks at an even pace, from nowhere.

python -m bench.gateway_load.bare_server PORT CHUNKS PERIOD_S
"""

import asyncio
import sys
import time
from typing import Any

import uvicorn

_CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef01234567","created":1700000000,"model":"paced","system_fingerprint":null,'
    b'"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"%d "},"logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)


def application(num_chunks: int, period_s: float) -> Any:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        loop = asyncio.get_running_loop()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        due_s = loop.time()
        for _ in range(num_chunks):
            due_s += period_s
            await asyncio.sleep(due_s - loop.time())
            chunk = _CHUNK % (time.monotonic_ns() // 1000)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    return answer


if __name__ == "__main__":
    app = application(int(sys.argv[2]), float(sys.argv[3]))
    uvicorn.run(app, port=int(sys.argv[1]), lifespan="off", log_level="warning", backlog=2048)
