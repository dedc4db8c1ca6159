"""Memory of a captured step: which storages it allocates, how long they live, and the peak.

In reading order: `schedule` (buffers with their lifetimes), `storages` (those of a graph that runs
node by node), `codegen_memory` (those of Inductor's code), `workspace` (memory within kernels),
`knapsack` (which results are worth keeping within a budget).
"""
