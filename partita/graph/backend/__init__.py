"""Backends of a graph: the executor that runs it node by node, and Inductor, with the store.

In reading order: `executor` (a graph as Python code, node by node or as calls of sections),
`section_cutter` (equal parts are compiled once), `inductor` (what is compiled, by which rank; save
and load) with `inductor_scheduling` (which calls are fused, in which order), `codegen_memory` (the
memory of the code that it generates), `store` (files, and which are trusted), `cuda_graphs`
(kernels that are launched as one).
"""
