"""What `p2ptrain export` writes, read by transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig
from p2ptrain.training import checkpoint
from p2ptrain.training import export as export_module
from p2ptrain.training.data.tokenizer import Bytes, Characters, Ids, Tokenizer
from p2ptrain.training.data.tokenizer_file import TokenizerFile, as_file, train_tokenizer
from p2ptrain.training.export import export
from p2ptrain.training.generation import load_model
from p2ptrain.training.models import GPT, GPTConfig, Llama, LlamaConfig, build
from tests.fakes import full_disk

transformers = pytest.importorskip("transformers")

TEXT = "To be, or not to be: that is the question.\n\tÜnïcödé 𝄞 \r\n  two  spaces"
TINY_GPT = GPTConfig(vocab_size=98, layers=2, heads=2, width=16, context=12)
TINY_LLAMA = LlamaConfig(vocab_size=98, layers=2, heads=2, width=16, hidden=24, context=12)


def _moved(model: nn.Module) -> nn.Module:
    """With biases and norms that are not those of the start."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (GPT(TINY_GPT), "GPT2LMHeadModel"),
        (Llama(TINY_LLAMA), "Qwen3ForCausalLM"),
        (Llama(replace(TINY_LLAMA, tied=False)), "Qwen3ForCausalLM"),
        (Llama(replace(TINY_LLAMA, qk_norm=False)), "LlamaForCausalLM"),
    ],
)
def test_transformers_computes_the_same_logits(model: nn.Module, expected: str, tmp_path: Path) -> None:
    model = _moved(model)
    export(model, Characters(), tmp_path / "out")
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(loaded).__name__ == expected
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    tokens = torch.randint(98, (3, 12))
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["chars", "bytes", "trained"])
def test_the_exported_tokenizer_makes_the_same_ids(name: str, tmp_path: Path) -> None:
    tokenizer: Tokenizer = {"chars": Characters(), "bytes": Bytes(), "trained": train_tokenizer([TEXT * 20], 300)}[name]
    export(_moved(GPT(replace(TINY_GPT, vocab_size=300))), tokenizer, tmp_path / "out")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    (ids,) = tokenizer.encode([TEXT])
    assert loaded(TEXT)["input_ids"] == ids.tolist()
    assert loaded.decode(ids.tolist(), clean_up_tokenization_spaces=False) == tokenizer.decode(ids.tolist())
    assert loaded.eos_token_id == tokenizer.separator
    assert loaded.model_max_length == 12
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == tokenizer.separator


@pytest.mark.parametrize("tokenizer", [Characters(), Bytes()])
def test_a_file_of_characters_or_bytes_is_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    file = TokenizerFile(as_file(tokenizer), "it")
    assert (file.vocab_size, file.separator) == (tokenizer.vocab_size, tokenizer.separator)
    assert file.encode([TEXT])[0].tolist() == tokenizer.encode([TEXT])[0].tolist()


def test_without_a_tokenizer_the_model_alone_is_written(tmp_path: Path) -> None:
    export(GPT(TINY_GPT), Ids(98), tmp_path / "out")
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}


def test_what_transformers_cannot_have_is_an_error(tmp_path: Path) -> None:
    wide = GPT(GPTConfig(vocab_size=98, layers=1, heads=2, head_size=16, width=16, context=12))
    with pytest.raises(ConfigError, match=r"2 heads of 16 on a width of 16, which GPT-2 cannot have"):
        export(wide, Characters(), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"Linear: transformers has no class for a model of your own"):
        export(nn.Linear(2, 2), Characters(), tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("precious")
    with pytest.raises(ConfigError, match=r"--out .*full: is not empty; give a new directory"):
        export(GPT(TINY_GPT), Characters(), tmp_path / "full")


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(export_module, "save_file", fail)
    with pytest.raises(ConfigError, match=r"--out .*out: cannot be written \(.*No space left on device"):
        export(GPT(TINY_GPT), Characters(), tmp_path / "out")
    monkeypatch.undo()
    with full_disk(), pytest.raises(ConfigError, match=r"--out .*out: cannot be written"):
        export(GPT(TINY_GPT), Characters(), tmp_path / "out")
    export(GPT(TINY_GPT), Characters(), tmp_path / "out")


def test_a_checkpoint_is_exported_with_its_runs_tokenizer(tmp_path: Path) -> None:
    made = train_tokenizer([TEXT * 20], 300)
    run = RunConfig(model="gpt-demo", tokenizer=made.identity, vocab_size=made.vocab_size)
    model = build("gpt-demo", vocab_size=run.vocab_size, seed=4)
    state = {"model": model.state_dict(), "peer": {}}
    checkpoint.save(tmp_path / "run", checkpoint.Checkpoint(3, {"run": run.to_dict()}, state))
    with pytest.raises(ConfigError, match=r"the run's tokenizer is not there; give it with --tokenizer FILE.json"):
        load_model(tmp_path / "run")
    (tmp_path / "run" / "tokenizer.json").write_bytes(made.file)
    found, tokenizer = load_model(tmp_path / "run")
    export(found, tokenizer, tmp_path / "out")
    # As written before tables had the tokenizer's rows.
    state["model"] = build("gpt-demo", vocab_size=500, seed=4).state_dict()
    checkpoint.save(tmp_path / "old", checkpoint.Checkpoint(3, {"run": run.to_dict()}, state))
    with pytest.raises(ConfigError, match=r"does not fit model gpt-demo with 300 ids \(size mismatch .*\); "):
        load_model(tmp_path / "old", str(tmp_path / "run"))
    generate = transformers.pipeline("text-generation", str(tmp_path / "out"), device="cpu")
    (said,) = generate("To be", max_new_tokens=5, do_sample=False)
    assert said["generated_text"].startswith("To be")
