"""Names in bytecode: what code may read or write, found without execution.

Python's compiler differs between versions, and only this file reads its instructions. It goes by
what an instruction does: the kind of its operand (`dis.hasname`, `dis.hasfree`), and the number of
values that it pushes (`dis.stack_effect`). A test in `tests/guards/test_bytecode.py` fails with the
name of each instruction that a new version adds.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import os
from collections.abc import Iterator
from types import CodeType

_NAMED = {op: dis.opname[op] for op in dis.hasname if op < len(dis.opname)}
_GLOBAL_OPS = {
    op
    for op, name in _NAMED.items()
    if "GLOBAL" in name or (name.endswith("_NAME") and not name.startswith("IMPORT"))
}
_ATTRIBUTE_OPS = {
    op for op, name in _NAMED.items() if name.startswith("LOAD_") and op not in _GLOBAL_OPS
}
_VARIABLE_OPS = _GLOBAL_OPS | set(dis.hasfree)
_WRITE_OPS = {
    op for op in (*_NAMED, *dis.hasfree) if dis.opname[op].startswith(("STORE_", "DELETE_"))
}
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_ITEM_WRITES = {"STORE_SUBSCR": 1, "STORE_SLICE": 2, "DELETE_SUBSCR": 1}
"""Instructions that write items: how deep in the stack the container is below its topmost value."""
_NEW = ("BUILD_LIST", "BUILD_MAP", "BUILD_SET")
_MUTATING_METHODS = frozenset(
    "append extend insert pop remove clear update setdefault add discard rotate popleft appendleft "
    "extendleft reverse sort popitem fill subtract".split()
)


def _instructions_of(code: CodeType) -> Iterator[dis.Instruction]:
    return (i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG"))


@functools.lru_cache(maxsize=4096)
def global_names(code: CodeType) -> tuple[str, ...]:
    """Returns the names of the globals that code uses. (`co_names` includes attributes.)"""
    used = [i.argval for i in _instructions_of(code) if i.opcode in _GLOBAL_OPS]
    return tuple(dict.fromkeys(used))


@functools.lru_cache(maxsize=4096)
def dotted_names(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Returns the attribute chains in code, such as ("torch", "relu") for `torch.relu`."""
    found: dict[tuple[str, ...], None] = {}
    chain: tuple[str, ...] = ()
    for i in _instructions_of(code):
        if i.opcode in _VARIABLE_OPS:
            chain = (i.argval,)
        elif i.opcode in _ATTRIBUTE_OPS and chain:
            chain = (*chain, i.argval)
            found[chain] = None
        else:
            chain = ()
    return tuple(found)


def attribute_names_in(code: CodeType) -> set[str]:
    """Returns the names of all attributes that a code object may read.

    They are the attribute names in its instructions, and its string constants: `getattr(x, "name")`
    may use these.
    """
    return {*code.co_names, *(c for c in code.co_consts if isinstance(c, str) and c.isidentifier())}


def strings_of(code: CodeType) -> set[str]:
    """Returns the string constants in a code object."""
    return {c for c in code.co_consts if isinstance(c, str)}


def line_of_write(codes: list[CodeType], key: object) -> str | None:
    """Returns the "file:line" where code assigns a variable, attribute or item; None if unsure.

    Args:
        codes: the code objects to search.
        key: the name of the variable or attribute, or the key of the item.
    """
    writes_by_name, mutations = [], []
    for code in codes:
        line = code.co_firstlineno
        for step in _instructions_of(code):
            line = (step.positions and step.positions.lineno) or line
            if step.opcode in _WRITE_OPS and step.argval == key:
                writes_by_name.append((code.co_filename, line))
            elif step.opname in _ITEM_WRITES or (
                step.opcode in _ATTRIBUTE_OPS and step.argval in _MUTATING_METHODS
            ):
                mutations.append((code.co_filename, line))
    found = writes_by_name or mutations
    if len(set(found)) == 0 or (not writes_by_name and len(set(found)) > 1):
        return None
    name, line = found[0]
    relative = os.path.relpath(name)
    return f"{name if relative.startswith('..') else relative}:{line}"


def _with_depths(code: CodeType) -> Iterator[tuple[dis.Instruction, int, int]]:
    """Yields each instruction, with the depth of the stack before and after it."""
    depth = 0
    at_label: dict[int, int] = {}  # where a jump ends
    for step in dis.get_instructions(code):
        before = at_label.pop(step.offset, depth)
        if step.opcode in _JUMPS:
            at_label[step.argval] = before + dis.stack_effect(step.opcode, step.arg, jump=True)
        depth = before + dis.stack_effect(step.opcode, step.arg, jump=False)
        yield step, before, depth


_COMPARING_NAMES = frozenset(
    "index remove count countOf indexOf contains get discard eq ne __eq__ __ne__ "
    "__contains__".split()
)


@functools.lru_cache(maxsize=4096)
def writes_items(code: CodeType) -> bool:
    """True if code may change the items of a container that it did not make.

    A container that it made is a local variable to which it assigns only new, empty containers.
    """
    own = _find_own_containers(code)
    is_own: dict[int, bool] = {}  # by stack depth: True if it is such a variable
    for step, before, depth in _with_depths(code):
        if step.is_jump_target:  # it may come from another branch
            is_own[before] = False
        is_method = step.opcode in dis.hasname and step.argval in _MUTATING_METHODS
        if step.opname in _ITEM_WRITES or is_method:
            below = _ITEM_WRITES.get(step.opname, 0)
            if not is_own.get(before - below) or step.opcode in _GLOBAL_OPS:
                return True
        for at in range(min(before + 1, depth), depth + 1):
            is_own[at] = step.opname.startswith("LOAD_FAST") and step.argval in own
    return False


