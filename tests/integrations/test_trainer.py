"""transformers' `Trainer` on a mesh: what one process logs, keeps and saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.programs.gloo_ranks import run_ranks
from tests.programs.trainer_runs import (
    EVALUATED,
    Sentences,
    as_under_torchrun,
    largest_difference,
    make_model,
)

pytestmark = [pytest.mark.slow, pytest.mark.gloo]

BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
# a name: the stage, the model, arguments
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "plain": (3, "plain", {}),
    "accumulation": (0, "plain", {"gradient_accumulation_steps": 2}),
    "best": (2, "plain", BEST | {"max_grad_norm": 0.3}),
    "dropout": (1, "dropout", {"eval_strategy": "no", "gradient_checkpointing": True}),
    "adapters": (3, "adapters", BEST | {"gradient_accumulation_steps": 2}),
    "bf16": (3, "float32", {"bf16": True}),
    "split batches": (3, "plain", {"accelerator_config": {"split_batches": True}}),
}
SHOWN = ("loss", "eval_loss", "grad_norm", "learning_rate", "epoch")


def train(ranks: int, name: str, folder: Path, resume: str | None = None) -> tuple[Any, Any]:
    """Returns what was logged, and the weights of the end; with an evaluation that is alone."""
    from transformers import Trainer, TrainingArguments

    stage, model, changes = CASES[name]
    kind: Any = Trainer
    placement = {}
    if ranks > 1:
        from partita.integrations.trainer import Trainer as kind

        placement = {"stage": stage}
    options = {
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_steps": 2,
        "save_total_limit": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    rows = 8 if name == "split batches" else 8 // ranks
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        **{**options, **changes},
    )
    data, evaluated = Sentences(), Sentences(EVALUATED)
    trainer = kind(make_model(model), args, train_dataset=data, eval_dataset=evaluated, **placement)
    assert trainer.get_total_train_batch_size(args) == 8 * args.gradient_accumulation_steps
    trainer.train(resume_from_checkpoint=resume)
    logged = [{k: h[k] for k in SHOWN if k in h} for h in trainer.state.log_history]
    predicted = trainer.predict(evaluated).predictions
    assert predicted.shape[0] == EVALUATED
    weights = trainer.accelerator.get_state_dict(trainer.model)
    return logged, {k: w.detach().clone() for k, w in weights.items()}


def train_all(ranks: int, folder: Path, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        mine = folder / f"{ranks} {name}"
        logged, weights = train(ranks, name, mine)
        resumed = None
        if ranks > 1:
            (first, *_) = sorted(mine.glob("checkpoint-*"), key=lambda p: int(p.name[11:]))
            resumed = train(ranks, name, mine, str(first))
        found[name] = logged, weights, resumed
    return found


def on_rank(rank: int, ranks: int, *args: Any) -> Any:
    return as_under_torchrun(rank, ranks, train_all, *args)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("truth")
    return run_ranks(on_rank, 1, 1, folder, [*CASES])[0]


@pytest.mark.parametrize(
    "ranks, names",
    [(2, [*CASES]), (4, ["plain", "adapters"])],
    ids=["two ranks", "four ranks"],
)
def test_a_run_is_that_of_one_process_and_resumes_to_the_same_bits(
    ranks: int, names: list[str], truth: dict[str, Any], tmp_path: Path
) -> None:
    for found in run_ranks(on_rank, ranks, ranks, tmp_path, names):
        for name in names:
            logged, weights, resumed = found[name]
            # transformers computes losses in float32
            near, exact = (2e-2, 2e-2) if name == "bf16" else (1e-5, 1e-9)
            assert largest_difference(logged, truth[name][0]) < near, name
            assert largest_difference(weights, truth[name][1]) < exact, name
            # A checkpoint at the end of an epoch is written before the epoch is evaluated.
            again, same = ([h for h in log if "loss" in h] for log in (resumed[0], logged))
            assert again == same, name
            assert largest_difference(resumed[1], weights) == 0, name
    saved = sorted(tmp_path.glob("*adapters/checkpoint-*"))
    assert saved and all((folder / "adapter_model.safetensors").exists() for folder in saved)
    whole = load_file(sorted(tmp_path.glob("*plain/checkpoint-*"))[-1] / "model.safetensors")
    assert whole["head.weight"].shape == (37, 12)
