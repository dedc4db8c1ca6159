"""The facts of an operator are what its calls do: told by schemas, held against behaviour."""

from __future__ import annotations

import operator
import warnings

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from partita.tensor.op_facts import facts_of

_SAMPLES = {torch.float32: 2, torch.complex64: 1}
_aten = torch.ops.aten


def _tensors(value):
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def _memory(t):
    return t.untyped_storage().data_ptr() if t.layout is torch.strided and t.numel() else None


def _metadata(t):
    return tuple(t.shape), t.stride(), t.storage_offset(), _memory(t)


def _bits(t):
    flat = t.resolve_conj().resolve_neg().reshape(-1)
    return torch.empty(flat.shape, dtype=flat.dtype).copy_(flat)  # a clone may keep a stride of 0


class _Checking(TorchDispatchMode):
    """Holds each call below against its facts; what disagrees is in `wrong`."""

    def __init__(self):
        super().__init__()
        self.wrong, self.seen = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        if any(t.layout is not torch.strided for t in given):
            return func(*args, **kwargs)
        before, laid = [_bits(t) for t in given], [*map(_metadata, given)]
        state = torch.random.get_rng_state()
        out = func(*args, **kwargs)
        made = _tensors(out)
        if any(t.layout is not torch.strided for t in made):
            return out
        self.seen.add(func)
        facts, had = facts_of(func), {_memory(t) for t in given} - {None}
        for told in self._told(func, facts, args, kwargs, given, before, made, had):
            self.wrong.add((str(func), told))
        if not facts.changes_metadata and laid != [*map(_metadata, given)]:
            self.wrong.add((str(func), "changes metadata"))
        if not torch.equal(state, torch.random.get_rng_state()) and not facts.draws:
            self.wrong.add((str(func), "draws"))
        return out

    def _told(self, func, facts, args, kwargs, given, before, made, had):
        places = {id(t) for one in facts.writes for t in _tensors(_operand(one, args, kwargs))}
        if facts.statistics and args[5]:
            places |= {id(t) for t in args[3:5]}
        memory = {_memory(t) for t in given if id(t) in places}
        for t, was in zip(given, before, strict=True):
            if _memory(t) not in memory and _same_size(t, was) and not _equal(_bits(t), was):
                yield "writes what it does not say"
        shown = {_memory(t) for t in made} & had
        if shown - memory and not facts.is_view:
            yield "shows memory and does not say so"
        if facts.makes_new and shown:
            yield "does not make new memory"
        if facts.moves:
            kinds = {t.dtype for t in made}
            elements = [_numbers(b) for b in before if b.dtype in kinds]
            if kinds - {b.dtype for b in before} or any(not _from(t, elements) for t in made):
                yield "computes"


def _operand(one, args, kwargs):
    return args[one.place] if one.place < len(args) else kwargs.get(one.name)


def _same_size(t, was):
    return t.numel() == was.numel()


def _equal(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.numel() else True


def _numbers(t):
    """Its elements, each as a number."""
    t = _bits(t)
    if t.is_complex():
        t = torch.view_as_real(t).double()
        return t[:, 0] + 1e3 * t[:, 1]
    return t.double().nan_to_num()


def _from(t, elements):
    return bool(torch.isin(_numbers(t), torch.cat(elements)).all())


def _check(names):
    checking = _Checking()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own deprecations
        for op in op_db:
            if not names(op.name):
                continue
            for dtype, count in _SAMPLES.items():
                if dtype not in op.dtypes:
                    continue
                samples = op.sample_inputs("cpu", dtype)
                for _, sample in zip(range(count), samples, strict=False):
                    if _runs(op, sample):
                        with checking:
                            op(sample.input, *sample.args, **sample.kwargs)
    return checking


def _runs(op, sample):
    """Does torch itself run this sample here? Some are for other devices, or are to fail."""
    try:
        op(sample.input, *sample.args, **sample.kwargs)
    except (AssertionError, NotImplementedError, RuntimeError):
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("letters", ["abc", "def", "ghijkl", "mn", "opqr", "s", "tuvwxyz_"])
def test_calls_do_what_is_said_of_their_operators(letters):
    checking = _check(lambda name: name.lstrip("_").split(".")[-1][:1] in letters)
    assert len(checking.seen) > 20
    assert not checking.wrong


def test_what_no_schema_says_is_in_the_table():
    wait = torch.ops._c10d_functional.wait_tensor.default
    for target in (_aten._unsafe_view.default, wait, operator.getitem):
        assert facts_of(target).is_view and facts_of(target).moves
    assert facts_of(_aten.bernoulli_.float).draws and facts_of(_aten.bernoulli_.float).writes
    assert facts_of(_aten._to_copy.default).casts and not facts_of(_aten._to_copy.default).moves
    assert facts_of(_aten.mm.default).makes_new and not facts_of(_aten.mm.default).moves
    assert facts_of(_aten._linalg_check_errors.default).checks
    assert facts_of(_aten.squeeze_.dim).changes_metadata
    assert facts_of(_aten.resize_.default).changes_metadata
    assert not facts_of(_aten.add_.Tensor).changes_metadata
    assert facts_of(_aten.set_.default).by_storage
    assert facts_of(_aten.as_strided.default).by_storage
    assert facts_of(_aten.detach.default).is_alias
    assert facts_of(print) == facts_of(len)


@pytest.mark.parametrize("call", ["ones_like", "new_full", "fill", "copy"])
def test_of_an_operand_that_is_overwritten_no_element_is_read(call):
    rest = {"new_full": ([2], 3.0), "fill": (3.0,), "copy": (torch.tensor([5.0, 6.0]),)}
    target = getattr(_aten, call)
    one, other = (target(x, *rest.get(call, ())) for x in torch.tensor([[0.0, 1.0], [7.0, 8.0]]))
    assert torch.equal(one, other)
    assert all(facts_of(getattr(target, o)).overwrites for o in target.overloads())
    assert not facts_of(_aten.add.Tensor).overwrites
