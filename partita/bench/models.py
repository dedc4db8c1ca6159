"""Models of benches, written in ordinary PyTorch for one device, with a factor for their width.

A model is called with its batch (tensors with samples in dimension 0) and returns its scalar loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita.app.models import GPT


class Linears(nn.Module):
    """A stack of linear layers of equal size.

    With few samples, its activations are small compared to its weights.
    """

    def __init__(self, wide: int = 1, layers: int = 8):
        super().__init__()
        width = 64 * wide
        self.net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return (self.net(x) ** 2).mean()


class Language(nn.Module):
    """A GPT with its cross-entropy loss on the next byte."""

    def __init__(self, wide: int = 1):
        super().__init__()
        self.gpt = GPT(layers=2, width=32 * wide, heads=2, context=32)

    def forward(self, text: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.gpt(text).flatten(0, 1), target.flatten())


class CNN(nn.Module):
    """Two convolutions with norms, and a classifier of four classes."""

    def __init__(self, wide: int = 1):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8 * wide, 3, padding=1),
            nn.BatchNorm2d(8 * wide),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8 * wide, 12 * wide, 3, padding=1, groups=4),
            nn.GroupNorm(4, 12 * wide),
            nn.LeakyReLU(),
            nn.AvgPool2d(2),
            nn.Dropout2d(0.1),
        )
        self.head = nn.Linear(12 * wide * 2 * 2, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.head(torch.flatten(self.features(x), 1))
        return F.cross_entropy(logits, target, label_smoothing=0.1)


class UNet(nn.Module):
    """A U-Net with two levels and skip connections. Its loss compares the result with a mask."""

    def __init__(self, wide: int = 1):
        super().__init__()
        few, many = 4 * wide, 8 * wide

        def double(i: int, o: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(2, o), nn.SiLU())

        self.down1, self.down2, self.middle = double(3, few), double(few, many), double(many, many)
        self.up1 = nn.ConvTranspose2d(many, many, 2, stride=2)
        self.join1, self.join2 = double(2 * many, many), double(many + few, few)
        self.out = nn.Conv2d(few, 1, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        y = self.join1(torch.cat([self.up1(c), b], dim=1))
        y = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
        logits = self.out(self.join2(torch.cat([y, a], dim=1)))
        mask = torch.sigmoid(logits)
        dice = 1 - (2 * (mask * target).sum() + 1) / (mask.sum() + target.sum() + 1)
        return F.binary_cross_entropy_with_logits(logits, target) + dice


class VAE(nn.Module):
    """A variational autoencoder of 16 numbers, with one hidden layer in encoder and decoder."""

    def __init__(self, wide: int = 1):
        super().__init__()
        hidden, latent = 12 * wide, 3 * wide
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(16, hidden), nn.ReLU())
        self.mean, self.logvar = nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.decode = nn.Sequential(
            nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, 16), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.encode(x)
        mean, logvar = self.mean(h), self.logvar(h)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        y = self.decode(z).view(-1, 1, 4, 4)
        fit = F.binary_cross_entropy(y, x, reduction="sum")
        kl = -0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())
        return (fit + kl) / x.size(0)


def mlp(wide: int = 1) -> nn.Sequential:
    """Returns a multi-layer perceptron from 6 inputs to 3 outputs, both multiplied by `wide`."""
    return nn.Sequential(
        nn.Linear(6, 10 * wide),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(10 * wide, 8 * wide),
        nn.Tanh(),
        nn.Linear(8 * wide, 3),
    )


class MLP(nn.Module):
    """The multi-layer perceptron `mlp` with a regression loss."""

    def __init__(self, wide: int = 1):
        super().__init__()
        self.net, self.loss = mlp(wide), nn.HuberLoss(delta=0.5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.net(x), target)
        return loss


# -- training setups -------------------------------------------------------------------------------

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model of the benches, with its data and its blocks.

    Attributes:
        make: a function of the width factor that returns the model.
        batch: a function of the width factor and the number of samples that returns a batch.
        blocks: patterns of the names of modules that remat recomputes one by one. If empty, the
            model is recomputed in one piece.
    """

    make: Callable[[int], nn.Module]
    batch: Callable[[int, int], Batch]
    blocks: tuple[str, ...] = ()


def images(n: int) -> Batch:
    """Returns `n` random images (n, 3, 8, 8), and their classes from 0 to 3."""
    return torch.randn(n, 3, 8, 8), torch.randint(0, 4, (n,))


MODELS: dict[str, Case] = {
    "gpt": Case(
        Language, lambda wide, n: tuple(torch.randint(0, 256, (2, n, 32))), ("gpt.blocks.*",)
    ),
    "linears": Case(Linears, lambda wide, n: (torch.randn(n, 64 * wide),)),
    "cnn": Case(CNN, lambda wide, n: images(n), ("features",)),
    "vae": Case(VAE, lambda wide, n: (torch.rand(n, 1, 4, 4),), ("encode", "decode")),
    "mlp": Case(MLP, lambda wide, n: (torch.randn(n, 6), torch.randn(n, 3)), ("net",)),
    "unet": Case(
        UNet,
        lambda wide, n: (torch.randn(n, 3, 8, 8), torch.randint(0, 2, (n, 1, 8, 8)) * 1.0),
        ("down*", "middle", "join*"),
    ),
}
"""The six models of the benches, by name."""
