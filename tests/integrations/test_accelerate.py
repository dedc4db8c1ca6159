"""accelerate's loop on a mesh: the losses, norms, metrics and states of one process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import partita as pt
from tests.programs.gloo_ranks import run_ranks
from tests.programs.trainer_runs import (
    EVALUATED,
    Sentences,
    as_under_torchrun,
    largest_difference,
    make_model,
)

pytestmark = [pytest.mark.slow, pytest.mark.gloo]

# a name: the stage, the model, whether a loader's batch is that of all ranks, accelerate's options
CASES: dict[str, tuple[int, str, bool, dict[str, Any]]] = {
    "plain": (3, "plain", False, {}),
    "accumulation": (0, "plain", False, {"gradient_accumulation_steps": 2}),
    "split batches": (1, "llama", True, {}),
    "adapters": (2, "adapters", False, {"gradient_accumulation_steps": 2}),
    "bf16": (3, "float32", False, {"mixed_precision": "bf16"}),
}
# The scheduler does not depend on the ranks; a model that does not import transformers.
SPLIT = {"plain split batches": (1, "plain", True, {})}


def train(
    ranks: int, name: str, folder: Path, resume: bool = False, sharded: bool = False
) -> tuple[Any, Any]:
    """Returns what each step and each evaluation found, and the weights of the end."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import set_seed

    AcceleratorState._reset_state(reset_partial_state=True)  # of the last run in this process
    GradientState._reset_state()
    stage, model_kind, split, options = {**CASES, **SPLIT}[name]
    placement = {}
    if ranks > 1 or sharded:
        from partita.integrations.accelerate import Accelerator

        placement = {"stage": stage}
    set_seed(0)
    batching = DataLoaderConfiguration(split_batches=split, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=batching, **options, **placement)
    model = make_model(model_kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    size, steps = (8, 6) if split else (8 // ranks, 6 * ranks)
    loader = torch.utils.data.DataLoader(Sentences(), size, shuffle=True)
    evaluated = torch.utils.data.DataLoader(Sentences(EVALUATED), size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 - k / steps)
    model, optimizer, loader, evaluated, schedule = accelerator.prepare(
        model, optimizer, loader, evaluated, schedule
    )
    if resume:
        accelerator.load_state(folder / "middle")
    found: list[Any] = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        skipped = 2 if resume and epoch == 0 else 0
        rest = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        for i, batch in enumerate(rest, skipped):
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                norm = torch.zeros(())
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            whole = accelerator.reduce(loss.detach()).item()
            found.append([whole, norm.item(), schedule.get_last_lr()[0]])
            if (epoch, i) == (0, 1):
                accelerator.save_state(folder / "middle")
        found.append(evaluate(accelerator, model, evaluated))
    accelerator.save_model(model, folder / "end")
    accelerator.wait_for_everyone()
    return found, accelerator.get_state_dict(accelerator.unwrap_model(model))


def evaluate(accelerator: Any, model: Any, loader: Any) -> list[float]:
    model.eval()
    rows = []
    for batch in loader:
        with torch.no_grad():
            logits = model(**batch)["logits"]
        logits, labels = accelerator.gather_for_metrics((logits, batch["labels"]))
        rows.append((logits.argmax(-1) == labels).double() + logits.mean(-1))
    model.train()
    scores = torch.cat(rows)
    assert len(scores) == EVALUATED and type(scores) is torch.Tensor
    return [scores.sum().item()]


def train_all(ranks: int, folder: Path, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        mine = folder / f"{ranks} {name}"
        once = train(ranks, name, mine)
        found[name] = *once, train(ranks, name, mine, resume=True) if ranks > 1 else None
    return found


def on_rank(rank: int, ranks: int, *args: Any) -> Any:
    return as_under_torchrun(rank, ranks, train_all, *args)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("truth")
    return run_ranks(on_rank, 1, 1, folder, [*CASES])[0]


@pytest.mark.parametrize(
    "ranks, names", [(2, [*CASES]), (4, ["plain", "adapters"])], ids=["two ranks", "four ranks"]
)
def test_a_loop_is_that_of_one_process_and_resumes_to_the_same_bits(
    ranks: int, names: list[str], truth: dict[str, Any], tmp_path: Path
) -> None:
    for found in run_ranks(on_rank, ranks, ranks, tmp_path, names):
        for name in names:
            steps, weights, resumed = found[name]
            # transformers computes losses in float32
            near, exact = (0.3, 2e-2) if name == "bf16" else (1e-5, 1e-9)
            assert largest_difference(steps, truth[name][0]) < near, name
            assert largest_difference(weights, truth[name][1]) < exact, name
            assert resumed[0] == steps[2:], name
            assert largest_difference(resumed[1], weights) == 0, name
    end = load_file(tmp_path / f"{ranks} plain" / "end" / "model.safetensors")
    assert largest_difference(end, truth["plain"][1]) < 1e-9


def train_once(ranks: int, folder: Path, resume: bool, sharded: bool) -> Any:
    steps, weights = train(ranks, *SPLIT, folder, resume, sharded)
    return steps, weights, torch.rand(()).item()


def on_rank_once(rank: int, ranks: int, *args: Any) -> Any:
    return as_under_torchrun(rank, ranks, train_once, *args)


@pytest.mark.parametrize(
    "saved_on, sharded, ranks",
    [(2, True, 1), (1, True, 2), (1, False, 2)],
    ids=["two ranks to one", "one rank to two", "accelerate alone to two ranks"],
)
def test_a_state_loads_on_another_number_of_ranks(
    saved_on: int, sharded: bool, ranks: int, tmp_path: Path
) -> None:
    steps, weights, _ = run_ranks(on_rank_once, saved_on, saved_on, tmp_path, False, sharded)[0]
    found = run_ranks(on_rank_once, ranks, ranks, tmp_path, True, True)
    for resumed, end, drawn in found:
        assert largest_difference(resumed, steps[2:]) < 1e-9
        assert largest_difference(end, weights) < 1e-9
        assert drawn == found[0][2]  # all ranks continue with one state of the generator


def use_without_partita(ranks: int, what: str) -> None:
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments

    model = pt.zero(make_model("plain"), pt.init_device_mesh("cpu", (2,)))
    if what == "Trainer":
        args = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to=[])
        Trainer(model, args, train_dataset=Sentences()).train()
        return
    accelerator = Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(Sentences(), 4)
    if what == "model":
        accelerator.prepare(model)
    for batch in accelerator.prepare(loader):  # each rank's own rows
        model(**batch)["loss"].backward()


def on_rank_without_partita(rank: int, *args: Any) -> str:
    try:
        as_under_torchrun(rank, 2, use_without_partita, *args)
    except pt.LayoutError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "what, facts",
    [
        ("model", ["is a DTensor", "from partita.integrations.accelerate import Accelerator"]),
        ("Trainer", ["is a DTensor", "from partita.integrations.trainer import Trainer"]),
        ("loader", ["differs between ranks", 'each_rank_has="piece"']),
    ],
)
def test_accelerate_without_partita_refuses_a_sharded_model(what: str, facts: list[str]) -> None:
    errors = run_ranks(on_rank_without_partita, 2, what)
    assert errors[0] and errors[0] == errors[1]
    assert all(fact in errors[0] for fact in facts), errors[0]


def use_numbers_of_a_rank(ranks: int) -> list[str]:
    from partita.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    errors = []
    for call in (accelerator.gather, accelerator.reduce):
        try:
            call(torch.tensor([accelerator.process_index]))
        except pt.LayoutError as error:
            errors.append(str(error))
    return errors


def on_rank_with_its_number(rank: int) -> list[str]:
    return as_under_torchrun(rank, 2, use_numbers_of_a_rank)


def test_values_that_differ_between_ranks_are_not_gathered() -> None:
    ours, theirs = run_ranks(on_rank_with_its_number, 2)
    assert len(ours) == 2 and ours == theirs
    assert all("differ" in error or "not read the same" in error for error in ours), ours
