"""Is every row of a rule right, and which right rows does the rule not know?

By brute force, on ranks that are simulated one after the other: cut the inputs as the row says
(pieces of uneven size, shares that are lopsided and of both signs), run the local kernel on each
rank, put the outputs together and compare with one device. Then the same backwards: the gradients
of the outputs are placed by duality, plain autograd runs on each rank, and the gradients of the
inputs, put together by duality, must be those of one device.

    python -m partita.rules.prove [op ...]
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from partita.layout import Partial as Shares
from partita.layout import Placement, Replicate, Shard, chunk

from .bind import NUMBER, Bound, bind
from .rows import Row
from .rule import RULES, Arg, Call, Like, Rewrite, Rule, Said
from .sentence import parse

__all__ = ["Proof", "prove"]

Sample = tuple[tuple[Any, ...], dict[str, Any]]
SCALES = {2: ((3.7, 1.0), (-2.7, -1.0)), 3: ((3.7, 1.0), (-1.2, -2.0), (-1.5, 1.0))}
"""Share r of a value x over n ranks is a * x + b * noise of `SCALES[n][r]`; they add up to x."""
WHOLE_SCALES = {2: ((3, 1), (-2, -1)), 3: ((3, 1), (-1, -2), (-1, 1))}
MOST_COMBINATIONS = 150
"""Samples with more placements of their operands than this are not searched."""


@dataclass
class Proof:
    """What was found: rows that are wrong, right rows that are missed, the number checked."""

    name: str
    wrong: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    rows: int = 0

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.rows} rows, {len(self.wrong)} wrong"]
        lines += [f"  wrong   {w}" for w in self.wrong]
        lines += [f"  missed  {m}" for m in self.missed]
        return "\n".join(lines)


def prove(function: Callable[..., Any], samples: Iterable[Sample], missed: bool = True) -> Proof:
    """Check each row of `function`'s rule, forward and dual, on 2 and 3 ranks.

    Args:
        samples: `(args, kwargs)`, with floating tensors in float64 for tight comparison.
        missed: also search for valid rows that the rule does not derive.

    Raises:
        KeyError: `function` has no rule.
    """
    rule = RULES[function]
    proof = Proof(rule.name)
    for args, kwargs in samples:
        trial = _Trial(function, rule, args, kwargs)
        rows: set[str] = set()
        for said in trial.sayings():
            rows |= _prove_saying(trial, said, proof)
        if missed and rows:
            proof.missed += [m for m in _search(trial, rows) if m not in proof.missed]
    return proof


# -- what the rule says of a sample ----------------------------------------------------------------


class _Trial:
    """One sample: its operands, in the order of the rule's terms, and how to replace them."""

    def __init__(self, function: Any, rule: Rule, args: tuple[Any, ...], kwargs: Any) -> None:
        self.function, self.rule, self.args, self.kwargs = function, rule, args, kwargs
        self.leaves, self.tree = tree_flatten((args, kwargs), is_leaf=lambda x: x is None)
        self.operands = self._operands()
        where = {id(x): i for i, x in enumerate(self.leaves) if isinstance(x, torch.Tensor)}
        self.places = [where[id(x)] if isinstance(x, torch.Tensor) else None for x in self.operands]
        self.expected = self.run(function, self.operands)
        self.differentiable = self._differentiable()

    def _declared(self) -> Iterator[tuple[inspect.Parameter, Any]]:
        given, named = list(self.args), dict(self.kwargs)
        for p in self.rule.params:
            if p.kind == p.VAR_POSITIONAL:
                for x in given:
                    yield p, x
                given = []
            elif given and p.kind != p.KEYWORD_ONLY:
                yield p, given.pop(0)
            elif p.name in named:
                yield p, named[p.name]

    def unread(self) -> list[Any]:
        """The arguments that are no tensors and in whose places the rule has no parameter."""
        params = self.rule.params
        names = {p.name.lstrip("_") for p in params}
        rest = [] if any(p.kind == p.VAR_POSITIONAL for p in params) else self.args[len(params) :]
        more = [*rest, *(x for name, x in self.kwargs.items() if name not in names)]
        return [x for x in more if x is not None and not isinstance(x, torch.Tensor)]

    def _operands(self) -> list[Any]:
        if self.rule.derive is None:
            count = len(parse(self.rule.text).terms)
            given = [*self.args, *self.kwargs.values(), *[None] * count][:count]
            return [x if x is None or isinstance(x, torch.Tensor) else NUMBER for x in given]
        values = [x for _, x in self._declared()]
        return [x for x in tree_flatten(values)[0] if isinstance(x, torch.Tensor)]

    def _differentiable(self) -> list[bool]:
        """For each operand, whether torch has a gradient for it."""
        able = []
        for i, x in enumerate(self.operands):
            able.append(
                isinstance(x, torch.Tensor) and (x.dtype.is_floating_point or x.is_complex())
            )
            if able[i]:
                leaf = x.detach().clone().requires_grad_()
                try:
                    outs = self.run(
                        self.function, [leaf if j == i else y for j, y in enumerate(self.operands)]
                    )
                    for out in outs:
                        if out.requires_grad:
                            torch.autograd.grad(out, leaf, _direction(out), allow_unused=True)
                except RuntimeError:
                    able[i] = False
        return able

    def leaves_of(self, tensors: Sequence[Any]) -> list[Any]:
        """Copies that want a gradient, where there is one."""
        return [
            x.detach().clone().requires_grad_(able) if isinstance(x, torch.Tensor) else x
            for x, able in zip(tensors, self.differentiable, strict=True)
        ]

    def sayings(self) -> Iterator[Said | Rewrite | None]:
        """What the rule says: of whole operands, and of each operand with one dimension split."""
        if self.rule.derive is None:
            yield Said(self.rule.text)
            return
        seen: list[Any] = []
        cases: list[tuple[int, int]] = [(-1, 0)]
        cases += [(i, d) for i, x in enumerate(self.operands) for d in range(x.ndim)]
        for case in cases:
            said = self._ask(case)
            text = said.text if isinstance(said, Said) else type(said).__name__
            if text not in seen:
                seen.append(text)
                yield said

    def _ask(self, case: tuple[int, int]) -> Said | Rewrite | None:
        def arg(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            i = next(i for i, y in enumerate(self.operands) if y is x)
            split = tuple(2 if (i, d) == case else 1 for d in range(x.ndim))
            return Arg(tuple(x.shape), split)

        positional, named = [], {}
        for p, value in self._declared():
            leaves, tree = tree_flatten(value, is_leaf=lambda x: x is None)
            value = tree_unflatten([arg(x) for x in leaves], tree)
            if isinstance(value, tuple) and any(isinstance(v, Arg) for v in value):
                value = list(value)  # as the dispatcher hands them over
            if p.kind == p.KEYWORD_ONLY or p.name in self.kwargs:
                named[p.name] = value
            else:
                positional.append(value)
        assert self.rule.derive is not None
        said = self.rule.derive(*positional, **named)
        if isinstance(said, str):
            return Said(said)
        return None if isinstance(said, Like) else said

    def run(self, kernel: Callable[..., Any], tensors: Sequence[Any]) -> list[torch.Tensor]:
        """`kernel` on the sample with its operands replaced; the tensors that it returns."""
        leaves = list(self.leaves)
        for place, x in zip(self.places, tensors, strict=True):
            if place is not None:
                leaves[place] = x
        args, kwargs = tree_unflatten(leaves, self.tree)
        out = kernel(*args, **kwargs)
        return [x for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor)]


