"""Models by name: initial weights depend only on the seed, and bad names get clear errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig
from p2ptrain.training.models import PRESETS, build, build_of, check_name, context_length, count_parameters

USERS_MODULE = """
import torch
from torch import nn

class Bigram(nn.Module):
    def __init__(self, vocab_size=98, context=None):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)
        if context:
            self.context = context
    def forward(self, tokens):
        return self.table(tokens)

def plain():
    return Bigram()

def sized(*, vocab_size):
    return Bigram(vocab_size, context=12)

def small():
    return Bigram(50)

class Peeking(Bigram):
    def forward(self, tokens):
        return self.table(tokens) + self.table(tokens.roll(-1, 1))

class Noisy(Peeking):
    def forward(self, tokens):
        return torch.rand(()) * super().forward(tokens)

class Short(Bigram):
    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(32, 98)
    def forward(self, tokens):
        return self.table(tokens) + self.positions(torch.arange(tokens.shape[1]))

class Counting(Bigram):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.dropout = nn.Dropout(0.5).eval()
    def forward(self, tokens):
        self.calls += 1
        if self.calls > 2:
            raise IndexError("the state of a sequence goes on from call to call")
        return self.dropout(self.table(tokens))

class Growing(Bigram):
    # As older rotary embeddings: a table that is as long as the longest window so far.
    def __init__(self):
        super().__init__()
        self.seen = 0
        self.register_buffer("positions", torch.zeros(0), persistent=False)
    def forward(self, tokens):
        if tokens.shape[1] > self.seen:
            self.seen = tokens.shape[1]
            self.positions = torch.arange(1.0, self.seen + 1)
        return self.table(tokens) + self.positions[: tokens.shape[1], None]

class Scaled(Bigram):
    # As BitNet's quantised activations: all positions share a scale.
    def forward(self, tokens):
        values = self.table(tokens)
        scale = values.abs().max()
        return (values / scale * 127).round() * scale / 127

def frozen():
    return Bigram().requires_grad_(False)

def number():
    return 5

def broken():
    raise RuntimeError("no weights here")

def failing():
    return nn.Linear(3, 3)

class Unequal(Bigram):
    def forward(self, tokens):
        return super().forward(tokens) @ self.table.weight[:3]

def unequal():
    return Unequal()

def flat():
    return nn.Flatten()

