"""The trainer: an ordinary training loop over tensors that are distributed on a mesh.

This file also has the checkpoints of a run (when one is written, how a run resumes) and the
timeline of a step, which torch's profiler measures.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import profile, record_function

import partita as pt
from partita.comm.device import HOST, Device, activities_to_profile, choose_device, is_of_host
from partita.compile.progress import phase_listener
from partita.graph.step_report import facts_of_graph, facts_of_moves, facts_of_parameter
from partita.report import TimelineEvent

from .data import Text, read
from .models import GPT
from .options import Options, flag, options_in

Emit = Callable[..., None]
"""A function that reports an event by its name and its facts: `emit("step", step=3, loss=2.1)`."""

MicroBatches = list[tuple[Tensor, Tensor]]
Run = Callable[[MicroBatches, int], Tensor]
"""A function of a step's micro-batches and number that updates the model and returns the loss."""

_TOLERANCE = 1e-5  # relative difference of losses that --verify accepts, fp32
_WARM_UP = 20  # steps until the learning rate is reached
_PROMPT = b"def "


def train(options: Options, emit: Emit, text: Text | None = None, mesh: Any = None) -> list[float]:
    """Trains a GPT and returns the loss of each step (nats per byte, before the step's update).

    Must be called on all ranks of `options.mesh` with equal options. It emits these events:
    - "ready" once; with a report also "layouts"
    - "at" when a step enters another phase, and "step" after each step
    - with a report, after its second step: "moves", and "graph" and "timeline" if there are any
    - "saved" when a checkpoint is on the disk
    - "sample" at the end

    Args:
        options: the options of the run.
        emit: a function that gets each event: `emit("step", step=3, loss=2.1, ...)`.
        text: the training data; by default read from `options.data`.
        mesh: an existing mesh, such as a mesh of `pt.ranks`; None makes one.

    Raises:
        ValueError: options that do not fit model, text or checkpoint; a loss that is not finite.
    """
    if text is None:
        text = read(options.data, context=options.context)
    device = choose_device(options.device) if mesh is None else Device(mesh.device_type)
    device.select()
    options, _ = replace(options, device=device.type).leave_out_idle()
    mesh = _make_mesh(options, device) if mesh is None else mesh
    model = build_model(options, mesh)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
    )
    schedule = _CheckpointSchedule(options, model, optimizer, emit)
    first = schedule.resume()
    emit(
        "ready",
        parameters=sum(p.numel() for p in model.parameters()),
        bytes=len(text.bytes),
        files=text.files,
        source=text.source,
        threads=torch.get_num_threads(),
        first=first,
    )
    reported = _ReportedStep(options, mesh, emit, first)
    reported.emit_layouts(model)
    make_run = _make_compiled_step if options.compile else _make_eager_step
    run = make_run(model, optimizer, options, reported.marked_emit)
    losses = []
    with ExitStack() as inside:
        if options.check_ranks:
            inside.enter_context(pt.check_ranks())
        nan = inside.enter_context(pt.detect_nan(model)) if options.detect_nan else None
        for step in range(first, options.steps):
            start = time.monotonic()
            with pt.ledger() as log, reported.measuring(step):
                batch = text.batch(
                    step, seed=options.seed, size=options.batch, context=options.context
                )
                for group in optimizer.param_groups:
                    group["lr"] = options.lr * _share_of_lr(step, options.steps)
                loss = run(_micro_batches(batch, mesh, options, device), step).item()
                if nan is not None:
                    nan.check(loss, step)
                elif not math.isfinite(loss):
                    raise ValueError(
                        f"the loss of step {step} is {loss}; --detect-nan names the module that "
                        "made it"
                    )
            losses.append(loss)
            seconds, memory = time.monotonic() - start, device.peak_memory()
            emit("step", step=step, loss=loss, seconds=seconds, nbytes=log.bytes, memory=memory)
            reported.emit_step(run, step, log)
            schedule.after_step(step)
        schedule.finish()
        if options.sample:
            emit("at", phase="sample", step=options.steps)
            with _computing_in_dtype(options, device):
                written = sample(model, _PROMPT, options.sample, seed=options.seed)
            emit("sample", prompt=_PROMPT.decode(), text=written.decode(errors="backslashreplace"))
    return losses


def build_model(options: Options, mesh: Any) -> GPT:
    """Returns the GPT of the options, distributed on `mesh`; plain if `mesh` is None."""
    torch.manual_seed(options.seed)
    model = GPT(  # its first values are drawn on the CPU: the same on every kind of device
        layers=options.layers, width=options.width, heads=options.heads, context=options.context
    ).to(choose_device(options.device).type if mesh is None else mesh.device_type)
    if mesh is not None:
        axes = mesh.mesh_dim_names
        # The vocabulary has 256 tokens, too few for a split that pays.
        plan = pt.plans.gpt(split_words=False, sequence=options.sp) if "tp" in axes else None
        pt.parallelize(model, mesh, plan)
        if "dp" in axes:
            pt.zero(model, mesh, "dp", stage=options.zero, precision=_zero_precision(options))
    if options.remat == "blocks":
        pt.remat(model, blocks=list(model.blocks))
    elif options.remat != "none" and not options.compile:
        pt.remat(model, policy=options.remat)
    return model


