"""Results as files and tables, ours and those of other tools; two results side by side."""
