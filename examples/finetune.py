"""A run that starts from a checkpoint: a network that reads upright digits learns digits that lie on their side.

Only the peer that starts the run needs the checkpoint; all others download the weights from the run. If you have no
checkpoint, the example makes one first. Needs: pip install -e '.[simulate]'. It takes half a minute:

    python examples/finetune.py

Paste the command that it prints into a second terminal, or run it on another machine. (p2ptrain join has --init-from.)
"""

import argparse
import contextlib
import shlex
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import nn

import p2ptrain

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--initial-peers", nargs="+", default=[], metavar="ADDRESS", help="where another peer is")
parser.add_argument("--host", default="/ip4/0.0.0.0/tcp/0", help="address to listen on")
parser.add_argument("--checkpoint", type=Path, default="digits.safetensors", help="weights to start from")
parser.add_argument("--steps", type=int, default=10_000, help="length of the run")
arguments = parser.parse_args()

pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
upright = pixels.float().reshape(-1, 1, 8, 8) / 16
lying = upright.rot90(1, (2, 3))
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
    nn.Flatten(), nn.Linear(512, 10),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(images: torch.Tensor, generator: torch.Generator) -> float:
    """Train on 64 of the first 1400 images; return the loss."""
    batch = torch.randint(1400, (64,), generator=generator)
    loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def report(when: str) -> None:
    """Print the accuracy on the images that no peer trains on."""
    right = [f"{(model(images[1400:]).argmax(1) == labels[1400:]).float().mean():.0%}" for images in (upright, lying)]
    print(f"{when}: {right[0]} of the upright digits, {right[1]} of the lying ones", flush=True)


if not arguments.initial_peers:
    if not arguments.checkpoint.exists():
        print(f"making {arguments.checkpoint}", flush=True)
        generator = torch.Generator().manual_seed(0)
        for _ in range(400):
            train_step(upright, generator)
        save_file(model.state_dict(), arguments.checkpoint)
        optimizer.state.clear()
    model.load_state_dict(load_file(arguments.checkpoint))

peer = p2ptrain.join(
    model, run_id="finetune", initial_peers=arguments.initial_peers, host_maddrs=[arguments.host],
    diloco=p2ptrain.DiLoCo(sync_every=500), total_steps=arguments.steps,
)  # fmt: skip
with contextlib.suppress(KeyboardInterrupt), peer:
    line = [sys.executable, __file__, "--steps", str(arguments.steps), "--initial-peers", *peer.maddrs]
    print("others join by:", shlex.join(line), sep="\n", flush=True)
    report(f"at step {peer.run_step}")
    generator = torch.Generator().manual_seed(peer.data_seed)
    while peer.run_step < arguments.steps:
        peer.step(loss=train_step(lying, generator), samples=64)
    peer.wait_finished()
report(f"after {peer.round} rounds")
