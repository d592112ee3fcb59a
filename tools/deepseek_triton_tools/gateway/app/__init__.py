"""The ASGI application: routes, streams to the client, access log, metrics and traces."""
