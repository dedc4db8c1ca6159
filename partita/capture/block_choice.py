"""The choice of blocks: `BlockChoice`, from the argument `blocks` of `pt.compile`.

Equal blocks become calls of one program (`fold`), and so do the updates of their parameters
(`block_updates`). `BlocksTraced` lists which were, and why the others were not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

_LISTS = (nn.ModuleList, nn.ModuleDict)
_LAYER_PARAMETERS = 2
"""A module with at most so many parameters is a layer, not a block."""
_LEAST_BY_DEFAULT = 6
"""With `blocks=None`, so many alike modules are blocks; folding fewer saves little."""


@dataclass(frozen=True)
class BlockCalls:
    """Equal calls of a block in a step, or updates of its parameters.

    Attributes:
        kind: the name of the block's class; of an update "AdamW of Block".
        count: how many calls are equal.
        reason: why they were left flat; "" if they are calls of one program.
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
    """The blocks of a step.

    Attributes:
        calls: the calls of blocks, by structure and by the reason why they were left flat.
        updates: the updates of blocks, in the same way.
    """

    calls: tuple[BlockCalls, ...] = ()
    updates: tuple[BlockCalls, ...] = ()

    @property
    def structures(self) -> tuple[tuple[str, int], ...]:
        """The class and number of equal calls, whether they were folded or left flat."""
        return tuple((calls.kind, calls.count) for calls in self.calls)

    @property
    def folded(self) -> tuple[tuple[str, int], ...]:
        """The class and number of equal calls that are calls of one program."""
        return tuple((calls.kind, calls.count) for calls in self.calls if not calls.reason)

    def left_flat(self, reason: str) -> BlocksTraced:
        """Returns the same blocks where those that were folded are inlined again."""
        found = (
            tuple(c if c.reason else replace(c, reason=reason) for c in calls)
            for calls in (self.calls, self.updates)
        )
        return BlocksTraced(*found)

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.calls, *self.updates)))


@dataclass(frozen=True)
class BlockChoice:
    """The modules of a step that are blocks.

    Attributes:
        named: the modules and classes that the user names; None to search for them: the outermost
            modules that are alike in class and in the names and shapes of their parameters.
        least: how many must be alike to be found by the search.
        outline_above: the nodes of a graph above which blocks stay calls; None for never.
    """

    named: tuple[nn.Module | type, ...] | None = None
    least: int = 2
    outline_above: int | None = None

    @classmethod
    def from_option(cls, blocks: bool | Iterable[nn.Module | type] | None) -> BlockChoice:
        """Returns the choice that the argument `blocks` of `pt.compile` means.

        Raises:
            ValueError: something that is neither a module nor a class of modules.
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
        """Returns the blocks of these models."""
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
    """The names and shapes of a module's parameters; `found` gets those of all modules within."""
    if module not in found:
        own = [(name, p.shape) for name, p in module._parameters.items() if p is not None]
        for name, child in module.named_children():
            parameters = _describe_parameters(child, found)
            own += ((f"{name}.{inner}", shape) for inner, shape in parameters)
        found[module] = tuple(own)
    return found[module]
