"""Backends: what a kind of process group does in ways of its own. No other room knows one by name.

In reading order: `backend` (what a transport and a graph ask of one, and the answers of one that is
best used as it is), `gloo` (those of Gloo), `choose` (which serves a mesh), `control` (what ranks
compare over, apart from their tensors). A new one is a subclass of `Backend` in a file of its own,
which says what differs, and a line of `choose`.
"""
