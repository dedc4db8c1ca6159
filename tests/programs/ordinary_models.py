"""Which ordinary models must run unmodified? Each is what a person writes for one device.

None of them knows of partita; those that a bench measures too are in `partita.bench.models`. A
model is called with its batch (tensors whose dimension 0 is that of the samples, or of the nodes or
edges of a graph) and returns its loss, a scalar.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partita.bench.models import MLP, images, mlp
from partita.bench.models import MODELS as MEASURED

__all__ = ["MODELS", "Case"]

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model and its data.

    Attributes:
        make: a new model, in the default dtype, initialised from torch's generator.
        batch: `n` samples.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]


MODELS: dict[str, Case] = {}


def _case(name: str, batch: Callable[[int], Batch]) -> Callable[[type], type]:
    def register(model: type) -> type:
        MODELS[name] = Case(model, batch)
        return model

    return register


for name, measured in {"cnn": "cnn", "unet": "unet", "vae": "vae", "mlp with huber": "mlp"}.items():
    found = MEASURED[measured]
    MODELS[name] = Case(partial(found.make, 1), partial(found.batch, 1))


def _make_mlp_with_mse() -> nn.Module:
    model = MLP()
    model.loss = nn.MSELoss()
    return model


MODELS["mlp with mse"] = Case(_make_mlp_with_mse, MODELS["mlp with huber"].batch)

WORDS, LENGTH = 13, 6


def _tokens(n: int) -> Batch:
    text = torch.randint(0, WORDS, (n, LENGTH + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


# -- language models -------------------------------------------------------------------------------


class _Block(nn.Module):
    """Pre-norm attention and MLP, as in GPT-2."""

    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.drop = nn.Dropout(0.1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(d, dim=2)
        q, k, v = (t.view(b, s, self.heads, d // self.heads).transpose(1, 2) for t in (q, k, v))
        y = self.attend(q, k, v).transpose(1, 2).contiguous().view(b, s, d)
        x = x + self.drop(self.out(y))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class _MaskedBlock(_Block):
    """Attention by hand, with a mask that is made in forward."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q.size(-2)
        mask = torch.tril(torch.ones(s, s, dtype=torch.bool, device=q.device))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(~mask, float("-inf"))
        return self.drop(F.softmax(scores, dim=-1)) @ v


@_case("gpt", _tokens)
class GPT(nn.Module):
    block: type[_Block] = _Block

    def __init__(self, d: int = 8, heads: int = 2, layers: int = 2):
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, d), nn.Embedding(LENGTH, d)
        self.blocks = nn.ModuleList(self.block(d, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, text: Tensor, target: Tensor) -> Tensor:
        places = torch.arange(text.size(1), device=text.device)
        x = self.tokens(text) + self.places(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), target.view(-1))


@_case("gpt with masks made in forward", _tokens)
class MaskedGPT(GPT):
    block = _MaskedBlock

    def forward(self, text: Tensor, target: Tensor) -> Tensor:
        # Some targets do not count, as where documents are packed.
        return super().forward(text, torch.where(text == 0, -100, target))


