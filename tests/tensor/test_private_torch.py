"""Does torch still behave as partita takes for granted, where torch promises nothing?

Each test is of torch alone, and fails clearly when a new torch breaks what one file stands on.
"""

from __future__ import annotations

import _abc
import abc
import functools
import gc
import importlib
import inspect
import pickle
import subprocess
import sys
import types
import weakref
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import (
    _ProxyTensor,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    set_proxy_slot,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, DimDynamic, ShapeEnv
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils import checkpoint as checkpoints
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._sympy.printers import PythonPrinter
from torch.utils.checkpoint import _CheckpointFrame
from torch.utils.dlpack import to_dlpack

import partita as pt
from partita.graph.backend.cpp_kernels import KernelCompiler, load_kernels, set_attribute
from partita.graph.backend.inductor import CONFIG, remove_compiler_data, remove_input_checks
from partita.graph.memory import workspace
from partita.tensor.tensor_state import (
    after_backward,
    backward_pass,
    count_holders,
    frees_graph,
    in_backward,
    in_formula_of_backward,
    is_only_returned,
    next_node,
    saving_hooks,
    will_execute,
)
from partita.tensor.torch_patches import BEGINS
from partita.versions import base_of_scheduler_passes
from tests.programs.gloo_ranks import run_ranks


class Typed(torch.Tensor):
    """What a DTensor is, without anything of ours."""


def test_a_plain_tensor_may_become_one_of_a_subclass_and_autograd_does_not_mind():
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.__class__ = Typed
    y.note = "kept with the object"
    assert type(y) is Typed and y.grad_fn is not None
    with torch._C.DisableTorchFunctionSubclass():
        z = y.sum()
    z.backward()
    assert x.grad.tolist() == [2, 2, 2]
    assert y.note == "kept with the object"


def test_the_attributes_of_the_base_class_speak_of_the_tensor_itself():
    base = torch._C.TensorBase
    x = torch.ones(2, 3)
    assert base.shape.__get__(x) == (2, 3) and base.size(x) == (2, 3) and base.numel(x) == 6
    base.grad.__set__(x, torch.zeros(2, 3))
    assert base.grad.__get__(x) is x.grad
    base.data.__set__(x, torch.ones(4))
    assert x.shape == (4,)


def test_it_is_known_whether_torch_functions_are_heard():
    assert torch._C._is_torch_function_enabled() and torch._C._len_torch_function_stack() == 0
    with torch._C.DisableTorchFunctionSubclass():
        assert not torch._C._is_torch_function_enabled()
        with torch._C._EnableTorchFunction():
            assert torch._C._is_torch_function_enabled()
        assert not torch._C._is_torch_function_enabled()


def test_a_call_runs_with_torch_functions_unheard():
    class Heard(torch.Tensor):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError

    run_locally = torch._C._disabled_torch_function_impl
    x = torch.ones(2).as_subclass(Heard)
    enabled = run_locally(torch._C._is_torch_function_enabled, (), ())
    assert not enabled and torch._C._is_torch_function_enabled()
    out = run_locally(torch.add, (), (x, x), {"alpha": 2})
    assert type(out) is torch.Tensor and out.tolist() == [3.0, 3.0]


def test_the_modes_that_listen_can_be_asked_for():
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Mode() as mode:
        assert torch._C._len_torch_function_stack() == 1
        assert torch._C._get_function_stack_at(0) is mode


def test_it_is_known_whether_a_backward_pass_is_at_work():
    seen = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(in_backward()))
    seen.append(in_backward())
    y.backward()
    assert [*seen, in_backward()] == [False, True, False]


def test_it_is_known_whether_a_backward_pass_frees_its_graph():
    seen = []
    x = torch.ones(1, requires_grad=True)
    y = x * x
    y.register_hook(lambda _: seen.append(frees_graph()))
    assert not frees_graph()
    y.backward(retain_graph=True)
    y.backward()
    assert seen == [False, True] and not frees_graph()


