"""A fleet that is the addresses of a DNS name, over real sockets: servers come and go while requests run."""

import asyncio
import itertools
import socket
import threading
from contextlib import ExitStack

import pytest

from deepseek_triton_tools.gateway.fleet.fleet import Fleet
from deepseek_triton_tools.gateway.fleet.server_sources import parse_source
from deepseek_triton_tools.gateway.triton.call import Call
from deepseek_triton_tools.gateway.triton.triton_server import TritonServer
from support.raw_triton import RawTriton, event
from support.waiting import PATIENCE_S

NAME = "servers.test"
HOSTS = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]


class NameServer:
    """Answers for NAME in place of the machine's resolver."""

    def __init__(self):
        self.hosts = []
        self._others = socket.getaddrinfo

    def getaddrinfo(self, host, port, *args, **named):
        if host != NAME:
            return self._others(host, port, *args, **named)
        if not self.hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.hosts]


@pytest.fixture
def names(monkeypatch):
    names = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    return names


@pytest.fixture
def tritons():
    """One on each address, all on the same port."""

    def answer(wire):
        wire.head()
        wire.chunk(event(text_output="Hel"))
        threading.Event().wait(0.02)  # so that some run whenever the name changes
        wire.chunk(event(text_output="lo", finish_reason="stop"))
        wire.chunk(b"")

    with ExitStack() as stack:
        tritons = {}
        port = 0
        for host in HOSTS:
            tritons[host] = stack.enter_context(RawTriton().serving(host, port))
            tritons[host].script = answer
            port = int(tritons[host].url.rpartition(":")[2])
        yield tritons


async def until(holds):
    while not holds():
        await asyncio.sleep(0.005)


def test_servers_join_and_leave_the_name_and_no_request_is_lost(names, tritons):
    port = tritons[HOSTS[0]].url.rpartition(":")[2]
    source = parse_source(f"dns+http://{NAME}:{port}")
    source.period_s = 0.02
    texts = []
    is_over = False

    async def ask_again_and_again(fleet, client):
        for number in itertools.count():
            if is_over:
                return
            call = Call({"text_input": "Hi"}, f"{client}-{number}", affinity=f"{client}-{number}".encode())
            texts.append("".join([part.text async for parts in fleet.generate(call) for part in parts]))

    async def body():
        nonlocal is_over
        names.hosts = HOSTS[:1]
        fleet = Fleet([source], "tensorrt_llm", connect=lambda url: TritonServer(url, "tensorrt_llm"))
        await fleet.start()
        clients = [asyncio.create_task(ask_again_and_again(fleet, client)) for client in range(6)]
        for hosts in (HOSTS[:2], HOSTS[1:2], [], HOSTS[1:], HOSTS[2:]):
            gone = set(names.hosts) - set(hosts)
            names.hosts = hosts
            wanted = {tritons[host].url for host in hosts or HOSTS[1:2]}  # with no answer the former list stays
            await until(lambda wanted=wanted: {server.url for server in fleet.servers()} == wanted)
            await until(lambda: all(server.state == "up" for server in fleet.servers()))
            for host in gone if hosts else ():  # it has finished, so it ends like a pod
                tritons[host].die()
            num_before = len(texts)
            await until(lambda before=num_before: len(texts) > before + 20 or any(client.done() for client in clients))
        is_over = True
        await asyncio.gather(*clients)
        await fleet.close()

    asyncio.run(asyncio.wait_for(body(), PATIENCE_S))

    assert set(texts) == {"Hello"}
    assert all(triton.asked for triton in tritons.values())
    assert sum(len(triton.asked) for triton in tritons.values()) == len(texts)
