"""Agreement of ranks: checks that a text is equal on all ranks, and decisions of all ranks
together.

    check_equal_on_ranks("from_local", "f32[8, 16] Shard(0)", wire)
    paths = control_plane().decide("saves", mine, lambda gathered: [gathered[0]] * len(gathered))

`check_equal_on_ranks` exchanges a digest. If digests differ, it exchanges the texts, and every rank
raises the same error, which names two ranks. A loop sends nothing after its first rounds, except
under `check_ranks()` (`is_agreed`).
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import copy
import json
import os
import threading
import warnings
import weakref
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from partita.layout import Fix, LayoutError

from .groups import ControlGroup, barrier_in_store, hash_text
from .ledger import user_line
from .ranks import RankWire, running_wire
from .trace import TraceWire
from .waiting import make_lost_rank_error
from .wire import Wire


def check_equal_on_ranks(what: str, mine: str, wire: Wire, **message: Any) -> None:
    """Raises LayoutError on all ranks of `wire`'s mesh unless `mine` is equal on all of them.

    Args:
        what: the name of the operation, equal on all ranks: "from_local".
        mine: this rank's text, of any length.
        message: `fact`, `reason` and `fixes` of the error (see `make_disagreement_error`).

    Raises:
        LayoutError: shows the texts of two ranks.
    """
    # Until a capture has found all tensors of the step, it runs with real ones.
    if is_alone(wire) or torch.compiler.is_compiling():
        return
    why, shown = f"compares {what}", f" {mine[:_SHOWN]}"
    if len(set(wire.exchange(why, hash_text(mine), shown=shown))) > 1:
        texts = [row.decode(errors="replace") for row in wire.exchange(why, mine.encode())]
        raise make_disagreement_error(what, texts, **message)


def is_alone(wire: Wire) -> bool:
    """True if `wire`'s mesh has no other ranks with which this rank could compare.

    Also True while a step is captured, because ranks compare the keys of captured steps instead.
    """
    return wire.mesh.size() == 1 or not wire.has_peers or isinstance(wire, TraceWire)


def is_agreed(wire: Wire, series: object, key: object = None) -> bool:
    """True if the ranks need not compare `key` now, because earlier comparisons predict it.

    An example is a loop whose shapes repeat. It is also True if there are no other ranks. A
    predicted key is added to the history of its series.

    All ranks of `wire`'s mesh have the same history, so all predict the same key. If the ranks'
    keys differ, some rank's key is not the predicted one. That rank compares, and finds the error.

    Args:
        series: a repeated decision, such as the shapes at a line of the program.
        key: the decision. A series whose key is None is compared once.
    """
    if is_alone(wire):
        return True
    if wire.scope.check is not None or (history := wire.agreed.get(series)) is None:
        return False
    return key is None or history.predicts(key)


def remember_agreed(wire: Wire, series: object, key: object = None) -> None:
    """Records that `key` of `series` was equal on all ranks of `wire`'s mesh, for `is_agreed`."""
    # A program has few lines, but one line may be compared for any number of different shapes.
    if len(wire.agreed) >= _KEPT:
        wire.agreed.clear()  # on all ranks at once, since they have agreed on as many
    history = wire.agreed.setdefault(series, AgreedKeys())
    if key is not None:
        history.add(key)


def is_due(wire: Wire, series: object) -> bool:
    """True in the calls 1, 2, 4, 8, ... of a series, in which ranks compare values.

    It is for values that cost time to read. Each call adds one to the count of the series. Under
    `check_ranks()` it is always True, and without other ranks on `wire`'s mesh always False.

    Args:
        series: what is compared, such as the values of the batches at a line of the program.
    """
    if is_alone(wire):
        return False
    if len(wire.calls_compared) >= _KEPT:
        wire.calls_compared.clear()  # on all ranks at once, since they have made equal calls
    calls = wire.calls_compared[series] = wire.calls_compared.get(series, 0) + 1
    return wire.scope.check is not None or not calls & (calls - 1)


_COMPARED_EVERY = 64
"""The most calls between two comparisons of the settings of a repeated call."""


