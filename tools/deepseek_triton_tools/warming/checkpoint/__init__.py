"""The things to be warmed: the options, the files of a checkpoint, and the checksums that they should have."""
