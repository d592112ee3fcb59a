"""OpenAI's requests, responses and errors as types and JSON, without any I/O."""
