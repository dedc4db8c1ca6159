"""Sample calls for the prover: ops that move elements (shapes, joins, indices)."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .values import RANDOM, Part, b, c, i, u, x


def shape() -> Part:
    return [
        (
            (torch.Tensor.view, torch.reshape),
            [
                c(x(12, 4), (3, 4, 4)),
                c(x(4, 6, 5), (24, 5)),
                c(x(4, 6), (6, 4)),
                c(x(4, 5), (-1,)),
                c(x(2, 3, 4), (2, 1, 3, 4)),
            ],
        ),
        (torch.flatten, [c(x(4, 3, 5)), c(x(4, 3, 5), 1), c(x())]),
        (torch.ravel, [c(x(4, 3))]),
        (torch.unflatten, [c(x(5, 12), 1, (3, 4)), c(x(12), 0, (2, -1))]),
        (torch.squeeze, [c(x(2, 1, 4)), c(x(2, 1, 4), 1), c(x(2, 1, 3), 0), c(x(2, 1, 1), (0, 1))]),
        (torch.unsqueeze, [c(x(5, 4), 1), c(x(5, 4), -1)]),
        ((torch.atleast_1d, torch.atleast_2d, torch.atleast_3d), [c(x()), c(x(5)), c(x(5, 4))]),
        (torch.transpose, [c(x(2, 4, 5), 0, -1), c(x(5, 4), 0, 1)]),
        (torch.permute, [c(x(2, 4, 5), (2, 0, 1))]),
        (torch.t, [c(x(5, 4)), c(x(5))]),
        (torch.adjoint, [c(x(2, 5, 4))]),
        (torch.movedim, [c(x(2, 4, 5), 0, 2), c(x(2, 4, 5), (0, 1), (2, 0))]),
        (
            torch.Tensor.expand,
            [c(x(5, 1), 5, 4), c(x(4), 3, 4), c(x(5, 1, 2), -1, 4, -1), c(x(1, 4), 1, 4)],
        ),
        (torch.broadcast_to, [c(x(5, 1), (2, 5, 4))]),
        ((torch.Tensor.expand_as,), [c(x(1, 4), x(5, 4))]),
        ((torch.Tensor.view_as, torch.Tensor.reshape_as), [c(x(5, 4), x(4, 5))]),
        (torch.broadcast_tensors, [c(x(5, 1), x(4))]),
        (torch.Tensor.repeat, [c(x(5, 4), 2, 1), c(x(4), 3, 2), c(x(5, 4), 1, 1, 1)]),
        (torch.tile, [c(x(5, 4), (2,)), c(x(5, 4), (3, 1, 2))]),
        (torch.repeat_interleave, [c(x(5, 4), 2), c(x(6, 4), 2, 0), c(x(5), 3)]),
        (torch.meshgrid, [c(x(5), x(4), indexing="ij"), c(x(5), x(4), indexing="xy")]),
        (torch.pixel_shuffle, [c(x(2, 8, 4, 3), 2)]),
        (torch.pixel_unshuffle, [c(x(2, 2, 8, 6), 2)]),
        (torch.channel_shuffle, [c(x(5, 6, 2), 3)]),
    ]


def join() -> Part:
    return [
        (torch.cat, [c([x(5, 4), x(2, 4)]), c([x(5, 4), x(5, 2), x(5, 1)], 1), c([x(5), x(0)])]),
        (torch.stack, [c([x(5, 4), x(5, 4)]), c([x(5, 4), x(5, 4)], -1)]),
        ((torch.hstack, torch.vstack, torch.dstack), [c([x(5, 4), x(5, 4)]), c([x(5), x(5)])]),
        (torch.column_stack, [c([x(5), x(5, 4)])]),
        (torch.split, [c(x(5, 4), 2), c(x(5, 4), [1, 3], 1)]),
        (torch.Tensor.split, [c(x(5, 4), 2)]),
        (torch.split_with_sizes, [c(x(5, 4), [1, 4])]),
        (torch.chunk, [c(x(5, 4), 3), c(x(5, 4), 2, 1)]),
        (torch.tensor_split, [c(x(5, 4), 3), c(x(5, 4), (1, 3), 1)]),
        (torch.unbind, [c(x(3, 5)), c(x(5, 2), 1)]),
        ((torch.hsplit, torch.vsplit), [c(x(6, 4), 2)]),
        (torch.dsplit, [c(x(2, 5, 4), 2)]),
    ]


def index() -> Part:
    s = slice
    return [
        (
            F.embedding,
            [c(i(7, 5, 2), x(7, 4)), c(i(7, 5), x(7, 4), 2), c(i(4, 5), x(4, 2), padding_idx=-1)],
        ),
        (torch.embedding, [c(x(7, 4), i(7, 5, 2)), c(x(7, 4), i(7, 5), 2)]),
        (F.embedding_bag, [c(i(7, 4, 3), x(7, 4)), c(i(7, 4, 3), x(7, 4), mode="max")]),
        (torch.index_select, [c(x(5, 4), 0, i(5, 3)), c(x(5, 4), -1, i(4, 7))]),
        (
            torch.gather,
            [c(x(5, 4), 0, i(5, 2, 4)), c(x(5, 4), 1, i(4, 5, 3)), c(x(5, 4), 1, i(4, 2, 3))],
        ),
        (torch.take, [c(x(5, 4), i(20, 4, 2))]),
        (
            torch.take_along_dim,
            [c(x(5, 4), i(5, 2, 4), 0), c(x(5, 4), i(4, 5, 1), 1), c(x(5, 4), i(5, 2, 4) - 5, 0)],
        ),
        (
            torch.scatter,
            [
                c(
                    x(5, 4),
                    1,
                    torch.stack([torch.randperm(4, generator=RANDOM)[:2] for _ in range(5)]),
                    x(5, 2),
                ),
                c(x(5, 4), 0, i(5, 2, 4), 2.0),
            ],
        ),
        (
            torch.scatter_add,
            [c(x(5, 4), 0, i(5, 7, 4), x(7, 4)), c(x(5, 4), 1, i(4, 3, 2), x(4, 3))],
        ),
        (torch.scatter_reduce, [c(x(5, 4), 0, i(5, 7, 4), x(7, 4), "amax")]),
        (
            torch.index_add,
            [c(x(5, 4), 0, i(5, 7), x(7, 4)), c(x(5, 4), 1, i(4, 3), x(5, 3), alpha=2)],
        ),
        (torch.index_copy, [c(x(5, 4), 0, torch.tensor([3, 1]), x(2, 4))]),
        (torch.index_fill, [c(x(5, 4), 0, i(5, 2), 2.0), c(x(5, 4), 1, i(4, 2), x())]),
        (torch.select, [c(x(5, 4), 0, 3), c(x(5, 4), 1, -1)]),
        (torch.narrow, [c(x(5, 4), 0, 1, 3), c(x(5, 4), 1, 0, 4)]),
        (
            torch.Tensor.__getitem__,
            [
                c(x(5, 4), 2),
                c(x(5, 4), s(1, 3)),
                c(x(5, 4), (s(None), s(None, None, 2))),
                c(x(5, 4, 2), (Ellipsis, -1)),
                c(x(5, 4, 2), (1, s(None), None, 0)),
                c(x(5, 4), None),
                c(x(5, 4), i(5, 7)),
                c(x(5, 4), (s(None), i(4, 3, 2))),
                c(x(5, 4, 3), (s(None), i(4, 2), s(0, 2))),
                c(x(5, 4, 3), (0, s(None), i(3, 2))),
                c(x(5, 4, 3), (i(5, 2), i(4, 2))),
                c(x(5, 4, 3), (i(5, 2), s(None), i(3, 2))),
                c(x(5, 4), b(5, 4)),
                c(x(5, 4), b(5)),
                c(x(5, 4), (s(None), b(4))),
                c(x(5, 4), Ellipsis),
            ],
        ),
        (
            torch.index_put,
            [
                c(x(5, 4), (torch.tensor([3, 1]),), x(2, 4)),
                c(x(5, 4), (i(5, 7),), x(7, 4), True),
                c(x(5, 4), (i(5, 7),), x(4), True),
                c(x(5, 4), (b(5),), x(4)),
                c(x(5, 4), (i(5, 3), i(4, 3)), x(3), True),
                c(x(5, 4, 3), (torch.tensor([3, 1]), torch.tensor([0, 2])), x()),
            ],
        ),
        (torch.roll, [c(x(5, 4), 2), c(x(5, 4), 1, 0)]),
        (torch.flip, [c(x(5, 4), (0,)), c(x(2, 5, 4), (0, 2))]),
        ((torch.fliplr, torch.flipud), [c(x(5, 4))]),
        (torch.rot90, [c(x(5, 4)), c(x(2, 5, 4), 2, (1, 2))]),
        (
            F.pad,
            [
                c(x(5, 4), (1, 2)),
                c(x(5, 4), (0, 0, 1, 1), value=2.0),
                c(x(4, 2, 5), (1, 1), mode="reflect"),
                c(x(4, 2, 5), (1, 1), mode="circular"),
            ],
        ),
        (torch.constant_pad_nd, [c(x(5, 4), (1, 2)), c(x(5, 4), pad=(1, 2))]),
        ((torch.tril, torch.triu), [c(x(5, 4)), c(x(2, 5, 4), 1), c(x(5, 7), -2)]),
        (torch.diagonal, [c(x(5, 4)), c(x(2, 5, 4), 1, 2, 0)]),
        (torch.linalg.diagonal, [c(x(2, 5, 4), offset=-1)]),
        (torch.diag_embed, [c(x(5, 4)), c(x(5, 4), 1, 0, 2)]),
        (torch.diag, [c(x(5)), c(x(5, 4)), c(x(4), -1), c(x(4), diagonal=1)]),
        (torch.Tensor.unfold, [c(x(5, 4), 0, 2, 1), c(x(5, 6), 1, 3, 2)]),
        (torch.searchsorted, [c(u(4).sort().values, u(5, 2)), c(u(5, 4).sort().values, u(5, 3))]),
        (torch.bucketize, [c(x(5, 4), u(3).sort().values)]),
        (torch.isin, [c(i(9, 5, 4), i(9, 3))]),
    ]
