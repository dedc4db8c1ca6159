"""Trainers of other packages that train models of partita, a module each.

`accelerate` has an `Accelerator`, `trainer` a `Trainer` of transformers (and of TRL), `lightning` a
`Strategy`. Each module imports its package, and nothing else of partita imports these modules. They
share `sharded_run`: where the model lives, which rows a batch has, and what a result is.
"""
