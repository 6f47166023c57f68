"""`p2ptrain export`: write a model as transformers loads it."""

from __future__ import annotations

from pathlib import Path

import click

from p2ptrain.settings.config import RunConfig


@click.command()
@click.argument("directory", default=f"p2ptrain-{RunConfig.run_id}", metavar="[CHECKPOINT]")
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
