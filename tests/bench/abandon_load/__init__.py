"""The parts of tests/bench/abandon.py: leaving -> stayed."""
