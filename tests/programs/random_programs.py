"""Which random programs are run on one device and on many ranks?

Lines of ordinary PyTorch over tensors in random layouts: split unevenly, over several axes in any
order, down to empty pieces; pending; whole. Operators and functions, views, writes into them, plain
tensors beside, other dtypes. What torch itself refuses on one device is not drawn.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch.nn import functional as F

from partita.layout import Invariant, Layout, Mesh, Partial, Placement, Replicate, Shard

__all__ = ["Program", "execute", "programs"]

MESHES = [{"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 2, "b": 3}]

Draw = Any


@dataclass(frozen=True)
class Program:
    """Lines of PyTorch over inputs x0, x1, ... that are laid out on a mesh."""

    mesh: dict[str, int]
    inputs: tuple[str, ...]
    lines: tuple[str, ...]

    def __repr__(self) -> str:
        head = [f"mesh {Mesh(tuple(self.mesh), tuple(self.mesh.values()))}"]
        head += [f"x{i} = {layout}" for i, layout in enumerate(self.inputs)]
        return "\n" + "\n".join([*head, *self.lines]) + "\n"

    def values(self) -> dict[str, torch.Tensor]:
        """The inputs, whole: the same numbers each time."""
        generator = torch.Generator().manual_seed(4)
        return {
            f"x{i}": torch.randn(Layout.parse(text).shape, generator=generator, dtype=torch.float64)
            for i, text in enumerate(self.inputs)
        }


def execute(lines: tuple[str, ...], space: dict[str, Any]) -> dict[str, Any]:
    """Run the lines; the tensors are added to `space`."""
    torch.manual_seed(5)
    code = {"torch": torch, "F": F, **space}
    exec(compile("\n".join(lines), "<program>", "exec"), code)
    return {n: v for n, v in code.items() if n[0] in "xt" and isinstance(v, torch.Tensor)}


# -- what a line may be ----------------------------------------------------------------------------

# torch.kron is given copies: torch saves its operands past the version check, so that a later write
# into one of them makes its gradient wrong on one device.

UNARY = """-{0}|torch.sin({0})|torch.tanh({0})|torch.sigmoid({0})|F.relu({0})|F.gelu({0})
F.silu({0})|torch.exp(-{0}.abs())|{0} * 0.5|{0} + 1.5|2 - {0}|{0} / 3|{0}.pow(2)
F.leaky_relu({0}, 0.1)|{0}.clamp(-0.7, 1.1)|{0}.clone()|F.softplus({0})|F.elu({0})|{0}.abs()
torch.log1p({0} * {0})|{0} @ {0}.transpose(-1, -2)|{0}.detach() * {0}|{0}.mean()|{0}.sum()
{0}.flatten()|{0}.t()|{0}.reshape(-1)|F.pad({0}, (1, 2))|{0}.unsqueeze(0).expand(2, *{0}.shape)
{0}.tril()|{0}.triu(1)|{0}.logsumexp(-1)|{0}.norm()|torch.flip({0}, (0,))
{0}.diagonal(dim1=-2, dim2=-1)|F.layer_norm({0}, {0}.shape[-1:])|F.rms_norm({0}, {0}.shape[-1:])
F.dropout({0}, 0.5)|torch.where({0} > 0, {0}, 0.3)|{0}.masked_fill({0} < 0.2, 0.7)
torch.dropout({0}, 0.3, True)|{0}[{0}.argmax(0)] if {0}.ndim == 1 else {0} + {0}.argmax(0)|{0}.var()
{0}.squeeze()"""

BINARY = """{0} + {1}|{0} - {1}|{0} * {1}|{0} / ({1}.abs() + 1)|torch.maximum({0}, {1})
torch.where({0} > {1}, {0}, {1})|torch.addcmul({0}, {0}, {1}, value=0.5)|torch.lerp({0}, {1}, 0.3)
{0}.masked_fill({1} > 0.1, 0.5)|torch.hypot({0}, {1})|torch.stack([{0}, {1}])|{0} @ {1}
torch.matmul({0}, {1}.transpose(-1, -2))|F.linear({0}, {1})|torch.cat([{0}, {1}])
torch.dot({0}, {1})|torch.cat([{0}, {1}], -1)|F.mse_loss({0}, {1})
F.huber_loss({0}, {1}, reduction="sum")|torch.outer({0}, {1})|torch.bmm({0}, {1})|torch.mv({0}, {1})
torch.addmm({0}, {0}, {1})|torch.atan2({0}, {1}.abs() + 1)|torch.kron({0}.clone(), {1}.clone())
F.cosine_similarity({0}, {1}, 0)|torch.einsum("i...,i...->...", {0}, {1})
torch.tensordot({0}, {1}, 1)|F.kl_div({0}, {1}.abs(), reduction="batchmean")"""

ALONG = """{0}.sum({d})|{0}.sum({d}, keepdim=True)|{0}.mean({d}, keepdim=True)|{0}.amax({d})
{0}.var({d})|torch.softmax({0}, {d})|F.log_softmax({0}, dim={d})|torch.cumsum({0}, {d})
{0}.std({d}, keepdim=True, unbiased=False)|{0}.logsumexp({d}, keepdim=True)|{0}.norm(dim={d})
{0}.transpose({d}, -1)|{0}.movedim({d}, 0)|{0}.unsqueeze({d})|{0}.squeeze({d})|{0}.flip({d})
{0}.select({d}, 0)|{0}.select({d}, -1)|{0}.narrow({d}, {0}.size({d}) // 2, {0}.size({d}) // 2)
{0}.chunk(2, {d})[-1]|{0}.split(2, {d})[0]|{0}.roll(1, {d})|{0}.repeat_interleave(2, {d})
{0}.index_select({d}, torch.arange({0}.size({d})) // 2)|{0}.max({d}).values|{0}.sort({d}).values
{0}.topk(1, {d}).values|torch.stack([{0}, {0} * 2], {d})|torch.cat([{0}, -{0}], {d})|{0}.prod({d})
{0}.gather({d}, torch.zeros_like({0}, dtype=torch.long))|{0}.unbind({d})[0]|{0}.cumprod({d})
{0}.index_add({d}, torch.arange({0}.size({d})) // 2, {0})|{0}.unflatten({d}, (-1, 2))
{0}.aminmax(dim={d}).min|{0}.scatter_add({d}, torch.zeros_like({0}, dtype=torch.long), {0})
F.normalize({0}, dim={d})|{0} + torch.arange({0}.size(-1))
{0}.masked_fill(torch.arange({0}.size(-1)) % 2 == 0, 0.5)|{0}.median({d}).values
torch.take_along_dim({0}, {0}.argsort({d}), {d})|F.glu({0}, {d})|{0}.nansum({d})
{0}.diff(dim={d})"""

INDEX = """{0}[0]|{0}[-1]|{0}[1:]|{0}[::2]|{0}[..., 0]|{0}[..., 1:3]|{0}[:, -1]|{0}[:, None]
{0}[None]|{0}[torch.tensor([0, 0])]|{0}[:, torch.tensor([0])]
{0}[torch.arange({0}.size(0)) % 2 == 0]|{0}[[0, -1]]|{0}[torch.tensor([[0], [0]])]
{0}[..., torch.tensor([-1, 0])]|{0}[0:1]|{0}[{0} > 0]|{0}.view(-1)|{0}.reshape(-1, {0}.size(-1))
{0}.flatten(0, 1)|{0}.reshape({0}.size(0), -1)|{0}.permute(*range({0}.ndim - 1, -1, -1))
{0}.reshape(*{0}.shape[::-1])|{0}.repeat(2, *[1] * ({0}.ndim - 1))|{0}.tile(2)|{0}.reshape(2, -1)
{0}.reshape(-1, 3)|{0}.T.contiguous()|{0}.expand(3, *{0}.shape)"""

INPLACE = """{0}.add_({1})|{0}.mul_({1})|{0}.mul_(0.5)|{0}.sub_({1}, alpha=2)|{0}.relu_()
{0}.clamp_(-1, 1)|{0}.tanh_()|{0}.masked_fill_({0} > 0.5, 0.25)|{0} += {1}|{0} *= {1}|{0}.zero_()
{0}.copy_({1})|{0}.div_(3)|{0}[0] = 0.5|{0}[0].add_(1)|{0}[..., :2] *= 2|{0}.unsqueeze_(0)
{0}.fill_(0.1)|{0}[1:] = {1}|{0} -= {1}|{0} /= 2|{0}.sigmoid_()|{0}.addcmul_({1}, {1}, value=0.1)
{0}.lerp_({1}, 0.3)|{0}.index_fill_(0, torch.tensor([0]), 0.5)|{0}[{0} > 0] = 0.5|{0}.squeeze_()
{0}[..., -1] = {1}|{0}.select(0, -1).copy_({1})|{0}.diagonal().zero_()|{0}.view(-1)[0] = 1
{0}.T.add_(1)|{0}[torch.tensor([0])] = 0.25|{0}.transpose_(0, -1)|{0}.detach().mul_(2)|{0}.t_()
{0}.narrow(-1, 0, 1).mul_({1})|{0}.index_add_(0, torch.tensor([0]), {1}[:1])|{0}.abs_().add_({1})
{0}.scatter_(0, torch.zeros_like({0}, dtype=torch.long), 0.5)|{0}.masked_fill_({1} > 0, 0.1)
{0}.unflatten(0, (-1, 2)).mul_(0.5)|{0}.flatten()[:2].neg_()|{0}.clamp_min_({1})|{0}.cumsum_(0)
{0}[{1} > 0.2] *= 2|{0}.chunk(2)[0].add_(1)|{0}.expand(2, *{0}.shape)[0].mul_(3)|{0}.tril_()"""

NN = """F.scaled_dot_product_attention({0}, {0}, {0})|F.scaled_dot_product_attention({0}, {1}, {1})
F.scaled_dot_product_attention({0}, {0}, {0}.cos(), is_causal=True)|F.conv1d({0}, {1})
F.conv2d({0}, {1}[None])|F.conv1d({0}, {1}, padding=1)|F.group_norm({0}, 1)
F.group_norm({0}, {0}.size(1))|F.batch_norm({0}, None, None, training=True)
F.instance_norm({0})|F.avg_pool1d({0}, 2, 1)|F.max_pool1d({0}, 2)
F.max_pool2d({0}, 2, 1)|F.adaptive_avg_pool1d({0}, 2)|F.dropout1d({0})
F.cross_entropy({0}, torch.arange({0}.size(0)) % {0}.size(1), label_smoothing=0.1)
F.nll_loss(F.log_softmax({0}, 1), {0}.argmax(1))|F.cross_entropy({0}, torch.softmax({1}, 1))
F.embedding(torch.arange(4) % {0}.size(0), {0})|F.embedding({1}.argmax(0), {0})|F.prelu({0}, {1})
F.binary_cross_entropy_with_logits({0}, torch.sigmoid({1}), reduction="none")|F.l1_loss({0}, {1})
F.one_hot({0}.argmax(-1), {0}.size(-1)).double() @ {1}|torch.cdist({0}, {1})|F.glu({0}, 0)
F.linear({0}, {1}, {1}.sum(-1))|F.interpolate({0}, scale_factor=2)|F.unfold({0}, 1)
F.smooth_l1_loss({0}, {1})|F.gaussian_nll_loss({0}, {1}, {1}.exp(), reduction="sum")
torch.baddbmm({0}, {0}, {1})|torch.einsum("...i,...j->...ij", {0}, {1})|torch.vdot({0}, {1})
torch.einsum("ij,kj->ik", {0}, {1})|torch.einsum("ij,ij->j", {0}, {1})|torch.chain_matmul({0}, {1})
torch.cov({0})|torch.corrcoef({0})|torch.trace({0})|torch.block_diag({0}, {1})|torch.cross({0}, {1})
torch.cartesian_prod({0}, {1})|torch.linalg.matrix_norm({0})|torch.vander({0}, 3)|{0}.cummax(0)[0]
torch.searchsorted({0}.sort().values, {1})|torch.bucketize({0}, torch.tensor([0.1, 0.5]))
torch.histc({0}, 4, -1, 1)|torch.logcumsumexp({0}, 0)|torch.renorm({0}, 2, 0, 0.9)
torch.randn_like({0})|torch.bernoulli(torch.sigmoid({0}))|torch.rand_like({0}) * {0}
torch.count_nonzero({0} > 0.1)|torch.nonzero({0} > 0.1)|({0} > 0.1).any()|torch.unique({0} > 0)"""

# Tensors that have no layout, and other dtypes. What is cast to float32 is exact in it.
BESIDE = """{0} + torch.ones({0}.shape[-1:])|{0} @ torch.eye({0}.size(-1))
torch.linspace(0, 1, {0}.size(-1)) * {0}|torch.ones(()) - {0}
{0}.where(torch.ones({0}.shape[-2:]).tril().bool(), 0.5)|torch.ones_like({0}) + {0}
torch.cat([{0}, torch.zeros({0}.shape)])|{0}.new_zeros({0}.shape) - {0}
{0}.masked_fill(torch.ones({0}.shape[-2:]).triu(1).bool(), -1.0)|{0} * torch.tensor(2)
torch.stack([torch.ones({0}.shape), {0}])|{0}.new_ones(2, {0}.size(-1)) * {0}
(({0} * 4).round() / 4).float().double()|({0} > 0.1).double() * {1}|({0} > {1}).sum(-1)
({0} * 3.7).long()|({0} * 3.7).int() + {0}|({0} > 0.1) & ({1} > 0.1)|{0}.to(torch.complex128).real
(({0} * 8).round() / 8).to(torch.float32).to({1}.dtype) + {1}
{0}.argsort(-1)|{0}.argmax() + {1}|{0}.bool() * {1}
({0} > 0.1).to({1}.dtype) * {1}|({0} > 0).double().mean()|({0} > 0).int().cumsum(-1) * {1}
torch.complex({0}, {1}).abs()|{0}.argmin(-1).to({1}.dtype)|{0}.sign().to(torch.int8) * {1}
({0} * 3).round().half().to(torch.float64)|{0}.long().double()|{0}.isfinite() * {0}"""

POOLS = [
    p.replace("\n", "|").split("|")
    for p in (UNARY, BINARY, BINARY, ALONG, INDEX, NN, BESIDE, INPLACE)
]

# -- drawing ---------------------------------------------------------------------------------------


@st.composite
def programs(draw: Draw) -> Program:
    """Programs of 3 to 10 lines, each from one drawn seed.

    Hypothesis repeats and varies what it drew: of lines drawn one by one, few kinds would come
    often and many never.
    """
    choose = random.Random(draw(st.integers(0, 2**64 - 1)))
    wanted = choose.randint(3, 10)
    mesh = choose.choice(MESHES)
    sizes = choose.choice([range(1, 7), (3, 4), (5,)])
    shapes = [
        tuple(choose.choice(sizes) for _ in range(choose.randrange(4)))
        for _ in range(choose.randint(1, 3))
    ]
    inputs = tuple(a_layout(choose, mesh, shape) for shape in shapes)
    lines: list[str] = []
    with torch.no_grad():
        space: dict[str, Any] = Program(mesh, inputs, ()).values()
        for _ in range(12 * wanted):
            line = a_line(choose, space, f"t{len(lines)}")
            try:
                after = execute((line,), {n: v.clone() for n, v in space.items()})
            except (RuntimeError, IndexError, ValueError, TypeError):
                continue  # shapes that do not go together
            if all(v.numel() <= 500 and v.isfinite().all() for v in after.values()):
                space = after
                lines.append(line)
                if len(lines) == wanted:
                    break
    assume(len(lines) >= 3)
    return Program(mesh, inputs, tuple(lines))


def a_layout(choose: random.Random, mesh: dict[str, int], shape: tuple[int, ...]) -> str:
    layout = Layout(shape)
    for axis in choose.sample(list(mesh), len(mesh)):
        kinds: list[Placement] = [Shard(d) for d in range(len(shape))]
        kinds += [Partial(), Replicate(), Invariant()]
        layout = layout.put(axis, choose.choice(kinds))
    return str(layout)


def a_line(choose: random.Random, space: dict[str, Any], new: str) -> str:
    """A line that reads or writes tensors of `space`; its result, if any, is called `new`."""
    pool = choose.choice(POOLS)
    made = [n for n in space if n[0] == "t"]
    if pool is POOLS[-1] and not made:  # an input is a leaf, which cannot be written
        pool = POOLS[0]
    text = choose.choice(pool)
    inplace = pool is POOLS[-1]
    x, y = choose.choice(made if inplace else list(space)), choose.choice(list(space))
    n = space[x].ndim
    line = text.format(x, y, d=choose.randrange(-n, n) if n else 0)
    return line if inplace else f"{new} = {line}"
