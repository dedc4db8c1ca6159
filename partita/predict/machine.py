"""Machines: the speed of a rank's processor, memory and links, and the fraction that kernels reach.

A machine is a TOML file. Three from public data sheets are included (`h100`, `h200`, `a100`).
`partita calibrate` writes one for your own machine. Amounts are numbers in base units (bytes,
seconds, operations per second) or text with a unit: "3.35 TB/s", "20 us", "989 TFLOP/s".
Collectives are priced by formulas of rings and trees over a link. Kernels are priced by a curve of
their rate if one was measured, otherwise by the roofline (`simulate`).
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import fx

from partita.layout.text import describe_value

_FOLDER = Path(__file__).with_name("machines")
_EFFICIENCIES = ("matmul", "attention", "memory", "link")
"""Kinds of work for which a machine states the fraction of the peak that it reaches."""
_POWERS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_UNITS: dict[str, dict[str, float]] = {
    "bytes": {f"{p}B": n for p, n in (_POWERS | _BINARY).items()},
    "bytes per second": {f"{p}B/s": n for p, n in (_POWERS | _BINARY).items()},
    "operations per second": {f"{p}FLOP/s": n for p, n in _POWERS.items()},
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    "parts": {"%": 1e-2},
}


class MachineError(ValueError):
    """An unknown machine, or an invalid machine file."""


def is_number(value: Any) -> bool:
    """True if `value` is a number that a float can hold. A bool is not a number here."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


@dataclass(frozen=True)
class Kind:
    """A check of an argument's value: which values are allowed.

    Attributes:
        allowed: a description of them, for errors.
        has: a function that returns True for an allowed value.
    """

    allowed: str
    has: Callable[[Any], bool]

    def check(self, name: str, value: Any, error: type[ValueError]) -> None:
        """Raises `error`, with `name`, `value` and what is allowed, unless the value is allowed."""
        if not self.has(value):
            raise error(f"{name} is {describe_value(value)}: {self.allowed}")


def _kind_of_count(least: int) -> Kind:
    """Returns the kind of whole numbers that are at least `least`."""
    return Kind(
        f"a whole number, at least {least}",
        lambda v: isinstance(v, Integral) and not isinstance(v, bool) and int(v) >= least,
    )


TEXT = Kind("a text", lambda value: isinstance(value, str))
CHOICE = Kind("True or False", lambda value: isinstance(value, bool))
COUNT, COUNT_OR_NONE_AT_ALL = _kind_of_count(1), _kind_of_count(0)
_FIGURE = Kind("a number, at least 0", lambda value: is_number(value) and value >= 0)
_LINK = Kind("a Link", lambda value: isinstance(value, Link))
_CURVE = Kind("a MeasuredCurve", lambda value: isinstance(value, MeasuredCurve))


def check_fields(of: object, error: type[ValueError], kinds: Mapping[str, Kind]) -> None:
    """Raises `error` for the first attribute of `of` that has a value which is not allowed.

    Args:
        kinds: maps the name of an attribute, or several names separated by blanks, to the kind.
    """
    for names, kind in kinds.items():
        for name in names.split():
            kind.check(name, getattr(of, name), error)


