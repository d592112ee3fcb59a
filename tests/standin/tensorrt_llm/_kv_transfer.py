"""KV caches on their way from a context server to a generation server: only who holds one, and no data.

A connection is one transfer. The context side greets; the generation side answers with the key of a KV cache, and the
last byte tells whether it was held. From then on it is not.
"""

import json
import os
import secrets
import socket
import threading

_KEY_BYTES = 32
_HELD, _GONE = b"+", b"-"
_TIMEOUT_S = 30.0


class TransferError(Exception):
    """The KV cache can't be had."""


class KvSender:
    """The KV caches that a context server holds. It listens from the first of them on."""

    def __init__(self, changed):
        """`changed` is called after every change of `num_blocks`, by any thread."""
        self.may_send = threading.Event()
        """Cleared by a test: transfers then wait before they begin."""
        self.may_send.set()
        self._changed = changed
        self._held = {}
        self._listener = None

    @property
    def num_blocks(self):
        return sum(list(self._held.values()))

    def hold(self, num_blocks):
        """Hold a KV cache; return the opaque state that leads to it."""
        if self._listener is None:
            # In a job of Slurm the other side is on another host.
            self._host = os.environ.get("SLURMD_NODENAME", "127.0.0.1")
            self._listener = socket.create_server((self._host, 0), backlog=256)
            threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()
        key = secrets.token_hex(_KEY_BYTES // 2)
        self._held[key.encode()] = num_blocks
        self._changed()
        return json.dumps({"host": self._host, "port": self._listener.getsockname()[1], "key": key}).encode()

    def close(self):
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _serve(self, listener):
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._send, args=(connection,), daemon=True).start()

    def _send(self, connection):
        with connection:
            self.may_send.wait()
            try:
                connection.sendall(_HELD)
                key = connection.recv(_KEY_BYTES, socket.MSG_WAITALL)
                held = self._held.pop(key, None)
                connection.sendall(_GONE if held is None else _HELD)
            except OSError:  # the generation server has gone; what it has not taken is still held
                return
            if held is not None:
                self._changed()


def receive(opaque_state, aborted):
    """Fetch a KV cache. A request that is aborted before the transfer begins leaves it where it is, for ever.

    :raises TransferError: where it is not held any more, or was left there.
    """
    state = json.loads(opaque_state)
    try:
        with socket.create_connection((state["host"], state["port"]), timeout=_TIMEOUT_S) as connection:
            connection.recv(1)
            if aborted.is_set():
                raise TransferError("aborted")
            connection.sendall(state["key"].encode())
            if connection.recv(1) != _HELD:
                raise TransferError("not held")
    except OSError as error:
        raise TransferError(str(error)) from error