def test_it_is_known_whether_a_backward_pass_will_execute_a_node():
    """`parallel/fsdp_hooks` releases a block that a pass for inputs only does not come to."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            nodes.append(weakref.ref(ctx))
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    nodes, seen = [], []
    w, x = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    y = Double.apply(w) * x
    y.register_hook(lambda _: seen.append(will_execute(nodes[0]())))
    torch.autograd.grad(y, x, retain_graph=True)
    torch.autograd.grad(y, w, retain_graph=True)
    y.backward()
    assert seen == [False, True, True]


def test_it_is_known_whether_a_gradient_is_added_or_only_returned():
    """`tensor/dtensor_gradients` makes `.grad` pending before backward adds to it."""
    seen = []
    w, x = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    w.register_hook(lambda _: seen.append(is_only_returned(w)))
    torch.autograd.grad(w * x, w)
    (w * x).backward()
    (w * x).backward(inputs=[w])
    assert seen == [True, False, False]


def test_it_is_known_whether_an_operator_of_a_formula_of_backward_or_a_hook_is_running():
    """`tensor/dispatch` runs the operators of a formula on pieces, and those of hooks on wholes."""

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.cos.default:
                seen.append(in_formula_of_backward())
            return func(*args, **(kwargs or {}))

    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(in_formula_of_backward()))
    with Look():
        x.sin().sum().backward()
    assert seen == [True, False]


def test_the_innermost_hooks_on_saved_tensors_can_be_asked_for():
    assert saving_hooks() is None
    outer, inner = (lambda t: t, lambda t: t), (lambda t: t, lambda t: t)
    with saved_tensors_hooks(*outer):
        assert saving_hooks() == outer
        with saved_tensors_hooks(*inner):
            assert saving_hooks() == inner
        assert saving_hooks() == outer
    assert saving_hooks() is None


def test_a_hook_is_taken_off_and_hung_up_again_by_its_number():
    called = []
    x = torch.ones(1, requires_grad=True)
    handle = x.register_hook(called.append)
    hook = x._backward_hooks.pop(handle.id)
    x.sum().backward()
    assert not called
    x._backward_hooks[handle.id] = hook
    x.sum().backward()
    assert len(called) == 1


def test_a_fused_optimizer_says_of_itself_that_it_unscales():
    """A GradScaler asks it in each step, and unscales by itself where the answer is no."""
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=1.0, fused=True)
    assert vars(optimizer)["_step_supports_amp_scaling"] is True
    vars(optimizer)["_step_supports_amp_scaling"] = False
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    assert p.grad.tolist() == [1.0, 1.0] and p.tolist() == [0.0, 0.0]


def test_an_optimizer_asks_lists_which_types_its_foreach_kernels_take():
    from torch.optim.optimizer import _default_to_fused_or_foreach, _foreach_supported_types
    from torch.utils._foreach_utils import _foreach_supported_types as in_clip

    assert pt.DTensor in _foreach_supported_types and pt.DTensor in in_clip
    source = inspect.getsource(_default_to_fused_or_foreach)
    assert "_foreach_supported_types" in source


def test_the_apply_of_a_custom_function_is_one_function_that_all_share():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            assert len(ctx.saved_tensors) == 1
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    Double.apply(x).sum().backward()
    assert x.grad.tolist() == [2, 2]
    assert callable(torch.autograd.Function.apply.__func__)
    assert callable(torch.autograd.function._is_setup_context_defined)
    assert hasattr(torch.autograd.function.BackwardCFunction.saved_tensors, "__get__")


def test_a_module_with_backward_hooks_makes_a_backward_hook_object():
    seen = []
    module = nn.Linear(2, 2)
    module.register_full_backward_hook(lambda m, before, after: seen.append((before, after)))
    module(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert len(seen) == 1
    names = inspect.signature(torch.utils.hooks.BackwardHook.__init__).parameters
    assert list(names) == ["self", "module", "user_hooks", "user_pre_hooks"]


def test_a_storage_that_is_emptied_frees_every_view_and_can_be_filled_again():
    x = torch.ones(8)
    view = x[2:4]
    x.untyped_storage().resize_(0)
    assert view.untyped_storage().nbytes() == 0
    x.untyped_storage().resize_(32)
    x.fill_(3)
    assert view.tolist() == [3, 3]


def test_what_torch_func_wraps_is_told_from_a_tensor():
    from torch._C._functorch import is_functorch_wrapped_tensor

    seen = []
    torch.func.vmap(lambda x: seen.append(is_functorch_wrapped_tensor(x)) or x)(torch.ones(2))
    assert seen == [True] and not is_functorch_wrapped_tensor(torch.ones(2))


def test_code_within_a_transform_can_run_as_if_there_were_none():
    from torch._C._functorch import is_functorch_wrapped_tensor
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    outside, wrapped = torch.ones(2), []

    def double(x):
        with temporarily_clear_interpreter_stack():
            wrapped.append(is_functorch_wrapped_tensor(torch.vmap(lambda y: y)(outside)))
            free = outside * 2
        wrapped.append(is_functorch_wrapped_tensor(free))
        return x * free

    assert torch.vmap(double)(torch.ones(3, 2)).tolist() == [[2, 2]] * 3
    assert torch.func.grad(lambda x: double(x).sum())(outside).tolist() == [2, 2]
    assert wrapped == [False] * 4


def test_control_flow_is_functions_whose_place_can_be_taken_and_that_take_what_torch_documents():
    import torch._higher_order_ops as control_flow
    from torch._higher_order_ops.associative_scan import generic_associative_scan

    def parameters_of(function):
        return [*inspect.signature(function).parameters]

    assert isinstance(torch.cond, types.FunctionType)
    assert parameters_of(torch.cond) == ["pred", "true_fn", "false_fn", "operands"]
    expected = {
        "associative_scan": ["combine_fn", "xs", "dim", "reverse", "combine_mode"],
        "while_loop": ["cond_fn", "body_fn", "carried_inputs"],
        "scan": ["combine_fn", "init", "xs", "dim", "reverse"],
    }
    for name, names in expected.items():
        assert parameters_of(getattr(control_flow, name)) == names
    for name in (*expected, "map"):
        assert isinstance(getattr(control_flow, name), types.FunctionType)
    x, y = torch.arange(1.0, 6), torch.arange(5.0)
    found = generic_associative_scan(lambda a, b, c, d: (a + c, b + d), [x, y])
    assert [t.tolist() for t in found] == [x.cumsum(0).tolist(), y.cumsum(0).tolist()]


def test_a_call_can_wait_for_the_end_of_the_backward_pass_that_is_at_work():
    said = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2

    def hook(_):
        said.append(backward_pass())
        after_backward(lambda: said.append(x.grad))

    y.register_hook(hook)
    y.backward(retain_graph=True)
    y.backward()
    first, grad, second, _ = said
    assert -1 not in (first, second) and first != second
    assert grad is not None and backward_pass() == -1


def test_the_nodes_of_autograd_are_numbered_in_the_order_in_which_they_are_made():
    x = torch.ones(1, requires_grad=True)
    before = x * 2
    since = next_node()
    after = x * 2
    assert before.grad_fn._sequence_nr() < since <= after.grad_fn._sequence_nr()


class ViewOfAFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g


def test_a_view_that_a_function_made_can_be_written_if_it_is_marked_as_another_view():
    x = torch.ones(3, requires_grad=True)
    base = x * 1
    with pytest.raises(RuntimeError, match="custom Function"):
        ViewOfAFunction.apply(base).mul_(2)
    view = ViewOfAFunction.apply(base)
    autograd = torch._C._autograd
    autograd._set_creation_meta(view, autograd._get_creation_meta(base.view_as(base)))
    view.mul_(2)
    (view * base).sum().backward()
    assert x.grad.tolist() == [8.0] * 3


@pytest.mark.parametrize("early", [False, True])
def test_a_node_with_the_highest_number_runs_as_soon_as_its_gradient_is_complete(early):
    ran = []
    x = torch.ones(1, requires_grad=True)
    alias = x.view_as(x)  # made first, so it would run last
    alias.register_hook(lambda _: ran.append("alias"))
    if early:
        alias.grad_fn._set_sequence_nr(2**64 - 1)
    other = torch.ones(1, requires_grad=True) * 2
    other.register_hook(lambda _: ran.append("other"))
    (alias + other).backward()
    assert ran == (["alias", "other"] if early else ["other", "alias"])


def test_inductor_keeps_its_files_where_it_is_told_or_in_a_folder_it_can_name(
    monkeypatch,
):
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    assert cache_dir() == default_cache_dir()


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_where_a_checkpoint_has_a_chunk_is_a_file_an_offset_and_a_length(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    (place,) = dcp.FileSystemReader(tmp_path).read_metadata().storage_data.values()
    assert type(place) is _StorageInfo
    assert place == _StorageInfo(place.relative_path, place.offset, place.length)
    assert place.offset + place.length == (tmp_path / place.relative_path).stat().st_size


def test_the_dispatcher_knows_what_autocast_lists_for_a_device():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert "aten::cross_entropy_loss" in torch._C._dispatch_get_all_op_names()
    assert has_kernel("aten::cross_entropy_loss", "AutocastCPU")
    assert not has_kernel("aten::softmax.int", "AutocastCPU")
    assert has_kernel("aten::softmax.int", "AutocastCUDA")
    assert has_kernel("aten::nll_loss_nd", "CompositeImplicitAutograd")
    assert not torch._C._is_any_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch._C._is_any_autocast_enabled()
        torch.set_autocast_enabled("cpu", False)
        assert not torch._C._is_any_autocast_enabled()
        torch.set_autocast_enabled("cpu", True)


@pytest.mark.slow
def test_zeros_without_memory_say_so_and_a_copy_has_memory():
    x = torch.ones(3, requires_grad=True)
    torch.sgn(x).sum().backward()
    assert x.grad._is_zerotensor() and not x._is_zerotensor()
    assert not x.grad.clone()._is_zerotensor() and not x.grad.any()


@pytest.mark.slow
def test_who_has_a_storage_is_counted_and_tensors_are_known_to_the_garbage_collector():
    x = torch.ones(4)
    assert count_holders(x.untyped_storage()) == 2
    view, array = x[1:], x.detach().numpy()
    assert count_holders(x.untyped_storage()) == 4
    assert {id(x), id(view)} <= set(map(id, gc.get_objects()))
    assert array.base is not None


def test_a_checkpoint_compares_what_was_saved_by_a_function_of_its_own():
    described = []
    with torch.utils.checkpoint.set_checkpoint_debug_enabled(False):
        frame = _CheckpointFrame(None, True, None, described.append)
    frame.metadata_fn(torch.ones(2))
    assert len(described) == 1
    assert frame.x_metadatas == []


def test_state_dicts_are_walked_by_functions_that_ask_for_torchs_own_dtensor():
    """`partita.comm.torch_distributed` takes their places."""
    from torch.distributed import _state_dict_utils as walk
    from torch.distributed.checkpoint import _state_dict_stager
    from torch.distributed.checkpoint import state_dict as door

    for module, name in (
        (walk, "_iterate_state_dict"),
        (walk, "_broadcast_tensors"),
        (door, "_distribute_state_dict"),
        (door, "_load_model_state_dict"),
        (_state_dict_stager.StateDictStager, "_offload_tensor"),
    ):
        assert getattr(module, name).__wrapped__.__name__ == name
    seen = []

    def heard(obj, sharded, dtensor, tensor, **options):
        seen.append(dtensor.__qualname__.partition(".")[0])
        return {}

    taught, walk._iterate_state_dict = walk._iterate_state_dict, heard
    try:
        walk._gather_state_dict({})
        walk._create_cpu_state_dict({})
        walk._offload_state_dict_to_cpu({})
    finally:
        walk._iterate_state_dict = taught
    assert seen == ["_gather_state_dict", "_create_cpu_state_dict", "_identity_func"]
    source = inspect.getsource(door._load_model_state_dict.__wrapped__)
    assert "_distribute_state_dict(" in source and "_broadcast_state_dict(" in source
    assert "info.broadcast_from_rank0" in source
    assert "_broadcast_tensors(" in inspect.getsource(walk._broadcast_state_dict)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_is_called_and_made_where_it_can_be_asked():
    heard = []
    for kind, call in (
        (torch.jit.ScriptFunction, lambda: torch.jit.script(torch.nn.functional.relu)),
        (torch._C.ScriptMethod, lambda: torch.jit.script(nn.ReLU()).forward),
    ):
        base = kind.__call__
        kind.__call__ = lambda self, *a, base=base: heard.append(type(self)) or base(self, *a)
        try:
            call()(torch.ones(2))
        finally:
            kind.__call__ = base
    assert heard == [torch.jit.ScriptFunction, torch._C.ScriptMethod]
    heard = []
    made = torch.jit._recursive.create_script_module
    torch.jit._recursive.create_script_module = lambda *a, **k: heard.append(a[0]) or made(*a, **k)
    try:
        module = nn.Linear(2, 2)
        torch.jit.script(module)
    finally:
        torch.jit._recursive.create_script_module = made
    assert heard == [module]


def test_dynamo_asks_a_tensor_for_one_attribute_before_it_traces_it():
    class Asked(Exception):
        pass

    class Refusing(torch.Tensor):
        @property
        def _dynamo_static_input_type(self):
            assert torch._guards.TracingContext.try_get() is not None
            raise Asked

    x = torch.ones(2).as_subclass(Refusing)
    try:
        torch.compile(lambda x: x + 1, backend="eager")(x)
        raise AssertionError("it did not ask")
    except Exception as error:
        assert "Asked" in repr(error) or isinstance(error.__cause__, Asked)
    frames = torch._C._dynamo.eval_frame
    frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    assert callable(frames.set_code_exec_strategy)


def told_by_a_group(rank):
    group = dist.new_group(timeout=timedelta(seconds=33))
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=33)
    assert group in dist.distributed_c10d._world.pg_map
    before = group._get_sequence_number_for_group()
    group.allreduce([torch.ones(1)]).wait(timedelta(seconds=1))
    return group._get_sequence_number_for_group() - before


@pytest.mark.slow
def test_a_group_tells_its_timeout_and_how_many_collectives_it_has_begun():
    assert run_ranks(told_by_a_group, 1) == [1]


def test_a_python_number_is_traced_and_what_is_asked_of_it_is_told():
    env = ShapeEnv(allow_scalar_outputs=True, specialize_zero_one=False)
    source = ConstantSource("rate")
    with FakeTensorMode(shape_env=env, static_shapes=True):
        symbol = env.create_unspecified_symbol(0.5, source, dynamic_dim=DimDynamic.DYNAMIC)
        number = env.create_symfloatnode(symbol, hint=0.5, source=source)
        x = torch.empty(3)

    def run(x):
        tracer = get_proxy_mode().tracer
        with tracer.graph.inserting_after(tracer.graph.find_nodes(op="placeholder")[-1]):
            node = tracer.graph.placeholder("number")
        proxy = torch.fx.Proxy(node, tracer)
        track_tensor_tree(number, proxy, constant=None, tracer=tracer)
        assert number != 0
        y = x * (1 - number)
        z = torch.ones_like(x)
        set_proxy_slot(z, tracer, get_proxy_slot(y, tracer))  # what reads z from now on reads y
        return z + 1

    made = make_fx(run)(x)
    (condition,) = [g.expr for g in env.guards if str(symbol) in map(str, g.expr.free_symbols)]
    code = PythonPrinter().doprint(condition)
    assert eval(code, dict(SYMPY_INTERP), {str(symbol): 2.0})
    assert not eval(code, dict(SYMPY_INTERP), {str(symbol): 0.0})
    assert symbol in env.backed_var_to_val and not env.pending_fresh_unbacked_symbols
    (end,) = made.graph.find_nodes(op="output")
    (read, *_) = end.all_input_nodes[0].all_input_nodes
    assert read.target is torch.ops.aten.mul.Tensor


def test_a_tensor_that_is_traced_is_had_without_a_call():
    mode = FakeTensorMode()

    def step(x):
        tracer = get_proxy_mode().tracer
        node = tracer.graph.call_function(
            torch.ops.aten.sin.default, (get_proxy_slot(x, tracer).proxy.node,)
        )
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            made = FakeTensor(mode, meta, x.device)
        node.meta["val"] = made
        set_proxy_slot(made, tracer, _ProxyTensor(torch.fx.Proxy(node, tracer), None))
        return made + 1

    with mode:
        traced = make_fx(step)(torch.ones(2))
    x = torch.ones(2)
    assert torch.equal(traced(x), x.sin() + 1)


def test_a_tracer_is_asked_to_call_each_module():
    called = []

    def step(x):
        tracer = get_proxy_mode().tracer
        usual = tracer.call_module

        def call_module(m, forward, args, kwargs):
            called.append(type(m))
            return usual(m, forward, args, kwargs)

        tracer.call_module = call_module
        return nn.Sequential(nn.ReLU())(x)

    make_fx(step)(torch.ones(2))
    assert called == [nn.Sequential, nn.ReLU]


def test_setting_the_gradient_mode_is_a_function_that_modes_hear_of():
    heard = []

    class Hearing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            heard.append(func)
            return func(*args, **(kwargs or {}))

    with Hearing(), torch.no_grad():
        pass
    assert heard == [torch._C._set_grad_enabled] * 2
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_bool_of_a_value_is_asked_of_the_environment_and_its_node_is_known():
    class Asking(ShapeEnv):
        def evaluate_sym_node(self, sym_node, *args, **kwargs):
            asked.append((sym_node.pytype, sym_node.has_hint()))
            question = torch.SymBool(sym_node)
            nodes.append(get_proxy_slot(question, get_proxy_mode().tracer).force().node)
            return True

    asked, nodes = [], []
    env = Asking(allow_scalar_outputs=True, specialize_zero_one=False)

    def run(x):
        if x.sum().item() != 0:
            x = x + 1
        if torch.any(x < 0):
            x = x * 2
        return x

    with FakeTensorMode(shape_env=env) as mode:
        made = make_fx(run)(mode.from_tensor(torch.ones(2)))
    assert asked == [(bool, False)] * 2
    assert [n.graph for n in nodes] == [nodes[0].graph] * 2
    names = [str(n.target) for n in made.graph.nodes]
    assert "aten.mul.Tensor" in names and names.count("aten._local_scalar_dense.default") == 2


def test_checkpoints_are_begun_by_functions_that_may_be_exchanged(monkeypatch):
    begun = []
    plain = getattr(checkpoints, BEGINS)
    apply = checkpoints.CheckpointFunction.apply

    def begin(function, *args, **kwargs):
        begun.append("without")
        return plain(function, *args, **kwargs)

    def apply_it(cls, function, preserve, *args):
        begun.append("reentrant")
        return apply(function, preserve, *args)

    monkeypatch.setattr(checkpoints, BEGINS, begin)
    monkeypatch.setattr(checkpoints.CheckpointFunction, "apply", classmethod(apply_it))
    x = torch.ones(2, requires_grad=True)
    for reentrant in (False, True):
        checkpoints.checkpoint(torch.sin, x, use_reentrant=reentrant).sum().backward()
    assert begun == ["without", "reentrant"]


def test_hooks_of_saved_tensors_are_put_around_code_by_one_method(monkeypatch):
    entered = []
    enter = saved_tensors_hooks.__enter__
    monkeypatch.setattr(
        saved_tensors_hooks, "__enter__", lambda hooks: entered.append(type(hooks)) or enter(hooks)
    )
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        checkpoints.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    names = [kind.__name__ for kind in entered]
    assert names[:2] == ["save_on_cpu", "_checkpoint_hook"]


def test_hooks_of_all_modules_are_in_dictionaries_that_each_call_of_a_module_looks_at():
    held = {k: v for k, v in vars(nn.modules.module).items() if k.startswith("_global_")}
    tables = {k: v for k, v in held.items() if k.endswith("_hooks")}
    hang = nn.modules.module
    for register, key in (
        (hang.register_module_forward_hook, "_global_forward_hooks"),
        (hang.register_module_forward_pre_hook, "_global_forward_pre_hooks"),
        (hang.register_module_full_backward_hook, "_global_backward_hooks"),
        (hang.register_module_full_backward_pre_hook, "_global_backward_pre_hooks"),
    ):
        assert isinstance(tables[key], dict) and not tables[key]
        handle = register(lambda *_: None)
        assert len(tables[key]) == 1 and vars(hang)[key] is tables[key]
        handle.remove()
        assert not tables[key]


def test_the_hooks_and_parts_of_a_module_are_in_dictionaries_of_its_own():
    module = nn.Linear(2, 2)
    held = vars(module)
    for register, key in (
        (module.register_forward_hook, "_forward_hooks"),
        (module.register_forward_pre_hook, "_forward_pre_hooks"),
        (module.register_full_backward_hook, "_backward_hooks"),
    ):
        assert isinstance(held[key], dict) and not held[key]
        register(lambda *_: None)
        assert len(held[key]) == 1
    assert [*held["_parameters"]] == ["weight", "bias"]
    assert all(isinstance(held[key], dict) for key in ("_buffers", "_modules"))
    assert "__getattribute__" not in vars(nn.Module)  # it may be put there, and taken away


def test_torch_asks_one_flag_whether_it_is_compiled():
    compiler = torch.compiler
    assert compiler._is_compiling_flag is False and not compiler.is_compiling()

    class Yes:
        def __bool__(self):
            return True

    compiler._is_compiling_flag = Yes()
    try:
        assert compiler.is_compiling()
    finally:
        compiler._is_compiling_flag = False
    assert not compiler.is_compiling()


def test_the_hooks_of_tensors_and_optimizers_are_in_dictionaries():
    p = nn.Parameter(torch.ones(2))
    base = torch._C.TensorBase
    tables = [base._backward_hooks, base._post_accumulate_grad_hooks]
    assert [table.__get__(p) for table in tables] == [None, None]
    p.register_hook(lambda g: g)
    p.register_post_accumulate_grad_hook(lambda p: None)
    assert len(p._backward_hooks) == len(p._post_accumulate_grad_hooks) == 1
    assert all(table.__get__(p) is table.__get__(p) for table in tables)
    optimizer = torch.optim.SGD([p], lr=0.1)
    told = []
    optimizer.register_step_pre_hook(lambda *_: told.append(1))
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    handle = register_optimizer_step_pre_hook(
        lambda o, *_: o._optimizer_step_pre_hooks.clear() if o is optimizer else None
    )
    try:
        p.grad = torch.ones(2)
        optimizer.step()  # a hook of all optimizers runs first, and may keep others from it
    finally:
        handle.remove()
    assert not told


def test_swap_tensors_leaves_the_dictionaries_of_hooks_and_setting_them_registers_them():
    base = torch._C.TensorBase
    tables = [base._backward_hooks, base._post_accumulate_grad_hooks]
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    called = []
    p.register_hook(lambda g: called.append("before"))
    p.register_post_accumulate_grad_hook(lambda p: called.append("after"))
    known = [table.__get__(p) for table in tables]
    plain = torch.utils.swap_tensors
    plain(p, q)
    assert [table.__get__(p) for table in tables] == known  # though they are called for q
    for table, hooks in zip(tables, known, strict=True):
        table.__set__(p, None)
        table.__set__(q, hooks)
    p.sum().backward()
    assert called == []
    q.sum().backward()
    assert called == ["before", "after"]


def test_modes_can_be_taken_from_their_stacks_for_a_while_and_told_from_torchs_own():
    class Function(TorchFunctionMode):
        pass

    class Op(TorchDispatchMode):
        pass

    with Function() as outer, Function() as inner, Op() as op:
        assert _get_current_dispatch_mode_stack() == [op] and not type(op).is_infra_mode()
        assert FakeTensorMode.is_infra_mode()
        with _disable_current_modes():
            assert _get_current_dispatch_mode_stack() == []
        with _pop_mode_temporarily() as first:
            assert first is inner and torch._C._get_function_stack_at(0) is outer
            with _pop_mode_temporarily():
                assert torch._C._len_torch_function_stack() == 0
        assert torch._C._get_function_stack_at(1) is inner
    with torch.device("cpu"):
        device = torch._C._get_function_stack_at(0)
        assert isinstance(device, torch.utils._device.DeviceContext) and device.device.type == "cpu"


@pytest.mark.slow
def test_what_torch_reads_a_tensor_as_a_number_with_is_one_operator_whose_place_can_be_taken():
    """In a process of its own: an operator's kernel is every test's."""
    program = """
