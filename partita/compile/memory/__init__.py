"""Memory of a captured step: which storages it allocates, how long they live, and the peak.

In reading order: `schedule` (buffers with their lifetimes), `storages` (those of a graph that runs
node by node, and memory within kernels), `codegen_memory` (those of Inductor's code).
"""
