"""A GPT that is trained with partita's ZeRO-3. `before.py` is the same program with FSDP2.

torchrun --nproc-per-node=2 examples/from_fsdp2/after.py
"""

import os

import torch
import torch.distributed as dist
from torch.nn import functional as F

import partita as pt
from partita.app.models import GPT  # plain PyTorch

ranks = int(os.environ["WORLD_SIZE"])
mesh = dist.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
torch.manual_seed(0)
model = GPT(layers=4, width=64, heads=4, context=32)
pt.zero(model, mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(5):
    text = (torch.randint(256, (16, 1)) + torch.arange(33)) % 256  # each row counts upward
    text = pt.distribute_batch(text, mesh)  # all rows
    x, y = text[:, :-1], text[:, 1:]
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    if mesh.get_rank() == 0:
        print(f"step {step}  loss {value:.4f}")

dist.destroy_process_group()
