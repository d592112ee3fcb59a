"""Requests to send: prompts of given lengths, files, traces, conversations."""
