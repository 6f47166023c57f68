"""`p2ptrain completion`: shell completion of commands, options, model names and files."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class

from p2ptrain.settings.setting import Setting

SHELLS = ("bash", "zsh", "fish")
# Environment variable in which click gets completion requests; derived from the command's name.
VARIABLE = "_P2PTRAIN_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that makes a shell complete p2ptrain.

    \b
    For bash, at the end of ~/.bashrc:
        eval "$(p2ptrain completion bash)"
    For zsh, at the end of ~/.zshrc (after compinit):
        eval "$(p2ptrain completion zsh)"
    For fish, once:
        p2ptrain completion fish > ~/.config/fish/completions/p2ptrain.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "p2ptrain", VARIABLE).source())


def complete_setting(
    setting: Setting, context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete a setting's value: its known names, else files or directories. bash cannot show both."""
    words = setting.metavar.split("|")
    if found := [CompletionItem(name) for name in setting.names if name.startswith(incomplete)]:
        return found
    if "FILE" in words:
        return complete_files(context, parameter, incomplete)
    return [CompletionItem(incomplete, type="dir")] if "DIR" in words else []


def complete_files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]
