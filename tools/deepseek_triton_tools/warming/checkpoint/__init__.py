"""Which files of a checkpoint are to be warmed, and whether they are whole."""
