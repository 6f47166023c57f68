"""p2ptrain without extras: each test hides the packages of all extras from a subprocess."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from p2ptrain.settings.extras import EXTRAS

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
# A module that is None in sys.modules can be neither found nor imported.
HIDE = f"import sys; sys.modules.update(dict.fromkeys({[name for names in EXTRAS.values() for name in names]!r}))\n"
COMMAND = HIDE + "from p2ptrain.cli.main import main; main()"
# Every module except those that plot or serve something.
IMPORT_THE_REST = HIDE + (
    "import importlib, pkgutil, p2ptrain\n"
    "for found in pkgutil.walk_packages(p2ptrain.__path__, 'p2ptrain.'):\n"
    "    optional = ('.plot', '.dashboard.', '.__main__', '.integrations.', '.demo.demo')\n"
    "    if not any(part in found.name for part in optional):\n"
    "        importlib.import_module(found.name)\n"
)
# Distribution names of the packages.
DISTRIBUTIONS = {"sklearn": "scikit-learn", "prometheus_client": "prometheus-client"}
STEPS = ("--steps", "2", "--threads", "1", "--device", "cpu", "--host-maddrs", "/ip4/127.0.0.1/tcp/0")


def _python(program: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("P2PTRAIN_")}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120,
        env={**environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["dashboard", "--initial-peers", "x"],
            "p2ptrain dashboard needs starlette, uvicorn, anyio, prometheus_client",
        ),
        (["join", "--dashboard", "0", *STEPS], "--dashboard needs starlette, uvicorn, anyio, prometheus_client"),
        (["join", "--prometheus", "0", *STEPS], "--prometheus needs starlette, uvicorn, anyio, prometheus_client"),
        (["demo"], "p2ptrain demo needs matplotlib, sklearn, threadpoolctl"),
        (["simulate"], "p2ptrain simulate needs matplotlib, sklearn, threadpoolctl"),
        (["reproduce", "s7"], "p2ptrain reproduce needs matplotlib, sklearn, threadpoolctl"),
        (
            ["join", "--num-shards", "2", "--sharding", "clusters", *STEPS],
            "sharding = 'clusters' needs matplotlib, sklearn, threadpoolctl",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_missing_extra_is_reported_with_its_pip_command(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = _python(COMMAND, *arguments, cwd=tmp_path)
    extra = "dashboard" if "starlette" in message else "simulate"
    line = done.stderr.splitlines()[-1]
    assert line == f"p2ptrain: error: {message}; install with: pip install 'p2ptrain[{extra}]'"
    assert "Traceback" not in done.stderr
    assert done.returncode == 2


def test_without_extras_help_works_and_a_peer_trains(tmp_path: Path) -> None:
    assert "p2ptrain join" in _python(COMMAND, "--help", cwd=tmp_path).stdout
    done = _python(COMMAND, "join", *STEPS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "finished at step 2: held-out " in done.stdout
    written = _python(COMMAND, "generate", "--length", "5", cwd=tmp_path)
    assert written.stdout.startswith("def "), written.stderr


def test_the_experiments_are_listed_without_extras(tmp_path: Path) -> None:
    done = _python(COMMAND, "reproduce", "--list", cwd=tmp_path)
    assert done.stdout.startswith("s2 "), done.stderr


def test_only_modules_that_plot_or_serve_import_an_extra(tmp_path: Path) -> None:
    done = _python(IMPORT_THE_REST, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_setup_cfg_has_the_same_extras() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    for extra, packages in EXTRAS.items():
        lines = config["options.extras_require"][extra].splitlines()
        required = {Requirement(line).name for line in lines if line and not line.startswith("#")}
        assert {canonicalize_name(name) for name in required} == {DISTRIBUTIONS.get(name, name) for name in packages}
