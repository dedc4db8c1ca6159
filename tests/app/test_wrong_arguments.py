"""What a newcomer gives wrongly is accepted if it has one meaning, or else refused in words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import partita as pt


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def on_ranks(program):
    with pt.ranks(dp=2) as world:
        return world.run(program)[0]


@pytest.mark.parametrize("change", [pt.zero, lambda model, mesh, **how: pt.remat(model, **how)])
def test_one_pattern_or_module_of_blocks_needs_no_list(change):
    def program(mesh):
        model = Model()
        change(Model(), mesh, blocks="layers.*")
        change(Model(), mesh, blocks=("layers.*", "head"))
        change(model, mesh, blocks=model.head)
        with pytest.raises(ValueError, match=r"no module is called 'block.*'; there are layers,"):
            change(Model(), mesh, blocks="block.*")
        with pytest.raises(ValueError, match="blocks: int 3 is no module of the model"):
            change(Model(), mesh, blocks=3)

    on_ranks(program)


def test_one_pass_or_object_of_a_compiled_step_needs_no_list():
    model, seen = Model(), []
    step = pt.compile(
        lambda x: model(x).sum(),
        state=model,
        without="bucket",
        passes=lambda program: seen.append(program) or "nothing",
        backend="graph",
    )
    step(torch.ones(1, 4))
    assert len(seen) >= 1
    with pytest.raises(ValueError, match=r"without: the passes are .*buckets"):
        pt.compile(lambda x: x * 2, without="buckets", backend="graph")(torch.ones(1))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda mesh: pt.tensor([1.0]), "write pt.distribute_tensor(torch.tensor(data), mesh"),
        (lambda mesh: pt.checkpoint(abs, 1), "torch.utils.checkpoint.checkpoint to recompute"),
        (lambda mesh: pt.compile(3), "compile takes a function or a module, not a int"),
        (lambda mesh: pt.full_state_dict({}), "takes a torch.nn.Module, not a dict"),
        (lambda mesh: pt.parallelize(Model(), mesh, "*"), "a plan is a dict by pattern of names"),
        (lambda mesh: pt.save("c", {}), "a path is text or a Path, not a dict: (state, path)"),
        (lambda mesh: pt.load("c", {}), "a path is text or a Path, not a dict: (state, path)"),
        (
            lambda mesh: pt.ones(2, device_mesh=mesh).redistribute([pt.Shard(0)]),
            "placements=[Shard(dim=0)]",
        ),
    ],
)
def test_what_has_no_meaning_is_refused_with_what_to_write(call, said):
    def program(mesh):
        with pytest.raises((TypeError, pt.LayoutError)) as caught:
            call(mesh)
        return str(caught.value)

    assert said in on_ranks(program)