class _RMSNorm(nn.Module):
    def __init__(self, d: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class _LlamaAttention(nn.Module):
    """Grouped heads by repeat_interleave; rotary by complex numbers."""

    def __init__(self, d: int, heads: int, groups: int):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, d // heads
        self.q = nn.Linear(d, heads * self.size, bias=False)
        self.k = nn.Linear(d, groups * self.size, bias=False)
        self.v = nn.Linear(d, groups * self.size, bias=False)
        self.o = nn.Linear(heads * self.size, d, bias=False)

    def turn(self, x: Tensor, turns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns[None, :, None, :]).flatten(3).type_as(x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = torch.repeat_interleave(k, self.heads // self.groups, dim=1)
        v = torch.repeat_interleave(v, self.heads // self.groups, dim=1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.turn(self.q(x).view(b, s, self.heads, self.size), turns)
        k = self.turn(self.k(x).view(b, s, self.groups, self.size), turns)
        v = self.v(x).view(b, s, self.groups, self.size)
        y = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


class _LlamaGQA(_LlamaAttention):
    """Grouped heads by enable_gqa; rotary by cosines and sines."""

    def turn(self, x: Tensor, turns: Tensor) -> Tensor:
        cos, sin = turns.real[:, None].repeat(1, 1, 2), turns.imag[:, None].repeat(1, 1, 2)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class _Llama(nn.Module):
    attention: type[_LlamaAttention]
    norm_type: type[nn.Module]

    def __init__(self, d: int = 16, heads: int = 4, groups: int = 2):
        super().__init__()
        size = d // heads
        rates = 1.0 / 10000 ** (torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(LENGTH) * 1.0, rates)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        self.embed = nn.Embedding(WORDS, d)
        self.attend = self.attention(d, heads, groups)
        self.norm1, self.norm2, self.norm3 = (self.norm_type(d) for _ in range(3))
        self.gate, self.up = nn.Linear(d, 24, bias=False), nn.Linear(d, 24, bias=False)
        self.down = nn.Linear(24, d, bias=False)
        self.head = nn.Linear(d, WORDS, bias=False)

    def forward(self, text: Tensor, target: Tensor) -> Tensor:
        x = self.embed(text)
        x = x + self.attend(self.norm1(x), self.turns[: text.shape[1]])
        h = self.norm2(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return F.cross_entropy(self.head(self.norm3(x)).flatten(0, 1), target.flatten())


@_case("llama, complex rotary, repeated heads", _tokens)
class Llama(_Llama):
    attention, norm_type = _LlamaAttention, _RMSNorm


@_case("llama, cos and sin, enable_gqa", _tokens)
class LlamaGQA(_Llama):
    attention, norm_type = _LlamaGQA, nn.RMSNorm


@_case("mixture of experts", lambda n: (torch.randn(n, 4, 6), torch.randn(n, 4, 6)))
class MixtureOfExperts(nn.Module):
    """Each token goes to its two best experts; a loss keeps the experts evenly used."""

    def __init__(self, d: int = 6, experts: int = 4):
        super().__init__()
        self.router = nn.Linear(d, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
            for _ in range(experts)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        flat = x.reshape(-1, x.size(-1))
        odds = F.softmax(self.router(flat), dim=-1)
        weight, chosen = torch.topk(odds, 2, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, place = (chosen == i).nonzero(as_tuple=True)
            if rows.numel() == 0:
                continue
            out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, place, None])
        used = torch.bincount(chosen.flatten(), minlength=len(self.experts)) / chosen.numel()
        balance = len(self.experts) * (used * odds.mean(0)).sum()
        return F.mse_loss(out.view_as(x), target) + 0.01 * balance


@_case("bert", lambda n: (*_tokens(n), torch.arange(n) % LENGTH + 1))
class Bert(nn.Module):
    """Padding is masked; some words are hidden, and only these are guessed."""

    def __init__(self, d: int = 8):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, d, padding_idx=0), nn.Embedding(LENGTH, d)
        self.norm, self.drop = nn.LayerNorm(d), nn.Dropout(0.1)
        self.attend = nn.MultiheadAttention(d, 2, dropout=0.1, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 16), nn.GELU(), nn.Linear(16, d), nn.Dropout(0.1))
        self.head = nn.Linear(d, WORDS)

    def forward(self, text: Tensor, target: Tensor, length: Tensor) -> Tensor:
        places = torch.arange(text.size(1)).expand(text.size(0), -1)
        padding = places >= length.unsqueeze(1)
        hidden = (places % 3 == 1) & ~padding
        x = self.words(text.masked_fill(hidden, WORDS - 1)) + self.places(places)
        x = self.drop(self.norm(x))
        y, _ = self.attend(x, x, x, key_padding_mask=padding, need_weights=False)
        x = self.norm1(x + y)
        x = self.norm2(x + self.mlp(x))
        losses = F.cross_entropy(self.head(x).transpose(1, 2), target, reduction="none")
        return (losses * hidden).sum() / hidden.sum().clamp(min=1)


# -- images ----------------------------------------------------------------------------------------


class _Residual(nn.Module):
    def __init__(self, i: int, o: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(i, o, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(o), nn.BatchNorm2d(o)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


@_case("resnet", images)
class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.blocks = nn.Sequential(_Residual(4, 8, 1), _Residual(8, 8, 2))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        x = self.pool(self.blocks(x)).flatten(1)
        return F.cross_entropy(self.head(x), target)


@_case("vit", images)
class ViT(nn.Module):
    def __init__(self, d: int = 8):
        super().__init__()
        self.patches = nn.Conv2d(3, d, 4, stride=4)
        self.cls = nn.Parameter(torch.randn(1, 1, d))
        self.places = nn.Parameter(torch.randn(1, 5, d))
        layer = nn.TransformerEncoderLayer(d, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.places
        x = self.encoder(x)
        return F.cross_entropy(self.head(self.norm(x[:, 0])), target)


class _Mixing(nn.Module):
    def __init__(self, tokens: int, d: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.across = nn.Sequential(nn.Linear(tokens, 8), nn.GELU(), nn.Linear(8, tokens))
        self.along = nn.Sequential(nn.Linear(d, 16), nn.GELU(), nn.Linear(16, d))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.along(self.norm2(x))


@_case("mlp-mixer", images)
class Mixer(nn.Module):
    def __init__(self, d: int = 6):
        super().__init__()
        self.embed = nn.Linear(3 * 4 * 4, d)
        self.blocks = nn.Sequential(_Mixing(4, d), _Mixing(4, d))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        b, c, h, w = x.shape
        x = x.reshape(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * 16)
        x = self.norm(self.blocks(self.embed(x))).mean(dim=1)
        return F.nll_loss(F.log_softmax(self.head(x), dim=1), target)


# -- sequences -------------------------------------------------------------------------------------


@_case("lstm", _tokens)
class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 5)
        self.rnn = nn.LSTM(5, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, WORDS)

    def forward(self, text: Tensor, target: Tensor) -> Tensor:
        x, (hidden, _) = self.rnn(self.embed(text))
        loss = F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())
        return loss + 0.01 * hidden.pow(2).mean()


@_case("gru", lambda n: (torch.randn(n, LENGTH, 3), torch.randn(n, 2)))
class GRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 6, num_layers=2, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        out, _ = self.rnn(x)
        return F.smooth_l1_loss(self.head(out[:, -1]), target)


@_case("seq2seq with attention", _tokens)
class Seq2Seq(nn.Module):
    def __init__(self, d: int = 6):
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, d), nn.Embedding(WORDS, d)
        self.encoder, self.decoder = nn.GRU(d, d, batch_first=True), nn.GRUCell(2 * d, d)
        self.score, self.head = nn.Linear(d, d, bias=False), nn.Linear(2 * d, WORDS)

    def forward(self, text: Tensor, target: Tensor) -> Tensor:
        memory, last = self.encoder(self.source(text))
        state, keys, steps = last[0], self.score(memory), []
        word = torch.zeros_like(target[:, 0])
        for t in range(target.size(1)):
            odds = torch.softmax(torch.einsum("bd,bsd->bs", state, keys), dim=1)
            context = torch.bmm(odds.unsqueeze(1), memory).squeeze(1)
            state = self.decoder(torch.cat([self.target(word), context], dim=1), state)
            steps.append(self.head(torch.cat([state, context], dim=1)))
            word = target[:, t]
        return F.cross_entropy(torch.stack(steps, dim=2), target)


@_case("transformer", _tokens)
class Transformer(nn.Module):
    def __init__(self, d: int = 8):
        super().__init__()
        self.embed = nn.Embedding(WORDS, d)
        self.net = nn.Transformer(d, 2, 1, 1, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(d, WORDS)

    def forward(self, text: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.size(1))
        x = self.net(self.embed(text), self.embed(target), tgt_mask=mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


# -- tables, clicks and graphs ---------------------------------------------------------------------


@_case("mlp with bce", lambda n: (torch.randn(n, 6), torch.randint(0, 2, (n, 3)) * 1.0))
class MLPwithBCE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(6), mlp())
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.net(x), target, pos_weight=self.weight)


def _clicks(n: int) -> Batch:
    return torch.randn(n, 4), torch.randint(0, 9, (n, 3, 2)), torch.randint(0, 2, (n,)) * 1.0


@_case("dlrm", _clicks)
class DLRM(nn.Module):
    """Bags of sparse features and a dense one; each pair of them interacts."""

    def __init__(self, d: int = 4):
        super().__init__()
        self.dense = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, d), nn.ReLU())
        self.bags = nn.ModuleList(nn.EmbeddingBag(9, d, mode=m) for m in ("sum", "mean", "sum"))
        self.top = nn.Sequential(nn.Linear(d + 6, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense: Tensor, sparse: Tensor, click: Tensor) -> Tensor:
        x = self.dense(dense)
        features = torch.stack([x, *(bag(sparse[:, i]) for i, bag in enumerate(self.bags))], dim=1)
        pairs = torch.bmm(features, features.transpose(1, 2))
        i, j = torch.tril_indices(4, 4, offset=-1)
        logits = self.top(torch.cat([x, pairs[:, i, j]], dim=1)).squeeze(-1)
        return F.binary_cross_entropy(torch.sigmoid(logits), click)


def _graph(n: int) -> Batch:
    nodes, edges = 2 * n, 3 * n
    ends = torch.randint(0, nodes, (edges,)), torch.randint(0, nodes, (edges,))
    return torch.randn(nodes, 5), *ends, torch.randint(0, 3, (nodes,))


@_case("gnn", _graph)
class GNN(nn.Module):
    """Messages along edges: a mean by index_add, then attention by scatter."""

    def __init__(self, d: int = 6):
        super().__init__()
        self.first, self.self1 = nn.Linear(5, d), nn.Linear(5, d)
        self.second, self.score, self.head = nn.Linear(d, d), nn.Linear(2 * d, 1), nn.Linear(d, 3)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, label: Tensor) -> Tensor:
        nodes = x.size(0)
        count = torch.zeros(nodes).index_add(0, target, torch.ones(target.size(0)))
        mean = x.new_zeros(nodes, 6).index_add_(0, target, self.first(x)[source])
        x = F.elu(self.self1(x) + mean / count.clamp(min=1).unsqueeze(1))
        h = self.second(x)
        score = F.leaky_relu(self.score(torch.cat([h[source], h[target]], dim=1))).squeeze(1)
        weight = torch.exp(score - score.max().detach())
        total = torch.zeros(nodes).scatter_add(0, target, weight)
        message = h[source] * (weight / total[target]).unsqueeze(1)
        places = target.unsqueeze(1).expand(-1, h.size(1))
        x = torch.zeros_like(h).scatter_add_(0, places, message)
        rare = torch.tensor([1.0, 2.0, 0.5])
        return F.cross_entropy(self.head(x + h), label, weight=rare)
