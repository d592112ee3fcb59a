"""A server between gateway and tritonserver whose model does what it is told: it calls the tools that a text asks for.

The tiny model knows five tools. The tests of others bring their own, and JSON schemas that the reference engine can't
follow. Requests with tools or with a guide are answered here, in the wire contract's words (docs/contract.md) and in
V3.1's form of calls; all others go on to the real server. A text that begins with OVERLOADED is refused the first time.
"""

import http.client
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import urlsplit

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
OVERLOADED = "Overloaded:"
_PIECE = 5
"""Characters in each event of a stream."""


@contextmanager
def obedient_triton(real_url):
    """The server's URL. real_url: the tritonserver behind it."""

    class Handler(_Handler):
        real = urlsplit(real_url).netloc
        refused: ClassVar[set[str]] = set()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    real: str
    refused: ClassVar[set[str]]

    def do_GET(self):
        self._relay(b"")

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            inputs = json.loads(body)
        except ValueError:
            inputs = {}
        asked = _asked(inputs)
        if asked.startswith(OVERLOADED) and asked not in self.refused:
            self.refused.add(asked)
            self._refuse()
            return
        text = _told(inputs)
        if inputs.get("task") == "describe":
            self._describe(body)
        elif text is None or inputs.get("task", "generate") != "generate":
            self._relay(body)
        else:
            self._say(text)

    def _say(self, text):
        """Answer a generate_stream request with a text, cut into pieces."""
        pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
        self._begin(200, {"Content-Type": "text/event-stream; charset=utf-8"})
        for number, piece in enumerate(pieces):
            outputs = {"model_name": "tensorrt_llm", "model_version": "1", "text_output": piece}
            if number == len(pieces) - 1:
                outputs |= {"finish_reason": "stop", "num_input_tokens": 10, "num_output_tokens": len(pieces)}
            self._chunk(f"data: {json.dumps(outputs)}\n\n".encode())
        self._chunk(b"")

    def _describe(self, body):
        """What the real server says of its model, which follows schemas too."""
        connection = http.client.HTTPConnection(self.real, timeout=120)
        connection.request("POST", self.path.replace("generate_stream", "generate"), body)
        outputs = json.loads(connection.getresponse().read())
        connection.close()
        info = json.loads(outputs["model_info"])
        info["fields"] |= {"guided_json": "", "guided_json_object": ""}
        outputs["model_info"] = json.dumps(info)
        streams = self.path.endswith("generate_stream")
        self._begin(200, {"Content-Type": "text/event-stream" if streams else "application/json"})
        self._chunk((f"data: {json.dumps(outputs)}\n\n" if streams else json.dumps(outputs)).encode())
        self._chunk(b"")

    def _refuse(self):
        self._begin(503, {"Content-Type": "application/json"})
        self._chunk(b'{"error":"[E_OVERLOADED] too many requests are in flight"}')
        self._chunk(b"")

    def _relay(self, body):
        """Pass the request on to the real server, and its answer back as it comes."""
        connection = http.client.HTTPConnection(self.real, timeout=120)
        try:
            kept = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
            connection.request(self.command, self.path, body or None, kept)
            answer = connection.getresponse()
            self._begin(answer.status, {"Content-Type": answer.headers.get("Content-Type", "application/json")})
            while part := answer.read1():
                self._chunk(part)
            self._chunk(b"")
        except BrokenPipeError:
            self.close_connection = True
        finally:
            connection.close()

    def _begin(self, status, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, part):
        self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))

    def log_message(self, format, *arguments):
        """Requests are not worth a line."""


# --- what an obedient model says --------------------------------------------------------------------------------------


def _told(inputs):
    """The answer to a request with tools or with a guide; None for all others."""
    messages = json.loads(inputs.get("messages") or "[]")
    tools = json.loads(inputs.get("tools") or "[]")
    asked = _asked(inputs)
    guides = {**inputs, **json.loads(inputs.get("sampling_parameters") or "{}")}
    if schema := guides.get("guided_json"):
        return json.dumps(_instance(json.loads(schema), asked), ensure_ascii=False)
    if guides.get("guided_json_object"):
        return json.dumps(dict.fromkeys(re.findall(r"'(\w+)'", asked), "a cat"))
    if not tools or inputs.get("tool_choice") == "none":
        return None
    if messages[-1]["role"] == "tool":
        return f"The tool said: {messages[-1]['content']}"
    function = _chosen(tools, inputs.get("tool_choice", "auto"), asked)
    arguments = json.dumps(_instance(function.get("parameters") or {}, asked), ensure_ascii=False)
    return f"{CALLS}{CALL}{function['name']}{SEPARATOR}{arguments}{END_CALL}{END_CALLS}"


def _asked(inputs):
    """The user's last text; "" where there is none."""
    messages = json.loads(inputs.get("messages") or "[]")
    return next((str(message["content"]) for message in reversed(messages) if message["role"] == "user"), "")


def _chosen(tools, choice, asked):
    functions = [tool["function"] for tool in tools]
    name = json.loads(choice)["function"]["name"] if choice.startswith("{") else None
    wanted = (
        function for function in functions if function["name"] == name or (not name and function["name"] in asked)
    )
    return next(wanted, functions[0])


def _instance(schema, asked):
    """A value that follows a JSON schema, with the text's numbers and quoted words."""
    if "$ref" in schema or "anyOf" in schema or "enum" in schema:
        return schema["enum"][0] if "enum" in schema else None
    kind = schema.get("type", "object")
    if kind == "object":
        return {name: _instance(part, asked) for name, part in schema.get("properties", {}).items()}
    if kind in ("integer", "number"):
        return int((re.findall(r"-?\d+", asked) or ["1"])[0])
    if kind == "array":
        return [_instance(schema.get("items", {"type": "string"}), asked)]
    return (re.findall(r"'([^']+)'", asked) or ["Pirate"])[0] if kind == "string" else kind == "boolean"
