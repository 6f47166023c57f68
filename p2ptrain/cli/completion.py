"""`p2ptrain completion`: what makes a shell complete our commands, options, and names of models and files."""

from __future__ import annotations

from collections.abc import Callable

import click
from click.shell_completion import CompletionItem, get_completion_class

from p2ptrain.settings.presets import MODELS, PRESETS
from p2ptrain.settings.table import Setting

SHELLS = ("bash", "zsh", "fish")
# Where click looks for a shell's question; it follows from the name of the command.
VARIABLE = "_P2PTRAIN_COMPLETE"
NAMES = {"model": MODELS, "preset": tuple(PRESETS), "device": ("auto", "cpu", "cuda", "mps")}

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script by which a shell completes p2ptrain's commands and options.

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


def completer(setting: Setting) -> Completer | None:
    """What completes a setting's value: its names, or files where it takes one; None where neither is known."""
    words = setting.metavar.split("|")
    names = NAMES.get(setting.name) or tuple(word for word in words if not word.isupper())
    takes_file, takes_directory = "FILE" in words, "DIR" in words
    if not names and not takes_file and not takes_directory:
        return None

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        if not found and (takes_file or takes_directory):
            # bash shows either names or files.
            found = [CompletionItem(incomplete, type="file" if takes_file else "dir")]
        return found

    return complete
