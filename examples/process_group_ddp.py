"""One peer that consists of several processes: two on the CPU here, or one per GPU on a machine with GPUs.

The processes train as usual under DistributedDataParallel. Only rank 0 exchanges with the other peers of the run, and
sends the result to the other ranks. Start two processes, for a minute:

    torchrun --nproc-per-node 2 examples/process_group_ddp.py

Paste the command that it prints into a second terminal: it starts a peer of one process, which trains in the same run.
If a process dies, the others stop; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --max-restarts 3 starts all of them
again (without the variable they may hang). Ctrl-C stops all of them; the traceback is from torchrun.
"""

import argparse
import contextlib
import datetime
import os
import shlex
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import p2ptrain

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--initial-peers", nargs="+", default=[], metavar="ADDRESS", help="where another peer is")
parser.add_argument("--host", default="/ip4/0.0.0.0/tcp/0", help="address to listen on")
parser.add_argument("--steps", type=int, default=20_000, help="length of the run")
arguments = parser.parse_args()

if "RANK" not in os.environ:  # started without torchrun: a peer of one process
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
# A lost process is noticed after a minute at the latest.
dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=datetime.timedelta(minutes=1))


def main() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)).to(device)
    with contextlib.suppress(KeyboardInterrupt), p2ptrain.join(
        model, run_id="process-group", initial_peers=arguments.initial_peers, host_maddrs=[arguments.host],
        diloco=p2ptrain.DiLoCo(sync_every=1000), total_steps=arguments.steps,
        process_group=dist.group.WORLD,
    ) as peer:  # fmt: skip
        if peer.rank == 0:
            command = [sys.executable, __file__, "--steps", str(arguments.steps), "--initial-peers", *peer.maddrs]
            print("others join by:", shlex.join(command), sep="\n", flush=True)
        parallel = DistributedDataParallel(model)  # averages the gradients of this peer's processes
        optimizer = torch.optim.Adam(parallel.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(peer.data_seed)  # different on each rank
        while peer.run_step < arguments.steps:
            inputs = torch.rand(128, 8, generator=generator).to(device)
            loss = (parallel(inputs) - inputs.prod(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = peer.step(loss=loss.item(), samples=len(inputs))  # 128 per process
            if (done := report.round) is not None and peer.rank == 0:
                print(
                    f"round {done.round} {done.status} by {len(done.contributors)}, loss {loss.item():.6f}", flush=True
                )
        peer.wait_finished()
        weights = torch.nn.utils.parameters_to_vector(model.parameters())
        # One string per line: the processes share a terminal.
        print(f"rank {peer.rank}: step {peer.run_step}, norm of the weights {weights.norm():.6f}\n", end="", flush=True)


main()
dist.destroy_process_group()
