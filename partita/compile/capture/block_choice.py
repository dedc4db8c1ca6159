"""Block choice: which modules of a step are traced once for all that are built alike.

`BlockChoice` is the argument `blocks` of `pt.compile`, and what capture learns on the way: classes
that cannot be blocks (`apart`), classes whose floats decide what they call (`constants`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

__all__ = ["BlockChoice", "BlocksTraced"]

_LISTS = (nn.ModuleList, nn.ModuleDict)
_LAYER_PARAMETERS = 2
"""A module with no more parameters is a layer, not a block: tracing it costs next to nothing."""
_LEAST_BY_DEFAULT = 6
"""Alike modules that make blocks where `blocks` is None: fewer are traced soon enough."""


@dataclass(frozen=True)
class BlocksTraced:
    """How the blocks of a step were traced.

    Attributes:
        structures: for each structure the name of its class and the number of its blocks.
        apart: the names of classes whose modules were each traced as they run, and why.
        updates: for each update that was traced once what it is of ("AdamW of Block"), and how many
            are like it.
    """

    structures: tuple[tuple[str, int], ...] = ()
    apart: tuple[tuple[str, str], ...] = ()
    updates: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        lines = [f"{kind}: {count} calls, traced once" for kind, count in self.structures]
        lines += [f"{name}: {count} updates, traced once" for name, count in self.updates]
        lines += [f"{kind}: each traced as it runs ({reason})" for kind, reason in self.apart]
        return "\n".join(lines)


@dataclass(frozen=True)
class BlockChoice:
    """Which modules are blocks.

    Attributes:
        named: the modules and classes that the user names; None to search for them: the outermost
            modules that are alike in class and in the names and shapes of their parameters.
        least: how many must be alike to be found by the search.
        outline_above: the nodes of a graph above which blocks stay calls; None for never.
        constants: classes in which floats are constants, since torch reads their values.
        apart: classes that cannot be blocks, and why; also of optimizers, whose updates cannot.
    """

    named: tuple[nn.Module | type, ...] | None = None
    least: int = 2
    outline_above: int | None = None
    apart: tuple[tuple[type, str], ...] = ()
    constants: frozenset[type] = frozenset()

    @classmethod
    def from_option(cls, blocks: bool | Iterable[nn.Module | type] | None) -> BlockChoice:
        """The choice that the argument `blocks` of `pt.compile` means.

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

    def with_constants(self, kind: type) -> BlockChoice:
        """The same choice, in which floats of this class are constants."""
        return replace(self, constants=self.constants | {kind})

    def without_class(self, kind: type, reason: str) -> BlockChoice:
        """The same choice without modules of this class."""
        return replace(self, apart=(*self.apart, (kind, reason)))

    @property
    def apart_by_name(self) -> tuple[tuple[str, str], ...]:
        """The names of the classes in `apart`, and why."""
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

    def find_updated(self, models: Iterable[nn.Module]) -> set[nn.Module]:
        """The blocks whose parameters are updated together: also those that cannot be traced once
        in forward."""
        return replace(self, apart=()).find(models)

    def _find_named_blocks(self, model: nn.Module) -> Iterator[nn.Module]:
        assert self.named is not None
        kinds = tuple(k for k in self.named if isinstance(k, type))
        those = {id(m) for m in self.named if isinstance(m, nn.Module)}
        for module in model.modules():
            if (isinstance(module, kinds) or id(module) in those) and self._can_be_block(module):
                yield module

    def _find_repeated_blocks(self, model: nn.Module) -> Iterator[nn.Module]:
        kinds: dict[nn.Module, Any] = {}
        _describe_modules(model, kinds)
        return self._find_outermost_repeats(model, kinds, Counter(kinds.values()))

    def _find_outermost_repeats(
        self, module: nn.Module, kinds: Mapping[nn.Module, Any], counts: Mapping[Any, int]
    ) -> Iterator[nn.Module]:
        for child in module.children():
            kind = kinds[child]
            if (
                counts[kind] >= self.least
                and kind[1] > _LAYER_PARAMETERS
                and self._can_be_block(child)
            ):
                yield child
            else:
                yield from self._find_outermost_repeats(child, kinds, counts)

    def _can_be_block(self, module: nn.Module) -> bool:
        kind = type(module)
        return not isinstance(module, _LISTS) and all(kind is not k for k, _ in self.apart)


def _describe_modules(module: nn.Module, kinds: dict[nn.Module, Any]) -> Any:
    """Note the structure of a module, and of all within: its class, how many parameters it has, and
    their names and shapes.

    Returns:
        The latter two.
    """
    if module in kinds:
        return kinds[module][1:]
    own = tuple((name, p.shape) for name, p in module._parameters.items() if p is not None)
    count, within = len(own), []
    for name, child in module.named_children():
        more, parameters = _describe_modules(child, kinds)
        if more:
            count += more
            within.append((name, parameters))
    kinds[module] = type(module), count, (own, *within)
    return kinds[module][1:]
