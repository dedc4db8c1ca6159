"""What code may read is found in its bytecode, by each version of Python's compiler."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest
import torch

import partita as pt
from partita.capture.code_origin import codes_within
from partita.guards.bytecode import (
    compares_identities,
    dotted_names,
    global_names,
    imported_names,
    line_of_write,
    may_read_any_name,
    writes_items,
)

# The instructions of Python 3.11, 3.12 and 3.13. The reader handles those that name a variable, an
# attribute or a module, that jump, or that write an item; of all others it needs the effect on the
# stack, which Python says.
KNOWN = set(
    """ASYNC_GEN_WRAP BEFORE_ASYNC_WITH BEFORE_WITH BINARY_OP BINARY_SLICE BINARY_SUBSCR
    BUILD_CONST_KEY_MAP BUILD_LIST BUILD_MAP BUILD_SET BUILD_SLICE BUILD_STRING BUILD_TUPLE CACHE
    CALL CALL_FUNCTION_EX CALL_INTRINSIC_1 CALL_INTRINSIC_2 CALL_KW CHECK_EG_MATCH CHECK_EXC_MATCH
    CLEANUP_THROW COMPARE_OP CONTAINS_OP CONVERT_VALUE COPY COPY_FREE_VARS DELETE_ATTR DELETE_DEREF
    DELETE_FAST DELETE_GLOBAL DELETE_NAME DELETE_SUBSCR DICT_MERGE DICT_UPDATE END_ASYNC_FOR END_FOR
    END_SEND ENTER_EXECUTOR EXIT_INIT_CHECK EXTENDED_ARG FORMAT_SIMPLE FORMAT_VALUE
    FORMAT_WITH_SPEC FOR_ITER GET_AITER GET_ANEXT GET_AWAITABLE GET_ITER GET_LEN GET_YIELD_FROM_ITER
    IMPORT_FROM IMPORT_NAME IMPORT_STAR INTERPRETER_EXIT IS_OP JUMP_BACKWARD
    JUMP_BACKWARD_NO_INTERRUPT JUMP_FORWARD JUMP_IF_FALSE_OR_POP JUMP_IF_TRUE_OR_POP KW_NAMES
    LIST_APPEND LIST_EXTEND LIST_TO_TUPLE LOAD_ASSERTION_ERROR LOAD_ATTR LOAD_BUILD_CLASS
    LOAD_CLASSDEREF LOAD_CLOSURE LOAD_CONST LOAD_DEREF LOAD_FAST LOAD_FAST_AND_CLEAR LOAD_FAST_CHECK
    LOAD_FAST_LOAD_FAST LOAD_FROM_DICT_OR_DEREF LOAD_FROM_DICT_OR_GLOBALS LOAD_GLOBAL LOAD_LOCALS
    LOAD_METHOD LOAD_NAME LOAD_SUPER_ATTR MAKE_CELL MAKE_FUNCTION MAP_ADD MATCH_CLASS MATCH_KEYS
    MATCH_MAPPING MATCH_SEQUENCE NOP POP_EXCEPT POP_JUMP_BACKWARD_IF_FALSE
    POP_JUMP_BACKWARD_IF_NONE POP_JUMP_BACKWARD_IF_NOT_NONE POP_JUMP_BACKWARD_IF_TRUE
    POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_NONE POP_JUMP_FORWARD_IF_NOT_NONE
    POP_JUMP_FORWARD_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE
    POP_JUMP_IF_TRUE POP_TOP PRECALL PREP_RERAISE_STAR PRINT_EXPR PUSH_EXC_INFO PUSH_NULL
    RAISE_VARARGS RERAISE RESERVED RESUME RETURN_CONST RETURN_GENERATOR RETURN_VALUE SEND
    SETUP_ANNOTATIONS SET_ADD SET_FUNCTION_ATTRIBUTE SET_UPDATE STORE_ATTR STORE_DEREF STORE_FAST
    STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST STORE_GLOBAL STORE_NAME STORE_SLICE STORE_SUBSCR SWAP
    TO_BOOL UNARY_INVERT UNARY_NEGATIVE UNARY_NOT UNARY_POSITIVE UNPACK_EX UNPACK_SEQUENCE
    WITH_EXCEPT_START YIELD_VALUE""".split()
)


def code_of(text: str) -> CodeType:
    """The code of a function whose body is `text`."""
    body = "\n    ".join(["def f(x, y, key):", *text.splitlines()])
    made = compile(body, "model.py", "exec", dont_inherit=True).co_consts
    return next(c for c in made if isinstance(c, CodeType))


def test_each_instruction_of_this_python_is_known_to_the_reader_of_bytecode():
    real = {name for name, op in dis.opmap.items() if op < 256}  # others are the compiler's own
    unknown = sorted(name for name in real - KNOWN if not name.startswith("INSTRUMENTED_"))
    assert not unknown, (
        f"Python {sys.version.split()[0]} has instructions with which the reader of bytecode "
        f"was not tried: {' '.join(unknown)}. If all cases of this file pass, add them to KNOWN."
    )


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("return len(ITEMS)", "len ITEMS"),
        ("return [SCALE * i for i in ITEMS if i > LEAST]", "ITEMS LEAST SCALE"),
        ("return {k: SCALE for k in ITEMS}, {SCALE for k in ITEMS}", "ITEMS SCALE"),
        ("return list(SCALE * i for i in x)", "SCALE list"),
        ("global N\nN = N + 1", "N"),
        ("global N\ndel N", "N"),
        ("return x.SCALE, x.f(SCALE=1)", ""),
        ("import SCALE\nreturn SCALE", ""),
    ],
)
def test_the_globals_of_code_and_of_what_it_defines_are_found(text: str, names: str):
    found = {name for code in codes_within(code_of(text)) for name in global_names(code)}
    assert found == set(names.split())


def test_the_globals_of_a_class_are_found():
    code = code_of("class K(BASE):\n    y: KIND = SCALE\n    def g(self): return LEAST\nreturn K")
    found = {name for inner in codes_within(code) for name in global_names(inner)}
    assert found >= {"BASE", "KIND", "SCALE", "LEAST"}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters are new in Python 3.12")
def test_the_globals_of_type_parameters_are_found():
    code = code_of("class K[T: BOUND](BASE[T]):\n    y: KIND = SCALE\ntype A = OTHER\nreturn K, A")
    found = {name for code in codes_within(code) for name in global_names(code)}
    assert found >= {"BOUND", "BASE", "KIND", "SCALE", "OTHER"}


@pytest.mark.parametrize(
    ("text", "chains"),
    [
        ("return torch.relu(x)", "torch.relu"),
        ("return torch.nn.functional.relu(x)", "torch.nn torch.nn.functional "
         "torch.nn.functional.relu"),
        ("return torch.pi", "torch.pi"),
        ("return f(torch.pi, x.y, key=math.e)", "torch.pi math.e"),
        ("return torch.f(x).g", "torch.f"),
        ("return [torch.relu(i) for i in x]", "torch.relu"),
        ("m = torch.nn\nreturn m.relu", "torch.nn"),
        ("return x.relu", ""),
    ],
)  # fmt: skip
def test_the_attributes_that_are_read_of_a_module_are_found(text: str, chains: str):
    found = {".".join(chain) for c in codes_within(code_of(text)) for chain in dotted_names(c)}
    assert found == set(chains.split())


def test_the_attributes_that_are_read_of_a_module_in_a_closure_are_found():
    code = code_of("import torch\ndef g(): return torch.relu(x)\nreturn g")
    assert {c for inner in codes_within(code) for c in dotted_names(inner)} == {("torch", "relu")}


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("import a.b", ["a.b"]),
        ("import a.b as c, d", ["a.b", "d"]),
        ("from a import b, c", ["a"]),
        ("from . import b", ["here.there"]),
        ("from ..b import c", ["here.b"]),
        ("z = [1, 2, 3]\nf(1, 2)\nfrom .b import c", ["here.there.b"]),
    ],
)
def test_imported_modules_are_found(text: str, modules: list[str]):
    assert list(imported_names(code_of(text), "here.there")) == modules


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("y = 1\nx.count = 2\nreturn y", 3),
        ("y = [i for i in x]\nx.count += 1", 3),
        ("global count\ny = 2\ncount = y", 4),
        ("y = 3\n\nx['a'] = y", 4),
        ("y = 3\nx[1:2] = y", 3),
        ("y = 3\ndel x[y]", 3),
        ("y = f(\n    x,\n    y,\n)\nx.append(\n    y\n)", 6),
        ("x.append(y)\nx[0] = 1", None),  # it may be either
        ("return x", None),
    ],
)
def test_the_line_that_writes_is_found(text: str, line: int | None):
    assert line_of_write([code_of(text)], "count") == (line and f"model.py:{line}")


SPELLED = """
    getattr(x, 'a')
    getattr(x, 'a', y.z(3))
    getattr(x[0], 'a')
    getattr(x.f(y, z=2), 'a')()
    getattr(x, 'a', f'{key}')
    getattr(x, 'a' if y else 'b')
    getattr(x if y else key, 'a')
    getattr(x, 'a', x if y else key)
    getattr(x or y, 'a')
    getattr(getattr(x, 'b'), 'a', getattr(y, 'c'))
    hasattr(x, 'a') and hasattr(x, 'b') or getattr(x, 'c')
    [getattr(x, 'a') for x in y] + [getattr(x, 'b', [i for i in y if i])]
    print(getattr(x, 'a'), key=getattr(y, 'b'))
