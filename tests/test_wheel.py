"""What `python -m build` makes installs and runs where there is nothing of this repository."""

from __future__ import annotations

import ast
import email
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from p2ptrain import __version__

ROOT = Path(__file__).parents[1]
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "p2ptrain-*")
ENVIRON = {
    name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("P2PTRAIN_")
}


def run(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run(words, cwd=cwd, env=ENVIRON, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, and the wheel that is built from it alone."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=NOT_SOURCE)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def scripts(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of a fresh environment with the wheel, and what it depends on from where the tests run."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    (wheel,) = dist.glob("*.whl")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=dist)
    site_packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=dist).strip())
    # Only the directory is added: the .pth files in it, of an editable p2ptrain for one, are not read.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return python.parent


def test_the_wheel_holds_the_package_with_its_data_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {path for path in (ROOT / "p2ptrain").rglob("*") if path.is_file() and path.parent.name != "__pycache__"}
    assert {path.relative_to(ROOT).as_posix() for path in package} <= names
    assert {name.split("/")[0] for name in names} == {"p2ptrain", f"p2ptrain-{__version__}.dist-info"}
    assert f"p2ptrain-{__version__}.dist-info/licenses/LICENSE" in names


def test_the_wheel_requires_all_that_it_imports(dist: Path) -> None:
    """Itself: what comes along with others today may be gone from them tomorrow."""
    (wheel,) = dist.glob("*.whl")
    homes = importlib.metadata.packages_distributions()
    lacking = set()
    with zipfile.ZipFile(wheel) as files:
        metadata = email.message_from_bytes(files.read(f"p2ptrain-{__version__}.dist-info/METADATA"))
        requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
        for file in map(PurePosixPath, files.namelist()):
            if file.suffix == ".py":
                # An integration has an extra of its name; which others need one is tested in tests/cli/test_extras.py.
                extra = file.stem if file.parent.name == "integrations" else "all"
                names = required(requirements, extra)
                for module in imported(files.read(str(file))) - sys.stdlib_module_names - {"p2ptrain"}:
                    if not names & set(map(canonicalize_name, homes.get(module, ()))):
                        lacking.add((str(file), module))
    assert requirements
    assert lacking == set()


def required(requirements: list[Requirement], extra: str) -> set[str]:
    """What is installed along with it, and with an extra and those that it names itself."""
    wanted = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": extra})]
    inner = {name for requirement in wanted if requirement.name == "p2ptrain" for name in requirement.extras}
    return {canonicalize_name(requirement.name) for requirement in wanted}.union(
        *(required(requirements, name) for name in inner)
    )


def imported(source: bytes) -> set[str]:
    """The packages that a file imports, at its beginning or later."""

    def modules() -> Iterator[str]:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module

    return {module.partition(".")[0] for module in modules()}


def test_the_source_distribution_holds_tests_and_documentation(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    some = {"CHANGELOG.md", "Makefile", "docs/understand/protocol.md", "tests/conftest.py", "examples/minimal.py"}
    assert some | {"mkdocs.yml"} <= names


def test_the_installed_command_runs_in_an_empty_folder(scripts: Path, tmp_path: Path) -> None:
    p2ptrain = scripts / "p2ptrain"
    assert run(p2ptrain, "--version", cwd=tmp_path) == f"p2ptrain {__version__}\n"
    assert "Train one neural network on many machines, peer to peer." in run(p2ptrain, "--help", cwd=tmp_path)
    assert "s7 " in run(p2ptrain, "reproduce", "--list", cwd=tmp_path)
    assert "### sync_every" in run(p2ptrain, "config", "reference", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
    short = ("--peers", "2", "--steps", "4", "--sync-every", "2", "--eval-every", "4")
    assert "written to" in run(p2ptrain, "simulate", *short, "--out", "here", cwd=tmp_path)
    assert (tmp_path / "here/curves.png").exists()
    imported = run(scripts / "python", "-c", "import p2ptrain; print(p2ptrain.__file__)", cwd=tmp_path)
    assert Path(imported).is_relative_to(scripts.parent)
