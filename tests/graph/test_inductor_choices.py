"""What decides which kernels become one is partita's within its compiles, and nobody else's there.

A thread of Inductor's keeps the choices of its first compile, whatever the settings say later.
"""

import pytest
import torch

import partita as pt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


def grow(x):
    """Two kernels at least: a sum of rows, and what reads it."""
    return x.cos() + (x * 2).sum(0)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Whose choices are asked whether two kernels may be one: a name for each question."""
    from torch._inductor import config
    from torch._inductor.choices import InductorChoices

    from partita.graph.backend.inductor_scheduling import FusionChoices

    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "partita"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    found = []

    def note(name, choices):
        ask = choices.can_fuse
        noting = staticmethod(lambda *args: (found.append(name), ask(*args))[1])
        monkeypatch.setattr(choices, "can_fuse", noting)

    note("torch", InductorChoices)
    note("partita", FusionChoices)
    torch.compiler.reset()
    with config.patch(fx_graph_cache=False):
        yield found


@pytest.mark.parametrize("first", ["torch", "partita"])
def test_each_compiler_makes_its_own_choices_whichever_compiled_first(asked, first):
    x = torch.ones(64, 64)
    compilers = {"torch": lambda: torch.compile(grow)(x), "partita": lambda: pt.compile(grow)(x)}
    # partita's class asks torch's in its turn, so that what is asked first tells whose it is.
    for name in sorted(compilers, key=lambda name: name != first):
        asked.clear()
        compilers[name]()
        assert asked[:1] == [name]
