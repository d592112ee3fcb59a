"""Two ways to run the same coroutines: blocking, and in an event loop."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deepseek_triton_client._asyncio_runtime import AsyncioRuntime
from deepseek_triton_client._blocking_runtime import BlockingRuntime, run
from deepseek_triton_client._core.client_settings import Endpoint, Settings
from deepseek_triton_client._core.exceptions import DeepseekTritonError
from deepseek_triton_client._core.interfaces import Input

_PATIENCE_S = 60
"""Seconds, more than anything here takes, after which a test that hangs fails."""

INPUTS = [Input("text_input", "BYTES", ["hi"])]


def opened(transport, inputs=INPUTS, *, connect_s=10.0):
    return transport.open("r1", inputs, connect_s=connect_s)


async def read_all(stream):
    """The responses. An error has those before it as `responses`."""
    responses = []
    try:
        while (outputs := await stream.receive()) is not None:
            responses.append(outputs)
        assert await stream.receive() is None
    except DeepseekTritonError as exc:
        exc.responses = responses
        raise
    finally:
        await stream.close()
        await stream.close()
    return responses


class BlockingDriver:
    """`run` runs a coroutine to its end; `start` does so in the background."""

    is_asyncio = False
    new_runtime: type[BlockingRuntime | AsyncioRuntime] = BlockingRuntime

    def __init__(self):
        self._transports = []
        self._threads = ThreadPoolExecutor(64)

    def transport(self, url, *, model_name="tensorrt_llm", **settings):
        """A transport, which is closed with the driver."""
        endpoint = Endpoint.parse(url)
        given = Settings(endpoints=(endpoint,), model_name=model_name, **settings)
        made = self.new_runtime().transport(endpoint, given)
        self._transports.append(made)
        return made

    def run(self, coroutine):
        return self.start(coroutine).result(_PATIENCE_S)

    def start(self, coroutine):
        return self._threads.submit(run, coroutine)

    def ask(self, transport, **options):
        return self.run(read_all(opened(transport, **options)))

    def fails(self, transport, kind=DeepseekTritonError, *, match=None, **options):
        with pytest.raises(kind, match=match) as caught:
            self.ask(transport, **options)
        return caught.value

    def soon(self, callback):
        """Call it on a thread where a watchdog would."""
        callback()

    def close(self):
        for each in self._transports:
            self.run(each.close())
        self._threads.shutdown()


class AsyncioDriver(BlockingDriver):
    is_asyncio = True
    new_runtime = AsyncioRuntime

    def __init__(self):
        super().__init__()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def start(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def soon(self, callback):
        self._loop.call_soon_threadsafe(callback)

    def close(self):
        super().close()
        self.run(self._loop.shutdown_asyncgens())
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


DRIVERS = {"blocking": BlockingDriver, "asyncio": AsyncioDriver}
