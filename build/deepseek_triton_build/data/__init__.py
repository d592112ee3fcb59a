"""Knowledge as data: the catalogue of models and GPUs, the record of each release, and the types of settings."""
