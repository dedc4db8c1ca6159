"""Calls over lists are put into a graph as they are, whatever the lists' length and kinds."""

import pytest
import torch

import partita as pt

SHAPES = [(3, 3), (3,), (3, 3), (2, 3), (3,), ()]


def lists(x):
    made = [x[: s[0]].clone() if len(s) == 2 else x.sum() * torch.ones(s) for s in SHAPES]
    return made, [t.double() if i % 2 else t + 1 for i, t in enumerate(made)]


def of_numbers(x, n):
    made, _ = lists(x)
    torch._foreach_mul_(made, n)
    torch._foreach_add_(made, [float(i) for i in range(len(made))])
    return torch._foreach_pow(n, made)


def of_two_dtypes(x, n):
    made, others = lists(x)
    torch._foreach_add_(made, others, alpha=2)
    return [*torch._foreach_add(made, others), *torch._foreach_sqrt(others)]


def of_itself(x, n):
    made, _ = lists(x)
    torch._foreach_addcdiv_(made, made, made, n)
    torch._foreach_lerp_(made, made, n)
    made[0].add_(1)
    torch._foreach_copy_(made[2:3], made[:1])
    return made


def of_views(x, n):
    made = [x[i] for i in (0, 1, 2, 0)]
    whole = x.clone()
    rows = [whole[i] for i in range(3)]
    torch._foreach_mul_(rows, n)
    torch._foreach_add_(rows, made[1:])
    return whole, *torch._foreach_maximum(rows, made[:3])


def of_numbers_of_its_own(x, n):
    made, _ = lists(x)
    torch._foreach_div_(made, [n + i for i in range(len(made))])
    return *torch._foreach_norm(made, 2.0), *torch._foreach_neg(made)


PROGRAMS = [of_numbers, of_two_dtypes, of_itself, of_views, of_numbers_of_its_own]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("spread", [False, True], ids=["plain", "spread"])
def test_a_captured_call_over_lists_gives_what_eager_does(program, spread):
    with pt.ranks(dp=2) as world:

        @world.run
        def check(mesh):
            step = pt.compile(program, backend="graph")
            for seed, number in ((0, 2.0), (1, 3.5)):
                torch.manual_seed(seed)
                x = torch.rand(3, 3)
                given = pt.distribute_tensor(x, mesh, [pt.Shard(1)]) if spread else x
                expected = program(x.clone(), number)
                for ours, theirs in zip(step(given, number), expected, strict=True):
                    ours = ours.full_tensor() if isinstance(ours, pt.DTensor) else ours
                    assert ours.dtype == theirs.dtype
                    torch.testing.assert_close(ours, theirs)


def test_lists_that_do_not_fit_are_refused_as_in_eager():
    def program(x):
        return torch._foreach_add([x, x, x], [x, x, x[:, :2]])

    with pytest.raises(Exception, match="size of tensor"):
        program(torch.ones(3, 3))
    with pytest.raises(Exception, match=r"size of tensor|broadcast"):
        pt.compile(program, backend="graph")(torch.ones(3, 3))
