"""The output of a survey and a warm-up: for people, for logs and for programs."""
