"""OpenAI's API in front of one or many Triton servers that run our model.

It translates, routes and guards. The model's server renders conversations and tools, makes tokens and separates the
reasoning, so the gateway needs no checkpoint.

app/         the ASGI application: routes, streams to the client, logs, metrics
guard/       API keys and their limits
fleet/       which servers there are, which of them gets a request, and trying another
triton/      one request to one server
tool_calls/  finds the calls of tools in a model's text while it streams
protocol/    OpenAI's requests, responses and errors, without any I/O
"""
