"""Small models of every kind, for front doors that take any model.

Each entry of `ZOO` makes a model, its inputs, and a function that turns both into a loss.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from programs import assert_nothing_left, assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint


class Transformer(nn.Module):
    def __init__(self, width=32, heads=4, layers=2, vocabulary=50):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 2 * width, dropout=0.1, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.output = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


class Tied(nn.Module):
    """The embedding's weight makes the logits too, and one layer is used twice."""

    def __init__(self, width=32, vocabulary=50):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layer = nn.Linear(width, width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for _ in range(2):
            x = x + torch.tanh(self.layer(x))
        return self.output(x)


class Residual(nn.Module):
    """Convolutions with batch norm and a skip, downsampled."""

    def __init__(self, channels=8, classes=5):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(4))
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(4)
        )
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x):
        x = self.stem(x)
        for first in (0, 2):
            y = F.relu(self.norms[first](self.convolutions[first](x)))
            y = self.norms[first + 1](self.convolutions[first + 1](y))
            x = F.max_pool2d(F.relu(x + y), 2)
        return self.classifier(x.mean(dim=(2, 3)))


class Recurrent(nn.Module):
    def __init__(self, width=24, vocabulary=40):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens))[0])


class InPlace(nn.Module):
    """Activations that overwrite their input, and sums that overwrite one of theirs."""

    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, 3)

    def forward(self, x):
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            y = F.leaky_relu(self.norm(first(x)), 0.1, inplace=True)
            y = second(y)
            y += x
            x = F.dropout(y, 0.2, training=self.training, inplace=True)
        return self.output(x)


class Views(nn.Module):
    """One projection cut in three, with transposed, expanded and overlapping views of it."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, 3)

    def forward(self, x):
        batch, rows, width = x.shape
        query, key, value = self.qkv(x).view(batch, rows, 3, self.heads, -1).unbind(2)
        scores = query.transpose(1, 2) @ key.permute(0, 2, 3, 1)
        y = (scores.softmax(-1) @ value.transpose(1, 2)).transpose(1, 2).reshape(x.shape)
        windows = y.unfold(1, 3, 1)  # each row lies in up to three of them
        y = y[:, 1:-1] * (windows * windows).mean(-1)
        scale = y.mean(dim=-1, keepdim=True).expand(-1, -1, width)
        return self.output(y * scale * scale)


class Checkpointed(nn.Module):
    def __init__(self, width=32, *, use_reentrant=False):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))
            for _ in range(4)
        )
        self.output = nn.Linear(width, 3)

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if index % 2:
                x = x + checkpoint(layer, x, use_reentrant=self.use_reentrant)
            else:
                x = x + layer(x)
        return self.output(x)


class Mlp(nn.Module):
    """Two linear layers by Megatron's names."""

    def __init__(self, width=32):
        super().__init__()
        self.linear_fc1 = nn.Linear(width, 4 * width)
        self.linear_fc2 = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


def tokens(generator, vocabulary):
    return torch.randint(0, vocabulary, (3, 12), generator=generator)


def rows(generator):
    return torch.randn(3, 12, 32, generator=generator)


ZOO = {
    "transformer": (Transformer, lambda g: tokens(g, 50)),
    "residual": (Residual, lambda g: torch.randn(3, 3, 12, 12, generator=g)),
    "lstm": (Recurrent, lambda g: tokens(g, 40)),
    "tied": (Tied, lambda g: tokens(g, 50)),
    "in_place": (InPlace, rows),
    "views": (Views, rows),
    "checkpoint": (Checkpointed, rows),
    "reentrant": (lambda: Checkpointed(use_reentrant=True), rows),
}


def make(name, *, seed=0):
    """Return a model of the zoo and a function that makes its inputs from a generator."""
    kind, inputs = ZOO[name]
    torch.manual_seed(seed)
    return kind(), inputs


def loss_of(model, x):
    """Return a loss in which all of the output counts."""
    y = model(x)
    return (y.float() * torch.linspace(-1, 1, y.shape[-1])).square().mean()


def train(name, context=None, *, steps=4, order="FBFB", seed=0):
    """Train a model of the zoo; return losses, gradients of every step, and buffers, as numbers.

    ``context`` is what to enter around each forward, or gets the model and returns that anew each
    time. ``order`` says in which order forwards (F) and backwards (B, oldest first) follow.
    """
    model, inputs = make(name, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(seed + 1)
    results = []
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(100 + step)
        graphs = []
        for action in order:
            if action == "B":
                graphs.pop(0).backward()
                continue
            x = inputs(generator)
            if x.is_floating_point():
                x.requires_grad_()
            with (context(model) if callable(context) else context) or nullcontext():
                loss = loss_of(model, x)
            graphs.append(loss)
            results.append(loss.detach().clone())
            del loss
        assert not graphs
        results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return results + [buffer.clone() for buffer in model.buffers()]


@functools.cache
def expected(name, **how):
    """Return what training without offload gives."""
    return train(name, **how)


def assert_exact(name, offload, **how):
    """Train without and with a front door's context; return what its last step has counted."""
    assert_same(expected(name, **how), train(name, offload, **how))
    offload.end_step()
    assert_nothing_left(offload._groups.manager)
    return offload.last_step
