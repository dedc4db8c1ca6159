"""Tools for checks: the prover of rules, the sweep over torch's own samples, counted bytes.

In reading order: `prove` with `trial`, `simulated_ranks` and `samples/` (the prover), `opinfo`,
`op_layouts`, `op_case` and `op_team` (the sweep), `allocated_bytes`, `believed_gpu` (captures for a
GPU on a machine without one).
"""
