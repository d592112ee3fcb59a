"""What is known: the catalogue of models and GPUs, the record of each release, and the types of settings."""
