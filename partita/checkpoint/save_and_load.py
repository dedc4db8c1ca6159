"""Saving and loading of a state, by all ranks together, onto any mesh.

Saving: each rank copies the shards that it may have to write (it stages them). Training waits only
for that copy. If several ranks hold the same shard, one of them writes it; each rank computes from
the layouts which rank that is. Rank 0 assigns the shards, so that each is written once, and renames
the folder when all ranks have written.

Loading: each rank reads its shards, in place. Before anything is changed, mismatches are found from
the metadata, and damage by the checksums. They are raised as one error, the same on every rank.
Checkpoints that torch wrote have no checksums, so each of their chunks is read twice.
"""

from __future__ import annotations

import copy
import hashlib
import io
import os
import pickle
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch.autograd.graph import increment_version

from partita.comm import (
    BackgroundResult,
    Decide,
    Piece,
    control_plane,
    message,
    user_line,
)
from partita.comm.device import HOST, Device, finish_copies, view_bytes
from partita.layout import Fix, LayoutError, Replicate
from partita.tensor import DTensor
from partita.tensor.dtensor import as_dtensor, checksum, destination, holders_of_piece, piece_held
from partita.tensor.tensor_state import Spec, current, spec_of, state_of

from .folder import (
    NAME,
    Checksums,
    Replacement,
    begin_replacement,
    compute_crcs,
    find_checkpoint,
    lock_for_reading,
)
from .object_state import KIND, KeyPath, Stored
from .optimizer_state import is_list_of_parameters
from .state import OpenedState, open_state


# torch.distributed.checkpoint calls these methods of a sharded tensor.
def _create_write_items(self: DTensor, fqn: str, object: Any) -> list[Any]:
    from .dcp_format import write_items  # it takes half a second

    return write_items(fqn, piece_held(self))


def _create_chunk_list(self: DTensor) -> list[Any]:
    from .dcp_format import chunks

    piece = piece_held(self)
    return chunks(piece.region, piece.shape)


DTensor.__create_write_items__ = _create_write_items  # type: ignore[attr-defined]
DTensor.__create_chunk_list__ = _create_chunk_list  # type: ignore[attr-defined]
DTensor.__get_tensor_shard__ = lambda self, index: piece_held(self).local  # type: ignore[attr-defined]

Strict = bool | Literal["state"]
"""The names for which loading raises an error.

True: names that only the state or only the checkpoint has. "state": names that only the state has.
False: none.
"""


def attempt(do: Callable[[], Any]) -> Any:
    """Calls `do()` and returns its result, or the exception that it raised.

    If it is passed to `ControlPlane.decide`, all ranks raise the exception.
    """
    try:
        return do()
    except Exception as error:
        return error


# -- saving ----------------------------------------------------------------------------------------

_memory: WeakKeyDictionary[Any, Memory] = WeakKeyDictionary()


