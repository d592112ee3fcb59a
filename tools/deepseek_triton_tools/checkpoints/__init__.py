"""Checkpoints: download, verify, describe, convert to other precisions, cut, and compare."""
