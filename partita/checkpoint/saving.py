"""Saving: all ranks write a state to a folder together, while training waits or goes on.

Each rank stages what it may write; training waits for that copy and for nothing else. Of pieces
that several ranks hold one is written: whose turn it is, ranks compute from layouts alone. Rank 0
divides what is offered, so that each is written once, and gives the folder its name when all have
written theirs. Both steps go through the control plane.
"""

from __future__ import annotations

import copy
import hashlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import BackgroundResult, Decide, Piece, control_plane
from partita.comm.device import HOST, Device, finish_copies, view_bytes
from partita.layout import Fix, LayoutError, Replicate
from partita.tensor import DTensor
from partita.tensor.dtensor import checksum, holders_of_piece, piece_held
from partita.tensor.tensor_state import Spec

from .folder import Checksums, Replacement, begin_replacement, compute_crcs
from .loading import attempt
from .state import KeyPath, OpenedState, open_state

_memory: WeakKeyDictionary[Any, Memory] = WeakKeyDictionary()


def save(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write `state` as the checkpoint `path`, a folder that torch.distributed.checkpoint reads.

    Every rank calls this with equal keys and the same path, on a file system that all see. Each
    rank writes its pieces, nothing is gathered, and of equal pieces one is written, by the ranks in
    turn. A checkpoint that is there is replaced, at once, when all of the new one is on the disk.

    Args:
        state: nested dicts and lists of tensors and values. A module, an optimizer, or anything
            else with `state_dict` and `load_state_dict` stands for its state; an optimizer is saved
            by the names that a module in `state` gives its parameters. A pending tensor is reduced
            first. Plain tensors and values must be equal on all ranks that have them, and so must
            what a layout says that several ranks hold: it is read once, to compare it.

    Raises:
        LayoutError: ranks differ in what several of them hold by one name.
        ValueError: ranks differ in a shape or dtype; some part of a tensor is on no
            rank; a value cannot be saved; there is something at `path` that is no checkpoint.
        OSError: the disk. Whatever the error, every rank raises it, and `path` is as it was.
    """
    all_ranks = control_plane()
    all_ranks.wait()
    _memory.pop(all_ranks, None)
    brought = attempt(lambda: stage_state(open_state(state), None))
    _SaveJob(all_ranks.rank, all_ranks.size, brought, _make_absolute(path)).run(all_ranks.decide)


def async_save(state: Mapping[str, Any], path: str | os.PathLike[str]) -> BackgroundResult:
    """`save`, of which only the copy to memory happens now; the rest goes on in another thread.

    The memory, as much as this rank writes, is kept for the next time and freed by `save`. A save
    that has not ended is waited for first. Of large tensors that several ranks hold, a sample of
    the elements is compared.

    Returns:
        A future: `result()` waits until the checkpoint is there, or raises what `save` would. Call
        it before the process groups are destroyed; an error that nobody asks for is warned of.
    """
    all_ranks = control_plane()
    all_ranks.wait()
    memory = _memory.setdefault(all_ranks, {})
    brought = attempt(lambda: stage_state(open_state(state), memory))
    return all_ranks.run_in_background(
        _SaveJob(all_ranks.rank, all_ranks.size, brought, _make_absolute(path)).run
    )


def _make_absolute(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(path))  # not resolved: a symbolic link is itself replaced


class _SaveJob:
    """One rank's part of a save."""

    def __init__(self, rank: int, ranks: int, brought: _StagedState | Exception, home: Path):
        self._rank, self._ranks, self._brought, self._home = rank, ranks, brought, home
        self._new: Replacement | None = None  # on rank 0

    def run(self, decide: Decide) -> None:
        try:
            kept, folder = decide(self._offer_items(), self._divide_items)
            written = attempt(lambda: self._write_items(kept, folder))
            decide(written, self._publish_checkpoint)
        finally:
            if self._new is not None:
                self._new.discard()

    # -- on every rank ---------------------------------------------------------------------------

    def _offer_items(self) -> Any:
        from partita.comm.dcp_format import Offer, SavePieces, offer_piece

        staged = self._brought
        if isinstance(staged, Exception):
            return staged
        staged.finish()
        self._planner = SavePieces(staged.pieces, staged.values)
        self._offers: list[Offer] = []
        for name, piece in staged.pieces.items():
            self._offers += offer_piece(name, piece, staged.paths[name])
        self._offers += [Offer(name, staged.paths[name]) for name in staged.values]
        return self._offers, self._home

    def _write_items(self, kept: list[int], folder: Path) -> Any:
        from partita.comm.dcp_format import Writer

        assert isinstance(self._brought, _StagedState)
        rows: list[Any] = []
        if kept:
            folder.mkdir(exist_ok=True)  # a file system may be slow to show what rank 0 made
            offers = [self._offers[i] for i in kept]
            rows = Writer(folder, self._home).write(offers, self._planner, self._rank)
        marks = self._brought.fingerprints() if self._ranks > 1 else {}
        return rows, _compute_checksums(folder, rows), marks

    # -- on rank 0, for all ----------------------------------------------------------------------

    def _divide_items(self, brought: list[tuple[Any, Path]]) -> list[tuple[list[int], Path]]:
        """For each rank, the indices of the items that it is to write, and the folder."""
        homes = sorted({str(home) for _, home in brought})
        if len(homes) > 1:
            raise ValueError(f"ranks save to different places: {', '.join(homes)}")
        kept, self._metadata = self._planner.divide([offers for offers, _ in brought])
        self._new = begin_replacement(self._home)
        return [(its, self._new.written) for its in kept]

    def _publish_checkpoint(
        self, brought: list[tuple[list[Any], list[int], dict[str, str]]]
    ) -> list[None]:
        from partita.comm.dcp_format import Writer

        _compare_fingerprints([marks for _, _, marks in brought])
        assert self._new is not None
        folder = self._new.written
        written = [row for rows, _, _ in brought for row in rows]
        Writer(folder, self._home).write_metadata(self._metadata, written)
        crcs = [crc for _, crcs, _ in brought for crc in crcs]
        places = [(file, at, size) for *_, file, at, size in written]
        Checksums.of(folder, dict(zip(places, crcs, strict=True))).write(folder)
        self._new.publish()
        return [None] * len(brought)


def _compute_checksums(folder: Path, rows: list[Any]) -> list[int]:
    """The checksum of each row's chunk, read from the one file that this rank has written."""
    if not rows:
        return []
    (name,) = {name for *_, name, _, _ in rows}
    found = compute_crcs(folder / name, [(at, size) for *_, at, size in rows])
    if None in found:
        raise OSError(f"{folder / name} is shorter than what was written to it")
    return found  # type: ignore[return-value]


def _compare_fingerprints(fingerprints: list[dict[str, str]]) -> None:
    first: dict[str, tuple[int, str]] = {}
    problems: dict[str, str] = {}
    for rank, found in enumerate(fingerprints):
        for name, mark in found.items():
            where, other = first.setdefault(name, (rank, mark))
            if mark != other:
                problems.setdefault(name, f"{name} (ranks {where} and {rank})")
    if problems:
        raise LayoutError(
            "the ranks hold different values by one name, and one of them would be lost",
            operands=tuple(problems.values()),
            fixes=(
                Fix("pt.distribute_tensor(t, mesh, placements)", "if rank 0's is the one to keep"),
                Fix('{f"data.{rank}": ...}', "if each rank is to have its own"),
            ),
        )


# -- staging ---------------------------------------------------------------------------------------

Memory = dict[str, torch.Tensor]
"""Buffers by name, kept for the next save: new memory costs five times the copy itself."""


@dataclass
class _StagedState:
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
    paths: dict[str, KeyPath] = field(default_factory=dict)
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


def stage_state(state: OpenedState, memory: Memory | None) -> _StagedState:
    """What this rank writes of `state`. Ranks that share tensors on a mesh must call it together.

    Pending tensors are reduced first: one collective each, noted in the ledger as explicit.

    Args:
        memory: buffers to copy tensors into; None: tensors are written from where they are.

    Raises:
        ValueError: a tensor on the meta device; a value that does not pickle.
    """
    out = _StagedState()
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
            value = _reduce_partial(value)
        spec = value._spec
        if spec not in known:
            axes, mine, count = holders_of_piece(value._spec)
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


def _reduce_partial(x: DTensor) -> DTensor:
    """`x` reduced over its partial axes."""
    return x.detach().redistribute(  # type: ignore[attr-defined]
        placements=[Replicate() if p.is_partial() else p for p in x.placements]
    )


def _copy_to_buffers(out: _StagedState, memory: Memory) -> None:
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