def save(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write `state` as the checkpoint `path`, a folder that torch.distributed.checkpoint can read.

    Must be called on all ranks with the same keys and the same path, on a shared file system. Each
    rank writes its own pieces; nothing is gathered. If several ranks hold the same piece, one of
    them writes it. An existing checkpoint at `path` is replaced only when the new one is completely
    on disk.

    Args:
        state: nested dicts and lists of tensors and values. It may contain modules, optimizers and
            other objects with `state_dict` and `load_state_dict`: their state is saved. An
            optimizer's state is saved by the parameter names of a module in `state`. Partial
            tensors are reduced first. Plain tensors and values, and pieces that several ranks hold,
            must be equal on these ranks. They are compared. (Objects of classes other than
            Python's, NumPy's, torch's and dataclasses are not compared, and one rank's object is
            saved.)

    Raises:
        LayoutError: ranks hold different values under the same name.
        ValueError: ranks differ in a shape or dtype; a part of a tensor is on no rank; a value
            cannot be saved; or `path` exists and is not a checkpoint.
        OSError: writing failed. Every rank raises each of these errors, and `path` is unchanged.
    """
    home = _make_absolute(path)
    all_ranks = control_plane()
    all_ranks.wait()
    _memory.pop(all_ranks, None)
    staged = attempt(lambda: stage_state(open_state(state), None))
    decide = all_ranks.decide_on("saves a checkpoint (pt.save)", f" to {home}")
    _SaveJob(all_ranks.rank, all_ranks.size, staged, home).run(decide)


def async_save(state: Mapping[str, Any], path: str | os.PathLike[str]) -> BackgroundResult:
    """Writes `state` as the checkpoint `path` like `save`, but in another thread.

    Only the copy to memory happens in this call. It takes as much memory as this rank writes. The
    memory is reused by the next `async_save` and freed by `save`. If an earlier save is still
    running, this call waits for it first. Unlike `save`, it compares only a sample of the elements
    of large tensors between ranks.

    Returns:
        A future. `result()` waits until the checkpoint is complete, and raises what `save` would
        raise. Call it before you destroy the process groups. If an error occurs and nobody calls
        `result()`, there is a warning.
    """
    home = _make_absolute(path)
    all_ranks = control_plane()
    memory = _memory.setdefault(all_ranks, {})

    def stage() -> Callable[[Decide], None]:
        staged = attempt(lambda: stage_state(open_state(state), memory))
        return _SaveJob(all_ranks.rank, all_ranks.size, staged, home).run

    why = "saves a checkpoint (pt.async_save)"
    return all_ranks.run_in_background(stage, why, f" to {home}")


def _make_absolute(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"a path is text or a Path, not a {type(path).__name__}: (state, path)")
    return Path(os.path.abspath(path))  # not resolved: a symbolic link itself is replaced


class _SaveJob:
    """One rank's part of a save."""

    def __init__(self, rank: int, ranks: int, staged: _StagedState | Exception, home: Path):
        self._rank, self._ranks, self._staged, self._home = rank, ranks, staged, home
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
        from .dcp_format import Offer, SavePieces, offer_piece

        staged = self._staged
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
        from .dcp_format import Writer

        assert isinstance(self._staged, _StagedState)
        rows: list[Any] = []
        if kept:
            folder.mkdir(exist_ok=True)  # a file system may be slow to show what rank 0 made
            offers = [self._offers[i] for i in kept]
            rows = Writer(folder, self._home).write(offers, self._planner, self._rank)
        marks = self._staged.fingerprints() if self._ranks > 1 else {}
        return rows, _compute_checksums(folder, rows), marks

    # -- on rank 0, for all ----------------------------------------------------------------------

    def _divide_items(self, gathered: list[tuple[Any, Path]]) -> list[tuple[list[int], Path]]:
        """Returns for each rank the indices of the items that it must write, and the folder."""
        homes = sorted({str(home) for _, home in gathered})
        if len(homes) > 1:
            raise ValueError(f"ranks save to different places: {', '.join(homes)}")
        kept, self._metadata = self._planner.divide([offers for offers, _ in gathered])
        self._new = begin_replacement(self._home)
        return [(its, self._new.written) for its in kept]

    def _publish_checkpoint(
        self, gathered: list[tuple[list[Any], list[int], dict[str, str]]]
    ) -> list[None]:
        from .dcp_format import Writer

        _compare_fingerprints([marks for _, _, marks in gathered])
        assert self._new is not None
        folder = self._new.written
        written = [row for rows, _, _ in gathered for row in rows]
        Writer(folder, self._home).write_metadata(self._metadata, written)
        crcs = [crc for _, crcs, _ in gathered for crc in crcs]
        places = [(file, at, size) for *_, file, at, size in written]
        Checksums.of(folder, dict(zip(places, crcs, strict=True))).write(folder)
        self._new.publish()
        return [None] * len(gathered)


def _compute_checksums(folder: Path, rows: list[Any]) -> list[int]:
    """Returns the checksum of each row's chunk, read from the file that this rank has written."""
    if not rows:
        return []
    (name,) = {name for *_, name, _, _ in rows}
    found = compute_crcs(folder / name, [(at, size) for *_, at, size in rows])
    if None in found:
        raise OSError(f"{folder / name} is shorter than the data that was written to it")
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
            "the ranks hold different values under one name, and one of them would be lost",
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
    """The data that one rank passes to a save.

    Attributes:
        pieces: maps names to the tensors that this rank may write. The other keys are names, too.
        values: all other values, as torch.save writes them.
        paths: the keys that lead to each entry.
        plain: names of the tensors that every rank has whole.
        texts: values as text that is equal for equal values.
        copies: copied values of Python's own types, which `finish` serializes.
        marks: a fingerprint of each piece that several ranks hold, by name and position. Taken at
            once, because ranks that do not write the piece keep no copy.
    """

    pieces: dict[str, Piece] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)
    paths: dict[str, KeyPath] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Any] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)

    def finish(self) -> None:
        """Pickle the copied values; may run in another thread."""
        while self.copies:
            self.write(*self.copies.popitem())

    def write(self, name: str, value: Any) -> None:
        """Pickles one value, and stores the text by which ranks compare it.

        Args:
            name: the name of the value in the state.

        Raises:
            ValueError: it does not pickle.
        """
        self.values[name] = _pickle_value(name, value)
        text = _canonicalize_value(value)
        if text is not None:
            self.texts[name] = text

    def fingerprints(self) -> dict[str, str]:
        """A hash of each value and plain tensor, by name, which ranks compare."""
        found = {name: _hash_tensor(self.pieces[name].local) for name in self.plain}
        return (found | self.marks) | {
            n: hashlib.sha1(text.encode()).hexdigest() for n, text in self.texts.items()
        }


