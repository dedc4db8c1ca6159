"""The prover: checks every row of a rule, and finds right rows that the rule lacks.

A *row* is one way to place an op's operands and results on a mesh axis. The prover works by brute
force, on ranks that are simulated one after the other. It splits the inputs as in the row, into
pieces of uneven size and unequal shares of both signs. It runs the local kernel on each rank, joins
the outputs and compares them with one device. Then it checks backward: gradients of the outputs are
placed by duality, and plain autograd runs on each rank. The gradients of the inputs, joined by
duality, must be the same as on one device.

    python -m partita.testing.prove [op ...]
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from partita.layout import Partial as Shares
from partita.layout import Placement, Replicate, Shard, chunk
from partita.rules.rule import RULES, Decomposition, KernelCall, KernelRule
from partita.rules.sentence import Bound, Row, bind, parse
from partita.tensor.op_facts import form_of
from partita.testing.simulated_ranks import (
    are_same,
    cut_for_ranks,
    find_difference,
    join_ranks,
    tolerance_of,
)

from .trial import Trial, draw_cotangent

Sample = tuple[tuple[Any, ...], dict[str, Any]]
MOST_COMBINATIONS = 150
"""The most placements of a sample's operands. Missed rows are not searched if it has more."""


@dataclass
class Proof:
    """The result of `prove` for one rule. It prints a line for each row that is wrong or missed.

    A row is one way to place an op's operands and results on a mesh axis.

    Attributes:
        name: the name of the rule.
        wrong: rows with other results than on one device: the row, the sentence, the shapes, and
            the largest difference.
        missed: rows that are right for the samples, and that the sentence lacks.
        rows: the number of checked rows, each on 2 and on 3 ranks if its dimension can be split.
    """

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
    """Checks each row of a function's rule, forward and backward, on 2 and 3 simulated ranks.

    A row is one way to place operands and results on a mesh axis. No process is started: the ranks
    are simulated one after the other. Their joined results must equal the function's result on one
    device, up to rounding.

        proof = prove(bias_gelu, [((x, bias, 0.5), {})])
        assert not proof.wrong, str(proof)

    Args:
        function: a function with a rule. It may also be any name of an operator of `torch.library`
            that has one.
        samples: calls, each `(args, kwargs)` of plain tensors. Different sizes that are not
            divisible by the number of ranks find most faults. float64 is compared most strictly.
        missed: True also searches for valid rows that the rule lacks.

    Returns:
        A `Proof` with the wrong and the missed rows as text, and the number of checked rows.

    Raises:
        KeyError: `function` has no rule.
        SentenceError: the rule's sentence does not fit a sample.
    """
    rule = RULES.get(function) or form_of(function).rule
    if rule is None:
        raise KeyError(f"{function} has no rule: give it one with pt.rule")
    proof = Proof(rule.name)
    for args, kwargs in samples:
        trial = Trial(function, rule, args, kwargs)
        rows: set[str] = set()
        for answer in trial.evaluate_rule():
            rows |= _prove_answer(trial, answer, proof)
        if missed and rows:
            proof.missed += [m for m in _find_missed_rows(trial, rows) if m not in proof.missed]
    return proof


# -- one row ---------------------------------------------------------------------------------------


def _prove_answer(
    trial: Trial, answer: KernelRule | Decomposition | None, proof: Proof
) -> set[str]:
    if answer is None:
        return set()
    if isinstance(answer, Decomposition):
        proof.rows += 1
        reason = _find_decomposition_fault(trial, answer)
        if reason:
            proof.wrong.append(f"{trial.rule.name} written as other ops: {reason}")
        return set()
    shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in trial.operands]
    bound = bind(parse(answer.text), shapes)
    trial.products = max(trial.products, math.prod(bound.sizes.values()))
    known = set(bound.sizes)
    if any(n not in known for out in bound.outputs for dim in out for n in dim.names):
        unread = trial.find_unread()
        if unread:
            proof.wrong.append(
                f'"{answer.text}": only the kernel knows the size of the result, and it may depend '
                f"on {unread}, which the rule does not declare"
            )
    for row in bound.rows:
        for n in (2, 3):
            if row.split and not bound.can_split(row.split, n):
                continue
            proof.rows += 1
            reason = _find_row_fault(trial, answer, bound, row, n)
            if reason:
                proof.wrong.append(f'{row} on {n} ranks of "{answer.text}" {shapes}: {reason}')
    return {str(row) for row in bound.rows}