@dataclass(slots=True)
class RepeatedCall:
    """The settings of a call that is made again and again, and when ranks compare them.

    An example is an optimizer's `step` with its learning rates. Ranks compare a hash of all calls'
    settings. So a comparison also finds a difference in an earlier call.

    Attributes:
        calls: the number of calls.
        settings: the settings of the last call: nested tuples of numbers and texts.
        changed: the number of the call in which they changed last.
        compared: the number of the call in which ranks compared them last.
        digest: a hash of the settings of all calls. It is equal on all ranks.
    """

    calls: int = 0
    settings: object = None
    changed: int = -_COMPARED_EVERY
    compared: int = -_COMPARED_EVERY
    digest: bytes = b""

    def add(self, settings: object) -> bool:
        """Adds a call with its settings. Returns True if ranks must compare them now.

        Ranks compare the first call, and then at least every 64th. A change is also compared at
        once, if the settings had not changed for 64 calls. A schedule that changes a rate in each
        step is not compared in each step, because this would cost more than a small step.
        """
        self.calls += 1
        comes_alone = False
        if settings != self.settings:
            if self.settings is not None:
                comes_alone = self.calls - self.changed >= _COMPARED_EVERY
                self.changed = self.calls
            self.settings = settings
            # Not `hash`: it takes a nan's address, and -1 and -2 have the same.
            self.digest = hash_text(f"{self.digest.hex()} {settings}", 4)
        if not comes_alone and self.calls - self.compared < _COMPARED_EVERY:
            return False
        self.compared = self.calls
        return True

    def __str__(self) -> str:
        return f"call {self.calls}, since the first {self.digest.hex()}"


class AgreedKeys:
    """The keys that ranks have compared at one line of the program, to predict the next key.

    A predicted key needs no comparison. The next key is expected to be the one `distance` keys ago:
    1 if the key stays the same, n in a loop over n keys. The key objects are kept alive, because a
    new object could get the hash of a freed one.
    """

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._keys: list[int] = []
        self._distance = 1

    def predicts(self, key: object) -> bool:
        """True if `key` is the predicted key. In this case `key` is added to the history."""
        keys, number = self._keys, self._numbers.get(key)
        if number is None or len(keys) < self._distance or keys[-self._distance] != number:
            return False
        self._append(number)
        return True

    def add(self, key: object) -> None:
        """Add a key that was not predicted, after the ranks have compared it."""
        if len(self._numbers) >= 2 * _REMEMBERED:  # at once on all ranks
            self._numbers, self._keys, self._distance = {}, [], 1
        number = self._numbers.setdefault(key, len(self._numbers))
        self._append(number)
        # As text, so that a fast search in C finds the longest suffix that occurred before.
        text = "".join(map(chr, self._keys[-_REMEMBERED - _COMPARED :]))

        def find_earlier(n: int) -> int:
            return text.rfind(text[-n:], 0, -1)

        most = range(1, min(_COMPARED, len(text) - 1) + 1)
        if longest := bisect_left(most, True, key=lambda n: find_earlier(n) < 0):
            self._distance = len(text) - longest - find_earlier(longest)

    def _append(self, number: int) -> None:
        self._keys.append(number)
        if len(self._keys) > 4 * _REMEMBERED:
            del self._keys[: 2 * _REMEMBERED]


_REMEMBERED, _COMPARED = 1024, 256
"""The least number of keys that are searched, and the most that are compared at one place."""
_KEPT = 1 << 16
_SHOWN = 200
"""Characters of a text in the error of ranks that do not all compare it."""


def gather_texts(mine: str, wire: Wire, why: str = "compares texts") -> list[str]:
    """Sends `mine` to all ranks of `wire`'s mesh, and returns every rank's text, in mesh order.

    Args:
        mine: this rank's text, of any length.
        why: what this rank does. Ranks that wait for it show this in warnings and errors.
    """
    return [row.decode(errors="replace") for row in wire.exchange(why, mine.encode())]


