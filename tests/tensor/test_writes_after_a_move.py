"""An operand that was moved for one op and written since: is the next op given what it holds now?

Every way to write a tensor that torch has, those that torch does not count included, between two
ops that need the tensor in the same other layout. The ground truth is the same on one device.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

import partita as pt
from partita.comm import wire_of
from partita.layout import Layout
from partita.tensor.tensor_state import spec_of

Tensor = Any
LEAF, RESULT, PLAIN = "a leaf", "a result", "without gradient"

# -- ways to write ---------------------------------------------------------------------------------
# Each doubles x, or does to it what is the same on a piece, on a share and on the whole value.


def local(x: Tensor) -> torch.Tensor:
    """The memory of this rank, as a user gets it."""
    return x.detach().to_local() if isinstance(x, pt.DTensor) else x.detach()


def double(x: Tensor) -> Tensor:
    return x.detach() * 2


def in_no_grad(write: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def write_in_no_grad(x: Tensor) -> None:
        with torch.no_grad():
            write(x)

    return write_in_no_grad


def write_by_storage(x: Tensor) -> None:
    storage = local(x).untyped_storage()
    twice = (local(x) * 2).contiguous().clone().untyped_storage()
    if local(x).numel():
        storage.copy_(twice)


def write_numpy(x: Tensor) -> None:
    memory = local(x).numpy()
    memory *= 2


def write_another_thread(x: Tensor) -> None:
    # Into this rank's memory: a thread that a user starts belongs to no rank.
    thread = threading.Thread(target=lambda: local(x).mul_(2))
    thread.start()
    thread.join()


def write_inference(x: Tensor) -> None:
    with torch.inference_mode():
        x.mul_(2)


def step_by(make: Callable[[list[Tensor]], Any]) -> Callable[[Tensor], Any]:
    def write(x: Tensor) -> None:
        p = x.detach().requires_grad_()
        p.grad = torch.ones_like(p.detach())
        make([p]).step()

    return write


def load_assigned(x: Tensor) -> None:
    module = nn.Module()
    module.x = nn.Parameter(x.detach())
    module.load_state_dict({"x": double(x)}, assign=False)


def from_vector(x: Tensor) -> None:
    vector = nn.utils.parameters_to_vector([x]).detach() * 2
    nn.utils.vector_to_parameters(vector, [x])


def swap(x: Tensor) -> None:
    # As one does it: gradients and attributes stay with the object.
    with torch.no_grad():
        other = double(x)
        if isinstance(x, nn.Parameter):
            other = nn.Parameter(other)
        torch.utils.swap_tensors(x, other.requires_grad_(x.requires_grad))


def freeze_and_back(x: Tensor) -> None:
    x.requires_grad_(False)
    x.mul_(2)
    x.requires_grad_(True)


def through_view(x: Tensor) -> None:
    x.detach().view(-1 if x.ndim < 2 else x.shape).mul_(2)


def set_data_of_view(x: Tensor) -> None:
    x.detach().view(x.shape).data.mul_(2)


def write_out(x: Tensor) -> None:
    torch.mul(double(x), 1, out=x.detach())


def by_clip(x: Tensor) -> None:
    nn.utils.clip_grad_value_([], 1.0)
    x.clamp_(-10, 10).mul_(2)


COUNTED: dict[str, Callable[[Tensor], Any]] = {
    "copy_": lambda x: x.copy_(double(x)),
    "mul_": lambda x: x.mul_(2),
    "add_": lambda x: x.add_(x.detach().clone()),
    "sub_": lambda x: x.sub_(-x.detach().clone()),
    "div_": lambda x: x.div_(0.5),
    "neg_": lambda x: x.neg_(),
    "zero_": lambda x: x.zero_(),
    "lerp_": lambda x: x.lerp_(double(x), 0.5),
    "addcmul_": lambda x: x.addcmul_(x.detach().clone(), torch.ones_like(x.detach())),
    "*=": lambda x: x.__imul__(2),
    "x[...] = y": lambda x: x.__setitem__(..., double(x)),
    "x[0] = y": lambda x: x.__setitem__(0, double(x)[0]),
    "x[:, 1:] *= 2": lambda x: x[:, 1:].mul_(2),
    "index_put_": lambda x: x.index_put_((torch.tensor([0, 1]),), double(x)[:2]),
    "index_copy_": lambda x: x.index_copy_(0, torch.tensor([1]), double(x)[1:2]),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([0]), 0.0),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([1]), x.detach()[1:2].clone()),
    "scatter_": lambda x: x.scatter_(0, torch.zeros(x.shape, dtype=torch.long), 0.0),
    "masked_fill_": lambda x: x.masked_fill_(x.detach() > 0.1, 0.5),
    "fill_diagonal_": lambda x: x.fill_diagonal_(0.5),
    "where": lambda x: x.copy_(torch.where(x.detach() > 0, double(x), 0.25)),
    "select": lambda x: x.select(0, 0).mul_(2),
    "view": through_view,
    "detach": lambda x: x.detach().mul_(2),
    "out=": write_out,
    "_foreach_mul_": lambda x: torch._foreach_mul_([x], 2.0),
    "_foreach_copy_": lambda x: torch._foreach_copy_([x], [double(x)]),
    "_foreach_add_": lambda x: torch._foreach_add_([x], [x.detach().clone()]),
    "SGD": step_by(lambda ps: torch.optim.SGD(ps, 0.5, foreach=False)),
    "SGD, foreach": step_by(lambda ps: torch.optim.SGD(ps, 0.5, foreach=True)),
    "Adam": step_by(lambda ps: torch.optim.Adam(ps, 0.5)),
    "AdamW, fused": step_by(lambda ps: torch.optim.AdamW(ps, 0.5, fused=True)),
    "nn.init": lambda x: nn.init.constant_(x, 0.25),
    "uniform_ of one value": lambda x: nn.init.uniform_(x, 0.25, 0.25),
    "load_state_dict": load_assigned,
    "vector_to_parameters": from_vector,
    "in inference mode": write_inference,
    "to_local()": lambda x: local(x).mul_(2),
    "to_local() of a view": lambda x: local(x.detach().view(x.shape)).mul_(2),
    "another thread": write_another_thread,
}

UNCOUNTED: dict[str, Callable[[Tensor], Any]] = {
    "x.data = y": lambda x: setattr(x, "data", double(x)),
    "x.data.copy_": lambda x: x.data.copy_(double(x)),
    "x.data.mul_": lambda x: x.data.mul_(2),
    "x.data[0] = y": lambda x: x.data.__setitem__(0, 0.5),
    "x.view().data": set_data_of_view,
    "x.data.view()": lambda x: x.data.view(x.shape).mul_(2),
    "x.data.detach()": lambda x: x.data.detach().mul_(2),
    "set_": lambda x: x.detach().requires_grad_(False) is None or x.set_(double(x)),
    "swap_tensors": swap,
    "numpy": write_numpy,
    "numpy of x.data": lambda x: write_numpy(x.data),
    "dlpack": lambda x: from_dlpack(local(x)).mul_(2),
    "untyped_storage": write_by_storage,
    "to_local().data": lambda x: local(x).data.mul_(2),
    "to_local().data.view": lambda x: local(x).data.view(-1).mul_(2),
    "unsafe version": lambda x: preserve_version(x),
    "memory from before": lambda x: x.memory_of_old.__imul__(2),
}


def preserve_version(x: Tensor) -> None:
    memory = local(x)
    with torch.autograd._unsafe_preserve_version_counter(memory):
        memory.mul_(2)


WRITES = {name: in_no_grad(write) for name, write in {**COUNTED, **UNCOUNTED}.items()}
WRITES |= {
    "frozen, written, unfrozen": in_no_grad(freeze_and_back),
    "frozen": lambda x: x.requires_grad_(False),
    "nothing": lambda x: None,
}

# -- layouts ---------------------------------------------------------------------------------------

CASES = [  # the mesh, x, and a tensor beside it for which x is moved
    ({"a": 2}, "[3, 4]", "[3@a, 4]"),
    ({"a": 2}, "[3, 4] {inv a}", "[3, 4@a]"),
    ({"a": 2}, "[3, 4] {inv a}", "[3, 4]"),
    ({"a": 2}, "[3, 4] {sum a}", "[3, 4]"),
    ({"a": 2}, "[3, 4] {sum a}", "[3, 4@a]"),
    ({"a": 2}, "[3@a, 4]", "[3, 4@a]"),
    ({"a": 3}, "[2@a, 3]", "[2, 3@a]"),
    ({"a": 3}, "[4, 2]", "[4, 2@a]"),
    ({"a": 2, "b": 2}, "[3@b, 4] {inv a}", "[3@b, 4]"),
    ({"a": 2, "b": 2}, "[3@(a b), 4]", "[3@b, 4@a]"),
    ({"a": 2, "b": 2}, "[3, 4@a] {sum b}", "[3@b, 4]"),
    ({"a": 2, "b": 3}, "[5, 4@b] {inv a}", "[5@a, 4@b]"),
]


def spread(mesh: Any, whole: torch.Tensor, text: str) -> pt.DTensor:
    """`whole` in a layout. Shares are of both signs; their sum is `whole`. Its memory is that of a
    numpy array that the caller has, too."""
    wire, layout = wire_of(mesh), Layout.parse(text)
    piece = whole
    for axis, _ in layout.partial:
        n, i = wire.mesh.size(axis), wire.at[wire.mesh.index(axis)]
        piece = piece * (2.0 * n - 1 if i == 0 else -2.0)
    for d, (offset, length) in enumerate(layout.local_region(wire.mesh, wire.at)):
        piece = piece.narrow(d, offset, length)
    memory = piece.contiguous().clone().numpy()
    x = pt.DTensor.from_local(
        torch.from_numpy(memory), mesh, spec_of(layout, wire).placements, shape=layout.shape
    )
    x.memory_of_old = memory
    return x


def run(x: Tensor, beside: Tensor, kind: str, write: Callable[[Tensor], Any]) -> list[Tensor]:
    """What two ops give before and behind a write, and the gradients of both."""
    leaf = x.requires_grad_() if kind != PLAIN else x
    memory = x.memory_of_old
    if kind == RESULT:
        x = leaf * 1
        memory = local(x).numpy()
    x.memory_of_old = memory
    first = torch.maximum(x, beside).detach().clone()
    write(x)
    second = torch.maximum(x, beside)
    out = [first, second.detach(), torch.tensor(float(second.requires_grad))]
    if second.requires_grad:
        (second * second.detach()).sum().backward()
        out.append(torch.zeros(()) if leaf.grad is None else leaf.grad)
    return out


def on_a_rank(mesh: Any, text: str, beside: str, kind: str, write: Any, truth: Any) -> None:
    whole, other = values(text)
    x, y = spread(mesh, whole, text), spread(mesh, other, beside).detach()
    ours = [t.full_tensor() if isinstance(t, pt.DTensor) else t for t in run(x, y, kind, write)]
    assert len(ours) == len(truth)
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def values(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    shape = Layout.parse(text).shape
    one, two = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return one, two


def on_one_device(text: str, kind: str, write: Any) -> list[torch.Tensor]:
    whole, other = values(text)
    memory = whole.numpy()
    whole.memory_of_old = memory
    return run(whole, other, kind, write)


@pytest.mark.slow
@pytest.mark.parametrize("way", WRITES)
def test_an_operand_that_was_moved_is_given_as_it_is_now(way: str) -> None:
    write = WRITES[way]
    # Every second layout by default; all of them with PARTITA_EXAMPLES.
    first = list(WRITES).index(way) % 2
    ran = 0
    for mesh, text, beside in CASES if "PARTITA_EXAMPLES" in os.environ else CASES[first::2]:
        for kind in (LEAF, RESULT, PLAIN):
            try:
                truth = on_one_device(text, kind, write)
            except RuntimeError:
                continue  # torch refuses it
            with pt.ranks(**mesh) as world:
                world.run(on_a_rank, text, beside, kind, write, truth)
            ran += 1
    assert ran
    print(f"{ran} cases")
