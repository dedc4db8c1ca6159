"""Calls as text: `F.linear(f32[8@dp, 16], f32[32@tp, 16])`, with a layout for each tensor."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable
from typing import Any

import torch

from partita.comm import user_line_of_error, wire_of
from partita.layout import Fix, Layout, LayoutError
from partita.tensor.dtensor import DTensor, tagged
from partita.tensor.spec import spec_of

__all__ = ["describe_raised", "read_call", "read_mesh"]

_DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
    "c128": torch.complex128,
}
_HOMES = {"F": torch.nn.functional, "torch": torch, "Tensor": torch.Tensor}
_DIGITS = 20  # of a number of ranks that is read as one
_CALL = re.compile(r"\s*(?P<name>[\w.:]+)\s*(?:\((?P<args>.*)\))?\s*", re.DOTALL)
_LAYOUT = re.compile(r"[a-z]+\d*\[[^\]]*\](\s*\{[^}]*\})?")
_NAME = re.compile(r"\s*(\w+)\s*=")


def read_mesh(text: str) -> dict[str, int]:
    """`dp=2,tp=4` as a dictionary. Raises LayoutError with the part that it cannot read."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        is_number = size.isascii() and size.isdecimal()
        if not name.isidentifier() or not is_number or name in axes or len(size) > _DIGITS:
            raise LayoutError(
                f"cannot read {part.strip()[:40]!r} in the mesh {text[:80]!r}",
                reason="a mesh names each of its axes once, with its number of ranks",
                fixes=(Fix("--mesh dp=2,tp=4"),),
            )
        if int(size) < 1:
            raise LayoutError(
                f"{name}={size} in the mesh {text!r} has no rank",
                reason="an axis has at least one rank",
                fixes=(Fix(f"{name}=1"), Fix("a mesh without it")),
            )
        axes[name] = int(size)
    return axes


def read_call(text: str, arguments: str, mesh: Any) -> tuple[Callable[..., Any], Any, Any]:
    """The function, the positional and the named arguments that a text says.

    Args:
        text: a function of torch ("F.linear", "torch.matmul", "Tensor.sum") or of yours
            ("module:function"), and its arguments in parentheses if they are not in `arguments`.
        arguments: what stands in the parentheses; a comma between two tensors may be left out.
        mesh: of the tensors, which have no memory. Floating ones require a gradient.

    Raises:
        LayoutError: there is no such function, or a part cannot be read; or a layout does not fit
            the mesh.
    """
    match = _CALL.fullmatch(text)
    if match is None:
        raise LayoutError(
            f"cannot read the call {text!r}",
            fixes=(Fix('"F.linear(f32[8@dp, 16], f32[32@tp, 16])"'),),
        )
    inside = ", ".join(filter(None, [match["args"], arguments]))
    args, kwargs = _Arguments(inside, mesh).read()
    return _find_function(match["name"]), args, kwargs


def _find_function(name: str) -> Callable[..., Any]:
    module, colon, inner = name.partition(":")
    if colon:
        try:
            home: Any = importlib.import_module(module)
        except KeyboardInterrupt:
            raise
        except ModuleNotFoundError as error:
            raise _no_function(name, str(error)) from None
        except BaseException as error:  # a module may raise, and end, as it likes
            said = describe_raised(f"importing {module}", error, is_user_s=True)
            raise _no_function(name, said) from None
    else:
        first, _, inner = name.partition(".")
        home = _HOMES.get(first)
        if home is None or not inner:
            raise _no_function(name, "a function is said with where it is")
    for part in inner.split("."):
        home = getattr(home, part, None)
    if not callable(home):
        raise _no_function(name, f"nothing that can be called is there as {inner}")
    return home  # type: ignore[no-any-return]


def describe_raised(what: str, error: BaseException, *, is_user_s: bool) -> str:
    """What raised an error, all that this says, and the line of what the user wrote.

    Args:
        is_user_s: did code of the user's raise it, or call what did?
    """
    said, _, _ = str(error).partition("\nException raised from")  # frames of C++
    # A SyntaxError says by itself where it is.
    has_line = is_user_s and not isinstance(error, SyntaxError)
    line = user_line_of_error(error) if has_line else ""
    at = f" (at {line})" if line else ""
    return f"{what} raised {type(error).__name__}{at}: {said.strip()}"


def _no_function(name: str, reason: str) -> LayoutError:
    fixes = ("F.linear", "torch.matmul", "Tensor.sum", "my_module:my_function")
    return LayoutError(f"no function {name!r}", reason=reason, fixes=tuple(map(Fix, fixes)))


class _Arguments:
    """A reader of arguments: layouts, lists of them, and Python's literals."""

    def __init__(self, text: str, mesh: Any):
        self.text, self.at, self.mesh = text, 0, mesh

    def read(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        while self._remaining_text():
            named = _NAME.match(self.text, self.at)
            if named is not None:
                self.at = named.end()
                kwargs[named[1]] = self._read_value()
            else:
                args.append(self._read_value())
            self._skip_mark(",")
        return tuple(args), kwargs

    def _remaining_text(self) -> str:
        self._skip_mark("")
        return self.text[self.at :]

    def _skip_mark(self, mark: str) -> None:
        while self.at < len(self.text) and self.text[self.at] in " \t\n" + mark:
            self.at += 1

    def _read_value(self) -> Any:
        self._skip_mark("")
        layout = _LAYOUT.match(self.text, self.at)
        if layout is not None:
            self.at = layout.end()
            return self._make_tensor(layout[0])
        if self.text[self.at : self.at + 1] == "[":
            return self._read_list()
        return self._read_literal()

    def _read_list(self) -> list[Any]:
        self.at += 1
        found = []
        while self._remaining_text() and self.text[self.at] != "]":
            found.append(self._read_value())
            self._skip_mark(",")
        if not self._remaining_text():
            raise self._cannot_read("a list has no end")
        self.at += 1
        return found

    def _read_literal(self) -> Any:
        """The shortest text from here that is one of Python's literals."""
        for end in filter(self._is_literal_end, range(self.at + 1, len(self.text) + 1)):
            try:
                value = ast.literal_eval(self.text[self.at : end].strip())
            except (ValueError, SyntaxError):
                continue
            self.at = end
            return value
        raise self._cannot_read("it is no layout, and no number, text, list or None")

    def _is_literal_end(self, i: int) -> bool:
        return i == len(self.text) or self.text[i] in ",]) \t\n"

    def _cannot_read(self, reason: str) -> LayoutError:
        return LayoutError(
            f"cannot read {self.text[self.at :].strip()!r} in the arguments {self.text!r}",
            reason=reason,
            fixes=(Fix('"f32[8@dp, 16], dim=1"'),),
        )

    def _make_tensor(self, text: str) -> DTensor:
        layout = Layout.parse(text)
        if layout.dtype not in _DTYPES:
            raise LayoutError(
                f"cannot read the dtype {layout.dtype!r} of {text!r}",
                fixes=tuple(Fix(name) for name in _DTYPES),
            )
        dtype, wire = _DTYPES[layout.dtype], wire_of(self.mesh)
        layout.check_axes(wire.mesh)
        spec = spec_of(Layout(layout.shape, layout.shards, layout.partial, layout.invariant), wire)
        local = torch.empty(spec.local_shape, dtype=dtype, device="meta")
        found = tagged(local, spec)
        return found.requires_grad_() if dtype.is_floating_point else found
