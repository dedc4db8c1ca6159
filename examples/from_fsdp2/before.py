"""A GPT that is trained with torch's FSDP2. `after.py` is the same program with partita.

torchrun --nproc-per-node=2 examples/from_fsdp2/before.py
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from partita.app.models import GPT  # plain PyTorch

ranks = int(os.environ["WORLD_SIZE"])
mesh = dist.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
torch.manual_seed(0)
model = GPT(layers=4, width=64, heads=4, context=32)
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(5):
    text = (torch.randint(256, (16, 1)) + torch.arange(33)) % 256  # each row counts upward
    text = text.chunk(ranks)[mesh.get_rank()]  # this rank's rows
    x, y = text[:, :-1], text[:, 1:]
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach() / ranks  # the mean over this rank's rows
    dist.all_reduce(loss)
    value = loss.item()
    if mesh.get_rank() == 0:
        print(f"step {step}  loss {value:.4f}")

dist.destroy_process_group()
