"""OpenAI's API in front of one or many Triton servers that run our model.

It translates, routes and guards. The model's server renders conversations and tools, makes tokens and separates the
reasoning, so the gateway needs no checkpoint.
"""
