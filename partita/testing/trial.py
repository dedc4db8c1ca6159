"""One sample call for the prover: the answer of a rule for it, and its result on one device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from partita.rules.rule import Arg, Decomposition, KernelRule, LikeRule, Rule
from partita.rules.sentence import NUMBER, parse


class Trial:
    """One sample call of a function with a rule, which can be repeated with parts of its operands.

    Attributes:
        expected: the function's results on one device.
        tensors: the operands and the expected results.
        products: a bound on the number of terms of all sums together: at first the largest tensor's
            number of elements. The prover raises it to the product of a sentence's dimensions.
        differentiable: for each operand, True if torch has a gradient for it.
    """

    def __init__(self, function: Any, rule: Rule, args: tuple[Any, ...], kwargs: Any) -> None:
        self.function, self.rule, self.args, self.kwargs = function, rule, args, kwargs
        self.leaves, self.tree = tree_flatten((args, kwargs), is_leaf=lambda x: x is None)
        self.operands = self._find_operands()
        where = {id(x): i for i, x in enumerate(self.leaves) if isinstance(x, torch.Tensor)}
        self.places = [where[id(x)] if isinstance(x, torch.Tensor) else None for x in self.operands]
        self.expected = self.run(function, self.operands)
        self.tensors = [x for x in [*self.operands, *self.expected] if isinstance(x, torch.Tensor)]
        self.products = max([x.numel() for x in self.tensors], default=1)
        self.differentiable = self._find_differentiable()

    def count_terms(self, value: torch.Tensor) -> int:
        """Returns how many terms may be summed in an element of `value`.

        This bounds rounding errors. `value` is an output or a gradient.
        """
        return max(1, self.products // max(1, value.numel()))

    def _declared_arguments(self) -> Iterator[tuple[inspect.Parameter, Any]]:
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

    def find_unread(self) -> list[Any]:
        """Returns the sample call's arguments that are neither tensors nor read by the rule."""
        params = self.rule.params
        names = {p.name.lstrip("_") for p in params}
        rest = [] if any(p.kind == p.VAR_POSITIONAL for p in params) else self.args[len(params) :]
        more = [*rest, *(x for name, x in self.kwargs.items() if name not in names)]
        return [x for x in more if x is not None and not isinstance(x, torch.Tensor)]

    def _find_operands(self) -> list[Any]:
        if self.rule.derive is None:
            count = len(parse(self.rule.text).terms)
            given = [*self.args, *self.kwargs.values(), *[None] * count][:count]
            return [x if x is None or isinstance(x, torch.Tensor) else NUMBER for x in given]
        values = [x for _, x in self._declared_arguments()]
        return [x for x in tree_flatten(values)[0] if isinstance(x, torch.Tensor)]

    def _find_differentiable(self) -> list[bool]:
        """Returns for each operand True if torch has a gradient for it."""
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
                            torch.autograd.grad(out, leaf, draw_cotangent(out), allow_unused=True)
                except RuntimeError:
                    able[i] = False
        return able

    def leaves_of(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns copies of `tensors`, which replace the operands, as leaves of autograd.

        They require grad if the operand in this place can have a gradient.
        """
        return [
            x.detach().clone().requires_grad_(able) if isinstance(x, torch.Tensor) else x
            for x, able in zip(tensors, self.differentiable, strict=True)
        ]

    def evaluate_rule(self) -> Iterator[KernelRule | Decomposition | None]:
        """Yields the different rules that a rule function returns for sharded operands.

        First all operands are replicated. Afterwards one dimension of one operand is sharded at a
        time. If the rule is a sentence and no function, yields that.
        """
        if self.rule.derive is None:
            yield KernelRule(self.rule.text)
            return
        seen: list[Any] = []
        cases: list[tuple[int, int]] = [(-1, 0)]
        cases += [(i, d) for i, x in enumerate(self.operands) for d in range(x.ndim)]
        for case in cases:
            answer = self._ask_case(case)
            text = answer.text if isinstance(answer, KernelRule) else type(answer).__name__
            if text not in seen:
                seen.append(text)
                yield answer

    def _ask_case(self, case: tuple[int, int]) -> KernelRule | Decomposition | None:
        def arg(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            i = next(i for i, y in enumerate(self.operands) if y is x)
            split = tuple(2 if (i, d) == case else 1 for d in range(x.ndim))
            return Arg(tuple(x.shape), split)

        positional, named = [], {}
        for p, value in self._declared_arguments():
            leaves, tree = tree_flatten(value, is_leaf=lambda x: x is None)
            value = tree_unflatten([arg(x) for x in leaves], tree)
            if isinstance(value, tuple) and any(isinstance(v, Arg) for v in value):
                value = list(value)  # as the dispatcher hands them over
            if p.kind == p.KEYWORD_ONLY or p.name in self.kwargs:
                named[p.name] = value
            else:
                positional.append(value)
        answer = self.rule.evaluate(*positional, **named)
        if isinstance(answer, str):
            return KernelRule(answer)
        return None if isinstance(answer, LikeRule) else answer

    def run(self, kernel: Callable[..., Any], tensors: Sequence[Any]) -> list[torch.Tensor]:
        """Returns the tensor results of `kernel` for the sample call with operands `tensors`."""
        leaves = list(self.leaves)
        for place, x in zip(self.places, tensors, strict=True):
            if place is not None:
                leaves[place] = x
        args, kwargs = tree_unflatten(leaves, self.tree)
        out = kernel(*args, **kwargs)
        return [x for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor)]


def draw_cotangent(x: torch.Tensor) -> torch.Tensor:
    """Returns random values to use as the gradient of the output `x`.

    Equal shapes get equal values.
    """
    g = torch.Generator().manual_seed(7)
    noise = torch.randn(x.shape, generator=g, dtype=torch.float64)
    return noise.to(x.dtype) if x.dtype.is_floating_point or x.dtype.is_complex else noise
