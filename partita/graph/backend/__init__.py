"""Backends of a graph: the executor that runs it node by node, and Inductor with its store.

A *section* is a part of a graph that is compiled separately. In reading order: `executor` (a graph
as Python code, node by node or as calls of sections), `section_cutter` (equal parts are compiled
once), `inductor` (which rank compiles what; save and load) with `cpp_kernels` (several kernels are
compiled at a time) and `inductor_scheduling` (which calls are fused, and the order of kernels),
`codegen_memory` (the memory of generated code), `store` (files, and which are trusted),
`cuda_graphs` (recorded kernels).
"""
