"""Blocks of a model: which parameters are gathered together, and for which modules.

A block is what one `forward` uses: a layer of a ModuleList or a Sequential, found by itself or
named by the user. Parameters outside of all blocks (an embedding, a final norm, a head) form a
block for each set of modules that own them, so that a tied weight is gathered for each of its
users.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from partita.comm import user_line
from partita.layout import Fix, LayoutError

__all__ = ["Block", "ParameterSlot", "block_modules", "find_blocks"]

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_WITHOUT_FORWARD, nn.Sequential)


@dataclass(frozen=True)
class ParameterSlot:
    """A module and the attribute under which it holds a parameter."""

    owner: nn.Module
    attr: str

    @property
    def parameter(self) -> Any:
        """The parameter that the module holds now.

        Raises:
            LayoutError: the module no longer has it: something has replaced it.
        """
        found = self.owner._parameters.get(self.attr)
        if found is None:
            raise LayoutError(
                f"a {type(self.owner).__name__} no longer has the parameter {self.attr} that "
                "pt.zero has sharded",
                place=user_line(),
                reason="pt.zero gathers and reduces the parameters that a model had when it came",
                fixes=(
                    Fix(
                        "pt.zero(model, mesh)",
                        "last: after parametrizations, weight norm, pruning",
                    ),
                ),
            )
        return found


@dataclass
class Block:
    """Parameters that are gathered together.

    Attributes:
        name: the name of its module in the model.
        modules: the modules whose forward needs the parameters; usually one.
        slots: for each parameter the places that hold it; more than one where it is tied.
    """

    name: str
    modules: tuple[nn.Module, ...]
    slots: list[list[ParameterSlot]] = field(default_factory=list)


def find_blocks(model: nn.Module, chosen: Sequence[str | nn.Module] | None = None) -> list[Block]:
    """The blocks of `model`, in the order of its modules; together they hold every parameter.

    Args:
        chosen: the modules that are to be blocks, themselves or as patterns of names
            ("layers.*": of what lies within another match, the outermost; "*" is each child of the
            model, and of a ModuleList each of its own); by default the children of the outermost
            ModuleLists and Sequentials.

    Raises:
        ValueError: a pattern that matches no module, or only lists of modules, a module that is
            not the model's or that lies within another block.
    """
    names = {module: name for name, module in model.named_modules()}
    roots = block_modules(model, chosen)
    home: dict[nn.Module, nn.Module] = {}
    for root in roots:
        for module in root.modules():
            if module in home and chosen is not None:
                raise ValueError(
                    f"blocks: {names[module]} lies within the block {names[home[module]]} "
                    f"and within {names[root]}; name one of the two"
                )
            home.setdefault(module, root)
    slots: dict[nn.Parameter, list[ParameterSlot]] = {}
    for module in model.modules():
        for attr, parameter in module._parameters.items():
            if parameter is not None and parameter.ndim:
                slots.setdefault(parameter, []).append(ParameterSlot(module, attr))
    blocks: dict[tuple[nn.Module, ...], Block] = {}
    for places in slots.values():
        roots_of = {home.get(s.owner, s.owner): None for s in places}
        key = tuple(roots_of)
        name = " and ".join(names[m] or "model" for m in key)
        blocks.setdefault(key, Block(name, key)).slots.append(places)
    return list(blocks.values())


def block_modules(
    model: nn.Module, chosen: Sequence[str | nn.Module] | None = None
) -> list[nn.Module]:
    """The modules that are blocks of `model`; see `find_blocks`."""
    if chosen is None:
        return list(_children_of_lists(model))
    return _find_chosen_modules(
        model, chosen, {module: name for name, module in model.named_modules()}
    )


def _children_of_lists(module: nn.Module) -> Iterable[nn.Module]:
    for child in module.children():
        if isinstance(module, _CONTAINERS) and not isinstance(child, _WITHOUT_FORWARD):
            yield child
        else:
            yield from _children_of_lists(child)


def _find_chosen_modules(
    model: nn.Module, chosen: Sequence[str | nn.Module], names: dict[nn.Module, str]
) -> list[nn.Module]:
    found: dict[nn.Module, None] = {}
    for one in chosen:
        if isinstance(one, str):
            # The model itself has no name, and a list of modules has no forward.
            called = [m for m, name in names.items() if name and fnmatchcase(name, one)]
            matching = _keep_outermost([m for m in called if not isinstance(m, _WITHOUT_FORWARD)])
            if not matching:
                some = ", ".join(n for n in list(names.values())[1:6])
                what = f"no module is called {one!r}; there are {some}, ..."
                if called:
                    what = f"{one!r} has no forward, but what is in it: '{one}.*'"
                raise ValueError(f"blocks: {what}")
            found.update(dict.fromkeys(matching))
        elif one not in names:
            raise ValueError(f"blocks: a {type(one).__name__} that is no module of the model")
        else:
            found[one] = None
    return list(found)


def _keep_outermost(matching: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that lie within no other: "*" matches dots too, and "layers.*" means the layers."""
    within = {child for m in matching for child in m.modules() if child is not m}
    return [m for m in matching if m not in within]
