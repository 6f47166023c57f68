"""A loop of your own around Accelerate: the processes that `accelerate launch` starts are one peer.

Needs: pip install -e '.[transformers]'. One process, for some seconds:

    python examples/accelerate_loop.py

Two processes, on two GPUs or on the CPU (without GPUs --multi_gpu means processes that talk over gloo; with --cpu
accelerate starts only one):

    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py

Paste the command that it prints into a second terminal, or run it on another machine.
"""

import argparse
import shlex
import sys

import torch
from accelerate import Accelerator

import p2ptrain

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--initial-peers", nargs="+", default=[], metavar="ADDRESS", help="where another peer is")
parser.add_argument("--host", default="/ip4/0.0.0.0/tcp/0", help="address to listen on")
parser.add_argument("--steps", type=int, default=2000, help="length of the run")
arguments = parser.parse_args()
torch.set_num_threads(1)

accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
inputs = torch.rand(8192, 8, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(inputs, inputs.prod(1, keepdim=True))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)  # each process gets a share of it
# First this, which moves the model to its device. Then join, with the processes that Accelerate has connected.
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
group = torch.distributed.group.WORLD if accelerator.num_processes > 1 else None
with p2ptrain.join(
    model, run_id="accelerate", initial_peers=arguments.initial_peers, host_maddrs=[arguments.host],
    diloco=p2ptrain.DiLoCo(sync_every=100), total_steps=arguments.steps, process_group=group,
) as peer:  # fmt: skip
    if accelerator.is_main_process:
        again = ["--steps", str(arguments.steps), "--initial-peers", *peer.maddrs]
        print("others join by:", shlex.join([sys.executable, __file__, *again]), sep="\n", flush=True)
    while peer.run_step < arguments.steps:
        for inputs, products in loader:
            with accelerator.accumulate(model):
                loss = (model(inputs) - products).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients or peer.run_step >= arguments.steps:
                continue  # an exchange after each step of the optimizer, not after each batch
            report = peer.step(loss=loss.item(), samples=2 * len(inputs))
            if (done := report.round) is not None and accelerator.is_main_process:
                print(f"round {done.round} {done.status} by {len(done.contributors)}, loss {loss:.6f}", flush=True)
    peer.wait_finished()
    norm = torch.nn.utils.parameters_to_vector(accelerator.unwrap_model(model).parameters()).norm()
    where = f"step {peer.run_step}, norm of the weights {norm:.6f}\n"
    print(f"rank {accelerator.process_index} of {accelerator.num_processes}: {where}", end="", flush=True)
accelerator.end_training()
