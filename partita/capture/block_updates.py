"""Updates of blocks: an optimizer steps separately for the parameters of each block.

An elementwise optimizer of torch updates each parameter in the same way and runs no user code. So
it may step for a few parameters at a time. Then each node of an update belongs to one block, and
`fold` replaces equal updates by calls of one subgraph. Parameters outside all blocks are updated
first, in one call.

While an optimizer steps, its step counts are float64 (`widen_counts`). So bias corrections are as
exact as in eager, which uses Python floats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode

from partita.tensor.tensor_state import count_writes

from .block_choice import BlockChoice
from .capture_context import attribute_set, dispatch_listeners, intercepting_modes, unprofiled
from .function_mode import StepFunctionMode
from .recorder import Recorder

# -- updates of optimizers -------------------------------------------------------------------------


_grad: Any = torch._C.TensorBase.grad
Run = Callable[[], Any]


class BlockUpdates:
    """Makes an optimizer update each block separately, so that equal updates can be folded.

    To fold is to replace equal parts of the graph by calls of one subgraph.

    Args:
        recorder: the recorder of the capture. It records to which block a node belongs.
        choice: the choice of modules that are blocks.
        models: the models of the step.
    """

    def __init__(self, recorder: Recorder, choice: BlockChoice, models: Iterable[nn.Module]):
        self._recorder = recorder
        self._listeners = dispatch_listeners()
        models = list(models)
        blocks = choice.find(models)
        # In the models' order, which is the same on all ranks.
        self._blocks = [m for model in models for m in model.modules() if m in blocks]
        self._block_of: dict[torch.Tensor, int] = {}

    @property
    def has_blocks(self) -> bool:
        """True if the step has blocks whose parameters may be updated separately."""
        return bool(self._blocks)

    def note_parameters(self) -> None:
        """Records to which block each parameter belongs. Call it while fakes replace parameters.

        If several blocks share a parameter, it belongs to the first of them.
        """
        self._block_of = {}
        for number, block in enumerate(self._blocks):
            for p in block.parameters():
                self._block_of.setdefault(p, number)

    def update_blocks(
        self, optimizer: Optimizer, run: Run, originals: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        """Traces an optimizer's step, if possible separately for the parameters of each block.

        Args:
            optimizer: the optimizer.
            run: calls the optimizer's own step.
            originals: maps a tensor that the optimizer updates to the model's parameter, if they
                are different tensors.
        """
        if self._can_be_split(optimizer):
            unprofiled(self._step_in_blocks, optimizer, run, originals)
        else:
            self._step(optimizer, run, optimizer.state)

    def _step_in_blocks(
        self, optimizer: Optimizer, run: Run, originals: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        groups, held = optimizer.param_groups, [*optimizer.state]
        block_of = self._find_blocks(optimizer, originals)
        for number in sorted({*block_of.values()}):
            params = [p for p, block in block_of.items() if block == number]
            own = [
                group | {"params": found}
                for group in groups
                if (found := [p for p in group["params"] if block_of[p] == number])
            ]
            kinds = () if number < 0 else (type(optimizer), type(self._blocks[number]))
            with attribute_set(optimizer, "param_groups", own), self._recorder.block(*kinds):
                self._step(optimizer, run, params)
        _order_state(optimizer, held)

    def _step(self, optimizer: Optimizer, run: Run, params: Iterable[torch.Tensor]) -> None:
        """Traces the update of `params`, while the optimizer has no other parameters."""
        states = [optimizer.state[p] for p in params if p in optimizer.state]
        counts = widen_counts(states, self._recorder.exact)
        run()
        narrow_counts(counts)

    def _find_blocks(
        self, optimizer: Optimizer, originals: Mapping[torch.Tensor, torch.Tensor]
    ) -> dict[torch.Tensor, int]:
        """Returns for each parameter the number of its block; -1 if it belongs to none.

        Parameters of different blocks that share a storage belong to none, because the result may
        depend on whether they are updated together.
        """
        params = [p for group in optimizer.param_groups for p in group["params"]]
        block_of = {p: self._block_of.get(originals.get(p, p), -1) for p in params}
        takers: defaultdict[int, set[int]] = defaultdict(set)
        for p, block in block_of.items():
            for memory in _find_memory(p, optimizer.state.get(p, {})):
                takers[memory].add(block)
        together = {-1}.union(*(blocks for blocks in takers.values() if len(blocks) > 1))
        return {p: -1 if block in together else block for p, block in block_of.items()}

    def _can_be_split(self, optimizer: Optimizer) -> bool:
        """True if torch's own code runs the update, and no hook or mode intercepts its calls."""
        own = vars(optimizer)
        return (
            not optimizer.defaults.get("differentiable")
            and own.get("grad_scale") is None
            and own.get("found_inf") is None
            and "_init_group" not in own
            and isinstance(_get_current_function_mode(), StepFunctionMode)
            and dispatch_listeners() == self._listeners
            and not intercepting_modes()
        )


def _order_state(optimizer: Optimizer, held: Sequence[torch.Tensor]) -> None:
    """Puts new entries of an optimizer's state in the order of its parameters.

    Args:
        held: the parameters that had state before.
    """
    new = optimizer.state.keys() - {*held}
    if not new:
        return
    for p in [p for group in optimizer.param_groups for p in group["params"]]:
        if p in new:
            optimizer.state[p] = optimizer.state.pop(p)


def _find_memory(p: torch.Tensor, state: Mapping[str, Any]) -> set[int]:
    """Returns identifiers of the storages of a parameter, its gradient and its state."""
    with DisableTorchFunction():
        taken = (p, _grad.__get__(p), *state.values())
        tensors = (t for t in taken if isinstance(t, torch.Tensor) and t.layout is torch.strided)
        return {t.untyped_storage()._cdata for t in tensors}  # private torch


# -- step counts -----------------------------------------------------------------------------------

COUNTS = ("step", "mu_product")
"""Names in an optimizer's state: the count of steps, and the product of NAdam's momenta."""

WidenedCounts = list[tuple[dict[Any, Any], torch.Tensor, torch.Tensor, int]]
"""(state, count, its float64 copy, number of writes of the copy) for each step count."""


def widen_counts(states: Iterable[dict[Any, Any]], exact: set[int] | None) -> WidenedCounts:
    """Replaces an optimizer's step counts by float64 copies, so that bias corrections are exact.

    Args:
        states: the optimizer states of parameters.
        exact: a set to which the ids of NAdam's momentum products are added, which eager code
            rounds to float32; None to skip them.

    Returns:
        The replaced counts, for `narrow_counts`, which restores them.
    """
    widened: WidenedCounts = []
    for entries in states:
        for name in COUNTS:
            number = entries.get(name)
            if not isinstance(number, torch.Tensor) or number.ndim or number.dtype != torch.float32:
                continue
            if name == "step":
                with torch.inference_mode(False):  # inference tensors have no version counter
                    entries[name] = wide = number.double()
                widened.append((entries, number, wide, count_writes(wide)))
            elif exact is not None:
                exact.add(id(number))
    return widened


def narrow_counts(widened: WidenedCounts) -> None:
    """Undoes `widen_counts`: writes the float64 step counts back into the original tensors.

    Counts that were not changed are put back without a write, so that they do not become inputs.

    Args:
        widened: the result of `widen_counts`. It is emptied.
    """
    for entries, number, wide, writes in widened:
        now = entries["step"]
        is_written = now is not wide or count_writes(wide) != writes
        entries["step"] = number.copy_(now) if is_written else number
    widened.clear()
