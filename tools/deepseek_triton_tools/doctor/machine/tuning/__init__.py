"""The settings of a machine that `doctor --tune` shows, as found and as advised. Nothing is changed."""
