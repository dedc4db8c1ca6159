"""Backends of a graph: the executor that runs it node by node, and Inductor, with the store.

In reading order: `executor` (a graph as Python code, node by node or as calls of sections),
`section_cutter` (equal parts are compiled once), `build` (what is compiled, and by which rank),
`inductor` (compile, save, load) with `inductor_scheduling` (which calls are fused, in which order),
`store` (files, and which are trusted), `cuda_graphs` (kernels that are launched as one).
"""