import torch
library, seen = torch.library.Library("aten", "IMPL"), []
library.impl("_local_scalar_dense", lambda x: seen.append(x) or 3, "CPU", allow_override=True)
n = torch.tensor(1)
assert torch.ones(4).topk(n).values.numel() == torch.arange(n).numel() == n.item() == 3
assert len(seen) == 3 and all(x is n for x in seen) and n.tolist() == 1
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


def test_a_view_of_a_dictionary_refers_to_it_alone():
    class Plain:
        pass

    held = {"a": 1}
    for view in (held.keys(), held.values(), held.items(), types.MappingProxyType(held)):
        assert gc.get_referents(view)[0] is held
    assert gc.get_referents(vars(Plain))[0]["__module__"] == __name__


def test_a_bounded_cache_refers_to_keys_and_results_in_the_order_of_use():
    @functools.lru_cache(maxsize=3)
    def squared(n):
        return {"n": n * n}

    for n in (1, 2, 3, 2, 4):
        squared(n)
    held = gc.get_referents(squared)
    table = [d for d in held if type(d) is dict and d is not vars(squared)][-1]
    entry = type(next(iter(table.values())))
    before = [value for value in held[: held.index(table)] if value is not entry]
    assert before[-6:] == [3, {"n": 9}, 2, {"n": 4}, 4, {"n": 16}] and sorted(table) == [2, 3, 4]


