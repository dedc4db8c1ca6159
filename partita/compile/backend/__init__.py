"""Backends of a graph: the executor that runs it node by node, and Inductor, with the store.

In reading order: `executor` (node by node), `build` and `built` (what is compiled of a program),
`compile_turns` (which rank compiles), `inductor` with `inductor_scheduling` (which calls it fuses,
in which order) and `constants`; `sections` and `cut` (equal parts compiled once); `store` with
`file_trust`, `artifact_slimming` and `stale_library_cleanup`; `cuda_graphs` (kernels that are
launched as one).
"""
