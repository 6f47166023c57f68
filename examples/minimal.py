"""The least that a peer needs: your model, your training loop, `p2ptrain.join` around it and one call inside.

Start it, and paste the command that it prints into a second terminal, or run it on another machine:

    python examples/minimal.py

Each peer draws its own data. Ctrl-C leaves the run, and the others continue.
"""

import argparse
import contextlib
import shlex
import sys

import torch

import p2ptrain

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--initial-peers", nargs="+", default=[], metavar="ADDRESS", help="where another peer is")
parser.add_argument("--host", default="/ip4/0.0.0.0/tcp/0", help="address to listen on")
arguments = parser.parse_args()

# Several peers on one machine would slow each other down: torch takes every core in every process.
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
peer = p2ptrain.join(
    model,
    run_id="minimal",
    initial_peers=arguments.initial_peers,
    host_maddrs=[arguments.host],
    diloco=p2ptrain.DiLoCo(sync_every=500),
)
with contextlib.suppress(KeyboardInterrupt), peer:
    line = shlex.join([sys.executable, __file__, "--initial-peers", *peer.maddrs])
    print("others join by:", line, sep="\n", flush=True)
    generator = torch.Generator().manual_seed(peer.data_seed)
    while True:
        inputs = torch.rand(256, 8, generator=generator)
        loss = (model(inputs) - inputs.prod(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report = peer.step(loss=loss.item(), samples=len(inputs))  # the only call that exchanges weights
        if (done := report.round) is not None:
            print(f"round {done.round} {done.status} by {len(done.contributors)}, loss {loss.item():.6f}", flush=True)
