"""Claims of torch's own tests of `fully_shard`. Each holds for `partita.fsdp`, or is documented.

Each function with `@claim` states one claim and names the tests of torch (of the folder
`test/distributed/_composable/fsdp`) that make it. The programs are our own.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections import defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable import checkpoint as checkpoint_module
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import partita as pt
from partita.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    get_mesh,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from partita.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.programs.claims import Claims, raises
from tests.programs.gloo_ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_torch.md"
CLAIMS = Claims({"dp": 4})
claim = CLAIMS.add

HSDP = {"replicate": 2, "shard": 2}
DP_TP = {"dp": 2, "tp": 2}


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int | None = None, bias: bool = True):
        super().__init__()
        hidden = hidden or 4 * width
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.down(F.gelu(self.up(x))))


def make_stack(width: int = 6, count: int = 3, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[MLP(width) for _ in range(count)]).to(dtype)


def shard(model: nn.Module, *blocks: Any, **options: Any) -> Any:
    """Shard the blocks, by default the children, and then the model."""
    for block in blocks or tuple(model.children()):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, pt.DTensor) else tensor


def mean_square(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def make_rows(
    number: int, *shape: int, dtype: torch.dtype = torch.float64, high: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    if high:
        return torch.randint(0, high, shape, generator=generator)
    return torch.randn(*shape, generator=generator, dtype=dtype)


def check_equal(found: Any, wanted: Any, what: str, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(
        full(found.detach()),
        wanted.detach(),
        rtol=tolerance,
        atol=tolerance,
        msg=lambda text: f"{what}: {text}",
    )


def check_same_training(
    plain: nn.Module,
    model: nn.Module,
    rows: Callable[[int], torch.Tensor],
    *,
    steps: int = 2,
    micros: int = 1,
    before: Callable[[int], None] = lambda micro: None,
    loss_of: Callable[[torch.Tensor], torch.Tensor] = mean_square,
    call: Callable[[nn.Module, torch.Tensor], Any] = lambda model, x: model(x),
    tolerance: float = 1e-9,
) -> None:
    """Train `plain` and the sharded `model` on the same global batches; compare all numbers."""
    mesh = get_mesh(model)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (plain, model)]
    for step in range(steps):
        for micro in range(micros):
            x = rows(step * micros + micro)
            wanted = loss_of(call(plain, x))
            wanted.backward()
            before(micro)
            loss = loss_of(call(model, pt.distribute_batch(x, mesh)))
            loss.backward()
            check_equal(loss, wanted, f"loss {step}", tolerance)
        theirs = dict(plain.named_parameters())
        for name, p in model.named_parameters():
            grad = theirs[name].grad
            if grad is None:
                assert p.grad is None or not full(p.grad).any(), f"{name} has a gradient"
            else:
                check_equal(p.grad, grad, f"gradient of {name}", tolerance)
        for one in optimizers:
            one.step()
            one.zero_grad(set_to_none=step % 2 == 0)
        for name, p in model.named_parameters():
            check_equal(p, theirs[name], name, tolerance)


# -- training --------------------------------------------------------------------------------------


class Adder(nn.Module):
    def forward(self, x, ys):
        return x + ys[0] + ys[1] + 1


@claim("test_root_move_forward_input_to_device")
def a_module_without_parameters_runs(mesh):
    model = fully_shard(Adder(), mesh=mesh)
    x = make_rows(0, 4)
    check_equal(model(x, (x, x)), 3 * x + 1, "output")


class Square(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(make_rows(0, 4, 4))

    def forward(self):
        return self.weight @ self.weight


@claim("test_root_no_forward_inputs")
def a_forward_without_inputs_has_the_gradient_of_one_device(mesh):
    plain, model = Square(), fully_shard(Square(), mesh=mesh)
    for m in (plain, model):
        m().square().sum().backward()
    check_equal(model.weight.grad, plain.weight.grad, "gradient")


@claim(
    "test_param_registration_after_forward",
    "test_param_registration_after_backward",
    "test_unshard_without_lazy_init",
    differs="parameters are always DTensors of the full shape",
)
def parameters_stay_dtensors_and_keep_their_values(mesh):
    for reshard in (True, False, None):
        plain, model = make_stack(), make_stack()
        fully_shard(model[0].up, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model[0].down, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

        def check(plain=plain, model=model):
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert isinstance(p, pt.DTensor)
                assert p.shape == q.shape
                check_equal(p, q, "parameter")

        model.unshard()
        check()
        out = model(pt.distribute_batch(make_rows(0, 4, 6), mesh))
        check()
        out.sum().backward()
        check()
        for m in model.modules():
            if isinstance(m, FSDPModule):
                m.reshard()
        check()


@claim("test_to_float64_after_init")
def a_model_may_be_cast_after_sharding(mesh):
    plain, model = make_stack(dtype=torch.float32), make_stack(dtype=torch.float32)
    shard(model, mesh=mesh)
    plain.double()
    model.double()
    assert all(p.dtype == p.to_local().dtype == torch.float64 for p in model.parameters())
    check_same_training(plain, model, lambda i: make_rows(i, 4, 6))
    assert all(p.dtype == torch.float64 for p in model.parameters())


@claim("test_train_parity_single_group_shard_dim0")
def one_group_trains_as_one_device_with_uneven_rows_of_weights(mesh):
    for shapes in ([(16, 15), (15, 8)], [(7, 15), (15, 3)], [(16, 17), (17, 8)]):

        def make(shapes=shapes):
            torch.manual_seed(0)
            first, second = (nn.Linear(*s) for s in shapes)
            return nn.Sequential(first, nn.ReLU(), second).double()

        model = fully_shard(make(), mesh=mesh)
        check_same_training(make(), model, lambda i, n=shapes[0][0]: make_rows(i, 8, n))


@claim("test_train_parity_single_worldsize1", sizes={"dp": 1})
def one_rank_sends_nothing(mesh):
    model = shard(make_stack(), mesh=mesh)
    with pt.ledger() as log:
        check_same_training(make_stack(), model, lambda i: make_rows(i, 4, 6))
    assert log.bytes == 0


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, 2)
        self.norm2, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm2(x))


VOCABULARY = 17


class Transformer(nn.Module):
    def __init__(
        self, layers: int = 2, width: int = 8, tied: bool = False, recompute: bool = False
    ):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(8, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.recompute = recompute
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x):
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False) if self.recompute else layer(h)
        return self.head(self.norm(h))


def make_transformer(**options: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(**options).double()


def make_tokens(number: int) -> torch.Tensor:
    return make_rows(number, 4, 8, high=VOCABULARY)


@claim("test_train_parity_multi_group", "test_train_parity_multi_group_unshard_async_op")
def groups_by_block_train_as_one_device(mesh):
    for reshard in (True, False):
        model = make_transformer()
        shard(model, *model.layers, mesh=mesh, reshard_after_forward=reshard)

        def unshard_all(_, model=model):
            for m in model.modules():
                if isinstance(m, FSDPModule):
                    m.unshard(async_op=True)

        steps = 1 if reshard else 2
        check_same_training(make_transformer(), model, make_tokens, steps=steps, before=unshard_all)


@claim(
    "test_train_parity_multi_group_cpu_offload_eager",
    "test_dp_state_dict_cpu_offload",
    differs="Offloading",
)
def offloading_is_refused(mesh):
    for pin in (True, False):
        policy = CPUOffloadPolicy(pin_memory=pin)
        with raises(ValueError, "offload_policy=OffloadPolicy()"):
            fully_shard(MLP(4), mesh=mesh, offload_policy=policy)


@claim(
    "test_param_registration_after_forward",
    "test_param_registration_after_backward",
    "test_train_parity_multi_group",
    "test_multi_forward_module",
    "test_gradient_accumulation",
    "test_all_gather_fp32",
    differs="partial resharding",
)
def resharding_to_fewer_ranks_is_refused(mesh):
    with raises(ValueError, "give True or False"):
        fully_shard(MLP(4), mesh=mesh, reshard_after_forward=2)


@claim("test_non_root_forward_backward")
def a_block_runs_alone_after_the_model(mesh):
    plain, model = make_stack(), make_stack()
    shard(model, mesh=mesh)
    x = make_rows(0, 8, 6)
    ours = pt.distribute_batch(x, mesh)
    for m, given in ((plain, x), (model, ours)):
        optimizer = torch.optim.Adam(m.parameters(), lr=1e-2)
        m(given).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        m[0](given).square().mean().backward()
        optimizer.step()
    check_equal(model(ours), plain(x), "output")


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x):
        return self.outer(self.inner(x) + self.inner(2 * x))


@claim("test_multi_forward_module")
def a_block_may_run_several_times_in_a_forward(mesh):
    for reshard in (True, False):
        torch.manual_seed(0)
        plain = Twice().double()
        model = copy.deepcopy(plain)
        shard(model, model.inner, mesh=mesh, reshard_after_forward=reshard)
        check_same_training(plain, model, lambda i: make_rows(i, 8, 4))


@claim(
    "test_explicit_prefetching",
    "test_set_modules_to_forward_prefetch",
    "test_set_modules_to_backward_prefetch",
    "test_backward_misprefetch",
    "test_post_optim_event",
    "test_share_comm_context",
    "test_set_reduce_scatter_max_input_buffers",
    "test_set_reduce_scatter_max_input_buffers_validation",
)
def calls_that_tune_overlap_change_no_number(mesh):
    model = shard(make_stack(count=4), mesh=mesh)
    layers = list(model)
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
        layer.set_modules_to_backward_prefetch(layers[max(i - 2, 0) : i])
    layers[0].set_modules_to_backward_prefetch(layers[1:])  # of no use in that direction
    share_comm_ctx(layers)
    model.set_is_last_backward(True)
    model.set_post_optim_event(None)
    model.set_unshard_in_backward(False)
    model.set_force_sum_reduction_for_comms(True)
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_reduce_scatter_max_input_buffers(2)
    check_same_training(make_stack(count=4), model, lambda i: make_rows(i, 4, 6))


@claim("test_train_parity_with_activation_checkpointing")
def checkpointed_blocks_train_as_one_device(mesh):
    model = make_transformer(recompute=True)
    shard(model, *model.layers, mesh=mesh)
    check_same_training(make_transformer(), model, make_tokens)
    for reshard in (True, False):
        model = make_stack()
        for block in model:
            checkpoint_module(block)
        shard(model, mesh=mesh, reshard_after_forward=reshard)
        check_same_training(make_stack(), model, lambda i: make_rows(i, 4, 6))


@claim(
    "test_train_parity_with_activation_checkpointing",
    "test_fully_shard_multi_module_backward_prefetch",
    "test_set_modules_to_backward_prefetch_inside_ac",
)
def modules_in_one_call_train_as_one_device(mesh):
    for recompute in (False, True):
        model = make_transformer(layers=3, recompute=recompute)
        fully_shard(model.layers[0], mesh=mesh)
        fully_shard([model.layers[1], model.layers[2]], mesh=mesh)
        fully_shard([model.tokens, model.places], mesh=mesh)
        model.tokens.set_unshard_in_backward(False)
        fully_shard([model.norm, model.head], mesh=mesh)
        fully_shard(model, mesh=mesh)
        check_same_training(make_transformer(layers=3), model, make_tokens, steps=1)


class Chunked(nn.Module):
    def __init__(self, tied: bool = False):
        super().__init__()
        self.embed, self.body = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8, bias=False)
        self.norm, self.head = nn.RMSNorm(8), nn.Linear(8, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x, skip_head=False):
        h = self.norm(self.body(self.embed(x)))
        return h if skip_head else self.head(h)


def make_chunked(tied: bool = False, dtype: torch.dtype = torch.float64) -> Chunked:
    torch.manual_seed(0)
    return Chunked(tied).to(dtype)


def run_in_chunks(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Forward without the head, then the head chunk by chunk, each with its own backward."""
    h = model(x, skip_head=True)
    total, grads = 0.0, []
    for chunk in h.detach().chunk(2, dim=1):
        chunk = chunk.detach().requires_grad_()
        loss = model.head(chunk).square().mean() / 2
        total = total + loss.detach()
        loss.backward()
        grads.append(chunk.grad)
    h.backward(torch.cat(grads, dim=1))
    return total


