"""Modules of torch.nn and its parametrisations, as users put them into models and make units of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.ordinary.program import (
    DIM,
    MESHES,
    Program,
    Results,
    Scenario,
    adamw,
    blocks,
    check,
    mean_square,
    results,
    scenario_id,
    scenarios_in,
    sgd,
)
from tests.support.sharded import mesh_id, pool_for

WORDS = 12
SEQUENCES = (2, 4, DIM)


def _words(x: Tensor) -> Tensor:
    """Words for numbers: [...] of floats -> [...] of indices below `WORDS`, among them 0."""
    return (x.abs() * 4).long().clamp(max=WORDS - 1)


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


class _Words(nn.Module):
    """An embedding and blocks behind it."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = blocks(2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(self.embedding(_words(x)))
        return out


class _Tied(_Words):
    """The embedding's weight once more as that of the head."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(WORDS, DIM))
        self.head = nn.Linear(DIM, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(super().forward(x))
        return out


class _Recurrent(nn.Module):
    """Two layers of LSTM, packed or not, and a head."""

    def __init__(self, lengths: list[int] | None = None) -> None:
        super().__init__()
        self.lengths = lengths
        options = {} if lengths is None else {"bidirectional": True, "proj_size": 3}
        self.lstm = nn.LSTM(DIM, DIM, 2, batch_first=True, **options)
        self.head = nn.Linear(DIM if lengths is None else 6, DIM)

    def forward(self, x: Tensor) -> Tensor:
        if self.lengths is None:
            out: Tensor = self.head(self.lstm(x)[0])
            return out
        packed, _ = self.lstm(pack_padded_sequence(x, self.lengths, batch_first=True))
        out = self.head(pad_packed_sequence(packed, batch_first=True)[0])
        return out


class _Lists(nn.Module):
    """Parameters in a list and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(DIM, DIM) * 0.3) for _ in range(3)])
        self.others = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(DIM))})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight + self.others["bias"])
        return x


class _Bilinear(nn.Module):
    """A bilinear layer, a temperature without dimensions, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(DIM, DIM, DIM)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bilinear(x, x) * self.temperature + self.nothing.sum()
        return out


class _Remembers(nn.Module):
    """Keeps its weight, transposed, and a penalty on it as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        self.transposed = self.linear.weight.t()
        self.penalty = self.linear.weight.square().sum()
        return torch.tanh(x @ self.transposed) + self.linear(x)


class _Experts(nn.Module):
    """A mixture of experts; those without rows run on nothing, or are skipped."""

    def __init__(self, chosen: int, skip: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 4)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.chosen, self.skip = chosen, skip

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = self.gate(x).softmax(-1).topk(self.chosen, -1)
        out = x * 0.1
        for index, expert in enumerate(self.experts):
            is_chosen = indices == index
            rows = is_chosen.any(-1).nonzero()[:, 0]
            if len(rows) or not self.skip:
                weight = (weights * is_chosen).sum(-1)[rows, None]
                out = out.index_add(0, rows, expert(x[rows]) * weight)
        return out


def embeds_bags_of_words(program: Program) -> Results:
    """Begins with an `EmbeddingBag`."""
    model = _Words(nn.EmbeddingBag(WORDS, DIM))
    return program.fit(model, [model.embedding, *model.blocks])


def embeds_with_padding(program: Program) -> Results:
    """Has a padding index, and gradients scaled by how often a word occurs."""
    model = _Words(nn.Embedding(WORDS, DIM, padding_idx=0, scale_grad_by_freq=True))
    return program.fit(model, [model.embedding, *model.blocks])


def ties_embedding_and_head(program: Program) -> Results:
    """Shares a weight between embedding and head, both of the root."""
    model = _Tied().double()
    program.shard(model, model.blocks)
    program.train(model, adamw(model))
    return results(model)


def normalises_weights(program: Program) -> Results:
    """Uses `parametrizations.weight_norm` in each unit."""
    model = blocks(2)
    for block in model:
        parametrizations.weight_norm(block[0])
    return program.fit(model, model)


