"""One request to one Triton server, over HTTP."""
