"""The deepseek-triton backend: everything `model.py` drives.

Needs the standard library, numpy and pyyaml, plus the engine it drives; imports none of the project's other packages,
because it runs inside Triton's container where nobody can be asked to install anything. Python 3.10 or newer.
"""
