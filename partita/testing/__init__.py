"""What measures right and wrong: the prover of rules, the sweep over torch's ops, counted bytes."""
