"""Use a trained model: `p2ptrain generate` writes text, `p2ptrain export` a directory that transformers loads."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from p2ptrain.cli.options import NumberRange
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.peer_config import default_dir


@click.command()
@click.argument("directory", default=str(default_dir(RunConfig.run_id)), metavar="[DIR]")
@click.option("--prompt", default="def ", help="Beginning of the text.")
@click.option("--length", type=click.IntRange(min=1), default=500, help="Tokens to add.")
@click.option(
    "--temperature", type=NumberRange(0, 100), default=0.8, help="Sampling temperature; 0 for the most likely text."
)
@click.option(
    "--top-p",
    type=NumberRange(min=0, max=1, min_open=True),
    default=1.0,
    help="Sample from the likeliest tokens of this probability in all.",
)
@click.option("--tokenizer", metavar="NAME", help="If DIR has none: FILE.json or hub:NAME, as for join.")
@click.option("--seed", type=click.IntRange(min=0, max=2**63 - 1), default=0, help="Seed of the sampling.")
def generate(
    directory: str, prompt: str, length: int, temperature: float, top_p: float, tokenizer: str | None, seed: int
) -> None:
    """Write text with a trained model.

    DIR is the --out directory of `p2ptrain join` (its newest checkpoint is used), one checkpoint in it, or what
    `p2ptrain export` wrote.

    \b
    With the model that `p2ptrain join` trained here:
        p2ptrain generate --prompt "class "
    With one checkpoint of another run:
        p2ptrain generate p2ptrain-novels/checkpoint-4000 --prompt "It was" --length 1000
    """
    from p2ptrain.protocol.wire.text import for_terminal
    from p2ptrain.training.generation import generate_text, load_model

    prompt = prompt.encode(errors="replace").decode()  # bytes of the terminal that are not UTF-8
    model, found = load_model(Path(directory), tokenizer)
    click.echo(prompt, nl=False)
    for text in generate_text(model, found, prompt, length=length, temperature=temperature, top_p=top_p, seed=seed):
        # The founder of a run chooses its tokenizer, and members what its weights write.
        click.echo(for_terminal(text) if sys.stdout.isatty() else text, nl=False)
    click.echo()


@click.command()
@click.argument("directory", default=str(default_dir(RunConfig.run_id)), metavar="[CHECKPOINT]")
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="New directory to write.")
@click.option("--tokenizer", metavar="NAME", help="If there is none: FILE.json or hub:NAME, as for join.")
def export(directory: str, out: Path, tokenizer: str | None) -> None:
    """Write a trained model as a directory that transformers loads.

    CHECKPOINT is the --out directory of `p2ptrain join` (its newest checkpoint is used), or one checkpoint in it.
    Writes config.json, model.safetensors and the tokenizer. Built-in models become GPT2LMHeadModel or
    Qwen3ForCausalLM.

    \b
        p2ptrain export p2ptrain-novels --out novels-gpt2
        python -c "import transformers; transformers.pipeline('text-generation', 'novels-gpt2')('It was')"
    """
    from p2ptrain.training.export import export as write
    from p2ptrain.training.generation import load_model

    model, found = load_model(Path(directory), tokenizer, needs_text=False)
    write(model, found, out)
    click.echo(f"wrote {out}; load it with transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})")
