"""`p2ptrain estimate`: what a run will cost on a link, before it starts."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, cast

import click

from p2ptrain.cli.options import settings_command, takes
from p2ptrain.errors import ConfigError
from p2ptrain.settings.link import LINK_SETTINGS, Link, parse_params
from p2ptrain.settings.presets import MODELS
from p2ptrain.settings.table import SETTINGS, Settings

# The settings on which the bytes of a round, of gossip and of joining depend.
OF_ROUNDS = ("sync_every", "round_sections", "round_codec", "round_density", "prune_fraction", "averaging")
OF_GOSSIP = ("fragment_fraction", "fragment_codec", "topology", "fan_out")
OF_OPTIMIZERS = ("outer_optimizer", "inner_optimizer", "inner_moments")
OF_PACE = ("max_contributors", "round_timeout_s", "gossip_budget")


@settings_command("model", "preset", *OF_ROUNDS, *OF_GOSSIP, *OF_OPTIMIZERS, *OF_PACE)
@click.option("--params", metavar="SIZE", help="Number of parameters, such as 124M or 1.5B; or give --model.")
@takes(Link)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def estimate(settings: Settings, params: str | None, as_json: bool, **given: Any) -> None:
    """Estimate what a run will cost on your link.

    Prints bytes and seconds of a round, of gossip and of joining, and the memory; then what to change, if anything.
    Connects to no peer. Assumes that all peers have a link like yours.

    \b
    GPT-2 small among eight peers, at 100 Mbit/s and 60 ms:
        p2ptrain estimate --params 124M --rate 100 --rtt 60 --peers 8
    A home line with a slow uplink, and steps of 0.2 s:
        p2ptrain estimate --model gpt-small --rate 100 --rate-up 20 --step-ms 200
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    link = Link(**chosen, gossip_budget=cast(float, settings.values["gossip_budget"]))
    run = settings.resolve_run(None)
    if params is not None and settings.sources["model"] == SETTINGS["model"].flag:
        raise ConfigError("--params and --model: each gives the number of parameters; leave one of them out")
    size = _count_parameters(settings) if params is None else parse_params(params, "--params")
    # Imported late, as numpy takes a moment.
    from p2ptrain.monitor.estimate import advice, estimate_run, texts

    found = estimate_run(run, size, link)
    if as_json:
        report = {"parameters": size, **dataclasses.asdict(link), **found.to_dict()}
        click.echo(json.dumps({**report, "advice": list(advice(run, size, link, found))}, indent=2, ensure_ascii=False))
    else:
        click.echo("\n".join(texts(run, size, link, found)))
        assumed = [f"{s.flag} {s.default:g}" for s in LINK_SETTINGS if s.default and s.field_name not in chosen]
        if not settings.explicit("sync_every") and not settings.from_preset("sync_every"):
            assumed.append(f"--sync-every {run.sync_every}")
        if assumed:
            click.echo(f"assumed: {', '.join(assumed)}")


def _count_parameters(settings: Settings) -> int:
    """The parameters of the model that the user gave."""
    model = str(settings.values["model"])
    if not settings.explicit("model") and not settings.from_preset("model"):
        raise ConfigError("--params is required; give the number of parameters, such as 124M, or --model")
    if model in MODELS:
        return parse_params(MODELS[model], model)
    from p2ptrain.settings.config import RunConfig
    from p2ptrain.training.models import count_parameters

    return count_parameters(model, vocab_size=RunConfig.vocab_size)
