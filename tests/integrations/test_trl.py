"""TRL's trainers on a mesh: what one process logs, but for `on_mesh`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.programs.gloo_ranks import run_ranks
from tests.programs.trainer_runs import as_under_torchrun, largest_difference, make_model

pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.gloo]

CASES = {  # the stage, the model
    "sft": (3, "llama"),
    "sft of adapters": (2, "adapters"),
    "dpo": (3, "llama"),
    "dpo of adapters": (3, "adapters"),  # the model without them is the reference
}
TIMES = ("runtime", "per_second", "flos", "preparation", "num_tokens")  # TRL counts anew


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<unk>"]
    words = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(34))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def write_text(i: int, words: int) -> str:
    return "".join(f" w{(i * 7 + k * k) % 34}" for k in range(words))


def train(ranks: int, name: str, folder: Path, resume: str | None = None) -> Any:
    import trl
    from datasets import Dataset

    stage, model = CASES[name]
    if name.startswith("sft"):
        config, kind = trl.SFTConfig, trl.SFTTrainer
        columns = {"text": [write_text(i, 4 + i % 6) for i in range(22)]}
    else:
        config, kind = trl.DPOConfig, trl.DPOTrainer
        columns = {
            "prompt": [write_text(i, 4) for i in range(22)],
            "chosen": [write_text(i + 3, 3 + i % 4) for i in range(22)],
            "rejected": [write_text(i + 5, 2 + i % 3) for i in range(22)],
        }
    options: dict[str, Any] = {}
    if ranks > 1:
        from partita.integrations.trainer import on_mesh

        kind, options = on_mesh(kind), {"stage": stage}
    if name == "dpo":
        options["ref_model"] = make_model(model)
    args = config(
        output_dir=str(folder),
        per_device_train_batch_size=8 // ranks,
        per_device_eval_batch_size=8 // ranks,
        num_train_epochs=2,
        learning_rate=1e-2,
        max_length=16,
        logging_steps=1,
        save_steps=2,
        eval_strategy="epoch",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    rows = Dataset.from_dict(columns)
    trainer = kind(
        make_model(model),
        args=args,
        train_dataset=rows,
        eval_dataset=rows.select(range(13)),
        processing_class=make_tokenizer(),
        **options,
    )
    trainer.train(resume_from_checkpoint=resume)
    return [
        {k: v for k, v in log.items() if not any(word in k for word in TIMES)}
        for log in trainer.state.log_history[:-1]
    ]


def train_all(ranks: int, folder: Path) -> dict[str, Any]:
    found = {}
    for name in CASES:
        mine = folder / f"{ranks} {name}"
        logged = train(ranks, name, mine)
        resumed = train(ranks, name, mine, str(mine / "checkpoint-2")) if ranks > 1 else None
        found[name] = logged, resumed
    return found


def on_rank(rank: int, ranks: int, folder: Path) -> Any:
    return as_under_torchrun(rank, ranks, train_all, folder)


def test_fine_tuning_is_that_of_one_process_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    truth = run_ranks(on_rank, 1, 1, tmp_path)[0]
    for found in run_ranks(on_rank, 2, 2, tmp_path):
        for name, (logged, resumed) in found.items():
            assert largest_difference(logged, truth[name][0]) < 1e-4, name
            assert resumed == logged, name