def stage_state(state: OpenedState, memory: Memory | None) -> _StagedState:
    """Copies the shards and values of `state` that this rank may have to write, and returns them.

    All ranks of a tensor's mesh must call it together. Partial tensors are reduced first, with one
    collective each, which the ledger records as explicit.

    Args:
        memory: buffers into which tensors are copied. None: tensors are not copied.

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
        value = current(value)
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
    """Returns a checksum of `x`; `sampled`: of a large tensor, of a sample of its elements."""
    with local_ops(), torch.no_grad():
        local = x.detach()
        if sampled and local.numel() > _SAMPLED:
            local = local.reshape(-1)[:: local.numel() // _SAMPLED]
        return " ".join(f"{n:x}" for n in checksum(local))


def _reduce_partial(x: DTensor) -> DTensor:
    """Returns `x` with its Partial axes reduced."""
    return x.detach().redistribute(  # type: ignore[attr-defined]
        placements=[Replicate() if p.is_partial() else p for p in x.placements]
    )


def _copy_to_buffers(out: _StagedState, memory: Memory) -> None:
    kept = {}
    with local_ops(), torch.no_grad():
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


class _Pickler(pickle.Pickler):
    """A pickler that refuses objects containing a DTensor: it would write one rank's piece only."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            raise _HoldsDTensor
        return NotImplemented


class _HoldsDTensor(Exception):
    pass


_PICKLE = SimpleNamespace(__name__=pickle.__name__, Pickler=_Pickler)


def _pickle_value(name: str, value: Any) -> bytes:
    stream = io.BytesIO()
    try:
        torch.save(value, stream, pickle_module=_PICKLE)
    except _HoldsDTensor:
        raise ValueError(
            f"{name}: a DTensor in a {type(value).__name__} would be written as one rank's piece; "
            "put it in a list or dict"
        ) from None
    except Exception as error:
        raise ValueError(f"{name} cannot be saved: {error}") from error
    return stream.getvalue()


_ATOMS = frozenset((bool, int, float, complex, str, bytes, type(None)))


def _is_of_python(value: Any) -> bool:
    """True if `value` consists of Python's own types, whose copies and pickles run no code."""
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind is dict:
        return all(map(_is_of_python, value)) and all(map(_is_of_python, value.values()))
    return kind in (list, tuple, set, frozenset) and all(map(_is_of_python, value))