def _make_eager_step(model: GPT, optimizer: Any, options: Options, emit: Emit) -> Run:
    """Returns a step that sums the gradients of micro-batches, updates, and returns the loss."""
    device = Device(next(model.parameters()).device.type)

    def run(micro_batches: MicroBatches, step: int) -> Tensor:
        optimizer.zero_grad()
        total = device.place(torch.zeros(()))
        for k, (inputs, targets) in enumerate(micro_batches, 1):
            with _holding_back(model, options) if k < options.accumulate else nullcontext():
                emit("at", phase="forward", step=step)
                with _computing_in_dtype(options, device):
                    logits = model(inputs)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
                loss = loss / options.accumulate
                emit("at", phase="backward", step=step)
                loss.backward()
            total = total + loss.detach()
        emit("at", phase="optimizer", step=step)
        optimizer.step()
        return total  # Partial: reduced once, when it is read

    return run


def _make_compiled_step(model: GPT, optimizer: Any, options: Options, emit: Emit) -> Run:
    """Returns the same step as one graph, which reports nothing while it runs."""
    eager = _make_eager_step(model, optimizer, options, _tell_nothing)
    graph = pt.compile(
        lambda micro_batches: eager(micro_batches, 0),
        state=[model, optimizer],
        budget=options.remat if isinstance(options.remat, int) else None,
        cuda_graphs=None if options.cuda_graphs else False,
    )

    def run(micro_batches: MicroBatches, step: int) -> Tensor:
        emit("at", phase="graph", step=step)
        with phase_listener(lambda phase: emit("at", phase=phase, step=step)):
            total: Tensor = graph(micro_batches)
        return total

    run.graph = graph  # type: ignore[attr-defined]  # a report reads its facts
    return run


class _ReportedStep:
    """The parts of the report that the options request, such as one step's moves.

    The second step is reported, because the first also plans and does other work once.
    """

    def __init__(self, options: Options, mesh: Any, emit: Emit, first: int):
        self.step = min(first + 1, options.steps - 1) if options.report is not None else -1
        self.emit, self.timeline = emit, _StepTimeline()
        self.measures = options.report is not None and (mesh is None or mesh.get_rank() == 0)
        self.marked_emit = self.timeline.marking(emit) if self.measures else emit

    def emit_layouts(self, model: GPT) -> None:
        if self.step >= 0:
            spread = [(n, p) for n, p in model.named_parameters() if isinstance(p, pt.DTensor)]
            self.emit("layouts", parameters=[facts_of_parameter(n, p) for n, p in spread])

    def measuring(self, step: int) -> AbstractContextManager[None]:
        measures = self.measures and step == self.step
        return self.timeline.measuring() if measures else nullcontext()

    def emit_step(self, run: Run, step: int, log: Any) -> None:
        if step != self.step:
            return
        self.emit("moves", moves=facts_of_moves(log.moves))
        graph = getattr(run, "graph", None)
        if graph is not None:
            self.emit("graph", **facts_of_graph(graph))
        if self.measures:
            self.emit("timeline", **self.timeline.facts())


def _tell_nothing(event: str, **facts: Any) -> None:
    pass


def _micro_batches(
    batch: tuple[Tensor, Tensor], mesh: Any, options: Options, device: Device
) -> MicroBatches:
    """Returns (inputs, targets) of each micro-batch, distributed over the mesh."""
    pairs = zip(*(device.place(t).chunk(options.accumulate) for t in batch), strict=True)
    return [pair if mesh is None else pt.distribute_batch(pair, mesh) for pair in pairs]


def _holding_back(model: GPT, options: Options) -> AbstractContextManager[None]:
    """Returns `no_sync` if ranks hold whole gradients, which are then sent once per step."""
    return pt.no_sync(model) if "dp" in dict(options.mesh) and options.zero < 2 else nullcontext()


def _computing_in_dtype(options: Options, device: Device) -> AbstractContextManager[Any]:
    """Returns autocast to bfloat16, except under ZeRO-3, which gathers cast parameters."""
    if options.dtype == "fp32" or options.zero == 3:
        return nullcontext()
    return device.autocast(torch.bfloat16)


def _zero_precision(options: Options) -> pt.MixedPrecision | None:
    if options.dtype == "fp32" or options.zero < 3:
        return None
    return pt.MixedPrecision(torch.bfloat16)


