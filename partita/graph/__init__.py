"""Programs: a training step as a graph that is checked, rewritten, compiled and run.

In reading order:

- What a program is: `program` (a graph, its inputs and outputs, its options), `slots` (the places
  of state), `graph_nodes` (nodes, their notes, subgraphs), `fake_values` (metadata of a call's
  result), `torch_settings`, `verify` (the grammar of graphs), `errors`.
- Its memory: `shared_memory` (which nodes share memory), `memory` (the schedule).
- Its blocks: `subgraphs` (inlining of their calls), `step_forms` (blocks as calls or inlined; how
  much is recomputed for a budget), `repeat_block` (a deeper step than the captured one).
- Rewrites: `passes/`.
- Execution: `backend/` (node by node, Inductor, CUDA graphs).
- Texts: `graph_text` (a printed graph, and the key that ranks compare), `step_report`.
"""
