"""The benches of `partita bench`, one file each.

In reading order: `place` (the device of a bench), `interleaved` (timing of several steps in turns),
`models` (the models that are timed), then one file for each bench.
"""
