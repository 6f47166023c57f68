"""Click options made from settings, so that help, environment and TOML always agree."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import click

from p2ptrain.cli.completion import complete_files, complete_setting
from p2ptrain.settings.run_key import looks_like_key, without_secrets
from p2ptrain.settings.table import SECTIONS, SETTINGS, merge
from p2ptrain.settings.ticket import looks_like_ticket

EVERY_WAY = (
    "Each setting can also come from an environment variable (P2PTRAIN_RUN_ID=novels) or from the TOML file given "
    'with -c (run_id = "novels"). Earlier ones win: flag, variable, file,{preset} default.'
)


# In a context's `meta`: whether all options are shown.
HELP_ALL = "p2ptrain.help_all"
TICKET_HELP = "Ticket that `p2ptrain join` printed, a file that holds one, or an initial peer."
# Of a word that is no ticket: it may be a part of one.
MAX_SHOWN_CHARS = 12
# What nanoGPT's and transformers' trainers call these settings: near spellings would suggest unrelated ones.
OTHER_NAMES = {
    "batch_size": "batch_tokens", "block_size": "context", "dataset": "data", "eval_interval": "eval_every",
    "eval_iters": "eval_tokens", "gradient_accumulation_steps": "micro_batch", "learning_rate": "lr",
    "lr_scheduler_type": "schedule", "max_iters": "steps", "max_steps": "steps", "optim": "inner_optimizer",
    "optimizer": "inner_optimizer", "out_dir": "out", "output_dir": "out",
    "per_device_train_batch_size": "micro_batch", "wandb_log": "log", "warmup_iters": "warmup_steps",
}  # fmt: skip


class NumberRange(click.FloatRange):
    """A range without nan, which click takes for a number of any range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


class SettingsCommand(click.Command):
    """A command whose help shows its settings in sections, and whose errors show no part of a ticket or a key.

    Attributes:
        rare: the options that only `--help-all` shows, where there is one.
    """

    rare: frozenset[str] = frozenset()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = OTHER_NAMES.get(error.option_name.lstrip("-").replace("-", "_"))
            if name is not None and name in {parameter.name for parameter in self.params}:
                message = f"No such option {error.option_name!r}. Did you mean {SETTINGS[name].flag!r}?"
                raise click.NoSuchOption(error.option_name, message, ctx=error.ctx) from None
            raise
        except click.UsageError:
            if all(without_secrets(word) == word for word in given):
                raise
            # A ticket that a messenger has broken: its parts are taken for other arguments.
            raise click.UsageError(
                "write the ticket as one word, without spaces and line breaks, and nothing beside it but options", ctx
            ) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        section_of = {setting.name: title for title, settings in SECTIONS.items() for setting in settings}
        titles: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            # Not every version of click takes help for an argument.
            record = ("[TICKET]", TICKET_HELP) if parameter.name == "ticket" else parameter.get_help_record(ctx)
            if record is not None and (parameter.name not in self.rare or ctx.meta.get(HELP_ALL)):
                titles.setdefault(section_of.get(parameter.name or "", "Options"), []).append(record)
        for title, records in titles.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.rare and not ctx.meta.get(HELP_ALL):
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(f"{len(self.rare)} more options: p2ptrain {ctx.info_name} --help-all")
        super().format_epilog(ctx, formatter)


def _check_ticket(context: click.Context, parameter: click.Parameter, word: str | None) -> str | None:
    """The ticket, or what `--initial-peers` takes. Raises UsageError on words that are nothing of this."""
    # A Path would raise if the word is too long for a name.
    is_place = word is not None and (bool(set(word) & set("/.")) or os.path.isfile(word))
    if word is None or is_place or looks_like_ticket(word) or looks_like_key(word):
        return word
    shown = word if len(word) <= MAX_SHOWN_CHARS else word[:MAX_SHOWN_CHARS] + "…"
    raise click.UsageError(f"{shown!r} is not a ticket, an address or a file", context)


def _show_all(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given:
        context.meta[HELP_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


def _warn_of_process_list(given: Sequence[str]) -> None:
    if any(map(looks_like_ticket, given)):
        click.echo(
            "warning: the ticket holds the run key, and other users of this machine can see it in the list of "
            "processes; put it into a file that only you can read (chmod 600), and give the file instead",
            err=True,
        )


def settings_command(
    *names: str, common: Collection[str] = (), kind: type[SettingsCommand] = SettingsCommand
) -> Callable[[Callable[..., None]], SettingsCommand]:
    """Make a command with `-c` and an option for each of these settings; its function is called with `settings`.

    Args:
        common: the settings that `--help` shows, while `--help-all` shows all; empty: `--help` shows all.
    """

    def decorate(function: Callable[..., None]) -> SettingsCommand:
        @functools.wraps(function)
        def command(config_file: str | None, ticket: str | None = None, **given: Any) -> None:
            flags = {name: given.pop(name) for name in names}
            if ticket is not None:
                flags["initial_peers"] = (ticket, *flags["initial_peers"])
            settings = merge(flags, os.environ, config_file)
            if settings.ticket is not None and settings.ticket.key is not None:
                _warn_of_process_list(flags["initial_peers"])
            function(settings, **given)

        decorated: Callable[..., None] = command
        if "initial_peers" in names:
            decorated = click.argument("ticket", required=False, metavar="[TICKET]", callback=_check_ticket)(decorated)
        for setting in reversed([SETTINGS[name] for name in names]):
            # Values stay text here: `merge` converts and checks the values of all sources.
            decorated = click.option(
                setting.flag,
                setting.name,
                metavar=setting.metavar,
                multiple=setting.kind is tuple,
                help=setting.help_with_default,
                shell_complete=functools.partial(complete_setting, setting),
            )(decorated)
        decorated = click.option(
            "-c",
            "--config",
            "config_file",
            metavar="FILE",
            help="TOML file with settings; or set P2PTRAIN_CONFIG.",
            shell_complete=complete_files,
        )(decorated)
        epilog = EVERY_WAY.format(preset=" preset," if "preset" in names else "")
        rare = frozenset(names).difference(common) if common else frozenset()
        if rare:
            decorated = click.option(
                "--help-all",
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help="Show all options and exit.",
            )(decorated)
        made = click.command(cls=kind, epilog=epilog)(decorated)
        made.rare = rare
        return made

    return decorate
