"""A request to a plan: plan.py says in which steps."""
