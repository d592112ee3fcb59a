"""The checks, one file for each thing they look at; check_table.py lists them all in order."""
