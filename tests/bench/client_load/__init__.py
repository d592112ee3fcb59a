"""The parts of tests/bench/client.py: cases -> serving -> driving (contenders) -> measures."""
