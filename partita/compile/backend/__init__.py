"""Backends of a graph: the executor that runs it node by node, and Inductor, with the store."""