@dataclass(frozen=True)
class MeasuredCurve:
    """Seconds as a function of an amount of work, interpolated between measured points.

    Attributes:
        amounts: bytes or operations, in increasing order.
        seconds: the time of each amount.

    Raises:
        ValueError: there is no point, the amounts do not increase, or a time is not positive.
    """

    amounts: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.amounts or len(self.amounts) != len(self.seconds):
            raise ValueError("must have as many amounts as seconds, at least one")
        if self.amounts[0] < 0 or [*self.amounts] != sorted({*self.amounts}):
            raise ValueError("must have amounts that rise, from 0 or more")
        if min(self.seconds) <= 0:
            raise ValueError("has seconds that are not above 0")

    def seconds_of(self, amount: float) -> float:
        """Returns the seconds for an amount of work (bytes or operations), by interpolation.

        An amount below the first point takes the first point's seconds. Beyond the last point, the
        line through the last two points is extended.
        """
        last = len(self.amounts) - 1
        if amount <= self.amounts[0] or not last:
            return self.seconds[0]
        right = min(bisect_left(self.amounts, amount), last)
        (a, b), (s, t) = self.amounts[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        # A larger amount must not be faster, even if the last two points have noise.
        return max(s + (t - s) * (amount - a) / (b - a), s)


def fit_curve(points: Sequence[tuple[float, float]]) -> MeasuredCurve:
    """Returns a curve through measured points `(amount, seconds)`, given in any order.

    Seconds never decrease: if a larger amount was faster, it gets the seconds of the smaller one.
    """
    amounts: list[float] = []
    seconds: list[float] = []
    for amount, taken in sorted(points):
        amounts.append(amount)
        seconds.append(max(taken, seconds[-1] if seconds else 0.0))
    return MeasuredCurve(tuple(amounts), tuple(seconds))


@dataclass(frozen=True)
class Machine:
    """The speed and memory of the hardware on which a rank runs.

    Attributes:
        name: the usual name.
        source: where the figures come from.
        memory_bytes: a rank's memory.
        memory_bandwidth: peak bytes per second that kernels read and write.
        kernel_seconds: the fixed cost of a kernel.
        fuses: True if adjacent element-wise kernels are compiled into one, as Inductor does.
        ranks_per_host: the number of ranks that the link `host` connects. `network` connects
            others.
        flops: peak operations per second, by dtype ("bfloat16", "float32").
        efficiency: the fraction of a peak that kernels reach, for each of `_EFFICIENCIES`.
        host: the link within a host.
        network: the link between hosts.
        links: the links that replace `host`, `network` and measurements, by the axes of a
            collective ("dp", or several separated by blanks). `efficiency` is not applied to them.
        overlaps: True if collectives run beside kernels without slowing them, as on GPUs.
        straggling: how late the slowest rank arrives at a collective, as a fraction of computing
            time.
        step_seconds: the host's time per step in addition to kernels and collectives.
        kernels: measured seconds by amount, for kinds of kernels (see `RATES`). Other kernels are
            priced by the roofline.
        collectives: measured seconds by bytes that a rank sends, by kind and number of ranks
            ("all_gather-4"). Others are priced as rings and trees with the links' figures.

    Raises:
        MachineError: a field has a wrong type. The error names it.
    """

    name: str
    source: str
    memory_bytes: float
    memory_bandwidth: float
    kernel_seconds: float
    fuses: bool
    ranks_per_host: int
    flops: Mapping[str, float]
    efficiency: Mapping[str, float]
    host: Link
    network: Link
    overlaps: bool = True
    straggling: float = 0.0
    step_seconds: float = 0.0
    kernels: Mapping[str, MeasuredCurve] = field(default_factory=dict)
    collectives: Mapping[str, MeasuredCurve] = field(default_factory=dict)
    links: Mapping[str, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        figures = "memory_bytes memory_bandwidth kernel_seconds straggling step_seconds"
        kinds = {"name source": TEXT, "fuses overlaps": CHOICE, "host network": _LINK}
        check_fields(self, MachineError, {**kinds, figures: _FIGURE, "ranks_per_host": COUNT})
        tables = {"kernels": _CURVE, "collectives": _CURVE, "links": _LINK}
        for name, kind in {"flops": _FIGURE, "efficiency": _FIGURE, **tables}.items():
            table = getattr(self, name)
            if not isinstance(table, Mapping):
                said = f"{name} is {describe_value(table)}"
                raise MachineError(f"{said}: {kind.allowed} by name, in a dictionary")
            for key, value in table.items():
                TEXT.check(f"a key of {name}", key, MachineError)
                kind.check(f"{name}[{describe_value(key)}]", value, MachineError)
        axes = [sorted(name.split()) for name in self.links]
        for place, name in enumerate(self.links):
            if axes[place] in axes[:place]:
                raise MachineError(f"links has two for the axes {name!r}: one serves any order")
        if not self.flops:
            in_a_file = 'bfloat16 = "989 TFLOP/s" in a file'
            raise MachineError(f"flops names no dtype: {{'bfloat16': 989e12}}, or {in_a_file}")
        for name in _EFFICIENCIES:
            if name not in self.efficiency:
                raise MachineError(f"efficiency has no {name!r}: a part of the peak, at most 1")

    def peak_flops(self, dtype: str) -> float:
        """Returns the peak operations per second for a dtype; the slowest dtype's if unknown."""
        return self.flops.get(dtype, min(self.flops.values()))

    def name_kernel(self, name: str) -> str:
        """Returns the name of the kernel that this machine runs for the kernel `name` of a graph.

        If torch had no GPU during the capture, the graph contains the CPU's fused attention. The
        GPU's kernel has the same operands and results.
        """
        return name.replace("_for_cpu", "") if self.overlaps else name

    def given_link(self, axes: Sequence[str]) -> Link | None:
        """Returns the link that the file or the user sets for exactly these axes, or None."""
        for name, link in self.links.items():
            if sorted(name.split()) == sorted(axes):
                return link
        return None

    def reached_link(self, axes: Sequence[str], mesh: Mapping[str, int]) -> Link:
        """Returns the latency and bandwidth that collectives over these axes reach in practice.

        They are the figures of a link in `links`, or a fraction (`efficiency`) of the slowest
        link's.

        Args:
            axes: the axes of the collective.
            mesh: the size of each axis, outermost first.
        """
        given = self.given_link(axes)
        if given is not None:
            return given
        link = self.link_of(axes, mesh)
        return Link(link.latency, link.bandwidth * self.efficiency["link"])

    def link_of(self, axes: Sequence[str], mesh: Mapping[str, int]) -> Link:
        """Returns the slowest link that a collective over these mesh axes uses, at its peak speed.

        It is `host` if each collective stays within a host. Otherwise a collective runs several
        rings, one for each of its ranks on a host, and each ring uses a network port of its own. So
        its bandwidth is `network`'s bandwidth times the number of rings, but at most `host`'s.
        (Eight ports of 25 GB/s were measured to carry 192 GB/s: github.com/NVIDIA, issue 812 of the
        collectives' library.)

        Args:
            axes: the axes of the collective.
            mesh: the size of each axis, outermost first. Ranks are counted row-major, and
                `ranks_per_host` consecutive ranks share a host.
        """
        if self._is_within_hosts(axes, mesh):
            return self.host
        rings = self._count_neighbours(axes, mesh)
        if rings == 1:
            return self.network
        bandwidth = min(self.host.bandwidth, rings * self.network.bandwidth)
        return Link(self.network.latency, bandwidth)

    def is_each_on_its_host(self, axes: Sequence[str], mesh: Mapping[str, int]) -> bool:
        """True if no two ranks of a collective over these axes share a host.

        False if a link is given for these axes.

        Args:
            axes: the axes of the collective.
            mesh: the size of each axis, outermost first.
        """
        if self.given_link(axes) is not None or self._is_within_hosts(axes, mesh):
            return False
        inner = 1  # the product of the axes after the last one in `axes`
        for name, size in reversed([*mesh.items()]):
            if name in axes:
                break
            inner *= size
        return inner % self.ranks_per_host == 0

    def _is_within_hosts(self, axes: Sequence[str], mesh: Mapping[str, int]) -> bool:
        """True if every ring over these axes is inside one host."""
        span, inner = 1, 1  # the consecutive ranks that contain a ring; those of all axes so far
        for name, size in reversed([*mesh.items()]):
            inner *= size
            if name in axes:
                span = inner
        # If `span` does not divide the ranks of a host, a ring may lie on two hosts.
        return self.ranks_per_host % span == 0 or inner <= self.ranks_per_host

    def _count_neighbours(self, axes: Sequence[str], mesh: Mapping[str, int]) -> int:
        """Returns how many ranks of a collective share a host; 1 if hosts split such groups."""
        left, found = self.ranks_per_host, 1
        for name, size in reversed([*mesh.items()]):
            here = math.gcd(size, left)
            if here != min(size, left):
                return 1
            found *= here if name in axes else 1
            left //= here
            if here < size:
                break
        return found


def shipped_machines() -> list[str]:
    """Returns the names of the machines that partita includes."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load_machine(name: str | Path | Machine) -> Machine:
    """Returns a machine by its name, or from the TOML file at a path. Returns a `Machine` as it is.

    Raises:
        MachineError: no such machine; or the file has an unknown or missing key, an amount in a
            wrong unit, or an amount that is not positive. The error names the key.
    """
    if isinstance(name, Machine):
        return name
    known = ", ".join(shipped_machines())
    if not isinstance(name, str | Path):
        said = f"machine is {describe_value(name)}: the name of a shipped one ({known})"
        raise MachineError(f"{said}, the path of a TOML file or a Machine")
    path = Path(name)
    if str(name) in shipped_machines():
        path = _FOLDER / f"{name}.toml"
    elif not os.path.isfile(path):  # also False for text that is not a valid path
        raise MachineError(
            f"no machine {describe_value(str(name))}: it is neither shipped ({known}) nor a file; "
            f"`partita calibrate --out machine.toml` measures this one"
        )
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, OSError, RecursionError) as error:
        raise MachineError(f"{path}: {error}") from None
    try:
        return _read_machine(found)
    except MachineError as error:
        raise MachineError(f"{path}: {error}") from None


def read_link(text: str) -> tuple[str, Link]:
    """Reads a link from a text such as "dp=10 us,50 GB/s". Returns the axes and the link.

    Raises:
        MachineError: the text cannot be read. The error says why.
    """
    axes, _, figures = text.partition("=")
    amounts = figures.split(",")
    if not axes.strip() or len(amounts) != 2:
        raise MachineError(f"{text!r} is not a link: write dp=10us,50GB/s")
    table = dict(zip(("latency", "bandwidth"), (a.strip() for a in amounts), strict=True))
    try:
        return " ".join(axes.split()), _read_link(axes.strip(), table)
    except MachineError as error:
        raise MachineError(f"--link: {error}") from None


# -- contents of a file ----------------------------------------------------------------------------

_Read = Callable[[str, Any], Any]
"""Called with a key and its value, which it reads. Raises MachineError, naming the key."""


def _read_machine(found: Mapping[str, Any]) -> Machine:
    read = _table_of(
        {
            **dict.fromkeys(("name", "source", "fuses", "ranks_per_host"), _as_it_is),
            "memory_bytes": read_amount("bytes"),
            "memory_bandwidth": read_amount("bytes per second"),
            "kernel_seconds": read_amount("seconds"),
            "flops": _rows_of(read_amount("operations per second"), _check_dtype),
            "efficiency": _table_of(dict.fromkeys(_EFFICIENCIES, _read_share)),
            "host": _read_link,
            "network": _read_link,
        },
        {
            "overlaps": _as_it_is,
            "straggling": read_amount("parts"),
            "step_seconds": read_amount("seconds"),
            "kernels": _table_of({}, dict.fromkeys(RATES, _read_curve)),
            "collectives": _rows_of(_read_curve, _check_collective),
            "links": _rows_of(_read_link),
        },
    )
    return Machine(**read("", found))


def _table_of(needed: Mapping[str, _Read], also: Mapping[str, _Read] | None = None) -> _Read:
    known = {**needed, **(also or {})}

    def read(key: str, found: Any) -> dict[str, Any]:
        _check_table(key, found)
        of = f"{key}." if key else ""
        for name in needed:
            if name not in found:
                raise MachineError(f"{of}{name} is missing")
        for name in found:
            if name not in known:
                raise MachineError(f"{of}{name} is not known: {', '.join(known)} are")
        return {name: known[name](f"{of}{name}", value) for name, value in found.items()}

    return read


def _check_table(key: str, found: Any) -> None:
    if not isinstance(found, dict):
        raise MachineError(f"{key} is a table: write [{key}]")


def _rows_of(read: _Read, check_name: Callable[[str, str], None] | None = None) -> _Read:
    """Returns a reader of a TOML table whose values `read` reads, under any names.

    Args:
        check_name: raises an error for a name that is not allowed; None allows all.
    """

    def read_rows(key: str, found: Any) -> dict[str, Any]:
        _check_table(key, found)
        if check_name is not None:
            for name in found:
                check_name(f"{key}.{name}", name)
        return {name: read(f"{key}.{name}", value) for name, value in found.items()}

    return read_rows


def _read_link(key: str, found: Any) -> Link:
    amounts = {"latency": read_amount("seconds"), "bandwidth": read_amount("bytes per second")}
    return Link(**_table_of(amounts)(key, found))


def _check_dtype(key: str, name: str) -> None:
    if str(getattr(torch, name, None)) != f"torch.{name}":  # torch.half says float16
        raise MachineError(f"{key} is not a dtype of torch: bfloat16, float32")


def _check_collective(key: str, name: str) -> None:
    kind, _, ranks = name.rpartition("-")
    if kind not in COLLECTIVES or not re.fullmatch("[1-9][0-9]*", ranks):
        known = f"it is one of {', '.join(COLLECTIVES)}, and the number of ranks: all_gather-4"
        raise MachineError(f"{key} is not known: {known}")


def _read_curve(key: str, found: Any) -> MeasuredCurve:
    rows = _table_of({"amounts": _read_row, "seconds": _read_row})(key, found)
    try:
        return MeasuredCurve(**rows)
    except ValueError as error:
        raise MachineError(f"{key} {error}") from None


def _read_row(key: str, found: Any) -> tuple[float, ...]:
    if not isinstance(found, list):
        raise MachineError(f"{key} is {describe_value(found)}, not of type list")
    if not all(is_number(value) and math.isfinite(value) for value in found):
        raise MachineError(f"{key} is {found!r}, not all of it numbers")
    return tuple(map(float, found))


def read_amount(what: str) -> _Read:
    """Returns a function that reads a positive amount of "bytes", "seconds" or another unit.

    The function takes the key in the machine file and its value. It raises a MachineError if it
    cannot read the value. `what` is a key of `_UNITS`.
    """
    units = _UNITS[what]

    def read(key: str, value: Any) -> float:
        said = describe_value(value)
        if isinstance(value, str):
            match = re.fullmatch(r"([-+\d.eE]+)\s*(\S+)", value.strip())
            if match is None or match[2] not in units:
                raise MachineError(f"{key} is {said}, not an amount of {what}: {', '.join(units)}")
            try:
                number = float(match[1]) * units[match[2]]
            except ValueError:  # only signs and dots, without a digit
                raise MachineError(f"{key} is {said}, which has no number") from None
        elif is_number(value):
            number = float(value)
        else:
            raise MachineError(f"{key} is {said}, not an amount of {what}")
        if not (math.isfinite(number) and number > 0):
            raise MachineError(f"{key} is {said}: {what} are above 0")
        return number

    return read


def _read_share(key: str, value: Any) -> float:
    if not is_number(value) or not 0 < value <= 1:
        said = describe_value(value)
        raise MachineError(f"{key} is {said}, not a part of a peak: above 0, at most 1")
    return float(value)


def _as_it_is(key: str, value: Any) -> Any:
    """Returns `value` unchanged: `Machine` itself refuses a wrong type."""
    return value


# -- times of collectives --------------------------------------------------------------------------

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send")
"""The kinds of collectives that have a formula."""


@dataclass(frozen=True)
class Link:
    """The connection of a rank to the others along a mesh axis.

    Attributes:
        latency: seconds of one message, from one rank to the next.
        bandwidth: bytes per second that a rank sends, in one direction.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        for name, what in (("latency", "seconds"), ("bandwidth", "bytes per second")):
            Kind(f"a number of {what}", is_number).check(name, getattr(self, name), MachineError)
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise MachineError(f"a latency of {self.latency} seconds: at least 0, and finite")
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise MachineError(f"a bandwidth of {self.bandwidth} bytes per second: more than 0")


def messages_of(kind: str, ranks: int) -> int:
    """Returns how many messages a rank sends one after the other in a collective on a ring.

    Args:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast" or "send".
        ranks: the number of ranks of the collective.

    Raises:
        ValueError: a kind that is not known.
    """
    if ranks == 1:
        return 0
    if kind not in COLLECTIVES:
        raise ValueError(f"no collective {kind!r}: {', '.join(COLLECTIVES)} are")
    # An all-to-all is a pairwise exchange, a broadcast a pipeline along the ring.
    return {"all_reduce": 2 * (ranks - 1), "send": 1}.get(kind, ranks - 1)


def collective_bytes(kind: str, ranks: int, whole: float) -> float:
    """Returns the bytes that one rank sends in a collective on a ring.

    Args:
        kind: the kind of the collective, as for `messages_of`.
        ranks: the number of ranks of the collective.
        whole: bytes of the unsharded tensor: the result of an all-gather, or the input of a
            reduce-scatter or all-reduce. For an all-to-all: the tensor that a rank has before it.
            For other kinds: the tensor that is sent.

    Raises:
        ValueError: a kind that is not known.
    """
    messages = messages_of(kind, ranks)
    if kind in ("send", "broadcast"):
        return whole if messages else 0.0
    return messages * whole / ranks


def collective_seconds(
    kind: str, ranks: int, nbytes: float, link: Link, *, each_on_its_host: bool = False
) -> float:
    """Returns the predicted seconds of a collective, by its fastest algorithm.

    The time counts from when the last rank begins. A ring of n ranks has n - 1 messages one after
    the other. An all-reduce is a reduce-scatter and an all-gather, so it has twice as many (Thakur,
    Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH",
    section 4, without their term for the arithmetic of a sum). An all-reduce may also run up and
    down two binary trees, with half of the bytes in each (Sanders, Speck and Traff 2009, "Two-tree
    algorithms for full bandwidth broadcast, reduction and scan"). As in NVIDIA's library, trees
    have 2 log2(n) messages between hosts and send all bytes twice (github.com/NVIDIA,
    src/graph/tuning.cc, in the function that tunes its model of a topology).

    If no two ranks share a host, all-gather and reduce-scatter may use parallel aggregated trees
    (Jeaugey 2025, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale",
    arXiv 2506.20252). As in that library since version 2.23, they have a latency for each level, a
    fifth of one for each rank, and three quarters of the bandwidth.

    Args:
        kind: the kind of the collective, as for `messages_of`.
        ranks: the number of ranks of the collective.
        nbytes: the bytes that one rank of a ring sends, as from `collective_bytes` or a ledger.
        link: the latency and bandwidth between the ranks.
        each_on_its_host: True if no two of the ranks share a host.

    Raises:
        ValueError: a kind that is not known.
    """
    if ranks == 1:
        return 0.0
    ring = messages_of(kind, ranks) * link.latency + nbytes / link.bandwidth
    levels = math.ceil(math.log2(ranks))
    if kind in ("all_gather", "reduce_scatter") and each_on_its_host:
        return min(ring, (levels + ranks / 5) * link.latency + nbytes / (0.75 * link.bandwidth))
    if kind != "all_reduce":
        return ring
    # A tree sends the whole tensor up and down; a ring sends (ranks - 1) / ranks of it twice.
    carried = nbytes * ranks / (ranks - 1)
    trees = 2 * levels * link.latency + carried / link.bandwidth
    return min(ring, trees)


# -- rates of kernels ------------------------------------------------------------------------------

# Kernels that read and write equally many bytes do not take the same time: additions are several
# times as fast as exponentials, and a sum over rows reads faster than a permutation writes. Kernels
# with a similar speed have one rate. `calibrate` has the calls that measure each rate.
_RATES = {
    "copy": "cat stack clone copy_ copy _to_copy contiguous constant_pad_nd repeat fill_ zero_ "
    "full full_like zeros zeros_like ones ones_like new_zeros new_full empty slice_scatter arange",
    "root": "sqrt rsqrt sqrt_ _foreach_sqrt",
    "transcendental": "gelu gelu_backward exp log log1p expm1 tanh mish softplus softplus_backward "
    "erf pow sin cos logsumexp",
    "sigmoid": "sigmoid silu silu_backward",
    "softmax": "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data "
    "nll_loss_forward nll_loss_backward",
    "norm": "native_layer_norm native_layer_norm_backward native_group_norm "
    "native_group_norm_backward native_batch_norm native_batch_norm_backward "
    "_native_batch_norm_legit _native_batch_norm_legit_functional _fused_rms_norm "
    "_fused_rms_norm_backward batch_norm_backward",
    "reduction": "sum mean amax amin max min linalg_vector_norm norm any all argmax prod "
    "max_pool2d_with_indices_backward avg_pool2d_backward",
    "unvectorized": "max_pool2d_with_indices avg_pool2d var var_mean native_dropout bernoulli "
    "normal_ uniform_",
    "gather": "embedding index index_select gather",
    "scatter": "embedding_dense_backward scatter scatter_ scatter_add scatter_add_ index_put "
    "index_put_ index_add _unsafe_index_put sort topk cumsum one_hot",
    "batched_matmul": "bmm baddbmm",
    "convolution": "convolution",
    "convolution_backward": "convolution_backward",
    "thin_convolution": "",
    "thin_convolution_backward": "",
}
_RATE_OF = {name: rate for rate, names in _RATES.items() for name in names.split()}
_CONVOLUTIONS = tuple(name for name in _RATES if "convolution" in name)
BY_FLOPS = ("matmul", "batched_matmul", *_CONVOLUTIONS, "attention", "attention_backward")
"""Rates whose amounts are operations; those of the others are bytes, read and written."""
RATES = (
    *(*_RATES, "matmul", "attention", "attention_backward"),
    *("permute", "arithmetic", "view", "number"),
)
"""All rates for which a machine may have a measured curve."""
_HOST_ONLY = ("getitem", "wait_tensor")
_MULTIPLIED_POWERS = (2, 3)
_THIN = 4
"""Input channels of a group up to which a convolution has too few products to each output."""


def rate_of(node: fx.Node, name: str, kind: str) -> str:
    """Returns the kind of measured speed (in `RATES`) for a graph node; "" if it costs no time.

    Args:
        name: the name of the operator.
        kind: the kind of the kernel, as in `Kernel`.
    """
    short = name.split("::")[-1]
    if kind == "free":
        return "" if short in _HOST_ONLY else _rate_of_free(node)
    if kind == "attention":
        return "attention_backward" if "backward" in short else "attention"
    if kind == "matmul":
        thin = "thin_" if short.startswith("convolution") and _count_channels(node) <= _THIN else ""
        return thin + _RATE_OF.get(short, "matmul")
    if short == "pow" and len(node.args) > 1 and node.args[1] in _MULTIPLIED_POWERS:
        return "arithmetic"
    if _copies_strided(node, short):
        return "permute"
    return _RATE_OF.get(short, "arithmetic")


def _count_channels(node: fx.Node) -> int:
    """Returns the input channels of a group of a convolution, from its weight."""
    weight: Any = node.args[2 if "backward" in str(node.target) else 1]
    return int(weight.meta["val"].shape[1])


def _rate_of_free(node: fx.Node) -> str:
    """Returns the rate of a node without a kernel: "number" for one number, otherwise "view"."""
    value = node.meta.get("val")
    schema = getattr(node.target, "_schema", None)
    is_view = schema is not None and any(r.alias_info is not None for r in schema.returns)
    if is_view or not isinstance(value, torch.Tensor) or value.numel() != 1:
        return "view"
    return "number"


def _copies_strided(node: fx.Node, short: str) -> bool:
    """True if the node copies a tensor that is not contiguous in memory."""
    if short not in ("clone", "reshape", "_unsafe_view", "contiguous") or not node.all_input_nodes:
        return False
    before = node.all_input_nodes[0].meta.get("val")
    return isinstance(before, torch.Tensor) and not before.is_contiguous()
