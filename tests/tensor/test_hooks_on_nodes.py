"""Hooks on nodes of autograd, which has pieces: right, or refused as they are registered."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import Node, register_multi_grad_hook

import partita as pt
from partita import Invariant, Partial, Replicate, Shard

T = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(3, 2)
PLACEMENTS = [Shard(0), Shard(1), Replicate(), Invariant(), Partial()]


def _leaf(mesh, placement):
    return pt.distribute_tensor(T, mesh, [placement]).requires_grad_()


def _norm_prehook(grads):
    return (grads[0] / grads[0].norm(),)


def _refused(mesh, register):
    x = _leaf(mesh, Shard(0))
    with pytest.raises(pt.LayoutError, match="a node of autograd behind a DTensor"):
        register(mesh, x)
    (x * 1).sum().backward()  # nothing was changed
    assert torch.equal(x.grad.full_tensor(), torch.ones_like(T))


def _old_module_hook(mesh, x):
    layer = nn.Linear(2, 4, dtype=torch.float64)
    pt.parallelize(layer, mesh, {"weight": {"tp": Shard(0)}})
    layer.register_backward_hook(lambda module, into, out: None)
    layer(x)


REFUSED = {
    "a hook before a node": lambda mesh, x: (x * 2).grad_fn.register_prehook(_norm_prehook),
    "a hook behind a node": lambda mesh, x: (x * 2).grad_fn.register_hook(lambda i, o: None),
    "a node further back": lambda mesh, x: (
        ((x * 2).exp()).grad_fn.next_functions[0][0].register_hook(lambda i, o: None)
    ),
    "a node of a moved operand": lambda mesh, x: x.redistribute(
        placements=[Replicate()]
    ).grad_fn.register_prehook(_norm_prehook),
    "a node of several results": lambda mesh, x: x.unbind(1)[0].grad_fn.register_prehook(
        _norm_prehook
    ),
    "an old hook of a module": _old_module_hook,
}


@pytest.mark.parametrize("way", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_a_hook_that_would_get_a_piece_is_refused(way):
    with pt.ranks(tp=2) as world:
        world.run(_refused, REFUSED[way])


def _hooks_on_a_leaf(mesh, placement):
    x = _leaf(mesh, placement) if mesh is not None else T.clone().requires_grad_()
    seen = []
    node = x.expand_as(x).grad_fn.next_functions[0][0]
    node.register_prehook(_norm_prehook)
    node.register_hook(lambda into, out: seen.append(out[0]))
    (x * x).sum().backward()
    found = [*seen, x.grad]
    return [g.full_tensor() if isinstance(g, pt.DTensor) else g for g in found]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_hooks_on_the_node_of_a_leaf_get_its_gradient(placement):
    truth = _hooks_on_a_leaf(None, None)
    with pt.ranks(tp=2) as world:
        for ours in world.run(_hooks_on_a_leaf, placement):
            for a, b in zip(ours, truth, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def _walk(mesh):
    x = _leaf(mesh, Shard(0))
    z = (x * 2).exp()
    node = z.grad_fn
    assert node is z.grad_fn and isinstance(node, Node) and node.name() == "ExpBackward0"
    before = node.next_functions[0][0]
    assert before == z.grad_fn.next_functions[0][0] and before.name() == "MulBackward0"
    assert before.next_functions[0][0].variable is x
    assert x.grad_fn is None
    seen = []
    register_multi_grad_hook([x, z], lambda grads: seen.extend(type(g) for g in grads))
    z.sum().backward()
    assert seen == [pt.DTensor, pt.DTensor]
    with pytest.raises(pt.LayoutError, match="get_gradient_edge of a DTensor"):
        torch.autograd.graph.get_gradient_edge(z)


def test_the_graph_behind_a_dtensor_can_be_walked():
    with pt.ranks(tp=2) as world:
        world.run(_walk)


def test_a_removed_hook_on_an_accumulated_gradient_leaves_none():
    def body(mesh):
        p = nn.Parameter(pt.distribute_tensor(torch.ones(4), mesh, [Replicate()]))
        calls = []
        kept = p.register_post_accumulate_grad_hook(lambda x: calls.append(x.grad.tolist()))
        count = len(torch._C.TensorBase._backward_hooks.__get__(p))
        for _ in range(3):
            handle = p.register_post_accumulate_grad_hook(lambda x: calls.append("removed"))
            handle.remove()
        with p.register_post_accumulate_grad_hook(lambda x: calls.append("left")):
            pass
        assert len(torch._C.TensorBase._backward_hooks.__get__(p)) == count
        (p * 2).sum().backward()
        kept.remove()
        (p * 2).sum().backward()
        return calls

    with pt.ranks(dp=2) as world:
        assert world.run(body) == [[[2.0] * 4]] * 2
