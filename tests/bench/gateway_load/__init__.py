"""The processes of tests/bench/gateway.py. Each is as cheap as it can be, so that the gateway's cost is what counts."""
