"""The text of every file that a plan is written as. The same plan gives the same bytes."""