constant = 5
"""


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_models.py").write_text(USERS_MODULE, encoding="utf-8")
    (tmp_path / "users_broken.py").write_text("import nowhere_to_be_found", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "users_models", raising=False)
    return "users_models"


def _weights(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters())


def test_first_weights_depend_on_the_seed_alone(users_module: str) -> None:
    for name in ("gpt-demo", f"{users_module}:plain"):
        torch.manual_seed(1)
        first = _weights(build(name, vocab_size=98, seed=5))
        state = torch.get_rng_state()
        torch.manual_seed(2)
        torch.rand(3)
        second = _weights(build(name, vocab_size=98, seed=5))
        assert torch.equal(first, second)
        assert not torch.equal(first, _weights(build(name, vocab_size=98, seed=6)))
        torch.manual_seed(1)
        assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", PRESETS)
def test_tables_of_built_in_models_have_a_row_for_each_id(name: str) -> None:
    for vocab_size in (98, 60_000):
        with torch.device("meta"):
            model = build(name, vocab_size=vocab_size, seed=0)
        logits = model(torch.zeros(1, 2, dtype=torch.int64, device="meta"))
        assert logits.shape == (1, 2, vocab_size)
        assert sum(p.numel() for p in model.parameters()) == count_parameters(name, vocab_size=vocab_size)


@pytest.mark.parametrize("name", ["gpt-demo", "llama-15m"])
def test_a_run_may_have_another_context_than_the_model(name: str) -> None:
    for context in (8, 600):
        with torch.device("meta"):
            model = build_of(RunConfig(model=name, context=context))
        assert context_length(model) == context
        assert model(torch.zeros(1, context, dtype=torch.int64, device="meta")).shape == (1, context, 98)
        counted = count_parameters(name, vocab_size=98, context=context)
        assert counted == sum(p.numel() for p in model.parameters())


def test_a_users_model_says_its_own_context(users_module: str) -> None:
    with pytest.raises(ConfigError, match=r"--context 8: a model of your own says its longest sequence"):
        build(f"{users_module}:sized", vocab_size=98, seed=0, context=8)


def test_a_users_factory_may_ask_for_the_vocabulary(users_module: str) -> None:
    sized = build(f"{users_module}:sized", vocab_size=98, seed=0)
    assert sized.training
    assert sized.table.weight.shape == (98, 98)
    assert context_length(sized) == 12
    assert context_length(build(f"{users_module}:plain", vocab_size=98, seed=0)) == 64


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt-dmo", r"unknown model; did you mean gpt-demo\?"),
        ("resnet", "unknown model; known are: diloco-150m, diloco-400m, diloco-60m, gpt-demo, gpt-small, gpt2-124m"),
        ("no_such_module:factory", "cannot import 'no_such_module'"),
        (":factory", "cannot import ''"),
        ("users_broken:factory", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("users_models:plan", r"no function 'plan'; did you mean plain\?"),
        ("users_models:constant", "no function 'constant'"),
        ("users_models:number", "returned int; it must be a torch.nn.Module"),
        ("users_models:broken", r"the factory failed at users_models.py:\d+ \(RuntimeError: no weights here\)"),
        ("users_models:failing", r"failed on int64 tokens of shape \(1, 64\) \(RuntimeError"),
        ("users_models:unequal", r"failed on int64 tokens of shape \(1, 64\) at users_models.py:\d+ \(Runtime"),
        (
            "users_models:flat",
            r"^--model \S+ tokens \(1, 64\) gave \(1, 64\); it must return logits of shape \(batch, time, 98 or",
        ),
        ("users_models:small", r"^--model users_models:small: tokens \(1, 64\) gave \(1, 64, 50\)"),
        (
            "users_models:Short",
            r"of shape \(1, 64\) .*\(IndexError.*; without an attribute context, windows are 64 tokens",
        ),
        ("users_models:Peeking", "its predictions depend on later tokens; it must be causal"),
        ("users_models:frozen", "the model has no parameter with requires_grad=True: there is nothing to train"),
    ],
)
def test_what_is_no_model_is_refused(name: str, message: str, users_module: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(name, vocab_size=98, seed=0)
    assert f"--model {name}" in str(caught.value)


def test_a_models_modes_are_as_its_factory_left_them_and_its_state_is_of_one_piece(users_module: str) -> None:
    model = build(f"{users_module}:Counting", vocab_size=98, seed=0)
    assert (model.training, model.dropout.training) == (True, False)
    model = build(f"{users_module}:Growing", vocab_size=98, seed=0)
    assert (model.seen, len(model.positions), float(model.positions[-1])) == (64, 64, 64.0)


def test_a_scale_that_all_positions_share_is_no_sight_of_later_tokens(users_module: str) -> None:
    for seed in range(30):
        build(f"{users_module}:Scaled", vocab_size=98, seed=seed)


@pytest.mark.filterwarnings("error")
def test_of_some_models_it_is_not_known_whether_they_are_causal(users_module: str) -> None:
    build(f"{users_module}:Noisy", vocab_size=98, seed=0)
    with torch.device("meta"):
        build(f"{users_module}:Peeking", vocab_size=98, seed=0)


def test_names_can_be_checked_without_building(users_module: str) -> None:
    check_name("gpt2-124m")
    check_name(f"{users_module}:broken")
    with pytest.raises(ConfigError):
        check_name(f"{users_module}:nothing")


def test_a_models_context_must_be_a_length() -> None:
    model = nn.Linear(1, 1)
    model.context = "long"
    with pytest.raises(ConfigError, match="context = 'long'"):
        context_length(model)
