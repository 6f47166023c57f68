"""`p2ptrain config`: show the settings with their sources, or print their reference page."""

from __future__ import annotations

import json

import click

from p2ptrain.cli import join
from p2ptrain.cli.options import settings_command
from p2ptrain.settings.setting import value_text
from p2ptrain.settings.table import Settings


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
    """Show the settings that `p2ptrain join` would use, and the source of each.

    Takes the same options as `p2ptrain join`.

    \b
        p2ptrain config show -c peer.toml --steps 500
    """
    merged = {name: {"value": value, "source": settings.sources[name]} for name, value in settings.values.items()}
    if as_json:
        click.echo(json.dumps(merged, indent=2))
        return
    texts = {name: value_text(value) for name, value in settings.values.items()}
    width = max(map(len, texts))
    value_width = max(map(len, texts.values()))
    for name, text in texts.items():
        click.echo(f"{name:<{width}}  {text:<{value_width}}  {settings.sources[name]}")


@config.command()
def reference() -> None:
    """Print the reference of all settings as Markdown, with the reasons for the defaults.

    \b
        p2ptrain config reference > docs/configuration.md
    """
    from p2ptrain.settings.reference import reference

    click.echo(reference(), nl=False)
