"""Training steps that are captured: plain, with data parallel, tensor parallel and ZeRO-3."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import partita as pt
from tests.programs.zero_training import gpt


def tiny():
    return gpt(layers=1, width=8)


def rows(mesh):
    placements = [pt.Shard(0) if a == "dp" else pt.Replicate() for a in mesh.mesh_dim_names]
    return lambda t: pt.distribute_tensor(t, mesh, placements)


def data_parallel(model, mesh):
    return pt.parallelize(model, mesh)


def tensor_parallel(model, mesh):
    return pt.parallelize(model, mesh, pt.plans.gpt(split_words=False))


def split_words(model, mesh):
    return pt.parallelize(model, mesh, pt.plans.gpt(split_words=True))


def zero3(model, mesh):
    return pt.zero(model, mesh)


def loss_of(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def plain_step(model, optimizer):
    def step(tokens, targets):
        optimizer.zero_grad()
        loss = loss_of(model, tokens, targets)
        loss.backward()
        optimizer.step()
        return loss

    return step


def losses(step, batch, steps):
    return [step(*batch).item() for _ in range(steps)]


def adamw(params, **options):
    return torch.optim.AdamW(params, lr=1e-2, **options)
