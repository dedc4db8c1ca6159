"""Placements: what one mesh axis does to one tensor, and so to its gradient."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Invariant", "Partial", "Placement", "Replicate", "Shard"]


@dataclass(frozen=True)
class Placement:
    """How one mesh axis holds one tensor. One of `Shard`, `Replicate`, `Partial`, `Invariant`."""

    def dual(self) -> Placement:
        """The placement of the gradient of a value placed like this.

        A gradient's placement is a function of its value's placement and of nothing else; this
        method is the only place that says which.
        """
        raise NotImplementedError

    def is_shard(self, dim: int | None = None) -> bool:
        """Does every rank hold a slice, of dimension `dim` if that is given?"""
        return False

    def is_replicate(self) -> bool:
        """Does every rank hold the whole value, which each may use differently?"""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Does every rank hold a share, pending a reduction (by `reduce_op` if that is given)?"""
        return False

    def is_invariant(self) -> bool:
        """Does every rank hold the whole value, in the same computation on each?"""
        return False


@dataclass(frozen=True)
class Shard(Placement):
    """Every rank of the axis holds a slice of tensor dimension `dim`."""

    dim: int

    def dual(self) -> Placement:
        return self

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True)
class Replicate(Placement):
    """Every rank holds the whole value and may use it differently, so gradients are shares."""

    def dual(self) -> Placement:
        return Partial()

    def is_replicate(self) -> bool:
        return True

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial(Placement):
    """Every rank holds a share; the value is the `reduce_op` ("sum", "max" or "min") of the shares.

    Only a sum has a gradient. There is no "avg": a mean is a sum divided by the global count.
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in ("sum", "max", "min"):
            raise ValueError(
                f'Partial reduces with "sum", "max" or "min", not {self.reduce_op!r}: '
                "write a mean as a sum divided by the global count"
            )

    def dual(self) -> Placement:
        if self.reduce_op != "sum":
            raise ValueError(f"a pending {self.reduce_op} has no gradient until it is reduced")
        return Replicate()

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    def __str__(self) -> str:
        return "P" if self.reduce_op == "sum" else f"P({self.reduce_op})"


@dataclass(frozen=True)
class Invariant(Placement):
    """Every rank holds the whole value and does the same with it, so gradients are whole too."""

    def dual(self) -> Placement:
        return self

    def is_invariant(self) -> bool:
        return True

    def __str__(self) -> str:
        return "I"