def test_an_abstract_class_tells_what_was_registered():
    class Kind(metaclass=abc.ABCMeta):  # noqa: B024
        pass

    Kind.register(int)
    assert [ref() for ref in _abc._get_dump(Kind)[0]] == [int]


def test_nodes_of_a_graph_are_compared_by_where_they_stand():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    one, two, three = (graph.call_function(torch.neg, (x,)) for _ in range(3))
    one.prepend(three)
    graph._root.prepend(two)
    assert x < three < one < two and sorted([two, one, three]) == [three, one, two]


def test_operands_that_the_property_sets_are_known_to_the_nodes_that_make_them():
    graph = torch.fx.Graph()
    x, y = (graph.create_node("placeholder", name, name=name) for name in "xy")
    made = graph.create_node("call_function", torch.ops.aten.add.Tensor, (x, x), name="add")
    torch.fx.Node.args.__set__(made, (x, y))
    torch.fx.Node.kwargs.__set__(made, {"alpha": y})
    assert made.args == (x, y) and made.kwargs == {"alpha": y}
    assert made.all_input_nodes == [x, y] and list(x.users) == list(y.users) == [made]
    assert graph.find_nodes(op="call_function", target=made.target) == [made]


def test_a_lazy_graph_module_writes_its_code_when_it_runs():
    from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module

    with _use_lazy_graph_module(True):
        made = make_fx(torch.sin)(torch.ones(2))
    assert isinstance(made, _LazyGraphModule) and made._needs_recompile()
    assert torch.equal(made(torch.ones(2)), torch.ones(2).sin())
    assert not made._needs_recompile()


