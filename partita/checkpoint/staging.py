"""Staging: what a rank writes of a state, and the copy of it with which training may go on.

Of pieces that several ranks hold, one is written: ranks compute from the layouts alone, without
asking each other, whose turn it is. Only what a rank writes is copied. Training waits for
`stage_state` and for nothing else: work on values that no program can change any more is left to
`StagedState.finish`.
"""

from __future__ import annotations

import copy
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import Piece
from partita.comm.device import HOST, Device, finish_copies, view_bytes
from partita.layout import Replicate
from partita.tensor import DTensor
from partita.tensor.dtensor import checksum, holders, piece_held
from partita.tensor.spec import Spec

from .state import OpenedState, Path

__all__ = ["Memory", "StagedState", "stage_state"]

Memory = dict[str, torch.Tensor]
"""Buffers by name, kept for the next save: new memory costs five times the copy itself."""


@dataclass
class StagedState:
    """What one rank brings to a save.

    Attributes:
        pieces: by name, the tensors that this rank writes, or offers to write where they are plain.
        values: by name, everything else, as torch.save writes it.
        paths: by name, the keys on the way to it.
        plain: names of the tensors that every rank has whole.
        texts: by name, a value as text that is equal if the values are.
        copies: values of Python's own types, copied, which `finish` serializes.
        marks: by name and place, a fingerprint of each piece that several ranks hold. Taken at
            once, since ranks that do not write the piece keep no copy.
    """

    pieces: dict[str, Piece] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Any] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)

    def finish(self) -> None:
        """Serialize the copied values; may run in another thread."""
        while self.copies:
            self.write(*self.copies.popitem())

    def write(self, name: str, value: Any) -> None:
        """Serialize one value, and note its text.

        Raises:
            ValueError: it does not pickle.
        """
        self.values[name] = _pickle_value(name, value)
        text = _canonicalize_value(value)
        if text is not None:
            self.texts[name] = text

    def fingerprints(self) -> dict[str, str]:
        """By name, the fingerprints that must be equal on all ranks that have the name."""
        found = {name: _hash_tensor(self.pieces[name].local) for name in self.plain}
        return (found | self.marks) | {
            n: hashlib.sha1(text.encode()).hexdigest() for n, text in self.texts.items()
        }


def stage_state(state: OpenedState, memory: Memory | None) -> StagedState:
    """What this rank writes of `state`. Ranks that share tensors on a mesh must call it together.

    Pending tensors are reduced first: one collective each, noted in the ledger as explicit.

    Args:
        memory: buffers to copy tensors into; None: tensors are written from where they are.

    Raises:
        ValueError: a tensor on the meta device; a value that does not pickle.
    """
    out = StagedState()
    written: dict[Any, list[int]] = {}  # bytes that each holder of a piece writes so far
    known: dict[Spec, tuple[Any, int]] = {}  # a model's many tensors have few specs
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
            value = reduce_partial(value)
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
"""Elements of a tensor that are compared where training waits only for a copy."""


def _fingerprint_tensor(x: DTensor, sampled: bool) -> str:
    """A checksum of `x`; `sampled`: of a large tensor, of a sample of its elements."""
    with Local(), torch.no_grad():
        local = x.detach()
        if sampled and local.numel() > _SAMPLED:
            local = local.reshape(-1)[:: local.numel() // _SAMPLED]
        return " ".join(f"{n:x}" for n in checksum(local))


def reduce_partial(x: DTensor) -> DTensor:
    """`x` reduced over its partial axes."""
    return x.detach().redistribute(  # type: ignore[attr-defined]
        placements=[Replicate() if p.is_partial() else p for p in x.placements]
    )


def _copy_to_buffers(out: StagedState, memory: Memory) -> None:
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
    """Does `value` consist of Python's own types, whose copies and pickles run no other code?"""
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
    # hashlib releases the interpreter lock: training goes on.
    return hashlib.sha1(view_bytes(x.detach().to(HOST).contiguous())).hexdigest()
