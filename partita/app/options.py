"""Options of a training run: one table, from which flags, config files and checkpoints are made."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from partita.checkpoint import is_checkpoint
from partita.comm.device import DEVICES, choose_device
from partita.report import check_written_folder

Mesh = tuple[tuple[str, int], ...]
"""Axis names and sizes; () for one device without a mesh."""

_LAST = "last"  # the checkpoint within --save DIR
_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "": 1}


# -- values as text --------------------------------------------------------------------------------


def read_mesh(text: str) -> Mesh:
    """Reads a mesh from `text`: "dp=2,tp=2" gives (("dp", 2), ("tp", 2)), and "" gives ().

    Raises:
        ValueError: an axis that is not "dp" or "tp", occurs twice, or has no number of ranks.
    """
    axes = []
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name not in ("dp", "tp") or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"{part!r} is not an axis: write dp=N, tp=N or dp=N,tp=N")
        axes.append((name, int(size)))
    if len({name for name, _ in axes}) < len(axes):
        raise ValueError(f"{text!r} names an axis twice")
    return tuple(axes)


def shown_mesh(mesh: Mesh) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh)


def _read_whole(text: str, least: float = -math.inf) -> int:
    """Returns a whole number, at least `least`."""
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None
    if number < least:
        raise ValueError(f"{number} is not a positive number" if least else f"{number} is below 0")
    return number


read_positive = partial(_read_whole, least=1)
_read_count = partial(_read_whole, least=0)


def _read_rate(text: str) -> float:
    """Returns a number above 0, and finite."""
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not 0 < number < math.inf:
        raise ValueError(f"{text} is not a positive number")
    return number


def _one_of(*allowed: Any) -> Callable[[str], Any]:
    known = {str(value): value for value in allowed}

    def read(text: str) -> Any:
        if text not in known:
            raise ValueError(f"{text!r} is not one of {', '.join(known)}")
        return known[text]

    return read


def _read_remat(text: str) -> str | int:
    """Reads the option --remat: "none", "blocks", or a number of bytes such as "64MiB"."""
    if text in ("none", "blocks"):
        return text
    for unit, size in _UNITS.items():
        number = text.removesuffix(unit).strip()
        if text.endswith(unit) and number.isdecimal():
            return int(number) * size
    raise ValueError(f"{text!r} is neither none nor blocks nor a budget such as 64MiB")


def _shown_remat(remat: str | int) -> str:
    if isinstance(remat, str):
        return remat
    unit, size = next((unit, size) for unit, size in _UNITS.items() if remat % size == 0)
    return f"{remat // size}{unit}"


# -- the table -------------------------------------------------------------------------------------


def _option(
    default: Any,
    what: str,
    read: Callable[[str], Any] = str,
    *,
    show: Callable[[Any], str | int | float] | None = None,
    metavar: str | None = None,
    alone: str | None = None,
) -> Any:
    """Returns one option: its default, its purpose, and how text becomes its value and back.

    Args:
        alone: the value of the flag without an argument.
    """
    facts = {"what": what, "read": read, "show": show, "metavar": metavar, "alone": alone}
    return field(default=default, metadata=facts)


@dataclass(frozen=True)
class Options:
    """The options of a training run. `partita train --help` shows the same table.

    A field's value may be invalid. `check` raises an error for it.
    """

    mesh: Mesh = _option(  # noqa: RUF009  it returns a field
        (), "dp splits the batch, tp the weights", read_mesh, show=shown_mesh, metavar="dp=2,tp=2"
    )
    data: Path | None = _option(  # noqa: RUF009
        None, "a folder of text, or a file (Python's standard library)", Path, show=str
    )
    steps: int = _option(600, "number of optimizer steps", read_positive)
    seed: int = _option(0, "seed of weights, batches and the sample", _read_whole)
    batch: int = _option(16, "sequences per step on all ranks", read_positive)
    context: int = _option(128, "bytes per sequence", read_positive)
    layers: int = _option(4, "number of blocks", read_positive)
    width: int = _option(128, "width of the residual stream", read_positive)
    heads: int = _option(4, "attention heads per block", read_positive)
    lr: float = _option(
        2e-3, "highest learning rate, reached in 20 steps; then a cosine", _read_rate
    )
    zero: int = _option(
        0,
        "shard over dp: 1 optimizer state, 2 also gradients, 3 also parameters",
        _one_of(0, 1, 2, 3),
        metavar="STAGE",
    )
    sp: bool = _option(False, "sequence parallelism: tp splits the sequence between blocks")
    remat: str | int = _option(
        "none",
        "recompute in backward: none, blocks, or what exceeds a budget such as 64MiB (of "
        "activations; with --compile, of the whole step)",
        _read_remat,
        show=_shown_remat,
        metavar="WHAT",
        alone="blocks",
    )
    dtype: str = _option(
        "fp32", "dtype of compute: fp32 or bf16; weights are in fp32", _one_of("fp32", "bf16")
    )
    device: str = _option(
        "auto", "auto, cpu or cuda; auto uses GPUs if there are any", _one_of(*DEVICES)
    )
    machine: str | None = _option(
        None,
        "the machine, to compute MFU: h100, h200, a100, or a TOML file",
        metavar="NAME",
    )
    compile: bool = _option(False, "compile the step as one graph, which is faster and sends less")
    cuda_graphs: bool = _option(
        True, "with --compile on GPUs: launch a step's kernels as one CUDA graph"
    )
    accumulate: int = _option(1, "number of micro-batches in each batch", read_positive)
    save: Path | None = _option(  # noqa: RUF009
        None, "save checkpoints in this folder", Path, show=str, metavar="DIR"
    )
    save_every: int = _option(100, "steps between checkpoints; 0: only at the end", _read_count)
    resume: bool = _option(False, "resume from the checkpoint in --save DIR, if there is one")
    detect_nan: bool = _option(False, "name the module that made the first NaN (slower)")
    check_ranks: bool = _option(False, "compare the ranks' calls before each collective (slower)")
    sample: int = _option(200, "bytes of text to generate at the end", _read_count)
    log: Path | None = _option(  # noqa: RUF009
        None, "write a JSON object for each step to this file", Path, show=str, metavar="FILE"
    )
    report: Path | None = _option(  # noqa: RUF009
        None,
        "write a page about the run to this file (needs plotly)",
        Path,
        show=str,
        metavar="FILE",
    )
    tensorboard: Path | None = _option(  # noqa: RUF009
        None, "log to TensorBoard, if it is installed", Path, show=str, metavar="DIR"
    )
    wandb: str | None = _option(
        None, "log to Weights & Biases, if it is installed", metavar="PROJECT"
    )
    mlflow: str | None = _option(None, "log to MLflow, if it is installed", metavar="EXPERIMENT")

    @property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.mesh)

    @property
    def flops_of_step(self) -> float:
        """Floating-point operations of a step, on all ranks together, without recomputation.

        Each element of a matrix is multiplied three times per token: once in forward, and twice in
        backward. Attention is causal, so a token attends to half of the others. (Chowdhery et al.,
        arXiv 2204.02311, appendix B, count all of them.)
        """
        matrices = 12 * self.layers * self.width**2 + 256 * self.width
        attention = 6 * self.layers * self.width * self.context
        return float((6 * matrices + attention) * self.batch * self.context)

    @property
    def checkpoint(self) -> Path | None:
        """The path of the run's checkpoint; None without `--save`."""
        return None if self.save is None else self.save / _LAST

    def check(self) -> None:
        """Raises an error for invalid options, before any rank starts.

        Raises:
            ValueError: options that do not fit each other, or that name a file or a folder that
                cannot be used. The error names the flag.
        """
        if self.width % (2 * self.heads):
            near = 2 * self.heads * max(1, round(self.width / (2 * self.heads)))
            raise ValueError(
                f"--width {self.width} does not divide into --heads {self.heads} of an even size; "
                f"--width {near} does"
            )
        choose_device(self.device)
        # On one rank a configuration for many runs; of many, some other axis was meant.
        shown, axes = f"--mesh {shown_mesh(self.mesh)}", dict(self.mesh)
        if self.zero and "dp" not in axes and axes:
            raise ValueError(f"--zero {self.zero} shards over dp, and {shown} has none")
        if self.sp and "tp" not in axes and axes:
            raise ValueError(f"--sp splits the sequence over tp, and {shown} has none")
        if self.compile and self.detect_nan:
            raise ValueError("--detect-nan checks modules, and a --compile step has none")
        if self.batch % self.accumulate:
            raise ValueError(
                f"--batch {self.batch} does not divide into --accumulate {self.accumulate} "
                "micro-batches of one size"
            )
        if self.data is not None and not self.data.exists():
            raise ValueError(f"--data: there is no {self.data}")
        if self.resume and self.save is None:
            raise ValueError("--resume goes on from the checkpoint in --save DIR: name the folder")
        if self.save is not None:
            check_written_folder(self.save, "--save")
        if self.checkpoint is not None and is_checkpoint(self.checkpoint) and not self.resume:
            raise ValueError(
                f"--save: {self.save} holds a checkpoint already; --resume goes on from it"
            )

    def leave_out_idle(self) -> tuple[Options, list[str]]:
        """Returns the options without those that have no effect on a single rank.

        Also returns a line for the user about each of these.
        """
        idle = {}
        if self.zero and not self.mesh:
            idle["zero"] = f"--zero {self.zero} has no effect on one rank, which shards nothing"
        if self.sp and not self.mesh:
            idle["sp"] = "--sp has no effect on one rank, which splits nothing"
        return replace(self, **dict.fromkeys(idle, 0)), list(idle.values())  # type: ignore[arg-type]

    # -- as a file -------------------------------------------------------------------------------

    def to_toml(self) -> str:
        """Returns the options as TOML text, with comments, which `options_in` reads."""
        lines = []
        for one in fields(self):
            value, show = getattr(self, one.name), one.metadata["show"]
            key = flag(one.name)
            if value is None:
                line = f'# {key} = "{one.metadata["metavar"] or "PATH"}"'
            else:
                # TOML's strings, numbers and booleans are written as JSON's are.
                line = f"{key} = {json.dumps(value if show is None else show(value))}"
            lines.append(f"{line:<24}  # {one.metadata['what']}")
        return "\n".join(lines) + "\n"


def flag(name: str) -> str:
    """Returns the command-line name of an option's field: "save_every" gives "save-every"."""
    return name.replace("_", "-")


def options_in(text: str, source: str = "config") -> dict[str, Any]:
    """Returns the options in the text of a TOML file, as keyword arguments of `Options`.

    Args:
        source: the name of the file in errors.

    Raises:
        ValueError: invalid TOML, an unknown option, or an invalid value.
    """
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source}: {error}") from None
    known = {flag(one.name): one for one in fields(Options)}
    found = {}
    for key, value in given.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1) or [", ".join(known)]
            raise ValueError(f"{source}: there is no option {key}; there is {near[0]}")
        found[known[key].name] = _value_of(known[key], value, f"{source}: {key}")
    return found


def _value_of(option: Any, value: Any, where: str) -> Any:
    is_switch = isinstance(option.default, bool)
    if is_switch is not isinstance(value, bool) or not isinstance(value, (bool, int, float, str)):
        wanted = "true or false" if is_switch else "a number or a string"
        raise ValueError(f"{where} = {value!r}: takes {wanted}")
    if is_switch:
        return value
    try:
        return option.metadata["read"](str(value))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
