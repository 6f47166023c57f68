"""One peer whose model is sharded over several processes: FSDP2, for a model that does not fit on one GPU.

Each process holds a part of each parameter, of its gradient and of the optimizer's state. Only rank 0 exchanges with
the other peers of the run; the others read and write their parts for it. Start two processes, on CPUs or GPUs:

    torchrun --nproc-per-node 2 examples/fsdp_peer.py

Paste the command that it prints into a second terminal: it starts a peer of one process that holds the whole model and
trains in the same run. Ctrl-C stops all processes; the traceback is from torchrun.
"""

import argparse
import contextlib
import datetime
import os
import shlex
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import p2ptrain

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--initial-peers", nargs="+", default=[], metavar="ADDRESS", help="where another peer is")
parser.add_argument("--host", default="/ip4/0.0.0.0/tcp/0", help="address to listen on")
parser.add_argument("--steps", type=int, default=10_000, help="length of the run")
arguments = parser.parse_args()

sharded = "RANK" in os.environ  # started by torchrun; otherwise a peer of one process
on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
if sharded:
    if on_gpu:
        torch.cuda.set_device(device)
    # gloo carries what is exchanged, nccl what FSDP2 gathers. A lost process is noticed after a minute at the latest.
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=datetime.timedelta(minutes=1))


def main() -> None:
    layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()) for _ in range(4)]
    model = torch.nn.Sequential(torch.nn.Linear(8, 256), *layers, torch.nn.Linear(256, 1)).to(device)
    if sharded:
        for layer in layers:
            fully_shard(layer)  # gathered for its forward and backward pass, then dropped again
        fully_shard(model)
    with contextlib.suppress(KeyboardInterrupt), p2ptrain.join(
        model, run_id="fsdp", initial_peers=arguments.initial_peers, host_maddrs=[arguments.host],
        diloco=p2ptrain.DiLoCo(sync_every=500), total_steps=arguments.steps,
        process_group=dist.group.WORLD if sharded else None,
    ) as peer:  # fmt: skip
        first = not sharded or dist.get_rank() == 0
        if first:
            command = [sys.executable, __file__, "--steps", str(arguments.steps), "--initial-peers", *peer.maddrs]
            print("others join by:", shlex.join(command), sep="\n", flush=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after fully_shard
        generator = torch.Generator().manual_seed(peer.data_seed)  # different on each rank
        while peer.run_step < arguments.steps:
            inputs = torch.rand(128, 8, generator=generator).to(device)
            loss = (model(inputs) - inputs.prod(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = peer.step(loss=loss.item(), samples=len(inputs))  # 128 per process
            if (done := report.round) is not None and first:
                print(f"round {done.round} {done.status} by {len(done.contributors)}, loss {loss.item():.6f}")
        peer.wait_finished()
        weights = peer.anchor_state_dict()  # of a sharded model: whole on rank 0, empty on the others
        if weights:
            total = sum(values.square().sum().item() for values in weights.values()) ** 0.5
            print(f"step {peer.run_step}, norm of the agreed weights {total:.6f}, hash {peer.anchor_hash[:12]}")


main()
if sharded:
    dist.destroy_process_group()
