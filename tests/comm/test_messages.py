"""Do values and errors reach other ranks as they were, and does nothing in a message run?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from partita.checkpoint import Loaded
from partita.comm import pack, unpack
from partita.graph.errors import CaptureError
from partita.layout import Fix, LayoutError


class Mine(KeyError):
    def __init__(self, a: int, b: int):
        super().__init__(a + b)


@pytest.mark.parametrize(
    "thing",
    [
        None,
        [1, 2.5, float("inf"), True, "a\n\u2028", b"\0\xff"],
        {"a": (1, ()), (0, "b"): [], 3: {}},
        (torch.Size([2, 0]), torch.bfloat16, Path("/a/b")),
        Loaded(("a", "b"), ()),
        {"tuple": 1},
    ],
    ids=str,
)
def test_a_value_arrives_as_it_was(thing):
    found = unpack(pack(thing))
    assert found == thing and type(found) is type(thing)


def test_not_a_number_arrives():
    assert str(unpack(pack([float("nan")]))) == "[nan]"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("a", 3), ValueError, "('a', 3)"),
        (OSError(28, "No space left on device", "/x"), OSError, None),
        (FileNotFoundError(2, "No such file or directory"), FileNotFoundError, None),
        (LayoutError("f", place="p:1", operands=("x",), fixes=(Fix("w", "m"),)), LayoutError, None),
        (CaptureError("f", reason="r"), CaptureError, None),
        (Mine(1, 2), KeyError, "'Mine: 3'"),
        (b"\xff".decode, ValueError, None),
    ],
    ids=[
        "ValueError",
        "full disk",
        "no file",
        "layout",
        "capture",
        "of a class of one's own",
        "decode",
    ],
)
def test_an_error_arrives_as_the_nearest_class_that_all_ranks_know(error, kind, text):
    if callable(error):
        with pytest.raises(UnicodeDecodeError) as caught:
            error()
        error = caught.value
    error.add_note("on rank 1")
    found = unpack(pack(error))
    assert isinstance(found, kind) and found.__notes__ == ["on rank 1"]
    assert str(error if text is None else text) in str(found)


def test_what_has_no_place_in_a_message_is_not_sent():
    for thing in (object(), print, torch.ones(1), Mine):
        with pytest.raises(TypeError, match="cannot be sent in a message between ranks"):
            pack([thing])


@pytest.mark.parametrize(
    "inside",
    [
        {"message": ["Popen", {"args": "true"}]},
        {"error": {"class": "eval", "text": "1", "notes": []}},
        {"error": {"class": "Mine", "text": "1", "notes": []}},
        {"dtype": "load"},
        {"__reduce__": 1},
        {},
        [{"tuple": 1}],
    ],
    ids=str,
)
def test_what_is_no_message_is_an_error_and_makes_nothing(inside):
    with pytest.raises(ValueError, match="a rank has sent something that is not a message"):
        unpack(json.dumps(inside).encode())
