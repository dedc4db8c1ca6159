"""Backends of a graph: the executor that runs it node by node, and Inductor, with the store.

In reading order: `executor` (node by node), `build` and `built` (what is compiled of a program),
`compile_turns` (which rank compiles), `inductor` with `fusion`, `fused_order` and `constants`,
`cut`, `sections` and `section_run` (equal parts compiled once), `store` with `artifact_slimming`,
`trust` and `stale_library_cleanup`.
"""