# -- cutting and putting together ------------------------------------------------------------------


def _shares(x: torch.Tensor, n: int) -> list[torch.Tensor]:
    if x.dtype == torch.bool:
        return [x if r == n - 1 else torch.zeros_like(x) for r in range(n)]
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return [a * x + b * (noise + 0.5).to(x.dtype) for a, b in SCALES[n]]
    return [a * x + b * (noise * 5).to(x.dtype) for a, b in WHOLE_SCALES[n]]


def _cut(x: Any, p: Placement | None, n: int) -> list[Any]:
    if p is None or not isinstance(x, torch.Tensor):
        return [x] * n
    if isinstance(p, Shard):
        return [x.narrow(p.dim, *chunk(x.shape[p.dim], n, r)) for r in range(n)]
    return _shares(x, n) if isinstance(p, Shares) else [x] * n


def _joined(parts: Sequence[torch.Tensor], p: Placement) -> torch.Tensor:
    """The value; raises ValueError where ranks differ that should agree."""
    if isinstance(p, Shard):
        return torch.cat(list(parts), p.dim)
    if isinstance(p, Shares):
        stacked = torch.stack(list(parts))
        if p.reduce_op == "sum":
            return stacked.sum(0).to(parts[0].dtype)
        return stacked.amax(0) if p.reduce_op == "max" else stacked.amin(0)
    for part in parts[1:]:
        if not _same(part, parts[0]):
            raise ValueError("ranks differ on a whole value")
    return parts[0]


