"""Block choice: which modules of a step are traced once for all that are built alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

__all__ = ["BlockChoice", "BlocksTraced"]

_LISTS = (nn.ModuleList, nn.ModuleDict)
_FEW = 2
"""Parameters of a module that is a layer rather than a block: to trace it costs next to nothing."""
_MANY = 6
"""Blocks that are alike and are traced once, if nobody has said whether: fewer are traced soon."""


@dataclass(frozen=True)
class BlocksTraced:
    """How the blocks of a step were traced.

    Attributes:
        structures: for each structure the class of its blocks and how many calls of them there are.
        apart: the classes whose blocks were each traced as they run, and why.
    """

    structures: tuple[tuple[str, int], ...] = ()
    apart: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"{kind}: {count} calls, traced once" for kind, count in self.structures]
        lines += [f"{kind}: each traced as it runs ({reason})" for kind, reason in self.apart]
        return "\n".join(lines)


@dataclass(frozen=True)
class BlockChoice:
    """Which modules are blocks.

    Attributes:
        named: modules, and classes of modules, that the user has named; None where they are found:
            the outermost of which a model has several, alike in class and in the names and shapes
            of their parameters.
        least: how many must be alike, where they are found.
        constants: classes of modules in which floats are constants: what they call hangs on them.
        apart: classes of modules that do what no call of a block can do for them, and what that is.
    """

    named: tuple[nn.Module | type, ...] | None = None
    least: int = 2
    apart: tuple[tuple[type, str], ...] = ()
    constants: frozenset[type] = frozenset()

    @classmethod
    def of(cls, blocks: bool | Iterable[nn.Module | type] | None) -> BlockChoice:
        """As the argument of `pt.compile` says it.

        Raises:
            ValueError: something that is neither a module nor a class of modules.
        """
        if blocks is True:
            return cls()
        if blocks is None:
            return cls(least=_MANY)
        named = tuple(blocks) if blocks else ()
        for one in named:
            if not isinstance(one, nn.Module) and not (
                isinstance(one, type) and issubclass(one, nn.Module)
            ):
                raise ValueError(f"compile: a block is a module or a class of them, not {one!r}")
        return cls(named)

    def with_constants(self, kind: type) -> BlockChoice:
        """The same, but that blocks of this class whose floats differ are of two structures."""
        return replace(self, constants=self.constants | {kind})

    def leaving(self, kind: type, reason: str) -> BlockChoice:
        """The same, but for modules of this class."""
        return replace(self, apart=(*self.apart, (kind, reason)))

    @property
    def told(self) -> tuple[tuple[str, str], ...]:
        """The names of the classes apart, and why."""
        return tuple((kind.__name__, reason) for kind, reason in self.apart)

    def find(self, models: Iterable[nn.Module]) -> set[nn.Module]:
        """The blocks of these models."""
        found: set[nn.Module] = set()
        for model in models:
            found.update(
                self._find_named_blocks(model)
                if self.named is not None
                else self._find_repeated_blocks(model)
            )
        return found

    def _find_named_blocks(self, model: nn.Module) -> Iterator[nn.Module]:
        assert self.named is not None
        kinds = tuple(k for k in self.named if isinstance(k, type))
        those = {id(m) for m in self.named if isinstance(m, nn.Module)}
        for module in model.modules():
            if (isinstance(module, kinds) or id(module) in those) and self._can_be_block(module):
                yield module

    def _find_repeated_blocks(self, model: nn.Module) -> Iterator[nn.Module]:
        kinds = {m: _structure_of_module(m) for m in model.modules()}
        return self._find_outermost_repeats(model, kinds, Counter(kinds.values()))

    def _find_outermost_repeats(
        self, module: nn.Module, kinds: Mapping[nn.Module, Any], counts: Mapping[Any, int]
    ) -> Iterator[nn.Module]:
        for child in module.children():
            kind = kinds[child]
            if counts[kind] >= self.least and len(kind[1]) > _FEW and self._can_be_block(child):
                yield child
            else:
                yield from self._find_outermost_repeats(child, kinds, counts)

    def _can_be_block(self, module: nn.Module) -> bool:
        kind = type(module)
        return not isinstance(module, _LISTS) and all(kind is not k for k, _ in self.apart)


def _structure_of_module(module: nn.Module) -> Any:
    return type(module), tuple((name, p.shape) for name, p in module.named_parameters())