def normalises_weights_by_hooks(program: Program) -> Results:
    """Uses the `weight_norm` of old, which computes the weight in a hook."""
    model = blocks(2)
    for block in model:
        with pytest.warns(FutureWarning, match="deprecated"):
            weight_norm(block[0])
    return program.fit(model, model)


def keeps_weights_orthogonal(program: Program) -> Results:
    """Uses `parametrizations.orthogonal`."""
    model = blocks(2)
    for block in model:
        parametrizations.orthogonal(block[0])
    return program.fit(model, model)


def caches_parametrised_weights(program: Program) -> Results:
    """Runs two forwards inside `parametrize.cached()`."""
    model = blocks(2)
    parametrize.register_parametrization(model[0][0], "weight", _Symmetric())

    def cached(model: nn.Module, x: Tensor) -> Tensor:
        with parametrize.cached():
            loss: Tensor = model(x).square().mean() + model(x + 1).mean()
        return loss

    return program.fit(model, model, loss_of=cached)


def prunes_weights(program: Program) -> Results:
    """Prunes at random before sharding: masks are buffers, weights are computed in hooks."""
    model = blocks(2)
    for block in model:
        prune.random_unstructured(block[0], "weight", 0.3)
    return program.fit(model, model)


def encodes_and_evaluates(program: Program) -> Results:
    """Evaluates a transformer's encoder between steps, which takes torch's fast path there."""
    layer = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double()
    program.shard(model, model.layers)
    optimizer, seen = sgd(model), []
    for k in range(3):
        program.train(model, optimizer, [k], shape=SEQUENCES)
        seen.append(program.evaluate(model, 50 + k, SEQUENCES))
    return results(model, seen=torch.stack(seen))


def reads_sequences(program: Program) -> Results:
    """Has an LSTM for a unit."""
    model = _Recurrent()
    return program.fit(model, [model.lstm, model.head], shape=SEQUENCES)


def reads_packed_sequences(program: Program) -> Results:
    """Packs sequences of different lengths for an LSTM in both directions with projections."""
    model = _Recurrent([4, 3])
    return program.fit(model, [model.lstm], shape=SEQUENCES)


def keeps_parameters_in_lists(program: Program) -> Results:
    """Computes with the parameters of a `ParameterList` and a `ParameterDict`; there are no units inside."""
    model = nn.Sequential(_Lists(), _Lists())
    return program.fit(model)


def convolves(program: Program) -> Results:
    """Has convolutions, transposed ones, group norms and learnt activations in its units."""
    model = nn.Sequential(
        nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)),
        nn.Sequential(nn.ConvTranspose1d(4, 4, 3, padding=1), nn.PReLU()),
    )
    return program.fit(model, model, shape=(2, 4, DIM))


def has_parameters_of_any_size(program: Program) -> Results:
    """Has a parameter of one element without dimensions, and one of none."""
    model = nn.Sequential(_Bilinear(), _Bilinear())
    return program.fit(model, model)


def remembers_weights_as_attributes(program: Program) -> Results:
    """Computes with a view of the weight kept as an attribute, and adds a penalty kept beside it to the loss."""
    model = nn.Sequential(_Remembers(), _Remembers())

    def penalised(model: nn.Module, x: Tensor) -> Tensor:
        out = mean_square(model, x)
        return out + 0.01 * sum((block.penalty for block in model), torch.zeros_like(out))  # type: ignore[attr-defined]

    return program.fit(model, model, loss_of=penalised)


def mixes_experts_that_are_units(program: Program) -> Results:
    """Makes a unit of each expert; all of them run, some on no rows."""
    model = _Experts(chosen=2, skip=False)
    return program.fit(model, model.experts, shape=(5, DIM))


def skips_experts_without_rows(program: Program) -> Results:
    """Makes a unit of each layer of experts, of which every rank skips others."""
    model = nn.Sequential(_Experts(1, skip=True), _Experts(1, skip=True))
    return program.fit(model, model, shape=(2, DIM))


@pytest.mark.parametrize("scenario", scenarios_in(__name__), ids=scenario_id)
@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_modules_equal_their_twins(request: pytest.FixtureRequest, shape: tuple[int, ...], scenario: Scenario) -> None:
    pool_for(request, shape).run(check, shape, scenario)
