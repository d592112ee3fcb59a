"""`make release` and what it needs. The wheel leaves this folder out."""