def _find_decomposition_fault(trial: Trial, answer: Decomposition) -> str:
    def both(kernel: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        inputs = trial.leaves_of(trial.operands)
        outs = trial.run(kernel, inputs)
        return outs, _compute_gradients(outs, inputs, [draw_cotangent(x) for x in outs])

    try:
        ours, theirs = both(answer.run), both(trial.function)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for what, a, b in zip(("value", "gradient"), ours, theirs, strict=True):
        if len(a) != len(b):
            return f"{len(a)} of a {what} and not {len(b)}"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            near = tolerance_of([*trial.tensors, x], [x, y], trial.count_terms(y))
            if reason := find_difference(x, y, near):
                return f"{what} {i} {reason}"
    return ""


def _make_kernel(trial: Trial, answer: KernelRule, bound: Bound, row: Row, n: int, r: int) -> Any:
    if answer.local is None:
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
    return answer.local(KernelCall(trial.function, shapes, outputs, pieces)) or trial.function


def _find_row_fault(trial: Trial, answer: KernelRule, bound: Bound, row: Row, n: int) -> str:
    """Returns why the row is wrong; "" if it is right."""
    kernels = [_make_kernel(trial, answer, bound, row, n, r) for r in range(n)]
    try:
        return _compare_outputs(trial, kernels, row.inputs, row.outputs, n)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _compare_outputs(
    trial: Trial,
    kernels: Sequence[Any],
    inputs: Sequence[Placement | None],
    outputs: Sequence[Placement],
    n: int,
) -> str:
    pieces = [cut_for_ranks(x, p, n) for x, p in zip(trial.operands, inputs, strict=True)]
    ranks = [trial.leaves_of([column[r] for column in pieces]) for r in range(n)]
    outs = [trial.run(kernel, mine) for kernel, mine in zip(kernels, ranks, strict=True)]
    if len(outs[0]) != len(outputs):
        return f"{len(outs[0])} outputs, and the sentence has {len(outputs)}"
    for i, p in enumerate(outputs):
        parts = [o[i].detach() for o in outs]
        terms = trial.count_terms(trial.expected[i])
        got = join_ranks(parts, p, terms)
        near = tolerance_of([*trial.tensors, got], parts, terms)
        if reason := find_difference(got, trial.expected[i].detach(), near):
            return f"output {i} {reason}"
    if any(isinstance(p, Shares) and p.reduce_op != "sum" for p in outputs):
        return ""
    return _compare_gradients(trial, ranks, outs, inputs, outputs, n)


def _compare_gradients(
    trial: Trial,
    ranks: Sequence[Sequence[Any]],
    outs: Sequence[Sequence[torch.Tensor]],
    inputs: Sequence[Placement | None],
    outputs: Sequence[Placement],
    n: int,
) -> str:
    leaves = trial.leaves_of(trial.operands)
    whole = trial.run(trial.function, leaves)
    directions = [draw_cotangent(x) for x in whole]
    expected = _compute_gradients(whole, leaves, directions)
    given: list[list[torch.Tensor]] = [[] for _ in range(n)]
    for i, p in enumerate(outputs):
        if isinstance(p, Shard):
            at = 0
            for r in range(n):
                length = outs[r][i].shape[p.dim]
                given[r].append(directions[i].narrow(p.dim, at, length))
                at += length
        else:
            for r, g in enumerate(cut_for_ranks(directions[i], p.dual(), n)):
                given[r].append(g)
    found = [_compute_gradients(o, mine, g) for o, mine, g in zip(outs, ranks, given, strict=True)]
    given_by_all = [g for mine in given for g in mine]
    places = [p for p, x in zip(inputs, leaves, strict=True) if _wants_gradient(x)]
    for k, place in enumerate(places):
        assert place is not None
        parts = [f[k] for f in found]
        terms = trial.count_terms(expected[k])
        got = join_ranks(parts, place.dual(), terms)
        near = tolerance_of([*trial.tensors, got], [*parts, *given_by_all], terms)
        if reason := find_difference(got, expected[k], near):
            return f"gradient {k} {reason}"
    return ""


def _wants_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _compute_gradients(
    outs: Sequence[torch.Tensor], inputs: Sequence[Any], given: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns a gradient for each input that requires one; zeros if it is not used."""
    wanted = [x for x in inputs if _wants_gradient(x)]
    pairs = [(o, g) for o, g in zip(outs, given, strict=True) if o.requires_grad]
    if not pairs or not wanted:
        return [torch.zeros_like(x) for x in wanted]
    roots, seeds = zip(*pairs, strict=True)
    grads = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)]


# -- rows that a rule lacks ------------------------------------------------------------------------


def _find_missed_rows(trial: Trial, known: set[str]) -> Iterator[str]:
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
        for placed in itertools.product(*_find_output_placements(trial, inputs, 2)):
            row = Row(tuple(inputs), tuple(placed))
            if str(row) not in known and all(_is_row_right(trial, row, n) for n in (2, 3)):
                yield str(row)


def _is_row_right(trial: Trial, row: Row, n: int) -> bool:
    try:
        return not _compare_outputs(trial, [trial.function] * n, row.inputs, row.outputs, n)
    except Exception:
        return False


def _find_output_placements(
    trial: Trial, inputs: Sequence[Placement | None], n: int
) -> list[list[Placement]]:
    """Returns for each output the placements that give its value; empty if there is none."""
    pieces = [cut_for_ranks(x, p, n) for x, p in zip(trial.operands, inputs, strict=True)]
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
                parts = [o[i] for o in outs]
                terms = trial.count_terms(whole)
                near = tolerance_of([*trial.tensors, whole], parts, terms)
                if are_same(join_ranks(parts, p, terms), whole, near):
                    fits.append(p)
            except (ValueError, RuntimeError, IndexError):
                continue
        found.append(fits)
    return found or [[]]


# -- on the command line ---------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Runs the prover for the ops `arguments`, or for all rules that have samples.

    Returns the exit code: 1 if a row is wrong.
    """
    from .samples import samples

    known = samples()
    parser = argparse.ArgumentParser(
        prog="python -m partita.testing.prove",
        description="Prove partita's own rules: each row, forward and dual, on 2 and 3 simulated "
        "ranks, against one device. Exit code 1 if a row is wrong.",
        epilog="A rule of your own: partita.testing.prove.prove(function, samples).",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a rule; all by default")
    names = parser.parse_args(arguments).names
    all_names = sorted({RULES[function].name for function in known})
    for name in names:
        if name not in all_names:
            near = difflib.get_close_matches(name, all_names)
            hint = f"; there is {' and '.join(near)}" if near else ""
            parser.error(f"no rule with samples is named {name!r}{hint}")
    wrong = rows = missed = 0
    for function, cases in known.items():
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
