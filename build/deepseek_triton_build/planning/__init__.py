"""From a request to a plan. plan.py lists the steps."""
