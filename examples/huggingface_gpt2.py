"""GPT-2 of the transformers library, trained by its own Trainer; a callback makes it a peer. Nothing is downloaded.

The model is created from a configuration (124 million parameters, fewer with --tiny) and learns Python's own source
text, byte by byte. Needs: pip install -e '.[transformers]'. It takes a minute with a small model:

    python examples/huggingface_gpt2.py --tiny

Paste the command that it prints into a second terminal, or run it on another machine. Ctrl-C leaves the run; the same
command with --resume continues from the last checkpoint.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import p2ptrain
from p2ptrain.integrations.transformers import P2PCallback

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--initial-peers", nargs="+", default=[], metavar="ADDRESS", help="where another peer is")
parser.add_argument("--host", default="/ip4/0.0.0.0/tcp/0", help="address to listen on")
parser.add_argument("--tiny", action="store_true", help="a model of 0.2 million parameters")
parser.add_argument("--steps", type=int, default=600, help="length of the run")
parser.add_argument("--out", default="gpt2", help="directory for checkpoints")
parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
options = parser.parse_args()
Path(options.out).mkdir(exist_ok=True)

TINY = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 256}
model = GPT2LMHeadModel(GPT2Config(**(TINY if options.tiny else {}), bos_token_id=0, eos_token_id=0))


class Windows(torch.utils.data.IterableDataset):
    """Random windows of the text, without end, different on every peer."""

    def __init__(self, seed: int) -> None:
        text = b"\n".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
        self.ids, self.seed = torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), seed

    def __iter__(self):
        generator, length = torch.Generator().manual_seed(self.seed), model.config.n_positions
        while True:
            start = int(torch.randint(len(self.ids) - length, (1,), generator=generator))
            yield {"input_ids": (ids := self.ids[start : start + length]), "labels": ids}


arguments = TrainingArguments(
    options.out, max_steps=options.steps, per_device_train_batch_size=8, gradient_accumulation_steps=2,
    learning_rate=3e-3 if options.tiny else 4e-4, lr_scheduler_type="cosine", warmup_steps=options.steps // 20,
    logging_steps=20, save_steps=100, save_total_limit=2, disable_tqdm=True, report_to=[],
    dataloader_pin_memory=torch.cuda.is_available(),
)  # fmt: skip
model.to(arguments.device)  # before joining: the Trainer would move it afterwards
with p2ptrain.join(
    model, run_id="gpt2", initial_peers=options.initial_peers, host_maddrs=[options.host],
    identity=Path(options.out, "identity.key"), diloco=p2ptrain.DiLoCo(sync_every=50), total_steps=options.steps,
) as peer:  # fmt: skip
    again = ["--tiny"] * options.tiny + ["--steps", str(options.steps), "--out", f"{options.out}-2"]
    again += ["--initial-peers", *peer.maddrs]
    print("others join by:", shlex.join([sys.executable, __file__, *again]), sep="\n", flush=True)
    trainer = Trainer(model, arguments, train_dataset=Windows(peer.data_seed), callbacks=[P2PCallback(peer)])
    try:
        trainer.train(resume_from_checkpoint=options.resume)
    except KeyboardInterrupt:
        print(f"left at step {peer.run_step}")
    else:
        trainer.save_model()
        print(f"finished after {peer.round} rounds; the model of all peers is in {options.out}")
