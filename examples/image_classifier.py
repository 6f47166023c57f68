"""A CNN that two peers train on handwritten digits, although the first sees only 0 to 4 and the second only 5 to 9.

Alone, neither learns the digits that it never sees. Together both learn all ten, and no image leaves its machine.
Needs: pip install -e '.[simulate]'. Both peers in one terminal, for half a minute:

    python examples/image_classifier.py

In two terminals or on two machines: start it with --wait in one, and paste the command that it prints into the other.
"""

import argparse
import copy
import shlex
import subprocess
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import p2ptrain

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--wait", action="store_true", help="wait for a second peer that you start yourself")
parser.add_argument("--initial-peers", nargs="+", default=[], metavar="ADDRESS", help="where the first peer is")
parser.add_argument("--host", default="/ip4/0.0.0.0/tcp/0", help="address to listen on")
parser.add_argument("--steps", type=int, default=600, help="training steps of each peer")
arguments = parser.parse_args()
digits = "5 to 9" if arguments.initial_peers else "0 to 4"

pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
images = pixels.float().reshape(-1, 1, 8, 8) / 16  # no peer trains on the last 397
mine = (labels[:1400] >= 5) == bool(arguments.initial_peers)
my_images, my_labels = images[:1400][mine], labels[:1400][mine]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    batch = torch.randint(len(my_images), (256,))
    model.train()
    loss = nn.functional.cross_entropy(model(my_images[batch]), my_labels[batch])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def accuracy(model: nn.Module) -> str:
    return f"{(model.eval()(images[1400:]).argmax(1) == labels[1400:]).float().mean():.0%}"


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
    nn.Flatten(), nn.Linear(128, 10),
)  # fmt: skip
alone = copy.deepcopy(model)
optimizer, optimizer_alone = (torch.optim.AdamW(each.parameters(), lr=3e-3) for each in (model, alone))

with p2ptrain.join(
    model, run_id="digits", initial_peers=arguments.initial_peers, host_maddrs=[arguments.host],
    diloco=p2ptrain.DiLoCo(sync_every=60), total_steps=arguments.steps,
) as peer:  # fmt: skip
    line = [sys.executable, __file__, "--steps", str(arguments.steps), "--initial-peers", *peer.maddrs]
    second = None if arguments.wait or arguments.initial_peers else subprocess.Popen([*line, "--host", arguments.host])
    if arguments.wait:
        print("the second peer is started by:", shlex.join(line), sep="\n", flush=True)
    while not peer.alive:
        time.sleep(0.1)
    while peer.run_step < arguments.steps:
        train_step(alone, optimizer_alone)
        report = peer.step(loss=train_step(model, optimizer), samples=256)
        if report.round is not None:
            print(f"the peer of {digits}: step {peer.run_step}, knows {accuracy(model)} of all ten digits", flush=True)
    peer.wait_finished()
print(f"the peer of {digits}: {accuracy(alone)} alone, {accuracy(model)} together", flush=True)
if second:
    second.wait()
