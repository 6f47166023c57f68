"""`p2ptrain generate`: text from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from p2ptrain.settings.config import RunConfig


@click.command()
@click.argument("directory", default=f"p2ptrain-{RunConfig.run_id}", metavar="[DIR]")
@click.option("--prompt", default="def ", show_default=True, help="What the text begins with.")
@click.option("--length", type=click.IntRange(min=1), default=500, show_default=True, help="Characters to add.")
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.8, show_default=True,
    help="Below 1 plays safe; 0 always takes the likeliest character.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Another seed, another text.")
def generate(directory: str, prompt: str, length: int, temperature: float, seed: int) -> None:
    """Let a trained model write text.

    DIR is the --out directory of a p2ptrain join, of which the newest checkpoint is taken, or one checkpoint in it.

    \b
    From the run that a bare `p2ptrain join` trained here:
        p2ptrain generate --prompt "class "
    From one checkpoint of another:
        p2ptrain generate p2ptrain-novels/checkpoint-4000 --prompt "It was" --length 1000
    """
    from p2ptrain.training.generation import generate_text, load_model

    model = load_model(Path(directory))
    click.echo(prompt, nl=False)
    for character in generate_text(model, prompt, length=length, temperature=temperature, seed=seed):
        click.echo(character, nl=False)
    click.echo()
