"""Trainers of other packages that train models of partita, one module each.

`accelerate` has an `Accelerator`, `trainer` a `Trainer` of transformers (and of TRL), `lightning` a
`Strategy`. Each module imports its package, and nothing else of partita imports these modules. They
share `sharded_run`: the mesh of the model, the split of batches by rows, and whole results.
"""
