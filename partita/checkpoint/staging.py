"""Staging: what does this rank write of a state, and what is copied so that training may go on?

Of equal pieces one is written: ranks know from the layouts alone, without asking each other, whose
turn it is. Only what a rank writes is copied. Training waits for `staged` and for nothing else:
what can be done later, of what no program can change any more, is left to `Staged.finish`.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import Piece
from partita.comm.device import HOST, Device, finish_copies
from partita.layout import Replicate
from partita.tensor import DTensor
from partita.tensor.checksum import checksum
from partita.tensor.pieces import holders, piece_held
from partita.tensor.spec import Spec

from .state import OpenedState, Path

__all__ = ["Memory", "Staged", "bytes_of", "staged"]

Memory = dict[str, torch.Tensor]
"""Copies by name, kept for the next save: new memory costs five times the copy itself."""


@dataclass
class Staged:
    """What one rank brings to a save.

    Attributes:
        pieces: by name, the tensors that this rank writes, or offers to where they are plain.
        values: by name, everything else, as torch.save writes it.
        paths: by name, the keys on the way to it.
        plain: names of the tensors that every rank has whole.
        texts: by name, a value as text that is equal if the values are.
        copies: values of Python's own types, copied, which `finish` writes.
        marks: by name and place, of what several ranks are said to hold alike, what tells whether
            they do. Taken at once, since those that do not write it keep no copy.
    """

    pieces: dict[str, Piece] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Any] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)

    def finish(self) -> None:
        """Have all values written and told as text, also in another thread."""
        while self.copies:
            self.write(*self.copies.popitem())

    def write(self, name: str, value: Any) -> None:
        """Have this value written and told as text.

        Raises:
            ValueError: it does not pickle.
        """
        self.values[name] = _pickle_value(name, value)
        text = _canonicalize_value(value)
        if text is not None:
            self.texts[name] = text

    def fingerprints(self) -> dict[str, str]:
        """By name, what must be equal on all ranks that have it, since one of them writes it."""
        found = {name: _hash_tensor(self.pieces[name].local) for name in self.plain}
        return (found | self.marks) | {
            n: hashlib.sha1(text.encode()).hexdigest() for n, text in self.texts.items()
        }


def staged(state: OpenedState, memory: Memory | None) -> Staged:
    """What this rank writes of `state`. Ranks that share tensors on a mesh must call it together.

    Pending tensors are reduced first: one collective each, noted in the ledger as explicit.

    Args:
        memory: to copy tensors into, and to keep; None: they are written from where they are.

    Raises:
        ValueError: a tensor on the meta device; a value that does not pickle.
    """
    out = Staged()
    written: dict[Any, list[int]] = {}  # bytes so far, by the place among the holders
    known: dict[Spec, tuple[Any, int]] = {}  # of a model's many tensors few are spread differently
    for name, leaf in state.leaves.items():
        value = leaf.value
        out.paths[name] = leaf.path
        if not isinstance(value, torch.Tensor):
            if _is_of_python(value):
                out.copies[name] = copy.deepcopy(value)
            else:
                out.write(name, value)
            continue
        if value.is_meta:
            raise ValueError(f"{name} is on the meta device: it has no values to save")
        if not isinstance(value, DTensor):
            out.pieces[name] = piece_held(value)
            out.plain.append(name)
            continue
        if value._spec.is_pending:
            value = settled(value)
        spec = value._spec
        if spec not in known:
            axes, mine, count = holders(value._spec)
            known[spec] = written.setdefault((spec.wire, axes), [0] * count), mine
        so_far, mine = known[spec]
        if len(so_far) > 1:
            place = f" at {[offset for offset, _ in spec.region]}" if spec.is_sharded else ""
            out.marks[name + place] = _fingerprint_tensor(value, sampled=memory is not None)
        turn = min(range(len(so_far)), key=so_far.__getitem__)
        so_far[turn] += spec.largest * value.dtype.itemsize
        if turn == mine:
            out.pieces[name] = piece_held(value)
    if memory is not None:
        _copy_to_buffers(out, memory)
    return out


_SAMPLED = 1 << 18
"""Elements of a tensor that are compared while training waits for a copy only."""


def _fingerprint_tensor(x: DTensor, sampled: bool) -> str:
    """What differs where a value does; `sampled`, of a large one where it does on the whole."""
    with Local(), torch.no_grad():
        local = x.detach()
        if sampled and local.numel() > _SAMPLED:
            local = local.reshape(-1)[:: local.numel() // _SAMPLED]
        return " ".join(f"{n:x}" for n in checksum(local))


def settled(x: DTensor) -> DTensor:
    """`x` with its pending axes reduced."""
    return x.detach().redistribute(  # type: ignore[attr-defined]
        placements=[Replicate() if p.is_partial() else p for p in x.placements]
    )


def _copy_to_buffers(out: Staged, memory: Memory) -> None:
    kept = {}
    with Local(), torch.no_grad():
        for name, piece in out.pieces.items():
            local = piece.local
            buffer = memory.get(name)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                pinned = Device(local.device.type).copies_beside_python
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)
            kept[name] = buffer
            out.pieces[name] = Piece(buffer, piece.shape, piece.region)
            buffer.copy_(local, non_blocking=True)
    memory.clear()
    memory.update(kept)
    finish_copies()


# -- values ----------------------------------------------------------------------------------------


def _pickle_value(name: str, value: Any) -> bytes:
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:
        raise ValueError(f"{name} cannot be saved: {error}") from error
    return stream.getvalue()


_ATOMS = frozenset((bool, int, float, complex, str, bytes, type(None)))


def _is_of_python(value: Any) -> bool:
    """May it be copied now and pickled later, without running anybody's code?"""
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind is dict:
        return all(map(_is_of_python, value)) and all(map(_is_of_python, value.values()))
    return kind in (list, tuple, set, frozenset) and all(map(_is_of_python, value))


def _canonicalize_value(value: Any) -> str | None:
    """A value of Python's own types as text, whatever the order of sets; None of other types."""
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, Mapping):
        parts = [_canonicalize_value((k, v)) for k, v in value.items()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = [_canonicalize_value(v) for v in value]
    else:
        return None
    if None in parts:
        return None
    if isinstance(value, (Mapping, set, frozenset)):
        parts.sort()  # type: ignore[type-var]
    return f"{type(value).__name__}({', '.join(parts)})"  # type: ignore[arg-type]


def _hash_tensor(x: torch.Tensor) -> str:
    # The lock of the interpreter is not held meanwhile: training goes on.
    return hashlib.sha1(bytes_of(x.detach().to(HOST).contiguous())).hexdigest()


def bytes_of(x: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    size = x.numel() * x.element_size()
    if size == 0:
        return memoryview(b"")
    memory = (ctypes.c_char * size).from_address(x.data_ptr())
    memory.owner = x  # type: ignore[attr-defined]  # the view keeps the array, and that the tensor
    return memoryview(memory).cast("B")
