"""`p2ptrain config`: show the settings with their sources, or print their reference page."""

from __future__ import annotations

import json

import click

from p2ptrain.cli import join
from p2ptrain.cli.options import settings_command
from p2ptrain.settings.model_defaults import BATCH_WINDOWS, EVAL_STEPS, model_defaults
from p2ptrain.settings.setting import value_text
from p2ptrain.settings.table import DEFAULT, MODEL, Settings


@click.group()
def config() -> None:
    """Show the settings, or print their reference page.

    \b
        p2ptrain config show
        p2ptrain config reference
    """


@config.add_command
@settings_command(*join.SETTINGS)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def show(settings: Settings, as_json: bool) -> None:
    """Show the settings of `p2ptrain join`, and their sources.

    Takes the same options as `p2ptrain join`. Values of a new run: a joiner adopts those of the run, and what follows
    from the model then follows from the run's.

    \b
        p2ptrain config show -c peer.toml --steps 500
    """
    values, sources = {**settings.values}, {**settings.sources}
    defaults = model_defaults(str(values[MODEL]))
    tokens = defaults.batch_tokens
    eval_tokens = None if tokens is None else EVAL_STEPS * tokens
    from_model = {"batch_tokens": tokens, "eval_tokens": eval_tokens, "eval_every": defaults.eval_every}
    for name, value in from_model.items():
        if values[name] is None:
            values[name], sources[name] = value, settings.with_model
    if as_json:
        merged = {name: {"value": value, "source": sources[name]} for name, value in values.items()}
        click.echo(json.dumps(merged, indent=2))
        return
    texts = {name: value_text(value) for name, value in values.items()}
    if sources["muon_lr"] == DEFAULT:
        texts["muon_lr"] = "unused"  # by AdamW
    if values["context"] == 0:
        texts["context"] = "the model's"
    windows = {"batch_tokens": BATCH_WINDOWS, "eval_tokens": EVAL_STEPS * BATCH_WINDOWS}
    # Of a model whose length is known only once it is built.
    texts.update({name: f"{count} windows" for name, count in windows.items() if values[name] is None})
    width = max(map(len, texts))
    value_width = max(map(len, texts.values()))
    for name, text in texts.items():
        click.echo(f"{name:<{width}}  {text:<{value_width}}  {sources[name]}")


@config.command()
def reference() -> None:
    """Print the reference of all settings as Markdown.

    \b
        p2ptrain config reference > docs/use/configuration.md
    """
    from p2ptrain.settings.reference import reference

    click.echo(reference(), nl=False)
