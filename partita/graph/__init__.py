"""Programs: a training step as a graph that is checked, rewritten, compiled and run.

In reading order:

- What a program is: `program` (a graph, its inputs and outputs, its options), `slots` (where state
  stands), `graph_nodes` (nodes, their notes, sections), `fake_values` (what a call makes),
  `verify` (the grammar of graphs), `errors`.
- Its memory: `shared_memory` (which nodes show the same), `memory` (the schedule).
- Its blocks: `block_calls` (calls of blocks in a graph), `block_programs` (a structure as a graph
  of its own), `step_forms` (blocks as calls; how much is made again for a budget).
- Rewrites: `passes/`.
- Execution: `backend/` (node by node, Inductor, CUDA graphs).
- What people and other ranks read: `graph_text` (and the key), `step_report`.
"""
