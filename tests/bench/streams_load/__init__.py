"""The parts of streams.py.

`cases` says what is run, `serving` makes the systems, `driving` starts one with its clients, `client` is one of those,
`reading` is what it makes of the bytes, and `measures` what the samples say.
"""
