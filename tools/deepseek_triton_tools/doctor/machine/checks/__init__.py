"""The checks, by what they look at; table.py has them all in order."""
