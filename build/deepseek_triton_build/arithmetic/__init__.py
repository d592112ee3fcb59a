"""Figures that follow from a plan: GPU memory, load time and the requests of a warm-up."""
