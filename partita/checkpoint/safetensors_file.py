"""Safetensors files: a whole model into one, and one or several into the shards of a model.

A file is eight bytes with the length of a header, the header (JSON: of each name the dtype, the
shape and the place of its bytes) and the bytes (https://github.com/huggingface/safetensors). It is
written tensor by tensor, which the safetensors package does not offer, and read with the package.
Files written here have checksums in the header's metadata: a CRC-32 of each tensor, and one of the
header, in hexadecimal digits.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from partita.comm import ControlPlane, Piece, control_plane, user_line
from partita.comm.device import HOST, view_bytes
from partita.parallel.parameters import initialize_missing
from partita.tensor.dtensor import piece_held

from .folder import Replacement, compute_crcs, lock_for_reading
from .full_state import (
    allocate_meta_tensors,
    collect_model_tensors,
    gather_full_value,
    remove_tied_names,
)
from .loading import Loaded, Mismatches, agree_on_mismatches, attempt, find_mismatches
from .state import Stored, open_state

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_CHECKSUMS = "partita_crc32"
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def save_safetensors(model: nn.Module | Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write all tensors of `model` into the file `path`, whole, as any program can read them.

    Every rank calls this; rank 0 writes. Tensors are gathered one after the other, so that no rank
    holds more than one whole tensor beside its own shards. The file appears when it is complete.

    Args:
        model: a module, or nested dicts of tensors, whose names are joined by dots.

    Raises:
        ValueError: something that is no tensor, or of a dtype that the format does not have.
        OSError: the disk; on every rank.
    """
    ranks, home = control_plane(), Path(os.path.abspath(path))
    tensors = _tensors_by_name(model)
    problem = next((p for name, x in tensors.items() if (p := _find_problem(name, x))), None)

    new: list[Replacement] = []  # on rank 0

    def start_replacement(brought: list[None]) -> list[None]:
        new.append(Replacement(home))
        return brought

    def publish_replacement(brought: list[None]) -> list[None]:
        new[0].publish()
        return brought

    ranks.decide(ValueError(problem) if problem else None, start_replacement)
    try:
        # Wide elements first: each tensor then lies at a multiple of its own element's size.
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        header = _make_header({name: tensors[name] for name in order})
        contents = (view_bytes(_copy_full_to_cpu(tensors[name])) for name in order)
        failed = attempt(lambda: _write_file(new[0].written, header, contents)) if new else None
        for _ in contents:  # a rank that does not write, or no more, takes part in gathering
            pass
        ranks.decide(failed, publish_replacement)
    finally:
        for one in new:
            one.discard()


def load_safetensors(
    model: nn.Module | Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    init_fn: Callable[[nn.Module], Any] | None = None,
) -> Loaded:
    """Read `path` into the tensors of `model`, in place; each rank reads its pieces alone.

    Every rank calls this. Needs the package safetensors (`pip install partita[train]`).

    What of a module is on the meta device gets memory now, piece by piece. What no file has then (a
    buffer that is not persistent; with `strict=False` a parameter that is missing) gets its first
    value from `init_fn`, called with the module that holds it, else from that module's own
    `reset_parameters`, or from an enclosing model's `_init_weights`.

    Args:
        model: a module, or nested dicts of tensors, whose names are joined by dots.
        path: a file, the index of several (`model.safetensors.index.json`), or a folder that has
            either.
        strict: whether names that only one side has are errors. Of a parameter with several names
            one is enough.

    Returns:
        The names that were passed over.

    Raises:
        LayoutError: everything that does not fit, in one error, on every rank. Nothing has changed.
            Or, when all else is loaded: what is on the meta device and nothing gave a value.
        OSError: there is no such file.
        ValueError: it is no safetensors file, or is damaged, where `save_safetensors` wrote it; a
            tensor of `model` is pending. Nothing has changed.
    """
    with contextlib.ExitStack() as held:
        passed_over = _load_files(model, Path(os.path.abspath(path)), strict, held)
    if isinstance(model, nn.Module):
        initialize_missing(model, init_fn)
    return passed_over


def _load_files(
    model: nn.Module | Mapping[str, Any], path: Path, strict: bool, held: contextlib.ExitStack
) -> Loaded:
    ranks, line = control_plane(), user_line()
    files: dict[str, Any] = {}

    def compare_files() -> Mismatches:
        files.update(_open_files(path, held, ranks))
        there = {name: _describe_stored(file.get_slice(name)) for name, file in files.items()}
        objects = _tensors_by_name(model)
        fits = find_mismatches(objects, there, strict, gives_memory=isinstance(model, nn.Module))
        return remove_tied_names(fits, objects, there)

    def read_tensors() -> None:
        if isinstance(model, nn.Module):
            allocate_meta_tensors(model, files)
        for name, x in _tensors_by_name(model).items():
            if name in files:
                _read_piece(files[name], name, piece_held(x))

    passed_over = agree_on_mismatches(ranks, attempt(compare_files), os.fspath(path), line)
    ranks.decide(attempt(read_tensors), lambda brought: brought)
    return passed_over


