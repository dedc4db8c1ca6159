"""The benches of `partita bench`, each in a file of its own.

In reading order: `place` (on what device), `interleaved` (how they are timed), `models` (what is
timed), then one file for each bench.
"""
