"""`p2ptrain data`: prepare token files, and describe them."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

import click

from p2ptrain.cli.options import NumberRange

# Seconds between two lines on progress where no terminal can show a bar (guess).
LINE_INTERVAL_S = 30.0
# What the demo model is evaluated on by default, and the longest default context of models of transformers.
FEW_HELD_OUT_TOKENS = 4096


@click.group()
def data() -> None:
    """Prepare token files to train on, and look into them."""


@data.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE…")
@click.option("--tokenizer", required=True, metavar="NAME", help="chars, bytes, FILE.json, hub:NAME or train:N.")
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="New directory to write.")
@click.option("--field", default="text", help="Field of a record that holds the text.")
@click.option("--split", default="train", help="Split of a dataset.")
@click.option(
    "--held-out", type=NumberRange(0, 0.5, min_open=True), default=0.005, help="Share of the documents to evaluate on."
)
@click.option("--jobs", type=click.IntRange(min=1), help="Processes.  [default: one for each core]")
def prepare(
    sources: tuple[str, ...], tokenizer: str, out: Path, field: str, split: str, held_out: float, jobs: int | None
) -> None:
    """Turn text into token files that `p2ptrain join --data DIR` trains on.

    SOURCE is a text file, a .jsonl (also .gz or .zst) or .parquet file, a directory of them, or hub:NAME for a dataset
    of the Hugging Face hub (hub:NAME:CONFIG). Files are never loaded whole. After an interruption the same command goes
    on. Documents are held out for evaluation by the hash of their text, so that copies are on the same side.

    \b
    A book, with a tokenizer made from it:
        p2ptrain data prepare novel.txt --tokenizer train:8192 --out novel
    A folder of .parquet files, with GPT-2's tokenizer:
        p2ptrain data prepare fineweb/ --tokenizer hub:gpt2 --out fineweb-gpt2
        p2ptrain join --data fineweb-gpt2 --model gpt2-124m
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from p2ptrain.settings.machine import usable_cores
    from p2ptrain.training.data.prepare import Progress
    from p2ptrain.training.data.prepare import prepare as run
    from p2ptrain.training.data.token_info import describe

    text = TextColumn("parts, {task.fields[tokens]} tokens")
    columns = (BarColumn(), MofNCompleteColumn(), text, TimeRemainingColumn())
    console = Console(stderr=True)
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task, said_s = bar.add_task("", total=None, tokens="0"), time.monotonic()

        def show(progress: Progress) -> None:
            nonlocal said_s
            tokens = f"{progress.tokens:,}"
            bar.update(task, completed=progress.units, total=progress.units_total, tokens=tokens)
            if bar.disable and time.monotonic() - said_s >= LINE_INTERVAL_S:
                click.echo(f"{progress.units} of {progress.units_total} parts, {tokens} tokens")
                said_s = time.monotonic()

        prepared = run(
            sources,
            out,
            tokenizer=tokenizer,
            field=field,
            split=split,
            held_out=held_out,
            jobs=jobs or usable_cores(),
            say=click.echo,
            on_progress=show,
        )
    if prepared.empty:
        click.echo(f"{prepared.empty:,} documents without text were left out; the first is {prepared.first_empty}")
    found = describe(out, check=False)
    click.echo("\n".join(found.lines()))
    if found.held_out_tokens < FEW_HELD_OUT_TOKENS:
        click.echo(
            f"warning: only {found.held_out_tokens:,} tokens are held out, and an evaluation needs at least a window; "
            f"give a larger --held-out than {held_out} and another --out, or join with a short --context"
        )
    click.echo(f"train on it with: {shlex.join(['p2ptrain', 'join', '--data', str(out)])}")


@data.command()
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--tokenizer", metavar="NAME", help="chars, bytes, FILE.json or hub:NAME: shows text, checks ids.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--check", is_flag=True, help="Read everything: hashes of prepared files, and ids within the vocabulary.")
def info(directory: Path, tokenizer: str | None, as_json: bool, check: bool) -> None:
    """Say what is in a directory of token files: tokens, documents, tokenizer, and how the texts begin.

    DIR is what `p2ptrain data prepare` wrote, or holds .bin files of nanoGPT, llm.c or modded-nanogpt. Those do not say
    their tokenizer: name it, and see whether the text is text.

    \b
        p2ptrain data info fineweb-gpt2 --check
        p2ptrain data info nanoGPT/data/openwebtext --tokenizer hub:gpt2
    """
    from p2ptrain.training.data.token_info import describe

    found = describe(directory, check=check, tokenizer_name=tokenizer)
    click.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) if as_json else "\n".join(found.lines()))