def _open_files(path: Path, held: contextlib.ExitStack, ranks: ControlPlane) -> dict[str, Any]:
    """By the name of each tensor, the file that has it. The ranks divide the checking of checksums.

    Args:
        held: holds the locks that keep the files from being replaced.

    Raises:
        OSError: there is nothing; the index names a file that is not there.
        ValueError: it is no safetensors file, or is damaged; or no index.
    """
    from safetensors import SafetensorError, safe_open

    found = {}
    for one, names in _listed_files(path):
        if os.access(one.parent, os.W_OK):  # else there is no one who could replace it
            held.enter_context(lock_for_reading(one))
        try:
            file = safe_open(os.fspath(one), framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{one} is no safetensors file: {error}") from None
        has = list(file.keys())
        lost = [name for name in names or () if name not in has]
        if lost:
            raise ValueError(f"{one} has no {lost[0]}, though the index says so")
        found.update(dict.fromkeys(has if names is None else names, file))
        _check_file(one, ranks.rank, ranks.size)
    return found


def _read_piece(file: Any, name: str, piece: Piece) -> None:
    """Read the region of `piece` of the tensor `name` into its memory."""
    with torch.no_grad():
        if not piece.shape:
            piece.local.copy_(file.get_tensor(name))
        elif piece.local.numel():
            box = tuple(slice(at, at + length) for at, length in piece.region)
            piece.local.copy_(file.get_slice(name)[box])


def _listed_files(path: Path) -> list[tuple[Path, list[str] | None]]:
    """The files at `path`, each with the names to read of it; None: all that it has."""
    if path.is_dir():
        indices = sorted(path.glob("*.safetensors.index.json"))
        files = sorted(path.glob("*.safetensors"))
        if len(indices) != 1 and len(files) != 1:
            what = "no" if not files else "several"
            raise FileNotFoundError(f"{path} has {what} safetensors files, and not one index")
        path = indices[0] if len(indices) == 1 else files[0]
    if path.suffix != ".json":
        return [(path, None)]
    try:
        placed = json.loads(path.read_text())["weight_map"]
        names: dict[str, list[str]] = {}
        for name, file in placed.items():
            names.setdefault(file, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is no index of safetensors files: no weight_map") from None
    for file in names:
        if Path(file).name != file:  # an index speaks of files beside it, and of no others
            raise ValueError(f"{path}: {file!r} is not the name of a file beside it")
    return [(path.parent / file, each) for file, each in names.items()]


# -- the file --------------------------------------------------------------------------------------


def _write_file(path: Path, header: bytes, contents: Iterable[memoryview]) -> None:
    """Write a file, and flush it to the disk."""
    with path.open("wb") as file:
        file.write(header)
        crcs = []
        for content in contents:
            file.write(content)
            crcs.append(zlib.crc32(content))
        file.seek(0)
        file.write(_with_checksums(header, crcs))
        file.flush()
        os.fsync(file.fileno())


def _make_header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    blank = "0" * 8 * (len(tensors) + 1)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", _CHECKSUMS: blank}}
    end = 0
    for name, x in tensors.items():
        start, end = end, end + x.numel() * x.element_size()
        header[name] = {
            "dtype": _NAMES[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _with_checksums(header: bytes, crcs: Sequence[int]) -> bytes:
    """The header with checksums in the place of its blank; its own is taken with zeros there."""
    blank = b"0" * 8 * (len(crcs) + 1)
    digits = b"".join(b"%08x" % crc for crc in crcs)
    digits += b"%08x" % zlib.crc32(header.replace(blank, digits + b"0" * 8, 1))
    return header.replace(blank, digits, 1)


def _check_file(path: Path, turn: int, turns: int) -> None:
    """Compare a file with its checksums, if it has any: the header, and every `turns`-th tensor
    from `turn` on.

    Raises:
        ValueError: it is damaged.
    """
    with path.open("rb") as file:
        start = file.read(8)
        header = start + file.read(int.from_bytes(start, "little"))
    names = json.loads(header[8:])
    about = names.pop("__metadata__", {})
    key = next((k for k in about if "partita" in k or "crc32" in k), None)
    if key is None:  # of another program
        return
    digits = about[key].encode()
    last = len(digits) - 8
    own = header.replace(digits, digits[:last] + b"0" * 8, 1) if digits else b""
    if (
        key != _CHECKSUMS
        or len(digits) != 8 * (len(names) + 1)
        or b"%08x" % zlib.crc32(own) != digits[last:]
    ):
        raise ValueError(f"{path} is damaged: the checksum of its header is wrong")
    mine = [one for i, one in enumerate(enumerate(names)) if i % turns == turn]
    spans = [names[name]["data_offsets"] for _, name in mine]
    found = compute_crcs(path, [(len(header) + at, end - at) for at, end in spans])
    for (i, name), crc in zip(mine, found, strict=True):
        if crc is None or b"%08x" % crc != digits[8 * i : 8 * i + 8]:
            raise ValueError(f"{path} is damaged: the checksum of {name} is wrong")


def _describe_stored(there: Any) -> Stored:
    dtype = there.get_dtype()
    return Stored((), tuple(there.get_shape()), _DTYPES.get(dtype, dtype))


# -- the tensors -----------------------------------------------------------------------------------


def _tensors_by_name(model: nn.Module | Mapping[str, Any]) -> dict[str, Any]:
    """The tensors, of a module as its own objects."""
    if isinstance(model, nn.Module):
        return collect_model_tensors(model)
    return {name: leaf.value for name, leaf in open_state(model).leaves.items()}


def _find_problem(name: str, x: Any) -> str | None:
    if not isinstance(x, torch.Tensor):
        return f"{name} is a {type(x).__name__}: a safetensors file has tensors only"
    if x.is_meta:
        return f"{name} is on the meta device: it has no values to save"
    if x.dtype not in _NAMES:
        return f"{name}: a safetensors file has no {x.dtype}"
    return None


def _copy_full_to_cpu(x: torch.Tensor) -> torch.Tensor:
    return gather_full_value(x).to(HOST).contiguous()