def _same(a: torch.Tensor, b: torch.Tensor, tolerance: float = 0.0) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    near = max(tolerance, _tolerance(a))
    return torch.allclose(a, b, near, near, equal_nan=True) if near else torch.equal(a, b)


def _tolerance(x: torch.Tensor) -> float:
    """How far apart two roundings of shares may lie: 0 for integers."""
    exact = not (x.dtype.is_floating_point or x.dtype.is_complex)
    return 0.0 if exact else max(1e-8, 8 * torch.finfo(x.dtype).eps)


# -- one row ---------------------------------------------------------------------------------------


def _prove_saying(trial: _Trial, said: Said | Rewrite | None, proof: Proof) -> set[str]:
    if said is None:
        return set()
    if isinstance(said, Rewrite):
        proof.rows += 1
        reason = _rewrite_differs(trial, said)
        if reason:
            proof.wrong.append(f"{trial.rule.name} written as other ops: {reason}")
        return set()
    shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in trial.operands]
    bound = bind(parse(said.text), shapes)
    known = set(bound.sizes)
    if any(n not in known for out in bound.outputs for dim in out for n in dim.names):
        unread = trial.unread()
        if unread:
            proof.wrong.append(
                f'"{said.text}": only the kernel tells the size of the result, and it may depend '
                f"on {unread}, which the rule does not declare"
            )
    for row in bound.rows:
        for n in (2, 3):
            if row.split and not bound.can_split(row.split, n):
                continue
            proof.rows += 1
            reason = _differs(trial, said, bound, row, n)
            if reason:
                proof.wrong.append(f'{row} on {n} ranks of "{said.text}" {shapes}: {reason}')
    return {str(row) for row in bound.rows}


def _rewrite_differs(trial: _Trial, said: Rewrite) -> str:
    def both(kernel: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        inputs = trial.leaves_of(trial.operands)
        outs = trial.run(kernel, inputs)
        return outs, _gradients(outs, inputs, [_direction(x) for x in outs])

    try:
        ours, theirs = both(said.run), both(trial.function)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for what, a, b in zip(("value", "gradient"), ours, theirs, strict=True):
        if len(a) != len(b) or not all(map(_same, a, b)):
            return f"another {what}: {a} and not {b}"
    return ""


def _kernel(trial: _Trial, said: Said, bound: Bound, row: Row, n: int, r: int) -> Any:
    if said.local is None:
        return trial.function
    pieces = {}
    if row.split:
        size = bound.sizes[row.split]
        pieces[row.split] = (*chunk(size, n, r), size)

    def local_size(names: Sequence[str]) -> int:
        if any(name not in bound.sizes for name in names):
            return -1
        return math.prod(pieces[k][1] if k in pieces else bound.sizes[k] for k in names)

    outputs = tuple(tuple(local_size(d.names) for d in out) for out in bound.outputs)
    shapes = tuple(o if isinstance(o, tuple) else None for o in bound.operands)
    return said.local(Call(trial.function, shapes, outputs, pieces)) or trial.function


def _differs(trial: _Trial, said: Said, bound: Bound, row: Row, n: int) -> str:
    """Why the row is wrong; empty where it is right."""
    kernels = [_kernel(trial, said, bound, row, n, r) for r in range(n)]
    try:
        return _compare(trial, kernels, row.inputs, row.outputs, n)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _compare(
    trial: _Trial,
    kernels: Sequence[Any],
    inputs: Sequence[Placement | None],
    outputs: Sequence[Placement],
    n: int,
) -> str:
    pieces = [_cut(x, p, n) for x, p in zip(trial.operands, inputs, strict=True)]
    ranks = [trial.leaves_of([column[r] for column in pieces]) for r in range(n)]
    outs = [trial.run(kernel, mine) for kernel, mine in zip(kernels, ranks, strict=True)]
    if len(outs[0]) != len(outputs):
        return f"{len(outs[0])} outputs, and the sentence has {len(outputs)}"
    for i, p in enumerate(outputs):
        got = _joined([o[i].detach() for o in outs], p)
        if not _same(got, trial.expected[i].detach()):
            return f"output {i} is {got} and not {trial.expected[i]}"
    if any(isinstance(p, Shares) and p.reduce_op != "sum" for p in outputs):
        return ""
    return _compare_gradients(trial, ranks, outs, inputs, outputs, n)


def _compare_gradients(
    trial: _Trial,
    ranks: Sequence[Sequence[Any]],
    outs: Sequence[Sequence[torch.Tensor]],
    inputs: Sequence[Placement | None],
    outputs: Sequence[Placement],
    n: int,
) -> str:
    leaves = trial.leaves_of(trial.operands)
    whole = trial.run(trial.function, leaves)
    directions = [_direction(x) for x in whole]
    expected = _gradients(whole, leaves, directions)
    given: list[list[torch.Tensor]] = [[] for _ in range(n)]
    for i, p in enumerate(outputs):
        if isinstance(p, Shard):
            at = 0
            for r in range(n):
                length = outs[r][i].shape[p.dim]
                given[r].append(directions[i].narrow(p.dim, at, length))
                at += length
        else:
            for r, g in enumerate(_cut(directions[i], p.dual(), n)):
                given[r].append(g)
    found = [_gradients(o, mine, g) for o, mine, g in zip(outs, ranks, given, strict=True)]
    places = [p for p, x in zip(inputs, leaves, strict=True) if _wants_gradient(x)]
    for k, p in enumerate(places):
        assert p is not None
        got = _joined([f[k] for f in found], p.dual())
        if not _same(got, expected[k], max(map(_tolerance, whole))):
            return f"gradient {k} is {got} and not {expected[k]}"
    return ""


def _wants_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _direction(x: torch.Tensor) -> torch.Tensor:
    """A gradient to send back: the same one for the same shape."""
    g = torch.Generator().manual_seed(7)
    noise = torch.randn(x.shape, generator=g, dtype=torch.float64)
    return noise.to(x.dtype) if x.dtype.is_floating_point or x.dtype.is_complex else noise


def _gradients(
    outs: Sequence[torch.Tensor], inputs: Sequence[Any], given: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """One for each input that wants one; zeros where it is not used."""
    wanted = [x for x in inputs if _wants_gradient(x)]
    pairs = [(o, g) for o, g in zip(outs, given, strict=True) if o.requires_grad]
    if not pairs or not wanted:
        return [torch.zeros_like(x) for x in wanted]
    roots, seeds = zip(*pairs, strict=True)
    grads = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)]


