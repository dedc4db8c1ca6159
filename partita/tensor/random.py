"""Random numbers on DTensors, which by default are the same in every layout.

Every rank draws the whole tensor from its own generator, and keeps its shard. All ranks seed their
generators equally. So `init`, `dropout` and `randn` give the same values as on one device, and the
generators keep equal states. But each rank draws all numbers, and needs the memory for them for a
short time. For dropout, that is the whole batch's mask.

`random_mode("pieces")` is cheaper: each rank draws only its shard. Its generator is seeded by a
number from the default generator and by the position of the shard. Values then depend on the
layout, but not on the number of ranks that hold the same shard. A run is reproducible on the same
mesh.

Both need generators in the same state on all ranks. Otherwise a dropout mask, or a weight that is
made on each rank, would differ between ranks. So the ranks compare their generators when a line of
the program first draws (`with_generator_check`).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from partita.comm import Wire, call_site, check_equal_on_ranks, is_agreed, is_alone, remember_agreed
from partita.comm.device import default_generator
from partita.layout import Fix
from partita.rules import Kernel, KernelCall, KernelRule, LikeRule
from partita.rules.rule import builtin_rule as rule
from partita.rules.rule import narrow_piece

from .aliasing import strides_of_whole
from .op_facts import FILLS, Form
from .tensor_state import Function, Kwargs

_MODE: ContextVar[str] = ContextVar("random_mode", default="one_device")


@contextlib.contextmanager
def random_mode(mode: str) -> Iterator[None]:
    """Set how DTensors draw random numbers inside the `with` block.

    Args:
        mode: "one_device": the same values as on one device. Each rank draws all of them, which
            costs time. "pieces": each rank draws only its shard; the values depend on the layout.
    """
    if mode not in ("one_device", "pieces"):
        raise ValueError(f'random_mode is "one_device" or "pieces", not {mode!r}')
    token = _MODE.set(mode)
    try:
        yield
    finally:
        _MODE.reset(token)


Draw = Callable[[torch.Tensor, torch.Generator | None], torch.Tensor]
"""`draw(tensor, generator)`: fills `tensor` with random numbers. None: the default generator."""


@torch.no_grad()
def _draw_piece(
    call: KernelCall,
    names: Sequence[str],
    x: torch.Tensor,
    draw: Draw,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    """Returns this rank's piece of the tensor like `x` that `draw` fills on one device."""
    if _MODE.get() == "pieces":
        seed = int(torch.randint(2**62, (), dtype=torch.int64))
        for name in names:
            seed = (seed * 1000003 + call.pieces.get(name, (0, 0, 0))[0] + 1) % 2**62
        generator = torch.Generator(device=x.device)
        generator.manual_seed(seed)
        return draw(torch.empty_like(x, memory_format=torch.contiguous_format), generator)
    shape = call.shapes[0]
    # Drawing fills memory in the order of the tensor's strides. If a rank has a single row, its own
    # strides may not show that order.
    lies = torch.empty_strided(shape, strides_of_whole(x, shape), device="meta")  # type: ignore[arg-type]
    strides = torch.empty_like(lies, memory_format=memory_format).stride()
    whole = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)  # type: ignore[arg-type]
    full = draw(whole, None)
    for dim, name in enumerate(names):
        if name in call.pieces:
            offset, length, _ = call.pieces[name]
            full = narrow_piece(full, dim, offset, length)
    return full