def test_torchs_older_profiler_tells_what_a_call_takes_and_says_nothing(capfd):
    x, ones = torch.ones(64, 512), torch.ones(64, 1)
    args = (x, x, [512], ones, ones, x[0], x[0], [True, True, True])
    backward = torch.ops.aten.native_layer_norm_backward.default
    taken = workspace(backward, args, [x, x[0], x[0]])  # two sums for each thread
    assert taken == 2 * x[0].nbytes * torch.get_num_threads()
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_storage_of_dlpack_shows_a_part_of_memory_and_keeps_what_is_said_of_it():
    whole = torch.arange(8.0)
    front = torch.from_dlpack(to_dlpack(whole.view(torch.uint8)[:12]))
    front.untyped_storage().room = whole
    shown = torch.empty(0).set_(front.untyped_storage(), 0, (3,), (1,))
    start = whole.data_ptr()
    del front, whole
    gc.collect()
    storage = shown.detach().untyped_storage()
    assert storage.nbytes() == 12 and storage.data_ptr() == start and not storage.resizable()
    assert storage.room.tolist() == list(range(8)) and storage.room.data_ptr() == start
    shown.add_(1)
    assert storage.room[:4].tolist() == [1, 2, 3, 3]
    assert not vars(shown.clone().untyped_storage())
    assert count_holders(storage) == 2  # the tensor and the storage in hand
    shown.share_memory_()  # elsewhere, and the same object still
    storage = shown.untyped_storage()
    assert storage.data_ptr() != start == storage.room.data_ptr()