def _find_own_containers(code: CodeType) -> set[str]:
    """Returns the local variables to which code assigns only new, empty containers."""
    own, others = set[str](), {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
    last = ""
    for step in _instructions_of(code):
        if "STORE_FAST" in step.opname:
            names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            is_new = step.opname == "STORE_FAST" and last in _NEW and not step.is_jump_target
            (own if is_new else others).update(names)
        last = step.opname if step.arg == 0 else ""
    return own - others


@functools.lru_cache(maxsize=4096)
def compares_identities(code: CodeType) -> bool:
    """True if code may compare two objects by identity, by `is` or `id`.

    Comparisons with a constant (`is None`) do not count.
    """
    by_function = not {"is_", "is_not"}.isdisjoint(code.co_names)
    return by_function or "id" in global_names(code) or _compares_by(code, ("IS_OP",))


@functools.lru_cache(maxsize=4096)
def compares_objects(code: CodeType) -> bool:
    """True if code may compare two objects by value: by `==`, `in` or a function.

    Comparisons with a constant do not count.
    """
    by_function = not _COMPARING_NAMES.isdisjoint(code.co_names)
    return by_function or _compares_by(code, ("COMPARE_OP", "CONTAINS_OP"))


def _compares_by(code: CodeType, names: tuple[str, ...]) -> bool:
    """True if an instruction with one of `names` compares two values, neither a constant."""
    constant: dict[int, bool] = {}  # by stack depth: True if it is a constant
    for step, before, depth in _with_depths(code):
        is_order = step.opname == "COMPARE_OP" and step.argval[0] in "<>"
        with_constant = constant.get(before - 1) or constant.get(before)
        if step.opname in names and not is_order and not with_constant:
            return True
        for at in range(min(before + 1, depth), depth + 1):
            constant[at] = step.opname == "LOAD_CONST"
    return False


@functools.lru_cache(maxsize=4096)
def imported_names(code: CodeType, package: str | None) -> tuple[str, ...]:
    """Returns the names of the modules that a code object imports when it runs.

    Args:
        package: the package that contains the code's module, for relative imports.
    """
    found, steps = [], list(_instructions_of(code))
    for n, i in enumerate(steps):
        if i.opname == "IMPORT_NAME":  # the level and the names imported were pushed
            dots = steps[n - 2].argval
            if not dots:
                found.append(i.argval)
            elif package:
                found.append(importlib.util.resolve_name("." * dots + i.argval, package))
    return tuple(found)


# -- reflection ------------------------------------------------------------------------------------

_GETTERS = ("getattr", "hasattr")
_REFLECTING_NAMES = frozenset(
    "vars dir globals eval exec attrgetter methodcaller __getattribute__ getmembers signature "
    "getattr_static fields get_type_hints".split()
)
_REFLECTING_ATTRIBUTES = frozenset(
    "__dict__ __annotations__ __doc__ __name__ __match_args__ __dataclass_fields__ __code__ "
    "__defaults__ __kwdefaults__ __signature__ __closure__".split()
)


@functools.lru_cache(maxsize=4096)
def may_read_any_name(code: CodeType) -> bool:
    """True if code may read an attribute whose name does not occur in it, as in `getattr(x, key)`.

    `getattr` with a constant name does not count. The name is constant if the instruction that
    pushes the second argument loads a constant. A call pushes the function, an empty stack entry
    and the arguments, in this order. So the depth of the stack shows which instruction that is.
    """
    if not (_REFLECTING_NAMES | _REFLECTING_ATTRIBUTES).isdisjoint(code.co_names):
        return True
    calls = _Calls()
    at_label: dict[int, _Calls] = {}  # where a jump ends
    for step, before, depth in _with_depths(code):
        if step.opname == "MATCH_CLASS":  # `__match_args__` names the attributes of a pattern
            return True
        if step.offset in at_label:
            calls = _merge_calls(at_label.pop(step.offset), calls)
        if step.opcode in _JUMPS:
            at_label[step.argval] = _merge_calls(calls, at_label.get(step.argval, calls))
            continue
        constant = step.opname == "LOAD_CONST" and isinstance(step.argval, str)
        calls = tuple((at, constant if depth == at + 2 else named) for at, named in calls)
        if calls and depth < calls[-1][0]:
            if not calls[-1][1]:
                return True
            calls = calls[:-1]
        if step.opname == "LOAD_GLOBAL" and step.argval in _GETTERS:
            if depth - before < 2:
                return True  # `getattr` itself is passed on, say to `map`
            calls = (*calls, (depth, False))
    return bool(calls)


_Calls = tuple[tuple[int, bool], ...]
"""The unfinished calls of `getattr`: the depth of the stack before the arguments, and True if the
name is a constant."""


def _merge_calls(jumped: _Calls, fallen: _Calls) -> _Calls:
    """Returns the unfinished calls at a label, to which both a jump and the line above may lead."""
    if len(jumped) != len(fallen):
        return jumped
    return tuple((at, a and b) for (at, a), (_, b) in zip(jumped, fallen, strict=True))
