"""A LightningModule, trained by Lightning's own Trainer; a callback makes it a peer. Nothing is downloaded.

The small model learns Python's own source text. Needs: pip install -e '.[lightning]'. It takes a minute:

    python examples/lightning_module.py

Paste the command that it prints into a second terminal, or run it on another machine. Ctrl-C leaves the run; the same
command with --resume lightning/last.ckpt continues. With --devices 2 two processes are one peer.
"""

import argparse
import os
import shlex
import sys
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import p2ptrain
from p2ptrain.integrations.lightning import P2PCallback

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--initial-peers", nargs="+", default=[], metavar="ADDRESS", help="where another peer is")
parser.add_argument("--host", default="/ip4/0.0.0.0/tcp/0", help="address to listen on")
parser.add_argument("--steps", type=int, default=2000, help="length of the run")
parser.add_argument("--devices", type=int, default=1, help="processes of this peer")
parser.add_argument("--resume", metavar="FILE", help="continue from a checkpoint")
options = parser.parse_args()
torch.set_num_threads(1)


class NextByte(LightningModule):  # from the 16 before it
    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)
        self.layers = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), *layers)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        if batch_idx % 200 == 0 and self.trainer.is_global_zero:
            print(f"step {callback.peer.run_step}, loss {loss:.2f}, peers {1 + len(callback.peer.alive)}", flush=True)
        return loss

    def on_fit_start(self) -> None:  # after that of the callback, which joins
        if self.trainer.is_global_zero:
            line = [sys.executable, __file__, "--steps", str(options.steps), "--initial-peers", *callback.peer.maddrs]
            print("others join by:", shlex.join(line), sep="\n", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


class Windows(torch.utils.data.IterableDataset):
    """Random windows of the text, without end, different on every peer and in each of its processes."""

    def __iter__(self):
        text = b"\n".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
        ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        generator = torch.Generator().manual_seed(callback.peer.data_seed)
        while True:
            start = int(torch.randint(len(ids) - 16, (1,), generator=generator))
            yield ids[start : start + 16], ids[start + 16]


run = {"run_id": "lightning", "diloco": p2ptrain.DiLoCo(sync_every=100), "total_steps": options.steps}
join = partial(p2ptrain.join, initial_peers=options.initial_peers, host_maddrs=[options.host], **run)
callback = P2PCallback(join)
saving = ModelCheckpoint("lightning", save_last=True, every_n_train_steps=50)
trainer = Trainer(
    max_steps=options.steps, accumulate_grad_batches=2, callbacks=[callback, saving], devices=options.devices,
    logger=False, enable_progress_bar=False,
)  # fmt: skip
trainer.fit(NextByte(), torch.utils.data.DataLoader(Windows(), batch_size=64), ckpt_path=options.resume)
print(f"finished at step {callback.peer.run_step} after {callback.peer.round} rounds")
