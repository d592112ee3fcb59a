"""The servers behind the gateway: which there are, how they are, which gets a request, and trying another."""
