"""What things cost: the benches of `partita bench`, each in a file of its own.

In reading order: `interleaved` (how they are timed), `models` (what is timed), then one file for
each bench.
"""
