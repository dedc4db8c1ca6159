"""Are recurrent layers captured, which keep their parameters in a list of their own?"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import partita as pt
from tests.programs.steps import squares

X = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(1))
LAYERS = {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN": nn.RNN}


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(0)
        self.layer = LAYERS[layer](4, 7, num_layers=2, batch_first=True)
        self.head = nn.Linear(7, 3)

    def forward(self, x):
        return self.head(self.layer(x)[0])


def train(mesh, layer, stage, fast, looked_at=False):
    """Losses of three steps; `looked_at` before and after them, the model runs eagerly too."""
    model, x = Recurrent(layer), X
    if mesh is not None:
        model = pt.zero(model, mesh, stage=stage) if stage else pt.parallelize(model, mesh)
        x = pt.distribute_tensor(X, mesh, [pt.Shard(0)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def look():
        with torch.no_grad():
            return [model(x).square().mean().item()] if looked_at else []

    step = squares(model, optimizer)
    step = pt.compile(step, backend="graph") if fast else step
    found = [*look(), *(step(x).item() for _ in range(3)), *look()]
    assert not [w for w in model.layer._flat_weights if isinstance(w, FakeTensor)]
    return torch.tensor(found)


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("stage", [0, 3])
def test_recurrent_layers_train_as_in_eager_and_as_on_one_device(layer, stage):
    with pt.ranks(dp=2) as world:
        eager = world.run(train, layer, stage, False)[0]
        fast = world.run(train, layer, stage, True)[0]
    torch.testing.assert_close(fast, eager, rtol=1e-6, atol=0)
    torch.testing.assert_close(fast, train(None, layer, 0, False), rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_a_captured_layer_still_runs_eagerly_and_ran_before(stage):
    with pt.ranks(dp=2) as world:
        found = world.run(train, "GRU", stage, True, True)[0]
    wanted = train(None, "GRU", 0, False, True)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_onednn_is_as_it_was_after_a_capture(monkeypatch):
    # As after torch.backends.disable_global_flags(), which cannot be taken back.
    monkeypatch.setattr(torch.backends, "__allow_nonbracketed_mutation_flag", False)
    before = torch.backends.mkldnn.enabled
    train(None, "LSTM", 0, True)
    assert torch.backends.mkldnn.enabled == before


def test_a_functional_lstm_is_refused_where_it_is_trained_and_names_the_layer():
    layer = nn.LSTM(4, 7)
    weights = nn.ParameterList(p.detach() for p in layer.parameters())
    hidden = torch.zeros(2, 1, 5, 7).unbind()

    def step(x):
        out, *_ = torch.lstm(x, hidden, list(weights), True, 1, 0.0, True, False, False)
        return torch.autograd.grad(out.sum(), list(weights))

    if torch.backends.mkldnn.is_available():
        with pytest.raises(pt.CaptureError, match=r"torch\.nn\.LSTM"):
            pt.compile(step, backend="graph")(X.transpose(0, 1)[:, :5])


def test_any_other_list_in_which_a_step_leaves_a_tensor_is_refused():
    model = Recurrent("RNN")
    model.seen = [torch.zeros(())]

    def step(x):
        loss = model(x).sum()
        model.seen = [loss]
        return loss

    with pytest.raises(pt.CaptureError, match=r"leaves a tensor in model\.seen"):
        pt.compile(step, backend="graph")(X)


def test_packed_sequences_are_refused_with_the_line_and_run_eagerly_where_that_is_asked_for():
    torch.manual_seed(0)
    model = nn.GRU(3, 4)
    lengths = torch.tensor([3, 2])

    def step(x):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths)
        return nn.utils.rnn.pad_packed_sequence(model(packed)[0])[0]

    x = torch.randn(3, 2, 3)
    with pytest.raises(pt.CaptureError, match=r"depends on data.*test_recurrent"):
        pt.compile(step, backend="graph")(x)
    with pytest.warns(UserWarning, match="runs eagerly"):
        found = pt.compile(step, backend="graph", fallback="eager")(x)
    torch.testing.assert_close(found, step(x))