def verify(options: Options, emit: Emit, *, compare: bool) -> bool:
    """Checks a mesh: trains on it, then on one device, and compares the loss of each step.

    Must be called on all ranks. The rank with `compare` makes the second run and emits the event
    "verify". It returns True if all relative differences are at most 1e-5. Other ranks return True.

    Args:
        options: the options of the run on the mesh.
        emit: a function that gets each event: `emit("step", step=3, loss=2.1, ...)`.
        compare: True on exactly one rank.
    """
    options = replace(options, sample=0)
    text = read(options.data, context=options.context)
    spread_out = train(options, emit, text)
    if not compare:
        return True

    alone = replace(
        options,
        mesh=(),
        zero=0,
        sp=False,
        remat="none",
        compile=False,
        accumulate=1,
        detect_nan=False,
        check_ranks=False,
    )
    single = train(alone, _tell_nothing, text)
    worst = max(abs(a - b) / abs(b) for a, b in zip(spread_out, single, strict=True))
    emit("verify", mesh=spread_out, one=single, difference=worst, tolerance=_TOLERANCE)
    return worst <= _TOLERANCE


@torch.no_grad()
def sample(model: GPT, prompt: bytes, count: int, *, seed: int) -> bytes:
    """Returns `count` bytes that the model generates after `prompt`, equal on every rank.

    Must be called on all ranks. The input always has the same length: it is padded at its end,
    which a causal model does not read. So all calls use the cached plans of the first call.

    `seed` selects one of the possible texts.
    """
    generator, device = torch.Generator().manual_seed(seed), next(model.parameters()).device
    tokens = list(prompt)
    for _ in range(count):
        recent = tokens[-model.context :]
        window = torch.zeros(1, model.context, dtype=torch.int64)
        window[0, : len(recent)] = torch.tensor(recent)
        logits = _full_value(model(window.to(device)))[0, len(recent) - 1].float().to(HOST)
        chances = F.softmax(logits / 0.7, dim=-1)
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(tokens[len(prompt) :])


def _share_of_lr(step: int, steps: int) -> float:
    falling = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / _WARM_UP) * falling


def _make_mesh(options: Options, device: Device) -> Any:
    if not options.mesh:
        return None
    names, sizes = zip(*options.mesh, strict=True)
    return pt.init_device_mesh(device.type, sizes, mesh_dim_names=names)


def _full_value(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, pt.DTensor) else x


# -- checkpoints of a run --------------------------------------------------------------------------

_FIXED = ("layers", "width", "heads", "context", "seed", "batch", "data")
"""Options that must not change when a run is resumed, because model and batches depend on them.
The mesh, and how it is used, may change."""


class _CheckpointSchedule:
    """The checkpoints of one run: model, optimizer, random numbers, and the step, which is the
    position in the data. Does nothing if `options.save` is None.

    Args:
        emit: a function that gets "saved", and the step with which a run would resume.
    """

    def __init__(
        self,
        options: Options,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        emit: Callable[..., None],
    ):
        self._options, self._emit, self._path = options, emit, options.checkpoint
        self._state: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "random": pt.RandomState(),
            "step": 0,
            "options": options.to_toml(),
        }
        self._pending_save: Any = None
        self._saved = 0

    def resume(self) -> int:
        """Loads the checkpoint if the run is to be resumed and there is one.

        Returns:
            The step to begin with.

        Raises:
            ValueError: the checkpoint is of another model or other data.
        """
        if self._path is None or not self._options.resume or not pt.is_checkpoint(self._path):
            return 0
        made: dict[str, Any] = {"options": ""}
        pt.load(made, self._path, strict=False)
        before = Options(**options_in(made["options"], f"{self._path}: options"))
        for name in _FIXED:
            was, now = getattr(before, name), getattr(self._options, name)
            if was != now:
                raise ValueError(
                    f"--resume: {self._path} was made with --{flag(name)} {was}, and this run has "
                    f"{now}"
                )
        pt.load(self._state, self._path)
        self._state["options"] = self._options.to_toml()
        self._saved = self._state["step"]
        return self._saved

    def after_step(self, step: int) -> None:
        """Begins to save in the background if a checkpoint is due after this step."""
        if self._pending_save is not None and self._pending_save.done():
            self._wait_for_save()
        every = self._options.save_every
        if self._path is not None and every and (step + 1) % every == 0:
            self._wait_for_save()
            self._emit("at", phase="save", step=step)
            self._state["step"] = step + 1
            self._pending_save = pt.async_save(self._state, self._path)

    def finish(self) -> None:
        """Saves the last step if it has not been saved. Call this at the end of the run."""
        self._wait_for_save()
        steps = self._options.steps
        if self._path is not None and self._saved < steps:
            self._emit("at", phase="save", step=steps - 1)
            self._state["step"] = steps
            pt.save(self._state, self._path)
            self._tell_saved(steps)

    def _wait_for_save(self) -> None:
        if self._pending_save is not None:
            self._pending_save.result()
            self._pending_save = None
            self._tell_saved(self._state["step"])

    def _tell_saved(self, step: int) -> None:
        self._saved = step
        self._emit("saved", step=step, path=str(self._path))


