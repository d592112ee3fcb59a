"""The parts of tests/bench/client.py (cases -> contenders -> runs) and of abandon.py (leaving -> stayed)."""
