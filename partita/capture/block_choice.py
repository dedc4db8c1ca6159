"""The choice of blocks: `BlockChoice`, from the argument `blocks` of `pt.compile`.

A block is a module whose structure occurs several times in a model, such as a transformer layer.
`fold` replaces equal blocks, and equal updates of their parameters (`block_updates`), by calls of
one subgraph. A block that is not replaced is "left flat": its nodes stay in the step's graph.
`BlocksTraced` lists the folded blocks, and for the others the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

_LISTS = (nn.ModuleList, nn.ModuleDict)
_LAYER_PARAMETERS = 2
"""A module with at most this many parameters is a layer, not a block."""
_LEAST_BY_DEFAULT = 6
"""With `blocks=None`, modules of one structure are blocks if there are at least this many."""


@dataclass(frozen=True)
class BlockCalls:
    """All equal calls of a block (such as a transformer layer) in a step, or all its equal updates.

    Attributes:
        kind: the name of the block's class; for an update "AdamW of Block".
        count: the number of equal calls.
        reason: why the calls were left flat (not folded); "" if they were folded.
    """

    kind: str
    count: int
    reason: str

    def __str__(self) -> str:
        many = "call" if self.count == 1 else "equal calls"
        how = f"left flat ({self.reason})" if self.reason else "folded into one program"
        return f"{self.kind}: {self.count} {many}, {how}"


@dataclass(frozen=True)
class BlocksTraced:
    """The blocks of a step that were folded into calls of one subgraph, and why others were not.

    Attributes:
        calls: an entry for each group of equal block calls and each reason to leave them flat.
        updates: an entry for each group of equal optimizer updates of blocks, and each reason.
    """

    calls: tuple[BlockCalls, ...] = ()
    updates: tuple[BlockCalls, ...] = ()

    @property
    def structures(self) -> tuple[tuple[str, int], ...]:
        """`(class name, number of calls)` for each group of equal block calls, folded or not."""
        return tuple((calls.kind, calls.count) for calls in self.calls)

    @property
    def folded(self) -> tuple[tuple[str, int], ...]:
        """`(class name, number of calls)` for each group of equal block calls that was folded."""
        return tuple((calls.kind, calls.count) for calls in self.calls if not calls.reason)

    def left_flat(self, reason: str) -> BlocksTraced:
        """Returns a copy in which no block is folded; `reason` says why calls were inlined."""
        found = (
            tuple(c if c.reason else replace(c, reason=reason) for c in calls)
            for calls in (self.calls, self.updates)
        )
        return BlocksTraced(*found)

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.calls, *self.updates)))


@dataclass(frozen=True)
class BlockChoice:
    """Decides which modules of a step are blocks: modules whose structure occurs several times.

    Attributes:
        named: the modules and classes that the user names. If None, `find` searches for the
            outermost modules of one class whose parameters have equal names and shapes.
        least: the least number of equal modules that the search counts as blocks.
        section_threshold: the least number of nodes of a graph in which blocks are folded
            (`StepOptions.section_threshold`).
    """

    named: tuple[nn.Module | type, ...] | None = None
    least: int = 2
    section_threshold: int | None = None

    @classmethod
    def from_option(cls, blocks: bool | Iterable[nn.Module | type] | None) -> BlockChoice:
        """Returns the choice for a value of the argument `blocks` of `pt.compile`.

        Raises:
            ValueError: an item is neither a module nor a class of modules.
        """
        if blocks is True:
            return cls()
        if blocks is None:
            return cls(least=_LEAST_BY_DEFAULT)
        named = tuple(blocks) if blocks else ()
        for block in named:
            if not isinstance(block, nn.Module) and not (
                isinstance(block, type) and issubclass(block, nn.Module)
            ):
                raise ValueError(f"compile: a block is a module or a class of them, not {block!r}")
        return cls(named)

    def find(self, models: Iterable[nn.Module]) -> set[nn.Module]:
        """Returns the modules in `models` that are blocks: named by the user, or repeated."""
        search = self._find_repeated if self.named is None else self._find_named
        return {block for model in models for block in search(model)}

    def _find_named(self, model: nn.Module) -> Iterator[nn.Module]:
        named = self.named or ()
        kinds = tuple(k for k in named if isinstance(k, type))
        for module in model.modules():
            is_named = isinstance(module, kinds) or any(module is m for m in named)
            if is_named and not isinstance(module, _LISTS):
                yield module

    def _find_repeated(self, model: nn.Module) -> Iterator[nn.Module]:
        found: dict[nn.Module, _Parameters] = {}
        _describe_parameters(model, found)
        structures = {module: (type(module), parameters) for module, parameters in found.items()}
        counts = Counter(structures.values())
        around = [model]
        for module in around:
            for child in module.children():
                structure = structures[child]
                is_block = counts[structure] >= self.least and len(structure[1]) > _LAYER_PARAMETERS
                if is_block and not isinstance(child, _LISTS):
                    yield child
                else:
                    around.append(child)


_Parameters = tuple[tuple[str, torch.Size], ...]


def _describe_parameters(module: nn.Module, found: dict[nn.Module, _Parameters]) -> _Parameters:
    """Returns (name, shape) of a module's parameters; adds those of inner modules to `found`."""
    if module not in found:
        own = [(name, p.shape) for name, p in module._parameters.items() if p is not None]
        for name, child in module.named_children():
            parameters = _describe_parameters(child, found)
            own += ((f"{name}.{inner}", shape) for inner, shape in parameters)
        found[module] = tuple(own)
    return found[module]