def check_chunks(model: nn.Module, plain: nn.Module, mesh: Any, number: int) -> None:
    x = make_tokens(number)
    check_equal(run_in_chunks(model, pt.distribute_batch(x, mesh)), run_in_chunks(plain, x), "loss")
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        check_equal(p.grad, q.grad, f"gradient of {name}")


@claim("test_partial_group_forward_then_standalone")
def a_head_runs_alone_chunk_by_chunk(mesh):
    for reshard in (True, False):
        model, plain = make_chunked(), make_chunked()
        fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=reshard)
        shard(model, model.embed, model.body, mesh=mesh, reshard_after_forward=reshard)
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, plain)]
        for step in range(2):
            check_chunks(model, plain, mesh, step)
            for one in optimizers:
                one.step()
                one.zero_grad()


@claim("test_partial_group_forward_then_standalone", "test_partial_group_reshard_toggle")
def tied_weights_in_one_call_run_chunk_by_chunk(mesh):
    model, plain = make_chunked(tied=True), make_chunked(tied=True)
    fully_shard(model.body, mesh=mesh)
    fully_shard([model.embed, model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)
    check_chunks(model, plain, mesh, 0)


@claim("test_partial_group_forward_then_standalone")
def the_output_dtype_of_a_block_holds_within_a_model_without_one(mesh):
    own = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
    model = make_chunked(dtype=torch.float32)
    fully_shard([model.norm, model.head], mesh=mesh, mp_policy=own)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    x = pt.distribute_batch(make_tokens(0), mesh)
    assert model(x, skip_head=True).dtype == torch.bfloat16
    assert model.head(torch.ones(2, 8)).dtype == torch.bfloat16


class FloatBetween(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x):
        return self.b(self.a(x).float())


@claim("test_grouped_module_cast_forward_inputs")
def inputs_of_each_module_in_one_call_are_cast(mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    model = FloatBetween()
    fully_shard([model.a, model.b], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    out = model(pt.distribute_batch(make_rows(0, 4, 8, dtype=torch.float32), mesh))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@claim("test_partial_group_forward_grad_accum_chunked")
def chunks_accumulate_over_micro_batches(mesh):
    for reshard in (True, False):
        model, plain = make_chunked(), make_chunked()
        fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=reshard)
        shard(model, model.embed, model.body, mesh=mesh, reshard_after_forward=reshard)
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            model.set_is_last_backward(micro == 2)
            check_chunks(model, plain, mesh, micro)


@claim("test_partial_group_reshard_toggle")
def resharding_may_be_switched_between_chunks(mesh):
    model, plain = make_chunked(), make_chunked()
    fully_shard([model.norm, model.head], mesh=mesh)
    shard(model, model.embed, model.body, mesh=mesh)
    for number in range(2):
        for m in (model.head, model):
            m.set_reshard_after_forward(False)
            m.set_reshard_after_backward(False)
        check_chunks(model, plain, mesh, number)
        for m in (model.head, model):
            m.set_reshard_after_forward(True)
            m.set_reshard_after_backward(True)
        model.head.reshard()


class Raiser(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.armed = inner, False

    def forward(self, x):
        if self.armed:
            raise RuntimeError("boom")
        return self.inner(x)


def fail(_: torch.Tensor) -> None:
    raise RuntimeError("boom")


@claim("test_reset_iter_state_after_exception")
def a_step_after_an_exception_in_forward_is_right(mesh):
    model, plain = make_chunked(), make_chunked()
    model.body, plain.body = Raiser(model.body), Raiser(plain.body)
    fully_shard([model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.body.armed = True
    with raises(RuntimeError, "boom"):
        model(pt.distribute_batch(make_tokens(0), mesh))
    model.body.armed = False
    model.reset_iter_state()
    loss = mean_square(model(pt.distribute_batch(make_tokens(0), mesh)))
    hook = model.body.inner.weight.register_hook(fail)
    with raises(RuntimeError, "boom"):
        loss.backward()
    hook.remove()
    model.reset_iter_state()
    model.zero_grad()
    check_same_training(plain, model, make_tokens)


@claim("test_double_forward_with_nested_fsdp_and_checkpoint")
def two_forwards_before_one_backward_with_checkpointing(mesh):
    for how in ("function", "composable"):
        model, plain = (make_transformer(layers=1, recompute=r) for r in (how == "function", False))
        for layer in model.layers:
            if how == "composable":
                checkpoint_module(layer)
            shard(layer, layer.attention, layer.mlp, mesh=mesh)
        fully_shard(model, mesh=mesh)
        x, y = make_tokens(0), make_tokens(1)
        for m, (a, b) in ((plain, (x, y)), (model, pt.distribute_batch((x, y), mesh))):
            (m(a).mean() - m(b).mean()).pow(2).backward()
        for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            check_equal(p.grad, q[1].grad, name)


@claim("test_double_partial_forward_then_backward")
def two_forwards_without_the_head_leave_it_without_a_gradient(mesh):
    model, plain = make_chunked(), make_chunked()
    fully_shard([model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)
    x, y = make_tokens(0), make_tokens(1)
    for m, (a, b) in ((plain, (x, y)), (model, pt.distribute_batch((x, y), mesh))):
        (m(a, skip_head=True).square().mean() + m(b, skip_head=True).mean()).backward()
    assert model.head.weight.grad is None
    for name in ("embed", "body", "norm"):
        check_equal(getattr(model, name).weight.grad, getattr(plain, name).weight.grad, name)


@claim(
    "test_train_parity_single_group_shard_largest_dim",
    "test_train_parity_shard_placement_fn_shard_largest_dim",
    "test_shard_placement_fn_contiguous_params_grads",
    "test_shard_placement_fn_tp_ep",
    "test_init_1d_transformer_shard_largest_dim",
    "test_init_1d_transformer_shard_dim_neg1",
    "test_init_2d_transformer_shard_diff_dim",
    "test_init_1d_uneven_shard_largest_dim",
    "test_invalid_shard_dim",
    differs="sharding of other dimensions than 0",
)
def sharding_another_dimension_is_refused(mesh):
    for placement in (pt.Shard(1), pt.Shard(-1)):
        with raises(ValueError, "shards dimension 0"):
            fully_shard(
                MLP(4),
                mesh=mesh,
                shard_placement_fn=lambda p, s=placement: s if p.ndim > 1 else None,
            )
    model = fully_shard(make_stack(), mesh=mesh, shard_placement_fn=lambda p: pt.Shard(0))
    check_same_training(make_stack(), model, lambda i: make_rows(i, 4, 6))


@claim("test_train_parity_with_shared_params")
def shared_parameters_of_the_model_train_as_one_device(mesh):
    for reshard in (False, True):
        model = make_transformer(tied=True)
        for layer in model.layers if reshard else ():
            checkpoint_module(layer)
        shard(model, *model.layers, mesh=mesh, reshard_after_forward=reshard)
        check_same_training(make_transformer(tied=True), model, make_tokens)


@claim("test_train_shared_params_uneven_shard")
def shared_parameters_in_one_call_with_uneven_shards(mesh):
    for reshard in (True, False):
        model = make_chunked(tied=True)
        options = {"mesh": mesh, "reshard_after_forward": reshard}
        fully_shard([model.embed, model.head], **options)
        fully_shard(model, **options)
        check_same_training(make_chunked(tied=True), model, make_tokens)


@claim("test_shared_params_separate_fsdp_groups_error")
def shared_parameters_in_separate_calls_are_right_or_refused(mesh):
    model = make_chunked(tied=True)
    fully_shard(model.embed, mesh=mesh)
    with raises(pt.LayoutError, "weight is sharded already", "modules that share a parameter"):
        fully_shard(model.head, mesh=mesh)


@claim("test_layer_by_layer_shard_no_false_positive")
def blocks_may_be_made_and_sharded_one_by_one(mesh):
    model = nn.Sequential()
    for _ in range(4):
        model.append(fully_shard(MLP(4).double(), mesh=mesh))
    fully_shard(model, mesh=mesh)
    model(pt.distribute_batch(make_rows(0, 4, 4), mesh)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@claim("test_gradient_accumulation", "test_1f1b_microbatching")
def gradients_accumulate_over_micro_batches(mesh):
    for reshard, synchronizes in ((True, True), (False, True), (True, False)):
        model = shard(make_stack(count=2), mesh=mesh, reshard_after_forward=reshard)

        def before(micro, model=model, synchronizes=synchronizes):
            last = micro == 2
            if synchronizes:
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)
            model.set_reshard_after_backward(last)
            model.unshard(async_op=True)

        check_same_training(
            make_stack(count=2), model, lambda i: make_rows(i, 4, 6), micros=3, before=before
        )


@claim("test_gradient_accumulation", sizes=HSDP)
def gradients_accumulate_over_replicas(mesh):
    for method in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        model = shard(make_stack(), mesh=mesh)

        def before(micro, model=model, method=method):
            getattr(model, method)(micro == 2)

        check_same_training(
            make_stack(), model, lambda i: make_rows(i, 4, 6), micros=3, before=before
        )


@claim("test_gradient_accumulation", differs="together for the whole model")
def gradients_are_kept_for_the_whole_model_or_the_call_is_refused(mesh):
    model = shard(make_stack(), mesh=mesh)
    with raises(ValueError, "call it on the model"):
        model[0].set_requires_gradient_sync(False)

    def before(micro):  # `recurse=False`: all are kept together, and the sums are the same
        model.set_requires_gradient_sync(micro == 1, recurse=False)

    check_same_training(make_stack(), model, lambda i: make_rows(i, 4, 6), micros=2, before=before)


def shard_2d(model: nn.Sequential, mesh: Any, **options: Any) -> nn.Module:
    """Tensor parallelism of each MLP of a stack over "tp", then FSDP over the other axes."""
    plan = {"*.up": ColwiseParallel(use_local_output=False)}
    plan["*.down"] = RowwiseParallel(use_local_output=False)
    parallelize_module(model, mesh["tp"], plan)
    data = tuple(a for a in mesh.mesh_dim_names if a != "tp")
    return shard(model, mesh=mesh[data] if len(data) > 1 else mesh[data[0]], **options)


@claim("test_2d_mlp_with_nd_mesh", sizes=DP_TP)
def tensor_parallel_and_fsdp_train_as_one_device(mesh):
    for width, reshard in ((3, True), (8, False), (5, True)):
        model = make_stack(width)
        if width == 5:
            for block in model:
                checkpoint_module(block)
        model = shard_2d(model, mesh, reshard_after_forward=reshard)
        check_same_training(make_stack(width), model, lambda i, w=width: make_rows(i, 4, w))
        assert all(p.device_mesh.ndim == 2 for p in model.parameters())


@claim("test_3d_mlp_with_nd_mesh", sizes={"replicate": 2, "shard": 2, "tp": 2})
def tensor_parallel_fsdp_and_replicas_train_as_one_device(mesh):
    for width in (3, 8):
        model = shard_2d(make_stack(width), mesh)
        for p, q in zip(model.parameters(), make_stack(width).parameters(), strict=True):
            check_equal(p, q, "parameter")
        check_same_training(make_stack(width), model, lambda i, w=width: make_rows(i, 8, w))
        assert all(len(p.placements) == 3 for p in model.parameters())


@claim("test_train_parity_hsdp", sizes=HSDP)
def replicas_of_shards_train_as_one_device(mesh):
    for reshard, recompute, width in ((False, False, 8), (True, True, 3), (True, False, 3)):

        def make(width=width):
            torch.manual_seed(0)
            norm = nn.LayerNorm(width, bias=False)
            return nn.Sequential(norm, MLP(width, 3 * width), MLP(width)).double()

        model = make()
        for block in model if recompute else ():
            checkpoint_module(block)
        shard(model, mesh=mesh, reshard_after_forward=reshard)

        def before(micro, model=model):
            model.set_requires_gradient_sync(micro == 1)

        check_same_training(
            make(), model, lambda i, w=width: make_rows(i, 4, w), micros=2, before=before
        )


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 8, kernel_size=4, stride=4)

    def features(self, x):
        return self.patch(x).flatten(2).transpose(1, 2)

    def forward(self, x):
        return self.features(x).sum(dim=1)


class Projected(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision, self.out = Vision(), nn.Linear(8, 5)

    def forward(self, x):
        return self.out(self.vision.features(x))


@claim("test_register_fsdp_forward_method")
def another_method_than_forward_uses_the_parameters_of_its_block(mesh):
    torch.manual_seed(0)
    plain = Projected().double()
    model = copy.deepcopy(plain)
    shard(model, mesh=mesh)
    register_fsdp_forward_method(model.vision, "features")
    check_same_training(plain, model, lambda i: make_rows(i, 4, 3, 8, 8))


# -- autograd --------------------------------------------------------------------------------------


class TwoOutputs(nn.Module):
    def __init__(self, both: bool):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.both = both

    def forward(self, x):
        return (self.first(x), self.second(x)) if self.both else F.relu(self.first(x))


def make_two_outputs(both: bool) -> TwoOutputs:
    torch.manual_seed(0)
    return TwoOutputs(both).double()


@claim("test_unused_forward_output")
def an_output_that_the_loss_does_not_use_has_no_gradient(mesh):
    for reshard in (True, False):
        plain, model = make_two_outputs(True), make_two_outputs(True)
        shard(model, model.first, mesh=mesh, reshard_after_forward=reshard)
        for loss_of in (lambda out: (out[0] * out[1]).mean(), lambda out: out[0].square().mean()):
            check_same_training(plain, model, lambda i: make_rows(i, 4, 6), loss_of=loss_of)


@claim("test_unused_forward_module", "test_fully_shard_multi_module_unused_module")
def a_module_that_forward_does_not_call_has_no_gradient(mesh):
    for reshard in (True, False):
        plain, model = make_two_outputs(False), make_two_outputs(False)
        fully_shard([model.first, model.second], mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        check_same_training(plain, model, lambda i: make_rows(i, 4, 6))


Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Inner:
    x: Any
    y: Any


@dataclasses.dataclass
class Outer:
    inner: Inner
    z: Any


PACK = {
    "list": lambda x: [x, x * 2],
    "tuple": lambda x: (x, x * 2),
    "dict": lambda x: {"x": x, "y": x * 2},
    "namedtuple": lambda x: Pair(x, x * 2),
    "dataclass": lambda x: Inner(x, x * 2),
    "nested": lambda x: Outer(Inner(x, x * 2), x * 3),
}


class Pack(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return PACK[self.kind](x)


def apply_within(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: apply_within(v, change) for k, v in value.items()}
    if isinstance(value, Pair):
        return Pair(*(apply_within(v, change) for v in value))
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return type(value)(**{k: apply_within(v, change) for k, v in fields.items()})
    return type(value)(apply_within(v, change) for v in value)


class Within(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value):
        return apply_within(value, lambda x: F.relu(self.linear(x)))


class Unpack(nn.Module):
    def forward(self, value):
        found = []
        apply_within(value, found.append)
        return sum(found)


@claim("test_nontensor_activations", "test_structured_input_output")
def activations_in_containers_train_as_one_device(mesh):
    for kind in PACK:
        torch.manual_seed(0)
        plain = nn.Sequential(Pack(kind), Within(), Within(), Unpack()).double()
        model = copy.deepcopy(plain)
        shard(model, mesh=mesh)
        check_same_training(plain, model, lambda i: make_rows(i, 4, 6), steps=1)


@claim("test_structured_input_output")
def activations_in_containers_are_cast(mesh):
    for kind in ("namedtuple", "dataclass", "nested"):
        for sums in (torch.bfloat16, torch.float32):
            torch.manual_seed(0)
            plain = nn.Sequential(Pack(kind), Within(), Within(), Unpack())
            model = copy.deepcopy(plain)
            shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, sums))
            x = make_rows(0, 4, 6, dtype=torch.float32)
            out = model(pt.distribute_batch(x, mesh))
            assert out.dtype == torch.bfloat16
            check_equal(out.float(), plain.bfloat16()(x.bfloat16()).float(), kind, 5e-2)
            out.float().mean().backward()
            assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@claim("test_post_acc_grad_hook_runs")
def a_post_accumulate_hook_runs_once_in_each_backward(mesh):
    model = shard(make_stack(count=2), mesh=mesh)
    counts: dict[str, int] = defaultdict(int)

    def count(name: str, p: torch.Tensor) -> None:
        assert p.grad is not None
        counts[name] += 1

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(functools.partial(count, name))
    model(pt.distribute_batch(make_rows(0, 4, 6), mesh)).sum().backward()
    assert dict(counts) == dict.fromkeys(dict(model.named_parameters()), 1)


@claim("test_post_acc_grad_hook_optim_parity")
def optimizers_in_post_accumulate_hooks_train_as_one_after_backward(mesh):
    plain, model = make_transformer(), make_transformer()
    shard(model, *model.layers, mesh=mesh)
    one = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    schedule = torch.optim.lr_scheduler.StepLR(one, step_size=2)
    many = {p: torch.optim.AdamW([p], lr=1e-2, foreach=False) for p in model.parameters()}
    schedules = {p: torch.optim.lr_scheduler.StepLR(o, step_size=2) for p, o in many.items()}

    def update(p: Any) -> None:
        many[p].step()
        many[p].zero_grad()
        schedules[p].step()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for step in range(3):
        x = make_tokens(step)
        wanted = mean_square(plain(x))
        wanted.backward()
        one.step()
        one.zero_grad()
        schedule.step()
        loss = mean_square(model(pt.distribute_batch(x, mesh)))
        loss.backward()
        check_equal(loss, wanted, f"loss {step}")
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            check_equal(p, q, f"{name} after step {step}")


# -- clipping and scaling --------------------------------------------------------------------------


def check_clipping(plain: nn.Module, model: nn.Module, mesh: Any, rows: Any) -> None:
    for kind in (2, 1, 3, math.inf):
        for m in (plain, model):
            m.zero_grad()
        (100 * plain(rows).square().mean()).backward()
        (100 * model(pt.distribute_batch(rows, mesh)).square().mean()).backward()
        norms = [
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-3, norm_type=kind, foreach=True)
            for m in (plain, model)
        ]
        check_equal(norms[1], norms[0], f"norm {kind}")
        assert full(norms[1]) > 1e-3
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            check_equal(p.grad, q.grad, f"{name} after clipping by norm {kind}")


@claim("test_clip_grad_norm_1d")
def clipping_takes_the_norm_of_the_whole_gradient(mesh):
    model = make_transformer()
    shard(model, *model.layers, mesh=mesh)
    check_clipping(make_transformer(), model, mesh, make_tokens(0))


@claim("test_clip_grad_norm_2d", sizes=DP_TP)
def clipping_with_tensor_parallelism_takes_the_norm_of_the_whole_gradient(mesh):
    check_clipping(make_stack(), shard_2d(make_stack(), mesh), mesh, make_rows(0, 4, 6))


def check_scaler(model: nn.Module, mesh: Any) -> None:
    for overflows in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        optimizer.zero_grad()
        scaler.scale(model(pt.distribute_batch(make_rows(0, 4, 6), mesh)).sum()).backward()
        p = next(model.parameters())
        scaled = full(p.grad).clone()
        if overflows and mesh.get_rank() == 1:  # one rank alone sees it
            p.grad.to_local()[0].fill_(math.inf)
        scaler.unscale_(optimizer)
        if not overflows:
            check_equal(p.grad, scaled / 2, "unscaled gradient")
        before = full(p.detach()).clone()
        scaler.step(optimizer)
        assert torch.equal(full(p.detach()), before) == overflows
        scaler.update()
        assert scaler.get_scale() == (1.0 if overflows else 2.0)


@claim("test_gradient_scaler")
def a_scaler_skips_the_step_on_all_ranks_if_one_gradient_overflows(mesh):
    check_scaler(shard(make_stack(), mesh=mesh), mesh)


@claim("test_gradient_scaler", sizes=DP_TP)
def a_scaler_works_with_tensor_parallelism(mesh):
    check_scaler(shard_2d(make_stack(), mesh), mesh)


# -- communication ---------------------------------------------------------------------------------


def count_collectives(model: nn.Module, mesh: Any) -> list[int]:
    """Gathers of forward, gathers of backward, reduce-scatters of backward; of a second step."""
    x = pt.distribute_batch(make_tokens(0), mesh)
    counts = []
    for _ in range(2):
        with pt.ledger() as forward:
            loss = model(x).square().mean()
        with pt.ledger() as backward:
            loss.backward()
        counts = [
            forward.count("all_gather"),
            backward.count("all_gather"),
            backward.count("reduce_scatter"),
        ]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        optimizer.zero_grad()
    return counts


@claim(
    "test_fully_shard_communication_count",
    "test_set_reshard_after_forward",
    "test_manual_reshard_with_reshard_after_forward_false",
    differs="module by module",
)
def each_group_is_gathered_and_reduced_in_one_collective(mesh):
    # Two layers, and four modules outside of them: two embeddings, a norm and the head. Of the
    # embeddings backward needs no weights.
    for reshard in (None, False):
        model = make_transformer()
        shard(model, *model.layers, mesh=mesh, reshard_after_forward=reshard)
        kept, freed = [6, 0, 6], [6, 4, 6]
        assert count_collectives(model, mesh) == (kept if reshard is False else freed)
        model.set_reshard_after_forward(reshard is False)
        assert count_collectives(model, mesh) == (freed if reshard is False else kept)


@claim(
    "test_set_reduce_scatter_divide_factor",
    "test_singleton_copy_division",
    differs="gradients are not averaged",
)
def a_factor_of_gradients_is_refused(mesh):
    model = shard(make_stack(), mesh=mesh)
    with raises(NotImplementedError, "(loss * factor).backward()"):
        model.set_gradient_divide_factor(4.0)
    with raises(NotImplementedError, "(loss * factor).backward()"):
        model.set_reduce_scatter_divide_factor(4.0)


@claim("test_size1_reduceop", "test_singleton_copy_division", sizes={"dp": 1})
def the_gradient_of_a_sum_is_that_of_one_device(mesh):
    model, plain = make_stack(), make_stack()
    shard(model, mesh=mesh)
    check_same_training(plain, model, lambda i: make_rows(i, 4, 6), loss_of=torch.sum)


@claim(
    "test_reduce_scatter_fp32",
    "test_size1_reduceop",
    differs="the gradient of a sum over rows is not divided by the number of ranks",
)
def the_gradient_of_a_sum_is_the_sum_over_the_rows_of_all_ranks(mesh):
    model, plain = make_stack(), make_stack()
    shard(model, mesh=mesh)
    check_same_training(plain, model, lambda i: make_rows(i, 4, 6), loss_of=torch.sum)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        h = self.trunk(x)
        return self.first(h), self.second(h)


@claim("test_fully_shard_backward_prefetch")
def two_backwards_through_one_forward_accumulate(mesh):
    torch.manual_seed(0)
    plain = Branches().double()
    model = copy.deepcopy(plain)
    shard(model, mesh=mesh)
    x = make_rows(0, 4, 6)
    for m, given in ((plain, x), (model, pt.distribute_batch(x, mesh))):
        first, second = m(given)
        if m is model:
            m.set_is_last_backward(False)
        second.square().mean().backward(retain_graph=True)
        if m is model:
            m.set_is_last_backward(True)
        first.square().mean().backward()
        m(given)[0].mean().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        check_equal(p.grad, q.grad, name)


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(make_rows(i, 6, 6) for i in range(3))
        self.mlps = nn.ModuleList(MLP(6) for _ in range(3))

    def forward(self, x):
        ys = []
        for weight, mlp in zip(self.weights, self.mlps, strict=True):
            ys.append(F.relu(x @ weight))
            if isinstance(mlp, FSDPModule):
                mlp.unshard(async_op=True)
        return sum(mlp(y) for mlp, y in zip(self.mlps, ys, strict=True))


@claim("test_unshard_async", "test_unshard_no_param_group")
def unshard_ahead_of_use_changes_no_number(mesh):
    torch.manual_seed(0)
    plain = Three().double()
    model = copy.deepcopy(plain)
    shard(model, *model.mlps, mesh=mesh, reshard_after_forward=False)
    check_same_training(plain, model, lambda i: make_rows(i, 4, 6))
    empty = shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=mesh)
    empty.unshard(async_op=True).wait()


@claim(
    "test_exception_when_used_together_with_comm_hooks",
    "test_custom_hsdp_all_reduce_hook",
    "test_custom_hook_custom_stream",
    differs="custom collectives",
)
def collectives_of_the_user_are_refused(mesh):
    model = shard(make_stack(), mesh=mesh)
    for method in ("set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"):
        with raises(NotImplementedError, method):
            getattr(model, method)(lambda *_: None)


# -- extensions, frozen and ignored parameters -----------------------------------------------------


class Packed(torch.Tensor):
    """A tensor of the user's own, with FSDP2's methods for its own all-gather."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.bfloat16(),), None

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        return outputs[0].to(dtype), outputs


@claim(
    "test_all_gather_extensions_train_parity",
    "test_all_gather_extensions_end_to_end",
    "test_all_gather_extensions_monkey_patch",
    "test_all_gather_extension_outer_size_stride",
    "test_all_gather_extension_hsdp_mesh",
    differs="parameters with an all-gather of their own",
)
def parameters_with_an_all_gather_of_their_own_are_refused(mesh):
    model = MLP(4)
    model.up.weight = nn.Parameter(model.up.weight.detach().as_subclass(Packed))
    with raises((TypeError, ValueError), "fsdp_pre_all_gather"):
        fully_shard(model, mesh=mesh)
    model = MLP(4)
    model.up.weight.fsdp_pre_all_gather = lambda mesh: None
    with raises((TypeError, ValueError), "fsdp_pre_all_gather"):
        fully_shard(model, mesh=mesh)


@claim("test_train_mixed_requires_grad_per_group", differs="sends zeros for the frozen ones")
def training_biases_alone_is_that_of_one_device(mesh):
    for after in (False, True):
        plain, model = make_stack(), make_stack()

        def freeze(plain=plain, model=model):
            for m in (plain, model):
                m[0].requires_grad_(False)
                for name, p in m.named_parameters():
                    p.requires_grad_("bias" in name and not name.startswith("0"))

        if not after:
            freeze()
        for block in model if after else ():
            checkpoint_module(block)
        shard(model, mesh=mesh)
        if after:
            freeze()
        with pt.ledger() as log:
            check_same_training(plain, model, lambda i: make_rows(i, 4, 6))
        sent = [m.op for m in log.moves if m.kind == "reduce_scatter"]
        assert sent == ["2", "1"] * 2, sent  # nothing of the frozen block


@claim("test_train_mixed_requires_grad_across_groups")
def frozen_and_trained_blocks_alternate_without_a_sharded_root(mesh):
    for unfreeze in (False, True):
        torch.manual_seed(0)
        plain = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]).double()
        model = copy.deepcopy(plain)
        for linear in model:
            fully_shard(linear, mesh=mesh)
        for m in (plain, model):
            for i, linear in enumerate(m):
                linear.requires_grad_(i % 2 == 1)
        check_same_training(plain, model, lambda i: make_rows(i, 4, 6))
        with torch.no_grad():
            x = make_rows(9, 4, 6)
            check_equal(model(pt.distribute_batch(x, mesh)), plain(x), "without gradients")
        if unfreeze:
            for m in (plain, model):
                m.requires_grad_(True)
        check_same_training(plain, model, lambda i: make_rows(i, 4, 6))


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.frozen, self.trained = (nn.Linear(5, 5) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = self.frozen(F.relu(self.trained(x)))
            with torch.no_grad():
                x += F.relu(self.trained(x))
        return x


@claim("test_multi_forward_mixed_requires_grad")
def blocks_run_several_times_with_and_without_gradients(mesh):
    for reshard in (True, False):
        torch.manual_seed(0)
        plain = Repeated().double()
        model = copy.deepcopy(plain)
        shard(model, mesh=mesh, reshard_after_forward=reshard)
        check_same_training(plain, model, lambda i: make_rows(i, 4, 5))


@claim(
    "test_ddp_A_fsdp_B_ddp_C",
    "test_move_states_to_device_ignored_param_device",
    differs="ignored parameters",
)
def ignored_parameters_are_refused(mesh):
    model = MLP(4)
    with raises(ValueError, "apply fully_shard to modules without them"):
        fully_shard(model, mesh=mesh, ignored_params={model.up.weight})


# -- mixed precision -------------------------------------------------------------------------------


def count_bytes(log: Any, kind: str) -> int:
    return sum(r.nbytes for r in log.moves if r.kind == kind)


def run_in_dtypes(mesh: Any, policy: Any, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    """Bytes of gathers and of reductions in a step, whose numbers are those of `policy`."""
    plain, model = make_stack(8, dtype=dtype), make_stack(8, dtype=dtype)
    shard(model, mesh=mesh, mp_policy=policy)
    work = policy.param_dtype or dtype
    x = make_rows(0, 4, 8, dtype=dtype)
    with pt.ledger() as log:
        out = model(pt.distribute_batch(x, mesh))
        assert out.dtype == (policy.output_dtype or work)
        loss = out.float().square().mean()
        loss.backward()
    wanted = plain.to(work)(x.to(work)).float().square().mean()
    wanted.backward()
    check_equal(loss, wanted, "loss", 5e-2)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad.dtype == p.dtype == dtype, name
        scale = q.grad.abs().max().item()
        check_equal(p.grad.float() / scale, q.grad.float() / scale, name, 5e-2)
    return count_bytes(log, "all_gather"), count_bytes(log, "reduce_scatter")


@claim("test_compute_dtype", "test_reduce_dtype", "test_reduce_scatter_fp16")
def parameters_and_gradients_are_sent_in_the_dtypes_of_the_policy(mesh):
    gathered, reduced = run_in_dtypes(mesh, MixedPrecisionPolicy())
    for dtype in (torch.bfloat16, torch.float16):
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        assert run_in_dtypes(mesh, policy) == (gathered // 2, reduced // 2)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    assert run_in_dtypes(mesh, policy) == (gathered // 2, reduced)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    assert run_in_dtypes(mesh, policy) == (gathered, reduced // 2)


class WithCounts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.counts = nn.Parameter(torch.ones(8, dtype=torch.int64), requires_grad=False)

    def forward(self, x):
        return self.layers(x)


@claim("test_reduce_dtype_after_frozen_first_forward")
def the_dtype_of_gradients_holds_after_a_frozen_first_forward(mesh):
    model = WithCounts()
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model.requires_grad_(False)
    x = pt.distribute_batch(make_rows(0, 4, 8, dtype=torch.float32), mesh)
    with torch.no_grad():
        model(x)
    model.layers.requires_grad_(True)
    model(x).sum().backward()
    assert {p.grad.dtype for p in model.layers.parameters()} == {torch.float32}
    assert model.counts.grad is None


@claim("test_grad_acc_with_reduce_dtype")
def gradients_accumulate_in_the_dtype_of_the_reduction(mesh):
    for reshard in (True, False):
        model = nn.Sequential(nn.Linear(4, 4, bias=False))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        for micro in range(2):  # 1 + 2**-10 is no number of bfloat16
            model.set_requires_gradient_sync(micro == 1)
            model.set_reshard_after_backward(micro == 1 or reshard)
            x = torch.full((4, 4), 2.0 ** (-10 * micro))
            model(pt.distribute_batch(x, mesh)).float().sum().backward()
        check_equal(model[0].weight.grad, torch.full((4, 4), 4 * (1 + 2.0**-10)), "gradient", 0.0)


@claim("test_no_warmup_jvp_reshard_after_forward_false")
def forward_mode_runs_through_a_block_and_leaves_it_as_it_was(mesh):
    x, t = make_rows(0, 4, 6), make_rows(1, 4, 6)
    for reshard in (False, True):
        plain, model = make_stack(count=1), make_stack(count=1)
        shard(model, mesh=mesh, reshard_after_forward=reshard)
        ours, tangent = pt.distribute_batch((x, t), mesh)
        out, zeros = torch.func.jvp(lambda _, m=model[0], x=ours: m(x), (t,), (t,))
        check_equal(out, plain[0](x), "output")
        assert not full(zeros).any()
        found = torch.func.jvp(model[0], (ours,), (tangent,))[1]
        check_equal(found, torch.func.jvp(plain[0], (x,), (t,))[1], "tangent")
        check_same_training(plain, model, lambda i: make_rows(i, 4, 6), steps=1)


class Recorded(nn.Module):
    """A model that records the dtypes that its modules get."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.got: dict[str, torch.dtype] = {}
        for name in ("first", "second"):
            getattr(self, name).register_forward_pre_hook(
                lambda m, args, name=name: self.got.update({name: args[0].dtype})
            )

    def forward(self, x):
        self.got["model"] = x.dtype
        return self.second(self.first(x))


@claim(
    "test_float16_on_one_submodule",
    "test_submodules_with_external_inputs",
    "test_norm_modules_bf16",
    "test_norm_modules_fp16",
    differs="one `param_dtype`",
)
def another_policy_for_one_block_is_refused(mesh):
    for policy in (
        MixedPrecisionPolicy(param_dtype=torch.float16),
        MixedPrecisionPolicy(cast_forward_inputs=False),
    ):
        model = Recorded()
        fully_shard(model.second, mesh=mesh, mp_policy=policy)
        with raises(pt.LayoutError, "sharded with other options", "blocks of one model"):
            fully_shard(model, mesh=mesh)


class External(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), AddTo()

    def forward(self, x):
        self.got = x.dtype
        return self.second(self.first(x), torch.ones(4, 8))


class AddTo(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, y):
        self.got = x.dtype, y.dtype
        return self.linear(x)


@claim("test_submodules_with_external_inputs")
def inputs_from_outside_are_cast_where_a_block_begins(mesh):
    half, single = torch.float16, torch.float32
    for casts in (True, False):
        model = External()
        policy = MixedPrecisionPolicy(param_dtype=half, cast_forward_inputs=casts)
        shard(model, model.second, mesh=mesh, mp_policy=policy)
        x = pt.distribute_batch(make_rows(0, 4, 8, dtype=single if casts else half), mesh)
        model(x).float().sum().backward()
        assert model.got == half
        assert model.second.got == (half, half if casts else single)


class Recomputed(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.linear, self.dtype, self.outputs = nn.Linear(1, 1), dtype, []
        self.inputs = []
        self.linear.register_forward_pre_hook(lambda m, args: self.inputs.append(args[0].dtype))

    def part(self, x):
        out = self.linear(x)
        self.outputs.append(out.dtype)
        return out

    def forward(self, x):
        x = checkpoint(self.part, x.to(self.dtype), use_reentrant=False, early_stop=False)
        return x.float().sum()


@claim("test_checkpoint_recompute_casts_forward_inputs", "test_checkpoint_recompute_casts_outputs")
def casts_are_the_same_when_a_block_is_recomputed(mesh):
    low = torch.bfloat16
    x = pt.distribute_batch(make_rows(0, 8, 1, dtype=torch.float32), mesh)
    model = Recomputed(torch.float32)
    shard(model, model.linear, mesh=mesh, mp_policy=MixedPrecisionPolicy(low, low))
    model(x).backward()
    assert model.outputs == [low, low]
    model = Recomputed(low)
    policy = MixedPrecisionPolicy(low, low, torch.float32, cast_forward_inputs=False)
    shard(model, model.linear, mesh=mesh, mp_policy=policy)
    model(x).backward()
    assert model.outputs == [torch.float32, torch.float32]


@claim("test_norm_modules_bf16", "test_norm_modules_fp16")
def norms_run_in_the_dtype_of_the_policy(mesh):
    for dtype in (torch.bfloat16, torch.float16):
        for norm, ends, shape in (
            (nn.LayerNorm(8), (nn.Linear(8, 8), nn.Linear(8, 8)), (4, 8)),
            (nn.BatchNorm1d(8), (nn.Linear(8, 8), nn.Linear(8, 8)), (4, 8)),
            (nn.BatchNorm2d(5), (nn.Conv2d(1, 5, 3), nn.Conv2d(5, 4, 3)), (4, 1, 9, 9)),
        ):
            model = nn.Sequential(ends[0], norm, ends[1])
            shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
            out = model(pt.distribute_batch(make_rows(0, *shape, dtype=torch.float32), mesh))
            assert out.dtype == dtype
            out.float().sum().backward()
            assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@claim("test_clamp_reduce_dtype")
def the_dtype_of_the_reduction_holds_after_the_model_is_cast(mesh):
    model = make_stack(8, dtype=torch.bfloat16)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    shard(model, mesh=mesh, mp_policy=policy)
    model.float()
    x = pt.distribute_batch(make_rows(0, 4, 8, dtype=torch.float32), mesh)
    with pt.ledger() as log:
        model(x).float().sum().backward()
    wanted = run_in_dtypes(mesh, policy)[1]
    assert count_bytes(log, "reduce_scatter") == wanted


# -- classes, state dicts --------------------------------------------------------------------------


@claim("test_fully_shard_reapply")
def a_second_call_is_refused(mesh):
    model = fully_shard(MLP(4), mesh=mesh)
    with raises(ValueError, "sharded already"):
        fully_shard(model, mesh=mesh)


@claim("test_fully_shard_cls")
def only_the_class_of_the_given_module_changes(mesh):
    model = fully_shard(MLP(4), mesh=mesh)
    assert isinstance(model, MLP)
    assert isinstance(model, FSDPModule)
    assert type(model).__name__ == "FSDPMLP"
    assert not any(isinstance(m, FSDPModule) for m in model.children())
    stack = fully_shard(make_stack(), mesh=mesh)
    part = stack[:2]
    assert isinstance(part, nn.Sequential)
    assert not isinstance(part, FSDPModule)


@claim("test_fully_shard_unsupported_module_cls")
def a_container_without_forward_is_refused(mesh):
    for container in (nn.ModuleList([MLP(4)]), nn.ModuleDict({"a": MLP(4)})):
        with raises((TypeError, ValueError), "forward"):
            fully_shard(container, mesh=mesh)


@claim("test_fully_shard_deepcopy", differs="a deep copy")
def a_deep_copy_is_a_sharded_model_of_its_own(mesh):
    model = shard(make_stack(), mesh=mesh)
    copied = copy.deepcopy(model)
    check_same_training(make_stack(), copied, lambda i: make_rows(i, 4, 6))
    check_same_training(make_stack(), model, lambda i: make_rows(i, 4, 6))


def check_state_dict(model: nn.Module) -> None:
    """Its values share memory with the parameters; loading writes into them."""
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1)
    at = {name: p.to_local().data_ptr() for name, p in model.named_parameters()}
    state = model.state_dict()
    assert state.keys() == at.keys()
    for name, value in state.items():
        assert isinstance(value, pt.DTensor)
        assert value.to_local().data_ptr() == at[name], name
    new = {name: value.detach().clone().fill_(7) for name, value in state.items()}
    assert all((full(p) == 1).all() for p in model.parameters())
    model.load_state_dict(new)
    for name, p in model.named_parameters():
        assert (full(p) == 7).all(), name
        assert p.to_local().data_ptr() == at[name], name


@claim("test_dp_state_dict_save_load")
def a_state_dict_holds_the_shards(mesh):
    for width in (2, 5):
        check_state_dict(shard(make_stack(width), mesh=mesh))
        model = shard(make_stack(width), mesh=mesh, reshard_after_forward=False)
        check_state_dict(model)
        before = model.state_dict()
        model(pt.distribute_batch(make_rows(0, 4, width), mesh))
        for name, value in model.state_dict().items():
            check_equal(value, full(before[name]), name)


@claim("test_dp_state_dict_save_load", sizes=HSDP)
def a_state_dict_of_replicas_holds_the_shards(mesh):
    for width in (2, 3, 5):
        check_state_dict(shard(make_stack(width), mesh=mesh))


@claim("test_cached_state_dict")
def a_state_dict_follows_training(mesh):
    for width in (2, 3, 5):
        model = fully_shard(nn.Linear(width, width, bias=False).double(), mesh=mesh)
        state = model.state_dict()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for i in range(2):
            model(pt.distribute_batch(make_rows(i, 4, width), mesh)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            own = model.weight.to_local().untyped_storage().data_ptr()
            assert state["weight"].to_local().untyped_storage().data_ptr() == own


@claim("test_2d_state_dict_correctness", "test_dp_tp_state_dict_save_load", sizes=DP_TP)
def a_state_dict_with_tensor_parallelism_is_that_of_one_device(mesh):
    for width in (4, 5):
        model = shard_2d(make_stack(width), mesh)
        wanted = make_stack(width).state_dict()
        for name, value in model.state_dict().items():
            check_equal(value, wanted[name], name)
        check_state_dict(model)


@claim("test_hsdp_tp_state_dict_save_load", sizes={"replicate": 2, "shard": 2, "tp": 2})
def a_state_dict_with_replicas_and_tensor_parallelism(mesh):
    check_state_dict(shard_2d(make_stack(4), mesh))


@claim("test_rank0_offload_full_state_dict")
def one_rank_keeps_a_full_state_dict(mesh):
    model = make_transformer()
    shard(model, *model.layers, mesh=mesh)
    kept = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor()
        if mesh.get_rank() == 0:
            kept[name] = whole.cpu()
    wanted = make_transformer().state_dict() if mesh.get_rank() == 0 else {}
    assert list(kept) == list(wanted)
    for name, value in kept.items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, wanted[name]), name


# -- initialization --------------------------------------------------------------------------------


@claim("test_move_states_to_device_tensor")
def all_state_is_on_the_device_of_the_mesh(mesh):
    model = MLP(4)
    model.register_buffer("steps", torch.zeros(3))
    fully_shard(model, mesh=mesh)
    for t in (*model.parameters(), *model.buffers()):
        assert isinstance(t, pt.DTensor)
        assert t.device.type == "cpu"


@claim("test_move_states_to_device_dtensor_valid", "test_shard_dtensor_parameters", sizes=DP_TP)
def parameters_of_tensor_parallelism_are_sharded_within_their_shards(mesh):
    model = make_stack(9)
    shard_2d(model, mesh)
    for (name, p), q in zip(model.named_parameters(), make_stack(9).parameters(), strict=True):
        assert p.size() == q.size()
        assert p.stride() == q.stride()
        check_equal(p, q, name)
        wanted = [pt.Shard(0), pt.Shard(0) if "up" in name else pt.Replicate()]
        if name.endswith("down.weight"):
            wanted[1] = pt.Shard(1)
        assert [*p.placements] == wanted, (name, p.placements)


@claim("test_move_states_to_device_dtensor_invalid", sizes=DP_TP)
def parameters_on_another_mesh_are_refused(mesh):
    model = parallelize_module(MLP(4), mesh["tp"], {"up": ColwiseParallel(use_local_output=False)})
    with raises(pt.LayoutError, "is on another mesh"):
        fully_shard(model)  # a mesh of all ranks, without an axis "tp"


@claim("test_invalid_mesh_ndim", sizes={"a": 2, "b": 2, "c": 1})
def a_mesh_of_three_dimensions_is_refused(mesh):
    with raises(pt.LayoutError, "mesh=mesh['a']"):
        fully_shard(MLP(4), mesh=mesh)


@claim("test_2d_mesh_without_mesh_dim_names")
def a_mesh_without_names_shards_over_its_last_dimension(_):
    mesh = init_device_mesh("cpu", (2, 2))
    model = shard(make_stack(), mesh=mesh)
    check_same_training(make_stack(), model, lambda i: make_rows(i, 4, 6))


@claim("test_shard_tensor_parameters")
def parameters_are_cut_as_torch_chunk_cuts(mesh):
    for shared in (False, True):
        plain, model = make_stack(3), make_stack(3)
        if shared:
            plain[0].up, model[0].up = plain[1].up, model[1].up
        fully_shard(model, mesh=mesh)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.size() == q.size()
            assert p.stride() == q.stride()
            pieces = [*q.chunk(4), *[q[:0]] * 4]
            assert torch.equal(p.to_local(), pieces[mesh.get_rank()])


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.linear(x) * self.scale


@claim("test_raise_scalar_parameter", differs="scalar parameters")
def a_scalar_parameter_stays_whole_and_trains(mesh):
    torch.manual_seed(0)
    plain = Scaled().double()
    model = fully_shard(copy.deepcopy(plain), mesh=mesh)
    check_same_training(plain, model, lambda i: make_rows(i, 4, 6))


@claim("test_raise_noncontiguous_parameter", differs="channels last")
def a_parameter_that_is_not_contiguous_trains(mesh):
    torch.manual_seed(0)
    plain = nn.Conv2d(4, 8, 3).double().to(memory_format=torch.channels_last)
    model = fully_shard(copy.deepcopy(plain), mesh=mesh)
    check_same_training(plain, model, lambda i: make_rows(i, 4, 4, 5, 5))


@claim("test_fully_shard_double_lazy_init", differs="a block may run before the model")
def a_block_runs_before_the_model(mesh):
    plain, model = make_stack(), make_stack()
    shard(model, mesh=mesh)
    x = make_rows(0, 4, 6)
    check_equal(model[0](pt.distribute_batch(x, mesh)), plain[0](x), "output")
    check_same_training(plain, model, lambda i: make_rows(i, 4, 6))


@claim("test_fully_shard_multi_module_root", differs="`fully_shard(model)` is optional")
def modules_in_one_call_run_without_a_root(mesh):
    plain, model = make_stack(), make_stack()
    fully_shard([*model], mesh=mesh)
    check_same_training(plain, model, lambda i: make_rows(i, 4, 6))


class WeightNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(3, 3, bias=False) for _ in range(2))
        self.norms = nn.Parameter(torch.empty(3))

    def set_norms(self):
        with torch.no_grad():
            norms = sum(torch.linalg.norm(m.weight, dim=1) for m in (self.first, self.second))
        self.norms = nn.Parameter(norms)

    def forward(self, x):
        return self.second(self.first(x)).sum() + self.norms.sum()


@claim("test_reset_sharded_param_in_lazy_init")
def a_parameter_may_be_replaced_by_one_made_of_others_after_sharding(mesh):
    torch.manual_seed(0)
    plain = WeightNorm().double()
    with torch.device("meta"):
        model = WeightNorm().double()
    shard(model, model.first, model.second, mesh=mesh)
    for name in ("first", "second"):
        inner = getattr(model, name).to_empty(device="cpu")
        with torch.no_grad():
            inner.weight.copy_(getattr(plain, name).weight)
    plain.set_norms()
    model.set_norms()
    x = make_rows(0, 4, 3)
    wanted, loss = plain(x), model(pt.distribute_batch(x, mesh))
    check_equal(loss, wanted, "loss")
    for one in (wanted, loss):
        one.backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        check_equal(p.grad, q.grad, name)


class Buffered(MLP):
    def __init__(self, width: int, **options: Any):
        super().__init__(width, width, **options)
        self.register_buffer("buffer", torch.randn(width))

    def reset_parameters(self):
        nn.init.normal_(self.buffer)

    def forward(self, x):
        return super().forward(x) + self.buffer


def check_materialization(model: nn.Module, mesh: Any, width: int) -> None:
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for t in (*model.parameters(), *model.buffers()):
        assert t.device.type == "cpu"
        t.detach().fill_(1337)
    for m in model.modules():
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()
    for t in (*model.parameters(), *model.buffers()):
        assert not (full(t.detach()) == 1337).any()
    # All ranks must have initialized to the values of one model.
    x = pt.distribute_batch(make_rows(0, 4, width, dtype=torch.float32), mesh)
    plain = copy.deepcopy(model).float()
    wanted = nn.Sequential(
        *[Buffered(width, bias="bias" in str([*dict(m.named_parameters())])) for m in model]
    )
    wanted.load_state_dict({k: full(v) for k, v in plain.state_dict().items()})
    out = model(x)
    check_equal(out.float(), wanted(full(x)), "output", 5e-2)
    out.float().sum().backward()
    optimizer.step()


@claim("test_meta_device_1d_init")
def a_model_on_the_meta_device_is_made_empty_and_initialized(mesh):
    for width in (8, 3, 1):
        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
            with torch.device("meta"):
                model = nn.Sequential(Buffered(width), Buffered(width, bias=False))
                shard(model, mesh=mesh, mp_policy=policy)
            check_materialization(model, mesh, width)
    with torch.device("meta"):
        model = shard(nn.Sequential(Buffered(8), Buffered(8)))
    check_materialization(model, get_mesh(model), 8)


@claim("test_meta_device_2d_init", sizes=DP_TP)
def a_model_on_the_meta_device_with_tensor_parallelism(mesh):
    for width in (8, 3):
        with torch.device("meta"):
            model = nn.Sequential(Buffered(width), Buffered(width))
            shard_2d(model, mesh)
        check_materialization(model, mesh, width)


@claim("test_invalid_meta_device_init")
def a_forward_on_the_meta_device_is_refused(mesh):
    with torch.device("meta"):
        model = make_stack()
    shard(model, mesh=mesh)
    x = pt.distribute_batch(make_rows(0, 4, 6), mesh)
    with raises(pt.LayoutError, "parameters of 0", "meta device", "to_empty"):
        model(x)


@claim("test_rank0_broadcast_meta_device_init")
def the_weights_of_rank_0_are_sent_to_a_model_on_the_meta_device(mesh):
    plain = make_transformer()
    with torch.device("meta"):
        model = Transformer().double()
    shard(model, *model.layers, mesh=mesh)
    theirs = plain.state_dict()
    sent = {}
    for name, meta in model.state_dict().items():
        value = theirs[name] if mesh.get_rank() == 0 else torch.zeros_like(theirs[name])
        sent[name] = nn.Parameter(pt.distribute_tensor(value, meta.device_mesh, meta.placements))
    model.load_state_dict(sent, assign=True)
    check_same_training(plain, model, make_tokens)


@claim("test_1d_process_group_init")
def a_mesh_of_a_process_group_trains(_):
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh = DeviceMesh.from_group(whole["dp"].get_group(), "cpu", mesh_dim_names=("dp",))
    model = shard(make_stack(), mesh=mesh)
    check_same_training(make_stack(), model, lambda i: make_rows(i, 4, 6))


@claim("test_2d_process_group_init")
def a_mesh_of_two_process_groups_trains(_):
    like = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = [like["replicate"].get_group(), like["shard"].get_group()]
    names = ("replicate", "shard")
    mesh = DeviceMesh.from_group(groups, "cpu", mesh=like.mesh, mesh_dim_names=names)
    model = shard(make_stack(), mesh=mesh)
    check_same_training(make_stack(), model, lambda i: make_rows(i, 4, 6))


@claim("test_hsdp_broadcast_across_replicas", sizes=HSDP)
def the_state_of_one_replica_is_broadcast_to_the_others(mesh):
    model = make_stack()
    model.register_buffer("buffer", make_rows(0, 6))
    shard(model, mesh=mesh)
    held = [t.detach() for t in (*model.parameters(), *model.buffers())]
    if mesh.get_local_rank("replicate") > 0:
        for t in held:
            t.to_local().fill_(1337)
    group = mesh.get_group("replicate")
    for t in held:
        dist.broadcast(t.to_local(), src=dist.get_process_group_ranks(group)[0], group=group)
    check_same_training(make_stack(), model, lambda i: make_rows(i, 4, 6))


@claim("test_old_import_training")
def blocks_become_modules_of_fsdp(mesh):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert all(isinstance(m, FSDPModule) for m in (model, *model))
    model(pt.distribute_batch(make_rows(0, 4, 8, dtype=torch.float32), mesh)).sum().backward()


class MixedDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        low = torch.ones(8, 8).to(torch.float8_e4m3fn)
        self.low = nn.Parameter(low, requires_grad=False)
        self.high = nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        return x @ (self.low.float() * self.high)


@claim("test_mixed_dtypes_no_grad_param")
def a_frozen_parameter_may_have_another_dtype(mesh):
    plain, model = MixedDtypes(), fully_shard(MixedDtypes(), mesh=mesh)
    x = make_rows(0, 4, 8, dtype=torch.float32)
    plain(x).square().mean().backward()
    model(pt.distribute_batch(x, mesh)).square().mean().backward()
    check_equal(model.high.grad, plain.high.grad, "gradient", 1e-5)


class Rotation(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.polar(make_rows(0, 6, 6).abs(), make_rows(1, 6, 6)))

    def forward(self, x):
        return (x.to(self.turn.dtype) @ self.turn).abs()


@claim()
def a_parameter_of_complex_numbers_trains(mesh):
    for stage in (0, 2, 3):
        model = Rotation()
        if stage == 3:
            fully_shard(model, mesh=mesh)
        else:
            pt.zero(model, mesh, stage=stage)
        check_same_training(Rotation(), model, lambda i: make_rows(i, 4, 6), steps=1)


# -- tests of torch that make no claim for a user of another implementation ------------------------

NO_CLAIM = {
    "private classes and functions": (
        "test_modules_to_run_forward_empty_for_single_module",
        "test_managed_modules_single",
        "test_managed_modules_nested",
        "test_managed_modules_nested_fully_shard_and_replicate",
        "test_managed_modules_duplicate",
        "test_managed_modules_list_of_mlps",
        "test_managed_states_shared_params_and_buffers",
        "test_managed_states_nested_fully_shard",
        "test_managed_states_list_of_mlps",
        "test_get_param_module_infos_shared_params",
        "test_get_param_module_infos_duplicates",
        "test_get_param_module_infos_list_of_mlps",
        "test_fully_shard_is_root",
        "test_fully_shard_module_and_param_fqns",
        "test_fully_shard_state",
        "test_reduce_scatter_max_input_buffers_resolves_to_max",
        "test_numerics",
        "test_kernels",
    ),
    "CUDA graphs, streams, time and memory": (
        "test_two_layer_fully_shard_cudagraph",
        "test_fully_shard_training_overlap",
        "test_fully_shard_post_optim_event_overlap",
        "test_fully_shard_training_memory",
    ),
    "NCCL": (
        "test_fully_shard_alloc_from_pg",
        "test_fully_shard_symm_mem",
        "test_fully_shard_force_sum_reduce_scatter",
        "test_fully_shard_force_sum_both_reductions",
    ),
}


def run_on_gloo(rank: int) -> dict[str, str]:
    return CLAIMS.run_on_gloo()


@pytest.mark.slow
def test_claims_hold_on_gloo():
    assert run_ranks(run_on_gloo, 4) == [{}] * 4


@pytest.mark.slow
def test_claims_about_other_numbers_of_ranks_hold():
    assert CLAIMS.run_on_threads() == {}


@pytest.mark.filterwarnings("ignore:every rank of")
def test_what_partita_had_otherwise_holds():
    once_wrong = (
        a_module_without_parameters_runs,
        tied_weights_in_one_call_run_chunk_by_chunk,
        a_step_after_an_exception_in_forward_is_right,
        shared_parameters_in_separate_calls_are_right_or_refused,
        parameters_with_an_all_gather_of_their_own_are_refused,
        inputs_from_outside_are_cast_where_a_block_begins,
        only_the_class_of_the_given_module_changes,
        a_container_without_forward_is_refused,
        a_forward_on_the_meta_device_is_refused,
    )
    assert CLAIMS.run_on_threads(*once_wrong) == {}


def test_differences_are_stated_on_the_page():
    assert CLAIMS.list_unwritten(PAGE.read_text()) == set()


def test_each_test_of_torch_has_a_claim_or_a_reason():
    with_claim = {name for claim in CLAIMS for name in claim.tests}
    without = [name for names in NO_CLAIM.values() for name in names]
    assert len(without) == len({*without} - with_claim)
