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
        with pytest.raises(ValueError, match="blocks: int 3 is not in the model"):
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
        (
            lambda mesh: pt.parallelize(Model(), mesh, "*"),
            "a dict by patterns of names as plan, not '*'",
        ),
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


def weights(model):
    return model.parameters()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda mesh: pt.Shard("dp"), "write Shard(0); the mesh axis is its place in a list"),
        (lambda mesh: pt.Shard(True), "Shard takes a dimension of the tensor, not True"),
        (lambda mesh: pt.Shard((0, 1)), "not (0, 1): write Shard(0)"),
        (lambda mesh: pt.zero(weights(Model()), mesh), "not a generator"),
        (lambda mesh: pt.zero([*weights(Model())], mesh), "pt.zero(model, ...)"),
        (lambda mesh: pt.zero(mesh, Model()), "pt.zero(model, ...)"),
        (lambda mesh: pt.zero(Model, mesh), "not the class Model"),
        (lambda mesh: pt.zero(Model(), mesh, 3), "zero(model, mesh, stage=3)"),
        (lambda mesh: pt.zero(Model(), mesh, pt.Shard(0)), 'zero(model, mesh, "dp")'),
        (lambda mesh: pt.zero(Model(), mesh, ["dp", "dp"]), "each once"),
        (lambda mesh: pt.zero(Model(), mesh, []), "the names of mesh axes"),
        (lambda mesh: pt.zero(Model(), mesh, precision="bf16"), "precision=torch.bfloat16"),
        (lambda mesh: pt.zero(Model(), mesh, precision=torch.int8), "a floating-point torch.dtype"),
        (lambda mesh: pt.MixedPrecision("bf16"), "MixedPrecision(param_dtype=torch.bfloat16)"),
        (lambda mesh: pt.MixedPrecision(output_dtype=torch.int64), "as output_dtype"),
        (lambda mesh: pt.no_sync(mesh).__enter__(), "pt.no_sync(model, ...)"),
        (lambda mesh: pt.no_sync(weights(Model())).__enter__(), "pt.no_sync(model, ...)"),
        (lambda mesh: pt.parallelize(mesh, Model(), {}), "pt.parallelize(model, ...)"),
        (lambda mesh: pt.parallelize(Model(), {}, mesh), "as plan, not a "),
        (lambda mesh: pt.parallelize(Model(), mesh, {0: {}}), "as plan, not 0"),
        (lambda mesh: pt.parallelize(weights(Model()), mesh, {}), "pt.parallelize(model, ...)"),
        (lambda mesh: pt.distribute_tensor([1.0], mesh), "torch.as_tensor(values)"),
        (lambda mesh: pt.distribute_tensor(mesh, torch.ones(2)), "takes a torch.Tensor, not a"),
        (lambda mesh: pt.distribute_tensor(Model(), mesh), "pt.distribute_module(module, mesh)"),
        (lambda mesh: pt.DTensor.from_local([1.0], mesh), "torch.as_tensor(values)"),
        (lambda mesh: pt.distribute_module(Model(), mesh, {"a": 1}), "a function as partition_fn"),
        (lambda mesh: pt.distribute_batch(torch.ones(2), mesh, "dp"), '{"dp": pt.Shard(0)}'),
        (lambda mesh: pt.clip_grad_norm_(Model(), 1.0), "(model.parameters(), max_norm)"),
        (lambda mesh: pt.clip_grad_norm_(1.0, weights(Model())), "takes parameters, not 1.0"),
        (lambda mesh: pt.clip_grad_norm_(Model().named_parameters(), 1.0), "not a tuple"),
        (lambda mesh: pt.clip_grad_norm_(None, 1.0), "takes parameters, not None"),
        (lambda mesh: pt.reduce_gradients(Model()), "reduce_gradients(model.parameters())"),
        (lambda mesh: pt.reduce_gradients(nn.Sequential(Model())), "takes parameters, not a Seq"),
        (lambda mesh: pt.reduce_gradients(Model().named_parameters()), "not a tuple"),
        (lambda mesh: pt.reduce_gradients(torch.optim.SGD(weights(Model()))), "not a SGD"),
        (lambda mesh: pt.materialize(weights(Model())), "pt.materialize(model, ...)"),
        (lambda mesh: pt.materialize(Model(), mesh), "a device, or none for the mesh's"),
        (lambda mesh: pt.materialize(Model(), init_fn=3), "a function of the model as init_fn"),
        (lambda mesh: pt.full_state_dict(Model(), Model()), "pt.full_state_dict(model, optimizer)"),
    ],
)
def test_an_argument_of_another_type_is_one_error_with_its_place_and_what_to_write(call, said):
    def program(mesh):
        with pytest.raises(TypeError) as caught:
            call(mesh)
        return str(caught.value)

    found = on_ranks(program)
    assert said in found and " takes " in found


def test_a_stage_that_is_none_is_refused():
    def program(mesh):
        for stage in (4, "3", True, None):
            with pytest.raises(ValueError, match="is not one of 0, 1, 2, 3"):
                pt.zero(Model(), mesh, stage=stage)

    on_ranks(program)
