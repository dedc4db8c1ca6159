"""Trainers of other packages (accelerate, transformers, TRL, Lightning), for models of partita.

`accelerate` has an `Accelerator`, `trainer` a `Trainer` of transformers (and of TRL), `lightning` a
`Strategy`. Each module imports its package, and nothing else of partita imports these modules. They
share `sharded_run`, which shards models, splits batches by rows, and gathers results.
"""