def _on_pieces(x: Any, run: Function) -> Callable[[KernelCall], Kernel | None]:
    """Returns the kernel of a rule for a split operand: it runs `run(draw_piece, input, ...)`.

    `draw_piece(draw)` returns this rank's piece of the tensor that `draw` fills on one device.
    """

    def make_kernel(call: KernelCall) -> Kernel | None:
        def run_on_piece(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return run(partial(_draw_piece, call, x.names, input), input, *args, **kwargs)

        return run_on_piece if call.pieces else None

    return make_kernel


def _make_draw(function: Function, args: Any, kwargs: Kwargs) -> Draw:
    """Returns a function that fills `out`: `function(out, *args, **kwargs)` with a generator."""

    def draw(out: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        own = {} if generator is None else {"generator": generator}
        return function(out, *args, **kwargs | own)

    return draw


@rule(torch.dropout)
def _derive_dropout(x: Any, _p: float = 0.5, _train: bool = True) -> KernelRule:
    def drop_elements(
        draw_piece: Any, input: torch.Tensor, p: float = 0.5, train: bool = True
    ) -> Any:
        if not train or p == 0:
            return input.clone() if train else torch.dropout(input, p, False)

        def draw(out: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
            if generator is None:
                return torch.dropout(out.fill_(1), p, True)
            return out.bernoulli_(1 - p, generator=generator).div_(1 - p)

        return input * draw_piece(draw)

    return KernelRule(f"+ {x.names} -> {x.names}", _on_pieces(x, drop_elements))


@rule(torch.alpha_dropout)
def _derive_alpha_dropout(x: Any) -> KernelRule:
    def drop_elements(
        draw_piece: Any, input: torch.Tensor, p: float = 0.5, train: bool = True
    ) -> Any:
        if not train or p in (0, 1):  # nothing is drawn
            return torch.alpha_dropout(input, p, train)
        # Dropped elements become -b. Then all are rescaled to mean 0 and variance 1.
        b = 1.7580993408473766
        scale = 1 / math.sqrt((b * b * p + 1) * (1 - p))

        def draw(out: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
            if generator is None:
                return torch.alpha_dropout(out.zero_(), p, True)
            kept = out.bernoulli_(1 - p, generator=generator)
            return kept.sub_(1).mul_(b * scale).add_(b * scale * p)

        shift = draw_piece(draw)  # positive for kept elements
        return input * ((shift > 0) * scale) + shift

    return KernelRule(f"{x.names} -> {x.names}", _on_pieces(x, drop_elements))


def _register_fill(function: Function) -> None:
    def fill_piece(draw_piece: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return input.copy_(draw_piece(_make_draw(function, args, kwargs)))

    def derive_fill(x: Any) -> KernelRule:
        return KernelRule(f"{x.names} -> {x.names}", _on_pieces(x, fill_piece))

    rule(function)(derive_fill)


for _name in FILLS:
    _register_fill(getattr(torch.Tensor, _name))


def _register_like(function: Function) -> None:
    def make_like(
        run: Any, draw_piece: Any, input: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        requires = kwargs.pop("requires_grad", False)
        lies = kwargs.pop("memory_format", torch.preserve_format)
        out = draw_piece(_make_draw(run, args, kwargs), lies)
        return out.clone().requires_grad_(requires)

    def derive_like(x: Any) -> LikeRule:
        # The call may be of another form of the function, such as an ATen operator.
        return LikeRule(
            x.shape, local=lambda call: _on_pieces(x, partial(make_like, call.run))(call)
        )

    rule(function)(derive_like)


for _function in (torch.rand_like, torch.randn_like, torch.randint_like):
    _register_like(_function)


# -- ranks compare their generators ----------------------------------------------------------------


def with_generator_check(kernel: Function, form: Form, wire: Wire) -> Function | None:
    """Wraps a kernel that draws random numbers, so that ranks compare their generators.

    They compare them at the first draw of each line. Returns None if there are no other ranks.

    Args:
        kernel: a function that draws random numbers.
        form: the form of the op.
        wire: the connection to the ranks that compare.
    """
    if is_alone(wire):
        return None
    return partial(run_with_generator_check, kernel, form.name, wire)


def run_with_generator_check(
    run: Function, op: str, wire: Wire, /, *args: Any, **kwargs: Any
) -> Any:
    """Calls `run(*args, **kwargs)`, which draws random numbers, and returns its result.

    If this is the first draw of its line, ranks compare their generators. If the generators had
    different states, all ranks raise an error.

    Args:
        op: the name of the op, for the error.
        wire: the connection to the ranks that compare.
    """
    # A disabled dropout draws nothing: its numbers distinguish the calls of one line.
    numbers = tuple([a for a in (*args, *kwargs.values()) if isinstance(a, (int, float))])
    key = (call_site(), "draw", op, numbers)
    if is_agreed(wire, key):
        return run(*args, **kwargs)
    generator = kwargs.get("generator") or default_generator(wire.device)
    before = generator.get_state()
    out = run(*args, **kwargs)
    compare_draws(op, wire, generator, before)
    remember_agreed(wire, key)
    return out


def compare_draws(op: str, wire: Wire, generator: torch.Generator, before: torch.Tensor) -> None:
    """Raises on all ranks if `op` drew random numbers from generators in different states.

    Args:
        generator: this rank's generator, after the draw.
        before: this rank's generator state before the draw.
    """
    if torch.equal(before, generator.get_state()):
        return
    state = hashlib.blake2b(bytes(before.tolist()), digest_size=6).hexdigest()
    check_equal_on_ranks(
        op,
        f"draws from a generator of seed {generator.initial_seed()}, in state {state}",
        wire,
        fact="the ranks' random generators are not in the same state",
        reason="each rank draws one device's numbers and keeps its part of them",
        fixes=(
            Fix("torch.manual_seed(seed)", "the same on every rank"),
            Fix("with torch.random.fork_rng(): ...", "around code that draws on some ranks only"),
        ),
    )