def _canonicalize_value(value: Any) -> str | None:
    """Returns a value as text, with sets in order; None for objects with unknown content."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {_hash_tensor(value)}"
    if isinstance(value, Enum):
        return f"{kind} {value.name}"
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None), torch.dtype)):
        return f"{kind} {value!r}"
    if hasattr(value, "__array_interface__"):  # of NumPy
        text = _canonicalize_value(value.tolist() if value.dtype.hasobject else value.tobytes())
        return text and f"{value.dtype} {value.shape} {text}"
    if isinstance(value, SimpleNamespace) or (is_dataclass(value) and hasattr(value, "__dict__")):
        text = _canonicalize_value(vars(value))
        return text and f"{kind} {text}"
    if isinstance(value, Mapping):
        parts = [_canonicalize_value((k, v)) for k, v in value.items()]
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        parts = [_canonicalize_value(v) for v in value]
    else:
        return None
    if None in parts:
        return None
    if isinstance(value, (Mapping, set, frozenset)):
        parts.sort()  # type: ignore[type-var]
    return f"{kind}({', '.join(parts)})"  # type: ignore[arg-type]


def _hash_tensor(x: torch.Tensor) -> str:
    # hashlib releases the interpreter lock, so training continues.
    return hashlib.sha1(view_bytes(x.detach().to(HOST).contiguous())).hexdigest()


# -- loading ---------------------------------------------------------------------------------------


def load(
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    strict: Strict = True,
    weights_only: bool = True,
) -> Loaded:
    """Read the checkpoint `path` into `state`: tensors in place, values into its dicts.

    Must be called on all ranks. Mesh, layouts and number of ranks may differ from the save. All
    elements are restored bit for bit. Modules, optimizers and other objects with `state_dict` and
    `load_state_dict` get the saved state. This includes state that a new object does not have yet.
    As with `optimizer.load_state_dict`, an optimizer has exactly the saved state afterwards.

    Args:
        state: the same structure that was saved, by partita or by torch.distributed.checkpoint.
        strict: True: names that are only in `state` or only in the checkpoint are errors. "state":
            names that are only in `state` are errors, so a part of a checkpoint can be loaded.
            False: neither are errors.
        weights_only: True reads values like `torch.load(weights_only=True)`, which runs no code.
            False reads any pickle. A pickle can run code, so use it only for files that you trust.

    Returns:
        The names that were skipped.

    Raises:
        LayoutError: one error that lists everything that does not fit: missing or unexpected names,
            different shapes or dtypes, tensors in place of values, or optimizer groups that differ.
            Nothing has been changed.
        ValueError: there is no checkpoint; a file is damaged or missing (the error names it); or a
            value needs `weights_only=False`. Nothing has been changed.
    """
    if strict not in (True, False, "state"):
        raise ValueError(f'strict={strict!r}: it is True, False or "state"')
    home = _make_absolute(path)
    all_ranks = control_plane()
    all_ranks.wait()
    line = user_line()
    with lock_for_reading(home):
        read = _LoadJob(state, home, strict, weights_only)
        decide = all_ranks.decide_on("loads a checkpoint (pt.load)", f" from {home}")
        skipped = agree_on_mismatches(decide, attempt(read.check), os.fspath(path), line)
        decide(attempt(read.finish), lambda gathered: gathered)
    return skipped


class _LoadJob:
    """One rank's part of a load: everything is checked before anything of the state changes."""

    def __init__(self, state: Mapping[str, Any], home: Path, strict: Strict, weights_only: bool):
        self._state, self._home = state, home
        self._strict, self._weights_only = strict, weights_only
        self._enums: list[
            type
        ] = []  # classes of values in the state: creating instances of these runs no code

    def check(self) -> Mismatches:
        """Returns how the checkpoint's metadata differs from the state. Nothing is loaded.

        Raises:
            ValueError: the checkpoint is damaged.
        """
        from .dcp_format import Reader

        folder = find_checkpoint(self._home)
        path = folder / ".metadata"
        content, checksums = path.read_bytes(), Checksums.read(folder)
        if checksums is not None:
            checksums.check_metadata(path, content)
        self._reader = reader = Reader(folder, content, is_intact=checksums is not None)
        if reader.has_checksums and checksums is None:
            raise ValueError(
                f"{folder / NAME} is missing: without it the other files cannot be checked"
            )
        there = {name: Stored(*parts) for name, parts in reader.describe().items()}
        lists = [name for name, one in there.items() if is_list_of_parameters(one)]
        self._read_values(folder, lists, checksums)
        self._inside = open_state(self._state, there, self._planner.values)
        held = {name: leaf.value for name, leaf in self._inside.leaves.items()}
        self._enums = [type(value) for value in held.values() if isinstance(value, Enum)]
        which = f"{zlib.crc32(content):08x}"
        found = find_mismatches(held, there, self._strict, which, of_optimizers=self._inside)
        if not found.wrong:
            self._check_chunks(folder, {n: x for n, x in held.items() if n in there}, checksums)
        return found

    def _read_values(
        self,
        folder: Path,
        names: list[str],
        checksums: Checksums | None,
        pieces: dict[str, Piece] | None = None,
    ) -> None:
        """Check the chunks of these values, and of `pieces`, and read the values.

        Raises:
            ValueError: a chunk is missing or damaged.
        """
        from .dcp_format import LoadPieces

        planner = LoadPieces(pieces or {}, names, self._reader, self._weights_only, self._enums)
        self._planner = planner
        self._tensors, plan_of_values = planner.plan_tensors(), planner.plan_values()
        places = [self._reader.places(plan) for plan in (self._tensors, plan_of_values)]
        if checksums is not None:
            checksums.check_chunks(folder, [*places[0], *places[1]])
        else:
            planner.trial = True
            self._reader.read(self._tensors, planner)
        self._reader.read(plan_of_values, planner)

    def _check_chunks(
        self, folder: Path, wanted: dict[str, Any], checksums: Checksums | None
    ) -> None:
        """Raise ValueError if a chunk is missing or damaged. Reads the values, but stores none."""
        tensors = {name: x for name, x in wanted.items() if isinstance(x, torch.Tensor)}
        self._targets = LoadTargets()
        tensors = {name: self._targets.add(x) for name, x in tensors.items()}
        destinations = {name: destination(x) for name, x in tensors.items()}
        # Of a Partial sum the first rank gets the value, and the others get zeros.
        self._emptied = [x for name, x in tensors.items() if destinations[name] is None]
        pieces = {name: piece for name, piece in destinations.items() if piece is not None}
        values = [name for name in wanted if name not in tensors]
        self._read_values(folder, values, checksums, pieces)

    def finish(self) -> None:
        """Read the tensors in place, and load the other values into the state."""
        with local_ops(), torch.no_grad():
            for x in self._emptied:
                x.detach().zero_()
        self._planner.trial = False
        self._reader.read(self._tensors, self._planner)
        self._targets.finish()
        for name, value in self._planner.values.items():
            self._inside.leaves[name].value = value
        for load_back in self._inside.load_back:
            load_back()


