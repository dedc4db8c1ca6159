"""The shape environment of a capture: it makes a symbolic float for each float of the step.

Only a capture imports this module, because sympy and Dynamo take a second to import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from partita.comm import user_line

from .fakes import SymbolicFloat
from .kernel_strides import KernelStridesMode


class NumberEnv(ShapeEnv):
    """The shape environment of the symbolic numbers in a capture.

    It records on which lines of the program the step branches on a number.

    Attributes:
        lines: the user's line of each guard of the shape environment, by the guard's index.
        asked: maps the symbol of each number that the step compares or reads to the first line that
            does so.
        answer: a function from the node of a number without a hint (known value) to the number's
            value, or None if that is unknown.

    Private torch: `ShapeEnv`, the only class that can trace a Python number.
    """

    def __init__(self) -> None:
        # `.item()` makes one more number that is known only when the graph runs.
        super().__init__(
            allow_scalar_outputs=True,
            allow_dynamic_output_shape_ops=False,
            specialize_zero_one=False,
        )
        self.lines: dict[int, str] = {}
        self.asked: dict[str, str] = {}
        self.answer: Callable[[Any], bool | float | None] = lambda question: None
        self._made: list[Any] = []

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        before = len(self.guards)
        found = super().evaluate_expr(*args, **kwargs)
        for i in range(before, len(self.guards)):
            self.lines[i] = user_line()
        return found

    def evaluate_sym_node(self, sym_node: Any, *args: Any, **kwargs: Any) -> Any:
        if not sym_node.has_hint():
            found = self.answer(sym_node)
            if found is not None:
                return found
        return super().evaluate_sym_node(sym_node, *args, **kwargs)

    def forget(self) -> None:
        """Drops all symbols at the end of a capture.

        In the graph the traced numbers are tensors, so Inductor must not find symbols for them.
        """
        for symbol in self._made:
            self.backed_var_to_val.pop(symbol, None)
        self.pending_fresh_unbacked_symbols.clear()

    def symbolic(self, name: str, value: float) -> SymbolicFloat:
        """Returns a new symbolic float, which replaces a float of the step.

        Args:
            name: the name of the float, for messages.
            value: its value now (the hint), by which branches are decided.
        """
        source = ConstantSource(name)
        symbol = self.create_unspecified_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
        self._made.append(symbol)
        made: Any = self.create_symfloatnode(symbol, hint=value, source=source)
        return SymbolicFloat(made.node)


def make_fake_mode() -> FakeTensorMode:
    """Returns a FakeTensorMode with static shapes, and with the strides that real kernels return.

    Its shape environment traces Python numbers. Without one, Inductor would bypass its cache.
    """
    return KernelStridesMode(shape_env=NumberEnv(), static_shapes=True)