def test_torch_lists_the_operators_that_custom_op_has_made():
    """partita/tensor/op_facts.py: of these it is known that they do nothing but give tensors."""
    from torch._library.custom_ops import OPDEFS

    @torch.library.custom_op("private_torch::listed", mutates_args=())
    def listed(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    assert OPDEFS["private_torch::listed"] is listed
    assert listed._opoverload._schema.name == "private_torch::listed"
    assert not any(name.startswith(("c10d", "_dtensor", "symm_mem", "aten")) for name in OPDEFS)


# -- Inductor --------------------------------------------------------------------------------------

# By name: `partita.compile` is the function.
INDUCTOR = importlib.import_module("partita.graph.backend.inductor")
RESULT = {
    "a saved result": (
        lambda entry: entry,
        "compiled_fw compiled_bw maybe_subclass_meta dispatch_wrappers runtime_metadata "
        "aot_forward_graph_str",
    ),
    "its metadata": (
        lambda entry: entry.runtime_metadata,
        "mutated_inp_runtime_indices tokens dynamic_outputs num_intermediate_bases output_info "
        "is_rng_op_functionalized grad_enabled_mutation",
    ),
    "what it says of an output": (
        lambda entry: entry.runtime_metadata.output_info[0],
        "output_type",
    ),
    "its code": (
        lambda entry: entry.compiled_fw.result,
        "source_code cache_key fx_kwargs current_callable after_deserialization _triton_bundle",
    ),
}
"""By what Inductor saves of a graph, where it is, and the attributes of it that artifacts are made
by."""


@pytest.mark.slow
def test_what_inductor_saves_of_a_graph_has_the_form_that_artifacts_are_made_of(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path))
    saved = []

    def note(text):
        saved.append(text)
        return remove_compiler_data(text)

    monkeypatch.setattr(INDUCTOR, "remove_compiler_data", note)
    pt.compile(lambda x: torch.relu(x @ x) + 1)(torch.ones(32, 32))
    (text,) = saved
    entry, *_ = pickle.loads(text)
    for what, (find, names) in RESULT.items():
        gone = [name for name in names.split() if not hasattr(find(entry), name)]
        assert gone == [], f"torch {torch.__version__}: {what} has no {gone}"
    assert entry.runtime_metadata.output_info[0].output_type.name == "non_alias"
    code = entry.compiled_fw.result.source_code
    assert "def call(self, args):" in code or "def call(args):" in code
    assert "from torch._inductor.select_algorithm import extern_kernels\n" in code
    assert "empty_strided_cpu(" in code and "Source Nodes: [" in code


