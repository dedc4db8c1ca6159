"""Does `generate()` of a model on a mesh write what it writes on one device?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import partita as pt

from .models import CLIENTS, WORDS
from .modes import make_model

NEW = 5


def prompt() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different lengths, padded on the left, as for generation."""
    torch.manual_seed(9)
    words = torch.randint(3, WORDS, (4, 5))
    mask = (torch.arange(5) >= torch.tensor([0, 1, 2, 3])[:, None]).long()
    return words * mask, mask


def write(model: Any, words: torch.Tensor, mask: torch.Tensor, **how: Any) -> torch.Tensor:
    torch.manual_seed(5)
    return model.generate(words, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, **how)


def on_a_mesh(mesh: Any, name: str, place: str, how: dict[str, Any]) -> torch.Tensor:
    model = make_model(CLIENTS[name], torch.float64).eval()
    if place == "tensor parallel":
        pt.parallelize(model, mesh, CLIENTS[name].plan)
        words, mask = prompt()  # plain: the same on all ranks
    else:
        (pt.zero if place == "ZeRO-3" else pt.parallelize)(model, mesh)
        words, mask = pt.distribute_batch(prompt(), mesh)
    text = write(model, words, mask, **how)
    return text.full_tensor() if isinstance(text, pt.DTensor) else text


@pytest.mark.parametrize("cached", [True, False], ids=["with cache", "without cache"])
@pytest.mark.parametrize("place", ["data parallel", "ZeRO-3", "tensor parallel"])
@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_greedy_text_is_that_of_one_device(name: str, place: str, cached: bool) -> None:
    how = {"do_sample": False, "use_cache": cached}
    truth = write(make_model(CLIENTS[name], torch.float64).eval(), *prompt(), **how)
    with pt.ranks(**{"tp" if place == "tensor parallel" else "dp": 2}) as world:
        for text in world.run(on_a_mesh, name, place, how):
            assert torch.equal(text, truth)


@pytest.mark.slow
def test_sampled_text_is_that_of_one_device() -> None:
    how = {"do_sample": True, "top_k": 8, "temperature": 0.9}
    truth = write(make_model(CLIENTS["GPT-2"], torch.float64).eval(), *prompt(), **how)
    with pt.ranks(dp=2) as world:
        for text in world.run(on_a_mesh, "GPT-2", "ZeRO-3", how):
            assert torch.equal(text, truth)
