"""What measures right and wrong: the prover of rules, the sweep over torch's ops, counted bytes.

In reading order: `prove` and `trial` with `samples/` (the rules), `opinfo`, `op_layouts`, `op_case`
and `op_team` (the sweep), `allocated_bytes`.
"""
