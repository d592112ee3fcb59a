"""Endpoints of deepseek-triton for AIPerf, which finds them by the entry point `aiperf.plugins`."""
