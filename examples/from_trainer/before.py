"""transformers' Trainer, on two ranks by DDP. `after.py` is the same program with ZeRO-3.

torchrun --nproc-per-node=2 examples/from_trainer/before.py
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes))
text = (torch.randint(64, (64, 1)) + torch.arange(16)) % 64  # each row counts upward
rows = [{"input_ids": row, "labels": row} for row in text]

arguments = TrainingArguments(
    output_dir="run",
    per_device_train_batch_size=8,
    learning_rate=1e-2,
    num_train_epochs=2,
    logging_steps=2,
    eval_strategy="epoch",
    save_steps=6,
    save_total_limit=2,
    use_cpu=True,
    disable_tqdm=True,
    report_to=[],
)
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:16])
trainer.train(resume_from_checkpoint="resume" in sys.argv)

for log in trainer.state.log_history if trainer.is_world_process_zero() else ():
    for name in ("loss", "eval_loss"):
        if name in log:
            print(f"step {log['step']}  {name} {log[name]:.4f}")
torch.distributed.destroy_process_group()