# -- timeline of a step ----------------------------------------------------------------------------

_MARK = "partita at "
_COLLECTIVES = {  # the libraries' names, without blanks
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
}
_PRODUCTS = ("mm", "linear", "matmul", "convolution")
_PHASES = ("forward", "backward", "update")


class _StepTimeline:
    """The measured timeline of one rank's step. The profiler slows the step down.

    Attributes:
        events: the events of the step, when it has run. Streams: "phase"; "compute", the outermost
            calls of torch's operators; "waiting", calls of collectives; "links", their other work.
            On a GPU its kernels are "compute" and "links", and calls of the processor are "calls".
    """

    source = (
        "Measured by torch's profiler on rank 0. The profiler slows the step down. It does not see "
        "compiled code, which is a gap"
    )

    def __init__(self) -> None:
        self.events: list[TimelineEvent] = []

    def marking(self, emit: Callable[..., None]) -> Callable[..., None]:
        """Returns a function like `emit` that also marks each phase of a step in the profile."""

        def mark_and_emit(event: str, **facts: Any) -> None:
            if event == "at":
                with record_function(_MARK + facts["phase"]):
                    pass
            emit(event, **facts)

        return mark_and_emit

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Profiles the step that runs inside the `with` block."""
        with (
            _without_its_log(),
            profile(activities=activities_to_profile(), acc_events=True) as found,
        ):
            yield
        self.events = _events_of([*found.events()])

    def facts(self) -> dict[str, Any]:
        """Returns the measured timeline as the data of the event "timeline"."""
        rows = [
            [e.name, e.stream, e.start, e.seconds, e.kind, e.phase, e.source, e.nbytes]
            for e in self.events
        ]
        return {"events": rows, "source": self.source}


@contextmanager
def _without_its_log() -> Iterator[None]:
    """Hides the profiler's own lines on standard error inside the `with` block."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = "5"
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]
        else:
            os.environ["KINETO_LOG_LEVEL"] = before


def _events_of(profiled: list[Any]) -> list[TimelineEvent]:
    marks = sorted(
        (e.time_range.start, e.name.removeprefix(_MARK)) for e in profiled if _is_mark(e)
    )
    work = [e for e in profiled if not _is_mark(e)]
    if not work:
        return []
    began = min([e.time_range.start for e in work] + [at for at, _ in marks])
    ended = max(e.time_range.end for e in work)
    on_gpu = not all(map(is_of_host, work))

    def make(name: str, stream: str, start: float, end: float, kind: str, phase: str) -> Any:
        return TimelineEvent(name, stream, (start - began) / 1e6, (end - start) / 1e6, kind, phase)

    phases = [(at, _name_of_phase(name)) for at, name in marks]
    found = []
    for (start, phase), (end, _) in zip(phases, [*phases[1:], (ended, "")], strict=True):
        if phase in _PHASES:
            found.append(make(phase, "phase", start, end, phase, phase))
    for event in work:
        stream, kind = _stream_of(event, on_gpu), _kind_of(event.name)
        start, end = event.time_range.start, event.time_range.end
        if stream and end > start:
            phase = next((p for at, p in reversed(phases) if at <= start and p in _PHASES), "")
            found.append(make(event.name, stream, start, end, kind, phase))
    return found


def _is_mark(event: Any) -> bool:
    return bool(event.name.startswith(_MARK))


def _name_of_phase(name: str) -> str:
    return "update" if name == "optimizer" else name


def _stream_of(event: Any, on_gpu: bool) -> str:
    """Returns the stream that shows an event; "" if it is inside another event that is shown."""
    is_collective = _kind_of(event.name) in _COLLECTIVES.values()
    if not is_of_host(event):
        return "links" if is_collective else "compute"
    if event.is_async:
        return "links" if is_collective else ""
    above = event.cpu_parent
    while above is not None:
        if _is_call(above.name):
            return ""
        above = above.cpu_parent
    if not _is_call(event.name):
        return ""
    if on_gpu:
        return "calls"
    return "waiting" if is_collective else "compute"


def _is_call(name: str) -> bool:
    return name.startswith(("aten::", "c10d::"))


def _kind_of(name: str) -> str:
    plain = name.lower().replace("_", "")
    for text, kind in _COLLECTIVES.items():
        if text in plain and not name.startswith("aten::"):
            return kind
    if "scaled_dot_product" in name or "flash" in plain:
        return "attention"
    return "matmul" if any(part in plain for part in _PRODUCTS) else "other"
