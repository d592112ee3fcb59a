"""What is wrong with a machine before a model is loaded on it, as a library: the checks of `deepseek-triton doctor`.

    report = examine(RealMachine(), Expected())

Standard library only, and of this project only modules that are so too (`packing.SENT` lists them): the same files
are zipped and piped to a bare `python3` on another host or in a stock container, which keeps nothing of them.
`machine` is all that a check sees of its surroundings.
"""
