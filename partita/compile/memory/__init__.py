"""Memory of a graph: which storages its nodes make, how long they live, and what holds the peak."""