@pytest.mark.slow
def test_what_inductor_generates_checks_its_inputs_in_lines_that_can_be_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path))
    before, after = [], []

    def note(text):
        before.append(pickle.loads(text)[0].compiled_fw.result.source_code)
        text = remove_input_checks(text)
        after.append(pickle.loads(text)[0].compiled_fw.result.source_code)
        return text

    monkeypatch.setattr(INDUCTOR, "remove_input_checks", note)
    pt.compile(lambda x: torch.relu(x @ x) + 1)(torch.ones(32, 32))
    assert "assert_size_stride(arg" in before[0] and "assert_size_stride(arg" not in after[0]


@pytest.mark.parametrize(
    ("home", "names"),
    [
        ("torch._inductor.async_compile:AsyncCompile", "cpp_pybinding submit wait"),
        (
            "torch._inductor.choices:InductorChoices",
            "can_fuse can_fuse_vertical can_fuse_horizontal",
        ),
        (
            "torch._inductor.codecache:CppPythonBindingsCodeCache",
            "_load_library _load_library_inner load_async suffix_template call_entry_function",
        ),
        ("torch._inductor.codecache:FxGraphCache", "cache_hit_post_compile"),
        ("torch._inductor.codegen.wrapper:PythonWrapperCodegen", "generate_kernel_call"),
        ("torch._inductor.graph:GraphLowering", "codegen save_output_code"),
        ("torch._inductor.ir:ConcatKernel", "create"),
        ("torch._inductor.ir:_CollectiveKernel", "create_out_of_place"),
        ("torch._inductor:lowering", "lowerings pointwise_cat register_lowering"),
        ("torch._inductor.scheduler:BaseSchedulerNode", "get_nodes get_buffer_names get_outputs"),
        ("torch._inductor.scheduler:BaseSchedulerNode", "is_reduction is_extern is_gpu"),
        (
            "torch._inductor.scheduler:BaseSchedulerNode",
            "get_operation_names prune_redundant_deps used_buffer_names",
        ),
        ("torch._inductor.scheduler:ForeachKernelSchedulerNode", "combinable_nodes"),
        ("torch._inductor.scheduler:NopKernelSchedulerNode", "get_nodes"),
        ("torch._inductor.scheduler:Scheduler", "can_buffer_be_removed_through_fusion"),
        ("torch._inductor.scheduler:Scheduler", "dep_size_hint"),
        ("torch._inductor.scheduler:SchedulerBuffer", "get_mutations"),
        ("torch._inductor.standalone_compile:AOTCompiledArtifact", "deserialize serialize"),
        ("torch._inductor.triton_bundler:TritonBundler", "begin_compile collect end_compile"),
        ("torch._inductor.virtualized:V", "set_choices_handler"),
    ],
)
def test_classes_of_inductor_have_the_methods_that_are_called_or_exchanged(home, names):
    module, name = home.split(":")
    owner = getattr(importlib.import_module(module), name)
    gone = [one for one in names.split() if not hasattr(owner, one)]
    assert gone == [], f"torch {torch.__version__}: {home} has no {gone}"


def test_inductor_lowers_a_concatenation_by_a_function_that_can_be_exchanged():
    from torch._inductor.lowering import lowerings

    assert callable(lowerings[torch.ops.aten.cat.default])


def test_settings_of_inductor_that_are_set_are_there():
    from torch._inductor import config

    names = [*CONFIG, "_post_fusion_custom_pass", "inductor_choices_class"]
    known = config.save_config_portable() | vars(config)
    gone = [n for n in names if n not in known and n not in config._config]
    assert gone == [], f"torch {torch.__version__}: Inductor has no setting {gone}"


