"""Models of transformers, from directories that stand for the hub's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import torch

from p2ptrain.errors import ConfigError, TransientError
from p2ptrain.training.data.tokenizer import Characters
from p2ptrain.training.export import export
from p2ptrain.training.generation import load_model
from p2ptrain.training.models import GPT, GPTConfig, build, check_name, context_length, count_parameters, hf

transformers = pytest.importorskip("transformers")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    export(GPT(GPTConfig(vocab_size=98, layers=2, heads=2, width=16, context=12)), Characters(), tmp_path / "tiny")
    return tmp_path / "tiny"


def test_from_its_configuration_a_model_has_the_seeds_weights(saved: Path) -> None:
    name = f"hf:{saved}"
    check_name(name)
    first, second, other = (build(name, vocab_size=98, seed=seed) for seed in (1, 1, 2))
    assert context_length(first) == 12
    assert context_length(build(name, vocab_size=98, seed=1, context=5)) == 5
    with pytest.raises(ConfigError, match=r"--context 13: must be at most 12, the positions of --model hf:"):
        build(name, vocab_size=98, seed=1, context=13)
    tokens = torch.randint(98, (2, 12))
    with torch.no_grad():
        assert first.eval()(tokens).shape == (2, 12, 98)
        assert torch.equal(first(tokens), second.eval()(tokens))
        assert not torch.equal(first(tokens), other.eval()(tokens))
    assert count_parameters(name, vocab_size=98) == sum(p.numel() for p in first.parameters())


@pytest.mark.parametrize("is_decoder", [False, True])
def test_only_causal_models_are_trained(tmp_path: Path, is_decoder: bool) -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    transformers.BertConfig(vocab_size=98, is_decoder=is_decoder, **shape).save_pretrained(tmp_path)
    if is_decoder:
        assert build(f"hf:{tmp_path}", vocab_size=98, seed=1).training
        return
    with pytest.raises(ConfigError, match=r"depend on later tokens; it must be causal .transformers: is_de"):
        build(f"hf:{tmp_path}", vocab_size=98, seed=1)


def test_a_hub_that_does_not_answer_may_do_so_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "is_hub_there", lambda: False)
    with pytest.raises(TransientError, match=r"no configuration that transformers can use"):
        build("hf:p2ptrain-tests/no-such-model", vocab_size=98, seed=1)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as raised:
        build("hf:p2ptrain-tests/no-such-model", vocab_size=98, seed=1)
    assert raised.type is ConfigError


def test_weights_that_the_hub_does_not_give_may_come_later(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration is in the cache."""
    config = transformers.AutoConfig.from_pretrained(saved)
    monkeypatch.setattr(hf, "is_hub_there", lambda: False)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: config)

    def fail(*_: object, **__: object) -> None:
        raise OSError("not in the cache")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(TransientError, match=r"no-such-model:pretrained: cannot be built .not in the cache"):
        build("hf:p2ptrain-tests/no-such-model:pretrained", vocab_size=98, seed=1)


def test_pretrained_weights_are_those_of_the_directory(saved: Path) -> None:
    torch.manual_seed(3)
    ours = GPT(GPTConfig(vocab_size=98, layers=2, heads=2, width=16, context=12)).eval()
    model = build(f"hf:{saved}:pretrained", vocab_size=98, seed=1).eval()
    tokens = torch.randint(98, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), ours(tokens), rtol=1e-5, atol=1e-5)


def test_weights_that_lack_what_the_configuration_names_are_refused(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"n_layer": 4}))
    with pytest.raises(ConfigError, match=r"its weights lack transformer.h.2.* and 23 more that its configuration"):
        build(f"hf:{saved}:pretrained", vocab_size=98, seed=1)


def test_a_configuration_without_positions_is_refused(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"n_positions": 0}))
    with pytest.raises(ConfigError, match="its configuration allows 0 positions; 1 or more can be trained"):
        build(f"hf:{saved}", vocab_size=98, seed=1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_layer": 5_000_000}, "has 5,000,000 layers, and at most 1,000 are built; give fewer"),
        ({"n_embd": 2**22}, r"its weights take at least \d+ TB \(.* of memory are free; train a smaller model"),
        ({"n_positions": 10**13}, r"its weights take at least \d+ TB \([\d,]+ parameters\), and .* of memory are free"),
        ({"n_embd": 2**62}, r"cannot be built \(Storage size calculation overflowed"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_it_is_built(
    changed: dict[str, int], message: str, saved: Path
) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | changed))
    for suffix in ("", ":pretrained"):
        with pytest.raises(ConfigError, match=f"--model hf:{saved}{suffix}: {message}"):
            build(f"hf:{saved}{suffix}", vocab_size=98, seed=1)


def test_a_tokenizer_that_is_larger_than_the_models_table_is_refused(saved: Path, tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(n): n for n in range(99)}, unk_token="0"))
    words.save(str(tmp_path / "words.json"))
    with pytest.raises(ConfigError, match="its tokenizer has 99 ids, and its model 98; give the model's own"):
        load_model(saved, str(tmp_path / "words.json"))


@pytest.mark.parametrize("suffix", ["", ":pretrained"])
def test_a_larger_tokenizer_gets_a_larger_table(saved: Path, suffix: str) -> None:
    model = build(f"hf:{saved}{suffix}", vocab_size=120, seed=1)
    with torch.no_grad():
        assert model(torch.full((1, 3), 119)).shape == (1, 3, 120)


def test_code_of_a_repository_is_neither_run_nor_asked_about(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (saved / "evil.py").write_text("raise SystemExit('run')")
    config = json.loads((saved / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (saved / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *asked: pytest.fail("asked on the terminal"))
    with pytest.raises(ConfigError, match=r"has no configuration that transformers can use"):
        check_name(f"hf:{saved}")


def test_a_model_of_transformers_is_exported_as_it_is(saved: Path, tmp_path: Path) -> None:
    model = build(f"hf:{saved}", vocab_size=98, seed=1).eval()
    model.lm.config.eos_token_id = model.lm.generation_config.eos_token_id = 5  # that of another tokenizer
    export(model, Characters(), tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text()).get("eos_token_id") == Characters().separator
    loaded, tokenizer = load_model(tmp_path / "out")
    assert tokenizer.vocab_size == 98
    tokens = torch.randint(98, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(tokens), model(tokens), rtol=1e-5, atol=1e-5)


def test_what_transformers_does_not_know_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"--model hf:.*empty: has no configuration that transformers can use \("):
        check_name(f"hf:{tmp_path / 'empty'}")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match=r"--model hf:.*empty:pretrained: cannot be built"):
        build(f"hf:{tmp_path / 'empty'}:pretrained", vocab_size=98, seed=0)
