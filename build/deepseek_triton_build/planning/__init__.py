"""The steps from a request to a plan, which plan.py lists."""
