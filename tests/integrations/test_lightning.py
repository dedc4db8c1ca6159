"""Lightning's Trainer with `MeshStrategy`: what one device logs, and the same after a resume."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs.gloo_ranks import run_ranks
from tests.programs.trainer_runs import (
    EVALUATED,
    Plain,
    Sentences,
    as_under_torchrun,
    largest_difference,
)

pl = pytest.importorskip("lightning.pytorch")
pytestmark = [pytest.mark.slow, pytest.mark.gloo]

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (3, {}),
    "accumulation": (0, {"accumulate_grad_batches": 2}),
    "clip": (2, {"gradient_clip_val": 0.3}),
}


def train(ranks: int, name: str, folder: Path, resume: Path | None = None) -> list[float]:
    """Returns the loss of each step, and the two metrics of each evaluation."""

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.found = Plain().double(), []

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss = self.net(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            out = self.net(**batch)
            self.log("of rows", out["loss"])
            self.log("right", (out["logits"].argmax(-1) == batch["labels"]).double().mean())

        def on_train_batch_end(self, *args: Any) -> None:
            self.found.append(self.trainer.callback_metrics["loss"].item())

        def on_validation_end(self) -> None:
            metrics = self.trainer.callback_metrics
            self.found += [metrics["of rows"].item(), metrics["right"].item()]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    stage, options = CASES[name]
    if ranks > 1:
        from partita.integrations.lightning import MeshStrategy

        options = options | {"strategy": MeshStrategy(stage=stage)}
    torch.manual_seed(0)
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        **options,
    )
    loaders = (torch.utils.data.DataLoader(Sentences(rows), 8 // ranks) for rows in (22, EVALUATED))
    trainer.fit(module, *loaders, ckpt_path=resume)
    return module.found


def train_all(ranks: int, folder: Path) -> dict[str, Any]:
    found = {}
    for name in CASES:
        mine = folder / f"{ranks} {name}"
        once = train(ranks, name, mine)
        found[name] = once, train(ranks, name, mine, mine / "epoch=0.ckpt") if ranks > 1 else None
    return found


def on_rank(rank: int, ranks: int, folder: Path) -> Any:
    return as_under_torchrun(rank, ranks, train_all, folder)


def test_a_fit_is_that_of_one_device_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    truth = run_ranks(on_rank, 1, 1, tmp_path)[0]
    for found in run_ranks(on_rank, 2, 2, tmp_path):
        for name, (once, resumed) in found.items():
            assert largest_difference(once, truth[name][0]) < 1e-9, name
            assert len(resumed) == len(once) // 2 and resumed == once[len(resumed) :], name


class Logging(pl.LightningModule):
    """A module with a `log` of its own, which keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.logged = torch.nn.Parameter(torch.ones(2, 2)), []

    def log(self, name: str, value: Any, **options: Any) -> None:
        self.logged.append((name, type(value), options))


def log_in_copies(rank: int) -> Any:
    from partita.integrations.lightning import MeshStrategy

    module, strategy = Logging(), MeshStrategy(stage=0)
    strategy.connect(module)
    strategy.model_to_device()
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    for i, one in enumerate([module, *copies]):
        one.log("loss", one.weight.sum(), number=i)
    return [one.logged for one in (module, *copies)]


def test_a_module_is_copied_and_pickled_and_each_logs_its_own_whole_tensors() -> None:
    for found in run_ranks(as_under_torchrun, 2, 2, log_in_copies):
        for i, logged in enumerate(found):
            assert logged == [("loss", torch.Tensor, {"number": i})]


def test_a_job_of_one_rank_runs_on_the_accelerator(monkeypatch):
    from partita.comm.device import Device
    from partita.integrations import lightning

    monkeypatch.setattr(lightning, "choose_device", lambda name: Device("cuda"))
    assert lightning.MeshStrategy().root_device == torch.device("cuda", 0)
