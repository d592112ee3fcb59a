"""This process and the tritonserver above it: what is ended, and by whom, when one of them is gone."""
