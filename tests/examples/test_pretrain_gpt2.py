"""Every command of examples/pretrain_gpt2.md, on three peers, with a small model and shards of some thousand tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.swarm.processes import Process, Swarm, assert_anchors_agree

PAGE = Path(__file__).parents[2] / "examples" / "pretrain_gpt2.md"
TEXT = "The three machines train one model. " * 2000
# What is smaller, or is elsewhere, than on the page.
SMALLER = {
    "--model gpt2-124m --data": "--model gpt-demo --lr 6e-4 --warmup-steps 5 --sync-every 20 --data",
    "gpt2-124m": "gpt-demo",
    "/ip4/0.0.0.0/tcp/4001": "/ip4/127.0.0.1/tcp/0",
}  # fmt: skip


def commands() -> list[str]:
    """The commands on the page, in their order."""
    lines = [line.removeprefix("$ ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line.startswith("p2ptrain ")]


def smaller(command: str) -> str:
    for large, small in SMALLER.items():
        command = command.replace(large, small)
    return command


def write_shards(folder: Path, tokenizer: Tokenizer) -> None:
    """As llm.c and modded-nanogpt write them."""
    folder.mkdir(parents=True)
    ids = np.array(tokenizer.encode(TEXT).ids, dtype=np.uint16)
    for name, part in (("train_000001", ids), ("train_000002", ids[::-1]), ("val_000000", ids[:4000])):
        header = np.zeros(256, dtype=np.int32)
        header[:3] = 20240520, 1, len(part)
        (folder / f"fineweb_{name}.bin").write_bytes(header.tobytes() + part.tobytes())


@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """The one that `hub:gpt2` names here: a small one of its kind, where the hub's files are kept."""
    small = Tokenizer(models.BPE())
    small.pre_tokenizer, small.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    small.train_from_iterator([TEXT[:100]], trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet))
    repository = tmp_path / "hub" / "models--gpt2"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("a" * 40)
    (repository / "snapshots" / ("a" * 40)).mkdir(parents=True)
    small.save(str(repository / "snapshots" / ("a" * 40) / "tokenizer.json"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return small


@pytest.mark.long
def test_the_commands_of_the_page_train_one_model_and_use_it(
    swarm: Swarm, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    info, estimate, start, join, peers, generate, export = map(smaller, commands())
    machines = [tmp_path / f"machine-{number}" for number in range(3)]
    for machine in machines:
        write_shards(machine / "fineweb10B", tokenizer)

    def run(command: str) -> Process:
        process = swarm.start(command, directory=machines[0])
        assert process.wait() == 0, swarm.report()
        return process

    assert "in 2 files" in run(info).output
    assert run(estimate).output.startswith("100k parameters, 3 peers")
    first = swarm.start(start, directory=machines[0], settings={"batch_tokens": 256})
    swarm.until(lambda: "or with this ticket:\n" in first.output)
    ticket = first.output.partition("or with this ticket:\n")[2].split()[2]
    trainers_ = [first]
    for machine in machines[1:]:
        command = join.replace("p2pt1…", ticket)
        trainers_.append(swarm.start(command, directory=machine, settings={"batch_tokens": 256}))
    swarm.until(lambda: all(peer.rounds(by=3) for peer in trainers_))
    assert run(peers.replace("p2pt1…", ticket)).output.startswith("run fineweb: 3 peers")
    assert_anchors_agree(*trainers_)
    for peer in trainers_:
        peer.terminate()
    assert [peer.wait() for peer in trainers_] == [0, 0, 0], swarm.report()
    assert run(generate).output.startswith("The three machines")
    run(export)
    assert (machines[0] / "gpt2-fineweb/model.safetensors").exists()