def make_disagreement_error(
    what: str,
    texts: Sequence[str],
    *,
    fact: str = "the ranks pass different arguments",
    reason: str = "a global tensor is one value, and each rank holds a part of it",
    fixes: Sequence[Fix] = (),
) -> LayoutError:
    """Returns the error for ranks that passed different values. It names two of the ranks.

    Args:
        what: the name of the operation.
        texts: each rank's text, in mesh order. They are not all equal.
        fact: what is wrong if the ranks differ.
        reason: why the values must be equal.
        fixes: what the user can do.
    """
    rank = next(i for i, text in enumerate(texts) if text != texts[0])
    return LayoutError(
        f"{what}: {fact}",
        place=user_line(),
        operands=(f"rank 0  {texts[0]}", f"rank {rank}  {texts[rank]}"),
        reason=reason,
        fixes=tuple(fixes) or (Fix("pass the same on every rank"),),
    )


def digest_of_text(text: str) -> int:
    """Returns a 63-bit hash of a text, the same in every process."""
    return int.from_bytes(hash_text(text)[:8], "big") >> 1


# -- messages --------------------------------------------------------------------------------------
# Values and errors are sent as JSON, because unpickling data from the network could run code. A
# message contains built-in types, shapes and dtypes of tensors, paths, dataclasses declared with
# `message`, and errors. An error that is neither built-in nor a LayoutError is sent as the nearest
# of these, with its class's name in its text.

T = TypeVar("T")
_declared: dict[str, type] = {}


def message(kind: type[T]) -> type[T]:
    """Registers the dataclass `kind`, so that `pack` can convert its instances to bytes.

    Returns `kind`, for use as a decorator.
    """
    _declared[kind.__name__] = kind
    return kind


message(Fix)


def pack(thing: Any) -> bytes:
    """Returns the object `thing` as bytes (JSON), to be sent to other ranks.

    Raises:
        TypeError: `thing` contains something that cannot be sent.
    """
    return json.dumps(_to_json(thing), separators=(",", ":")).encode()


def unpack(data: bytes) -> Any:
    """Returns the object that `pack` has converted to the bytes `data`.

    Raises:
        ValueError: the bytes are not a message.
    """
    try:
        return _from_json(json.loads(data))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"a rank has sent something that is not a message: {error}") from None


_PLAIN = (str, int, float, bool, type(None))


def _to_json(x: Any) -> Any:
    kind = type(x)
    if kind in _PLAIN:
        return x
    if kind is list:
        return [_to_json(y) for y in x]
    if _declared.get(kind.__name__) is kind:
        parts = {one.name: _to_json(getattr(x, one.name)) for one in fields(x)}
        return {"message": [kind.__name__, parts]}
    for name, form in _FORMS.items():
        if kind is form.kind or (form.takes_subclasses and isinstance(x, form.kind)):
            return {name: form.write(x)}
    raise TypeError(f"a {kind.__qualname__} cannot be sent in a message between ranks")


def _from_json(x: Any) -> Any:
    if type(x) is list:
        return [_from_json(y) for y in x]
    if type(x) is not dict:
        return x
    ((name, inside),) = x.items()
    if name == "message":
        kind, parts = inside
        return _declared[kind](**{part: _from_json(value) for part, value in parts.items()})
    return _FORMS[name].read(inside)


def _dtype_from_json(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return found


# -- errors ----------------------------------------------------------------------------------------


def _error_to_json(error: BaseException) -> dict[str, Any]:
    # Another class may need any arguments: it is sent as the nearest base that is known.
    bases = type(error).__mro__
    name = next(base.__name__ for base in bases if _known_error(base.__name__) is base)
    parts: dict[str, Any] = {"class": name, "text": str(error)}
    if name != type(error).__name__:
        parts["text"] = f"{type(error).__name__}: {error}"
    if isinstance(error, LayoutError):
        parts["said"] = {key: _to_json(value) for key, value in error.parts.items()}
    elif isinstance(error, OSError) and error.errno is not None:
        file = None if error.filename is None else str(error.filename)
        parts["args"] = [error.errno, error.strerror, file]
    notes = getattr(error, "__notes__", [])
    return {**parts, "notes": list(map(str, notes))}


def _error_from_json(parts: dict[str, Any]) -> BaseException:
    kind = _known_error(parts["class"])
    if kind is None:
        raise TypeError(f"{parts['class']} is no error")
    error: BaseException
    if "said" in parts:
        error = kind(**{key: _from_json(value) for key, value in parts["said"].items()})
    elif "args" in parts:
        number, text, name = parts["args"]
        error = kind(number, text) if name is None else kind(number, text, name)
    else:
        try:
            error = kind(parts["text"])
        except TypeError:  # it needs more arguments, as UnicodeDecodeError does
            error = ValueError(f"{parts['class']}: {parts['text']}")
    for note in parts["notes"]:
        error.add_note(note)
    return error


def _known_error(name: str) -> type[BaseException] | None:
    """Returns the built-in error class with this name, or one of partita's LayoutErrors."""
    found = getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, BaseException):
        return found
    return _layout_errors().get(name)


