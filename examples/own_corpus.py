"""A language model of your own text: a folder of files, a tokenizer trained on it, streamed data, and resuming.

The first peer trains the tokenizer and sends it to the others as a model buffer.

    python examples/own_corpus.py [FOLDER of .txt, .md and .py files; default: the source of p2ptrain]

The command that it prints starts a second peer, here or on another machine, with its own folder or with a part of this
one (--shard 0/2 and 1/2). Ctrl-C saves; the same command continues.
"""

import argparse
import contextlib
import shlex
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer, Tokenizer

import p2ptrain
from p2ptrain.training.models.gpt import GPT, GPTConfig  # or any other model

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", nargs="?", type=Path, default=Path(p2ptrain.__file__).parent, help="of text files")
parser.add_argument("--initial-peers", nargs="+", default=[], metavar="ADDRESS", help="where another peer is")
parser.add_argument("--host", default="/ip4/0.0.0.0/tcp/0", help="address to listen on")
parser.add_argument("--checkpoint", type=Path, default="corpus.pt", help="file to save to and to continue from")
parser.add_argument("--shard", default="0/1", help="which part of the text to read, of how many")
parser.add_argument("--steps", type=int, default=2000, help="length of the run")
options = parser.parse_args()
BATCH, CONTEXT, PIECE = 8, 64, 100_000
files = [path for path in sorted(options.folder.rglob("*")) if path.suffix in (".txt", ".md", ".py")]
pieces = [(path, start) for path in files for start in range(0, path.stat().st_size, PIECE)]
mine = pieces[int(options.shard.split("/")[0]) :: int(options.shard.split("/")[1])]
model = GPT(GPTConfig(vocab_size=1024, layers=2, heads=4, width=96, context=CONTEXT))
model.register_buffer("tokenizer", torch.zeros(200_000, dtype=torch.uint8))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
if saved := torch.load(options.checkpoint, weights_only=True) if options.checkpoint.exists() else {}:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
elif not options.initial_peers:
    (trained := ByteLevelBPETokenizer()).train([*map(str, files)], vocab_size=1024, show_progress=False)
    text = torch.tensor(list(trained.to_str().encode()), dtype=torch.uint8)
    model.tokenizer[: len(text)] = text


def batches(tokenizer: Tokenizer, number: int, seed: int):
    """Yield (number, (batch, time) ids) without end, from piece `number` on, in a new order at each pass."""
    while True:
        order = torch.randperm(len(mine), generator=torch.Generator().manual_seed(seed + number // len(mine)))
        path, start = mine[order[number % len(mine)]]
        text = np.memmap(path, mode="r")[start : start + PIECE].tobytes().decode(errors="ignore")
        ids = torch.tensor(tokenizer.encode(text).ids + [0] * (CONTEXT + 1))  # at least one window
        yield from ((number, batch) for batch in ids.unfold(0, CONTEXT + 1, CONTEXT).split(BATCH))
        number += 1


peer = p2ptrain.join(
    model, run_id="corpus", initial_peers=options.initial_peers, host_maddrs=[options.host], total_steps=options.steps,
    identity=options.checkpoint.with_suffix(".key"), diloco=p2ptrain.DiLoCo(sync_every=50), resume=saved.get("peer"),
)  # fmt: skip
with contextlib.suppress(KeyboardInterrupt), peer:
    line = [sys.executable, __file__, str(options.folder), "--steps", str(options.steps), "--checkpoint", "second.pt"]
    print("others join by:", shlex.join([*line, "--initial-peers", *peer.maddrs]), sep="\n", flush=True)
    tokenizer = Tokenizer.from_str(bytes(model.tokenizer.tolist()).rstrip(b"\0").decode())
    for piece, ids in batches(tokenizer, saved.get("piece", 0), peer.data_seed):
        if peer.run_step >= options.steps:
            break
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (done := peer.step(loss=loss.item(), samples=ids.numel()).round) is not None:
            saved["piece"] = piece
            print(f"round {done.round} {done.status} by {len(done.contributors)}, loss {loss.item():.3f}", flush=True)
    peer.wait_finished()
saved |= {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "peer": peer.state_dict()}
torch.save(saved, options.checkpoint)
