"""Memory of a graph: which storages its nodes make, how long they live, and what holds the peak.

In reading order: `storages` (what nodes make and show), `schedule` (what is alive when),
`codegen_memory` and `workspace` (of compiled code), `knapsack` (what is worth keeping).
"""