# -- rows that a rule does not know ----------------------------------------------------------------


def _search(trial: _Trial, known: set[str]) -> Iterator[str]:
    """Every placement of the operands for which the function itself gives a right output."""
    choices: list[list[Placement | None]] = []
    for x in trial.operands:
        if not isinstance(x, torch.Tensor):
            choices.append([None])
            continue
        here: list[Placement | None] = [Replicate()]
        here += [Shard(d) for d in range(x.ndim) if x.shape[d] > 1]
        if x.dtype.is_floating_point or x.dtype.is_complex:
            here.append(Shares())
        choices.append(here)
    if math.prod(map(len, choices)) > MOST_COMBINATIONS:
        return
    for inputs in itertools.product(*choices):
        if all(p is None or p == Replicate() for p in inputs):
            continue
        for placed in itertools.product(*_outputs(trial, inputs, 2)):
            row = Row(tuple(inputs), tuple(placed))
            if str(row) not in known and all(_holds(trial, row, n) for n in (2, 3)):
                yield str(row)


def _holds(trial: _Trial, row: Row, n: int) -> bool:
    try:
        return not _compare(trial, [trial.function] * n, row.inputs, row.outputs, n)
    except Exception:
        return False


def _outputs(trial: _Trial, inputs: Sequence[Placement | None], n: int) -> list[list[Placement]]:
    """For each output the placements that give its value; empty where there is none."""
    pieces = [_cut(x, p, n) for x, p in zip(trial.operands, inputs, strict=True)]
    try:
        outs = [trial.run(trial.function, [column[r] for column in pieces]) for r in range(n)]
    except Exception:
        return [[]]
    found = []
    for i, whole in enumerate(trial.expected):
        fits: list[Placement] = []
        able: list[Placement] = [Replicate(), *(Shard(d) for d in range(whole.ndim))]
        if whole.dtype != torch.bool:
            able.append(Shares())
        for p in able:
            try:
                if _same(_joined([o[i] for o in outs], p), whole):
                    fits.append(p)
            except (ValueError, RuntimeError, IndexError):
                continue
        found.append(fits)
    return found or [[]]


# -- on the command line ---------------------------------------------------------------------------


def main(names: Sequence[str]) -> int:
    """Prove the rules that have samples, or those of `names`; 1 if a row is wrong."""
    from .samples import samples

    wrong = rows = missed = 0
    for function, cases in samples().items():
        if names and RULES[function].name not in names:
            continue
        proof = prove(function, cases)
        wrong, rows = wrong + len(proof.wrong), rows + proof.rows
        missed += len(proof.missed)
        print(proof)
    print(f"{rows} rows: {wrong} wrong; {missed} right ones are missed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