def _layout_errors() -> dict[str, type[LayoutError]]:
    found: dict[str, type[LayoutError]] = {}
    waiting: list[type[LayoutError]] = [LayoutError]
    while waiting:
        kind = waiting.pop()
        if kind.__module__.startswith("partita.") and kind.__init__ is LayoutError.__init__:
            found[kind.__name__] = kind
        waiting += kind.__subclasses__()
    return found


# -- the types of a message ------------------------------------------------------------------------


class _Form(NamedTuple):
    """The functions that write values of one type as JSON, and read them."""

    kind: type
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]
    takes_subclasses: bool = False


_FORMS = {
    "tuple": _Form(tuple, lambda x: [*map(_to_json, x)], lambda x: tuple(map(_from_json, x))),
    "dict": _Form(
        Mapping,
        lambda x: [[_to_json(k), _to_json(v)] for k, v in x.items()],
        lambda x: {_from_json(k): _from_json(v) for k, v in x},
        takes_subclasses=True,
    ),
    "bytes": _Form(bytes, lambda x: base64.b64encode(x).decode(), base64.b64decode),
    "size": _Form(torch.Size, list, torch.Size),
    "dtype": _Form(torch.dtype, lambda x: str(x).removeprefix("torch."), _dtype_from_json),
    "path": _Form(Path, str, Path, takes_subclasses=True),
    "error": _Form(BaseException, _error_to_json, _error_from_json, takes_subclasses=True),
}


# -- the control plane -----------------------------------------------------------------------------

Answer = Callable[[list[Any]], Sequence[Any]]
Decide = Callable[[Any, Answer], Any]
_PATIENCE_WITH_THREADS = 1800.0
"""Seconds that a rank's thread waits for those of other ranks of one process."""


