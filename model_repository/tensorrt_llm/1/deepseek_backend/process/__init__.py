"""This process and the tritonserver above it: who ends what when something is gone."""
