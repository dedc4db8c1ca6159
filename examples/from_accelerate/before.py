"""A loop of accelerate, on two ranks by DDP. `after.py` is the same program with ZeRO-3.

torchrun --nproc-per-node=2 examples/from_accelerate/before.py
"""

import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.nn import functional as F

order = DataLoaderConfiguration(use_seedable_sampler=True)  # the same rows, on any ranks
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=order)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
x = torch.randn(64, 8)
data = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

if "resume" in sys.argv:
    accelerator.load_state("run/state")
for epoch in range(2 if "resume" in sys.argv else 0, 4):
    loader.set_epoch(epoch)
    losses, right = [], []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            scores = model(inputs)
            loss = F.cross_entropy(scores, targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean"))
        right.append(accelerator.gather_for_metrics(scores.argmax(1) == targets))
    mean, hits = torch.stack(losses).mean(), torch.cat(right).sum()
    accelerator.print(f"epoch {epoch}  loss {mean:.4f}  right {hits} of {len(data)}")
    if epoch == 1:
        accelerator.save_state("run/state")
accelerator.end_training()