ASKED_OF_KERNELS = {
    "a kernel": (
        lambda kernel: kernel,
        "get_nodes get_buffer_names get_outputs is_reduction is_extern read_writes "
        "unmet_dependencies min_order max_order",
    ),
    "what it reads and writes": (
        lambda kernel: kernel.read_writes,
        "reads writes reads_and_writes",
    ),
    "a result of it": (lambda kernel: kernel.get_outputs()[0], "users get_mutations"),
    "all kernels": (lambda kernel: kernel.scheduler, "mutation_real_name name_to_fused_node"),
    "who reads that": (lambda kernel: kernel.get_outputs()[0].users[0], "get_name"),
    "a part of it": (lambda kernel: kernel.get_nodes()[0].node, "get_origins"),
}
"""By what Inductor's hooks are shown, where it is, and the attributes that are asked of it."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_kernels_that_inductor_shows_to_its_hooks_tell_what_is_asked_of_them(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "TORCHINDUCTOR_CACHE_DIR", str(tmp_path)
    )  # of code made before none is asked
    from torch._inductor import config, custom_graph_pass
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    gone, asked, ends, sizes, inputs, origins = [], [], set(), [], [], []

    class Order(base_of_scheduler_passes(custom_graph_pass)):
        def uuid(self):
            return "partita's contract: order"

        def __call__(self, kernels):
            for kernel in kernels:
                for what, (find, names) in ASKED_OF_KERNELS.items():
                    gone.extend(
                        f"{what}: {n}" for n in names.split() if not hasattr(find(kernel), n)
                    )
                ends.update(u.get_name() for b in kernel.get_outputs() for u in b.users)
                inputs.extend(n for b in kernel.get_outputs() for n in b.get_mutations())
                origins.extend(o.name for p in kernel.get_nodes() for o in p.node.get_origins())
            assert {*inputs} <= {*V.graph.graph_inputs}
            assert {*origins} <= {n.name for n in V.graph.module.graph.nodes}
            return kernels

    class Choices(InductorChoices):
        def uuid(self):
            return "partita's contract: choices"

        @staticmethod
        def can_fuse(scheduler, node1, node2, shared_data_score):
            asked.append("whether")
            sizes.extend(scheduler.dep_size_hint(d) for d in node1.read_writes.reads)
            return InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)

        @staticmethod
        def can_fuse_vertical(scheduler, node1, node2, shared_data_score):
            asked.append("vertical")
            return InductorChoices.can_fuse_vertical(scheduler, node1, node2, shared_data_score)

        @staticmethod
        def can_fuse_horizontal(scheduler, node1, node2, shared_data_score):
            asked.append("horizontal")
            return InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)

    def step(x, y):
        total = (x * 2).sum(0)
        y.add_(x @ x)
        return total + 1, x.cos(), x.sin()

    hooks = {"_post_fusion_custom_pass": Order(), "inductor_choices_class": Choices}
    torch.compiler.reset()
    settings = config.patch(hooks | {"fx_graph_cache": False})
    with V.set_choices_handler(Choices()), settings:  # a thread keeps those of its first compile
        torch.compile(step)(torch.ones(8, 8), torch.ones(8, 8))
    assert gone == [], f"torch {torch.__version__}: {gone}"
    assert {"whether", "vertical", "horizontal"} <= {*asked}
    assert "OUTPUT" in ends and inputs and origins
    assert sizes and all(isinstance(size, int) for size in sizes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_kernels_in_cpp_are_functions_of_one_library_that_its_file_loads_again():
    from torch._inductor.async_compile import AsyncCompile

    compiled = [torch.compile(lambda x: x.sin() + 1), torch.compile(lambda x: x.exp())]
    x = torch.arange(4.0)
    with KernelCompiler() as kernels, ExitStack() as stack:
        stack.enter_context(torch._inductor.config.patch(fx_graph_cache=False))
        names, scopes = kernels.collect_kernels(stack), []
        set_attribute(stack, AsyncCompile, "wait", lambda self, scope: scopes.append(scope))
        for function in compiled:
            with pytest.raises(TypeError, match="not callable"):  # it has no kernels yet
                function(x)
        kernels.begin_library()
        libraries = kernels.libraries_of(names)
    assert len(libraries) == 1 and all("__file__" in scope for scope in scopes)
    sin, exp = map(load_kernels(libraries).get, names)
    for kernel, found in ((sin, x.sin() + 1), (exp, x.exp())):
        out = torch.zeros(4)
        kernel(x, out)
        torch.testing.assert_close(out, found)


def test_fake_modes_have_a_cache_that_can_be_switched_off_and_a_memo_that_can_be_cleared():
    """`pt.eager_memory` does so."""
    with FakeTensorMode() as mode:
        assert mode.cache_enabled in (True, False)
        made = torch.nn.Linear(2, 2)
        # Beside weak references no parameter can be swapped for a converted one.
        assert weakref.getweakrefs(made.weight)
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        assert not weakref.getweakrefs(made.weight)


def test_make_fx_looks_for_dead_code_by_the_graphs_own_method():
    """Capture switches that look off."""
    looked = []

    def traced(x):
        graph = get_proxy_mode().tracer.graph
        graph.eliminate_dead_code = lambda *args, **kwargs: looked.append(True)
        return x + 1

    make_fx(traced)(torch.ones(2))
    assert looked


def test_each_call_in_a_fake_mode_goes_through_dispatch():
    calls = []

    class Mode(FakeTensorMode):
        def dispatch(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return super().dispatch(func, types, args, kwargs or {})

    with Mode() as mode:
        x = torch.ones(2, 3)
    assert (x + 1).fake_mode is mode  # outside of the mode, too
    assert torch.ops.aten.add.Tensor in calls


def test_fakes_of_torch_still_lie_otherwise_than_what_a_kernel_makes():
    """When this fails, `partita/capture/kernel_strides.py` may be superfluous."""
    call = torch.ops.aten.softplus_backward

    def strides():
        grad, x = torch.ones(2, 4, 12).transpose(1, 2), torch.ones(2, 12, 4)
        return call(grad, x, 1.0, 20.0).stride()

    with FakeTensorMode():
        faked = strides()
    assert strides() == (48, 1, 12) != faked


def test_a_sub_mesh_knows_the_mesh_that_it_was_taken_from():
    """`comm/meshes.py` finds the whole mesh where a user names a part of it."""
    from torch.distributed.device_mesh import _mesh_resources, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        assert whole["dp"]._get_root_mesh() is whole
        assert whole._get_root_mesh() is whole
        assert _mesh_resources.mesh_stack == []
        with whole:
            assert _mesh_resources.mesh_stack[-1] is whole
    finally:
        dist.destroy_process_group()