"""
COMPUTED = """
    getattr(x, key)
    getattr(x, 'a' + key)
    getattr(x, f'a{key}')
    getattr(x, f'{key}')
    getattr(x, 'a%s' % key)
    getattr(x, y[0])
    getattr(x, y[1:2])
    getattr(x, y.lower())
    getattr(x, 'a'.upper())
    getattr(x, str(key))
    getattr(x, key, 'a')
    getattr(x, 'a' if y else key)
    getattr(x, key if y else 'a')
    getattr(x, key or 'a')
    getattr(x, y and 'a')
    getattr(getattr(x, 'a'), key)
    getattr(getattr(x, key), 'a')
    print(getattr(x, 'a'), key=getattr(y, key))
    [getattr(x, k) for k in y]
    map(getattr, x)
    getattr(*x)
    vars(x)
    x.__dict__
"""


@pytest.mark.parametrize("form", ["return {}", "z = {}\nreturn z", "z = f(1, {}, 2)\nreturn z"])
def test_code_reflects_where_a_name_is_computed_and_not_where_it_is_spelled(form: str):
    def reflecting(texts: str) -> list[str]:
        codes = {t: codes_within(code_of(form.format(t))) for t in texts.strip().splitlines()}
        return [text for text, found in codes.items() if any(map(may_read_any_name, found))]

    assert reflecting(SPELLED) == []
    assert reflecting(COMPUTED) == COMPUTED.strip().splitlines()


def test_a_pattern_of_a_class_may_ask_for_any_of_its_attributes():
    assert may_read_any_name(code_of("match x:\n    case int(real=1): return y"))
    assert not may_read_any_name(
        code_of("match x:\n    case {'a': 1}: return y\n    case [1]: return key")
    )


@pytest.mark.parametrize(
    ("text", "compares"),
    [
        ("return x is y", True),
        ("return f(1, x is y)", True),
        ("return f(None, x.a is not y)", True),
        ("return x is key['a']", True),
        ("return x is f(None)", True),
        ("return f(None) is y", True),
        ("return x[0] is y[1]", True),
        ("return x if y is key else 1", True),
        ("return f(1, [i for i in x if i is y])", True),
        ("return id(x)", True),
        ("return x is None", False),
        ("return None is x.a", False),
        ("return f(x, y, key['a'] is not None, 1)", False),
        ("return x if y is None else key is True", False),
        ("return f(x) is None or y is ...", False),
    ],
)
def test_code_that_compares_two_objects_is_found(text: str, compares: bool):
    assert any(map(compares_identities, codes_within(code_of(text)))) == compares


class Scales:
    one, other = 2.0, 5.0


NAME, BRANCH = "other", False


@pytest.mark.parametrize(
    "read",
    [
        lambda: getattr(Scales, "one" if BRANCH else NAME),
        lambda: getattr(Scales, NAME if not BRANCH else "one"),
        lambda: getattr(Scales, BRANCH or NAME),
        lambda: sum([getattr(Scales, name) for name in [NAME]]),
    ],
)
def test_a_step_that_computes_a_name_is_captured_again_when_the_attribute_changes(
    read: Callable[[], float], monkeypatch: pytest.MonkeyPatch
):
    step = pt.compile(lambda x: x * read(), backend="graph")
    assert [step(torch.ones(1)).item() for _ in range(2)] == [5.0, 5.0]
    monkeypatch.setattr(Scales, "other", 7.0)
    assert step(torch.ones(1)).item() == 7.0


@pytest.mark.parametrize(
    "text",
    [
        "b.append(1)",
        "b[0] = 1",
        "del b[0]",
        "G.append(1)",
        "out = b\nout.append(1)",
        "out = []\nout = b\nout.append(1)",
        "out = [] if c else b\nout.append(1)",
        "out = b if c else []\nout.append(1)",
        "out = []\n(b if c else out)[0] = 1",
        "out = []\n(out if c else b).append(1)",
        "out = []\nout.append(b)\nout[0].append(1)",
        "for out in b: out.append(1)",
        "with b as out: out.append(1)",
    ],
)
def test_code_writes_items_of_containers_that_it_did_not_make(text: str):
    assert writes_items(code_of_function(text))


@pytest.mark.parametrize(
    "text",
    [
        "out = []\nfor k in b: out.append(b[k])",
        "out = {}\nout[b] = 1\ndel out[b]",
        "out = []\nout[0:1] = b",
        "return [x for x in b]",
    ],
)
def test_a_container_that_code_has_made_is_its_own(text: str):
    assert not writes_items(code_of_function(text))


def code_of_function(text: str) -> CodeType:
    lines = "\n    ".join(text.splitlines())
    made: dict[str, Any] = {}
    exec(f"def f(b, c):\n    {lines}", made)
    found: CodeType = made["f"].__code__
    return found