class LoadTargets:
    """The tensors into which a checkpoint is read. View copies are written at the end."""

    def __init__(self) -> None:
        self._views: list[tuple[DTensor, DTensor]] = []
        self._others: list[torch.Tensor] = []

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the tensor into which the value of `x` is read: `x`, or a new tensor for a view
        copy.

        A view copy is written later (`finish`), because a write to it also writes its base.
        """
        if not isinstance(x, DTensor) or state_of(x).copied_view is None:
            self._others.append(x)
            return x
        with local_ops(), torch.no_grad():
            value = as_dtensor(x.detach().clone(), spec_of(x._spec.layout, x._spec.wire))
        self._views.append((x, value))
        return value

    def finish(self) -> None:
        """Writes the view copies, after all values were loaded."""
        # A rank has read nothing into an empty piece, but all ranks must make view copies again.
        increment_version([x for x in self._others if not x.is_inference()])
        with torch.no_grad():
            for x, value in self._views:
                x.copy_(value)


# -- mismatches ------------------------------------------------------------------------------------


@message
@dataclass(frozen=True)
class Loaded:
    """The names that `load` skipped on this rank. Without `strict=True` there may be some.

    Attributes:
        missing_keys: names in the state that the checkpoint lacks.
        unexpected_keys: names in the checkpoint that the state lacks.
    """

    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()


@message
@dataclass(frozen=True)
class Mismatches:
    """The differences between the state and the checkpoint, as one rank found them.

    Attributes:
        values: lines about tensors with another shape or dtype, and tensors in place of values.
        keys: lines about names that only the state or only the checkpoint has, one for each name or
            prefix. Names that `strict` allows to be missing have no line.
        skipped: all these names, with those that have no line.
        which: identifies the checkpoint, because another one may have had the same path before.
    """

    values: tuple[str, ...]
    keys: tuple[str, ...]
    skipped: Loaded
    which: str = ""

    @property
    def wrong(self) -> bool:
        """True if any of the differences is an error."""
        return bool(self.values or self.keys)


def find_mismatches(
    held: Mapping[str, Any],
    there: Mapping[str, Stored],
    strict: Strict,
    which: str = "",
    gives_memory: bool = False,
    tied: Mapping[str, Any] | None = None,
    of_optimizers: OpenedState | None = None,
) -> Mismatches:
    """Returns the differences between a state and a checkpoint.

    Args:
        held: the tensors and values of the state, by name.
        there: the metadata of the checkpoint's entries, by name.
        strict: decides which missing and unexpected names are errors (see `load`).
        which: identifies the checkpoint, because another one may have had the same path before.
        gives_memory: True if tensors on the meta device get memory before they are loaded.
        tied: shared tensors, by name. The checkpoint needs only one of the names of each.
        of_optimizers: the opened state, with the differences of its optimizers.
    """
    opened = of_optimizers or OpenedState()
    values = list(opened.wrong)
    for name, value in held.items():
        if name not in there:
            continue
        here, stored = str(Stored.of(value)), str(there[name])
        if here != stored:
            values.append(f"{name}: {stored} in the checkpoint, {here} in the state")
        elif isinstance(value, torch.Tensor) and value.is_meta and not gives_memory:
            values.append(f"{name}: on the meta device, which has no memory to load into")
    found = {id(x) for name, x in (tied or {}).items() if name in there and torch.is_tensor(x)}
    optional = {name for name, x in (tied or {}).items() if id(x) in found}
    missing = [
        name
        for name in held
        # Old checkpoints do not record the kinds of containers.
        if name not in there and name not in optional and not name.endswith(f".{KIND}")
    ]
    missing += opened.missing
    extra = [name for name in there if name not in held and not _is_below(name, opened.unexpected)]
    extra += opened.unexpected
    keys: list[str] = []
    if strict:
        keys += _describe_names(missing, {*there}, "in the state, not in the checkpoint")
    if strict is True:
        keys += _describe_names(extra, {*held}, "in the checkpoint, not in the state")
    return Mismatches(tuple(values), tuple(keys), Loaded(tuple(missing), tuple(extra)), which)


def _is_below(name: str, others: Iterable[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)


_MOST_LISTED = 4
"""Names with one beginning that are listed one by one."""


def _describe_names(names: list[str], others: Set[str], where: str) -> list[str]:
    """Returns a line for each of `names`; one line for many with the same first parts.

    Args:
        others: the names of the other side. None of them begins with these common parts.
    """
    taken = {one[:i] for one in others for i in range(len(one) + 1) if one[i : i + 1] in (".", "")}
    groups: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        heads = (".".join(parts[:i]) for i in range(1, len(parts)))
        head = next((one for one in heads if one not in taken), name)
        groups.setdefault(head, []).append(name)
    lines = []
    for head, below in groups.items():
        if len(below) <= _MOST_LISTED:
            lines += [f"{name}: {where}" for name in below]
        else:
            lines.append(f"{head} ({len(below)} names, such as {below[0]}): {where}")
    return lines


def agree_on_mismatches(
    decide: Decide, found: Mismatches | Exception, path: str, line: str
) -> Loaded:
    """Raises an error on all ranks if any rank cannot load; returns the names to skip.

    Args:
        decide: `ControlPlane.decide` for this load, as a function of `mine` and `answer`.
        found: what this rank found, or the exception that it raised.
        path: the path of the checkpoint, for the error.
        line: the user's "file:line", for the error.

    Raises:
        LayoutError: some ranks found mismatches. Every rank raises it, with all mismatches.
        ValueError: ranks have read different checkpoints at that path.
    """

    def merge_mismatches(gathered: list[Mismatches]) -> list[Loaded]:
        values = tuple(dict.fromkeys(one for rank in gathered for one in rank.values))
        keys = tuple(dict.fromkeys(one for rank in gathered for one in rank.keys))
        fixes = []
        if values:
            fixes.append(Fix("load into the shapes and dtypes that were saved, then cast"))
        if keys:
            if not any(rank.skipped.missing_keys for rank in gathered):
                fixes.append(Fix('strict="state"', "loads only what the state has"))
            fixes.append(Fix("strict=False", "loads the names that both have"))
        if fixes:
            raise LayoutError(
                f"the checkpoint {path} does not fit the state",
                place=line,
                operands=values + keys,
                fixes=tuple(fixes),
            )
        if len({rank.which for rank in gathered}) > 1:
            raise ValueError(f"{path} was replaced while the ranks began to read it: load it again")
        return [rank.skipped for rank in gathered]

    result: Loaded = decide(found, merge_mismatches)
    return result