class BackgroundResult(Future[Any]):
    """The result of work in a background thread, like a future. `pt.async_save` returns one.

    If the work failed and nobody reads the error, dropping the object gives a warning.
    """

    _asked = False

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the work, and returns its result or raises its error.

        Args:
            timeout: the longest wait, in seconds.
        """
        self._asked = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the work, and returns its error, or None if it succeeded.

        Args:
            timeout: the longest wait, in seconds.
        """
        self._asked = True
        return super().exception(timeout)

    def __del__(self) -> None:
        if self.done() and not self._asked and (error := super().exception()) is not None:
            warnings.warn(f"{type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)


class ControlPlane:
    """A channel for small messages by which all ranks of a job decide something together.

    Attributes:
        rank: this rank's number.
        size: the number of ranks.
    """

    rank = 0
    size = 1

    def __init__(self) -> None:
        self._background: BackgroundResult | None = None
        self._worker: tuple[int, ThreadPoolExecutor] | None = None  # (process, its thread)

    def decide(self, why: str, mine: Any, answer: Answer, shown: str = "") -> Any:
        """Lets rank 0 compute an answer for each rank, from every rank's `mine`.

        Returns this rank's answer. All ranks must call it.

        Args:
            why: what the ranks do, equal on all ranks: "saves a checkpoint (pt.save)".
            mine: this rank's value, or an exception if this rank has failed.
            answer: a function that is called on rank 0 with every rank's `mine`, in rank order.
                Returns the answer for each rank, in rank order.
            shown: details of what this rank does, for errors.

        Raises:
            LayoutError: other ranks do something else, or have ended. All ranks raise it.
            Exception: what `answer` raised, or what the first failed rank passed. All ranks raise
                it.
        """
        self.wait()
        return _unwrap_outcome(self._decide(why, mine, answer, shown))

    def decide_on(self, why: str, shown: str = "") -> Decide:
        """Returns `decide` with these `why` and `shown`, as a function of `mine` and `answer`."""
        return lambda mine, answer: self.decide(why, mine, answer, shown)

    def meet(self, why: str, shown: str = "") -> None:
        """Waits until all ranks call this with the same `why` (a barrier).

        `shown` has details of what this rank does, for errors. Raises LayoutError on all ranks if
        other ranks do something else, or have ended.
        """
        self.decide(why, None, lambda gathered: gathered, shown)

    def run_in_background(
        self, prepare: Callable[[], Callable[[Decide], Any]], why: str, shown: str = ""
    ) -> BackgroundResult:
        """Calls `prepare()` now, and the function that it returns in a background thread.

        All ranks must call it. Each rank first waits for the others, and for earlier background
        work. The background function gets `decide` as its argument, and may communicate only by it.
        All calls share one thread, because starting a new one blocks until it runs.

        Args:
            prepare: a function that runs after the ranks have met. So no rank waits for another
                rank's `prepare`. It must not raise an error.
            why: what the ranks do, equal on all ranks.
            shown: details of what this rank does, for errors.

        Raises:
            LayoutError: other ranks do something else, or have ended. All ranks raise it.
        """
        self.wait()
        decide = self._start_background(why, shown)
        run = prepare()
        self._background = outcome = BackgroundResult()
        if self._worker is None or self._worker[0] != os.getpid():
            name = f"partita, beside rank {self.rank}"
            self._worker = os.getpid(), ThreadPoolExecutor(1, name)
        self._worker[1].submit(
            _run_into_future,
            run,
            lambda mine, answer: _unwrap_outcome(decide(mine, answer)),
            [outcome],
        )
        self._wait_until_all_started()
        return outcome

    def wait(self) -> None:
        """Wait until the work that this rank started by `run_in_background` has ended."""
        if self._background is not None:
            wait([self._background])
            self._background = None

    # -- what subclasses override ------------------------------------------------------------------

    def _decide(self, why: str, mine: Any, answer: Answer, shown: str) -> Any:
        return _compute_outcomes([mine], answer)[0]

    def _start_background(self, why: str, shown: str) -> Decide:
        """Meet the other ranks. Returns the `decide` function for the background thread."""
        return lambda mine, answer: _compute_outcomes([mine], answer)[0]

    def _wait_until_all_started(self) -> None:
        """Waits until all in-process ranks are here. After that, any of them may block."""


def _run_into_future(
    run: Callable[[Decide], Any], decide: Decide, outcomes: list[BackgroundResult]
) -> None:
    # The error's traceback refers to this frame. A reference back would be a cycle.
    outcome: BackgroundResult | None = outcomes.pop()
    assert outcome is not None
    try:
        with torch.no_grad():
            result = run(decide)
    except BaseException as error:
        outcome.set_exception(error)
        outcome = None
    else:
        outcome.set_result(result)


class _OfGroups(ControlPlane):
    """The control plane of the default process group's ranks, over a separate control group.

    It is separate so that a thread may use it while the program's collectives run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Weak, since torch owns its groups: one kept alive would hold its threads until the end.
        self._world = weakref.ref(dist.group.WORLD)
        self._control: ControlGroup | None = None

    @property
    def is_current(self) -> bool:
        """True if this object was made for the present process groups of the job."""
        return self._world() is dist.group.WORLD

    def _decide(self, why: str, mine: Any, answer: Answer, shown: str, watched: bool = True) -> Any:
        if not self.is_current:
            raise RuntimeError("the process groups were destroyed before all ranks had agreed")
        if self.size == 1:
            return super()._decide(why, mine, answer, shown)
        if self._control is None:
            place = f"{why}{shown}, at {user_line() or 'no line'}"
            barrier_in_store(dist.group.WORLD, "first decision", place)  # type: ignore[arg-type]
            self._control = ControlGroup("everyone", range(self.size))

        def answer_packed(gathered: list[bytes]) -> list[bytes]:
            return _all_packed(_compute_outcomes(list(map(unpack, gathered)), answer))

        try:
            packed = _pack_or_error(mine)
            got = unpack(self._control.decide(why, packed, answer_packed, shown, watched=watched))
        except RuntimeError as error:  # from the group: errors of `answer` are outcomes
            if (
                isinstance(error, LayoutError)
                or (gone := make_lost_rank_error(error, why, range(self.size))) is None
            ):
                raise
            raise gone from error
        if isinstance(got, _Failed) and got.rank == self.rank:
            mine.__notes__ = got.error.__notes__
            got.error = mine  # this rank's own error, with its class and its traceback
        return got

    def _start_background(self, why: str, shown: str) -> Decide:
        self.meet(why, shown)
        return lambda mine, answer: self._decide(why, mine, answer, shown, watched=False)


def _pack_or_error(mine: Any) -> bytes:
    try:
        return pack(mine)
    except TypeError as error:
        return pack(error)  # which all ranks raise


def _all_packed(answers: Sequence[Any]) -> list[bytes]:
    try:
        return list(map(pack, answers))
    except TypeError as error:
        return [pack(_Failed(error))] * len(answers)


class _OfOneProcess(ControlPlane):
    """The control plane of the ranks of a running `pt.ranks` world."""

    def __init__(self, wire: RankWire):
        super().__init__()
        self._wire, self.rank, self.size = wire, wire.rank, wire.mesh.size()

    def _decide(self, why: str, mine: Any, answer: Answer, shown: str) -> Any:
        def answer_outcomes(gathered: list[Any]) -> Sequence[Any]:
            return _compute_outcomes(gathered, answer)

        return self._wire.decide(mine, answer_outcomes, why, shown=shown)

    def _start_background(self, why: str, shown: str) -> Decide:
        make = lambda gathered: [_Board(self.size)] * self.size  # noqa: E731
        board: _Board = self.decide(why, None, make, shown)
        return lambda mine, answer: board.decide(self.rank, mine, answer)

    def _wait_until_all_started(self) -> None:
        self._decide("starts a thread", None, lambda gathered: gathered, "")


class _Board:
    """The place where the background threads of in-process ranks meet."""

    def __init__(self, size: int):
        self._gathered: list[Any] = [None] * size
        self._outcomes: Sequence[Any] = ()
        self._answer: Answer | None = None
        self._meeting = threading.Barrier(size, self._answer_meeting, _PATIENCE_WITH_THREADS)

    def decide(self, rank: int, mine: Any, answer: Answer) -> Any:
        self._gathered[rank] = mine
        if rank == 0:
            self._answer = answer
        self._meeting.wait()
        return self._outcomes[rank]

    def _answer_meeting(self) -> None:
        assert self._answer is not None
        self._outcomes = _compute_outcomes(self._gathered, self._answer)


# -- outcomes --------------------------------------------------------------------------------------


@message
@dataclass(eq=False)
class _Failed:
    """An error as a message to all ranks. `rank` raised it; None: `answer` did."""

    error: BaseException
    rank: int | None = None


def _compute_outcomes(gathered: list[Any], answer: Answer) -> Sequence[Any]:
    for rank, one in enumerate(gathered):
        if isinstance(one, BaseException):
            if len(gathered) > 1:
                one.add_note(f"on rank {rank} of {len(gathered)}")
            return [_Failed(one, rank)] * len(gathered)
    try:
        return answer(gathered)
    except Exception as error:
        return [_Failed(error)] * len(gathered)


def _unwrap_outcome(outcome: Any) -> Any:
    if isinstance(outcome, _Failed):
        error, line = outcome.error, outcome.error.__traceback__
        with contextlib.suppress(Exception):  # some errors cannot be copied
            error = copy.copy(error)  # each rank adds its own lines to the traceback
        raise error.with_traceback(line) from None
    return outcome


# -- the control plane of this code ----------------------------------------------------------------

_alone = ControlPlane()
_of_groups: _OfGroups | None = None


def control_plane() -> ControlPlane:
    """Returns the control plane: the channel by which all ranks of the job decide together."""
    global _of_groups
    wire = running_wire()
    if wire is not None:
        found: ControlPlane = wire.__dict__.setdefault("control_plane", None) or _OfOneProcess(wire)
        wire.__dict__["control_plane"] = found
        return found
    if not (dist.is_available() and dist.is_initialized()):
        return _alone
    if dist.get_backend() == "fake":
        raise LayoutError("the fake backend has only one rank, so ranks cannot be compared")
    if _of_groups is None or not _of_groups.is_current:
        _of_groups = _OfGroups()
    return _of_groups
