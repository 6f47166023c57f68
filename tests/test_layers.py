"""The components of the package: imports point up one list only, and what each may know of the world."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "p2ptrain"

# What every component may import: modules that import nothing of ours, and the version.
LEAVES = {"__version__", "error_log", "errors", "formatting", "signals"}
# Each row may import the rows above it, and the leaves. A new component gets its place here.
LAYERS: list[set[str]] = [
    {"algorithms", "settings"},
    {"protocol"},
    {"memory_network", "network"},
    {"peer"},
    {"monitor"},
    {"api", "integrations", "training"},
    {"demo", "simulation"},
    {"cli"},
]
# The same of what is in protocol/: each may import those before it.
PROTOCOL = (
    "anchor", "restarts", "token_bucket", "push_pace", "nursery", "wire", "parallel", "os_memory", "links",
    "membership", "event_log", "exchange", "rounds", "gossip", "pairwise", "state_sync", "node",
)  # fmt: skip
RANK = {name: rank for rank, names in enumerate([LEAVES, *LAYERS]) for name in names}

FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def component(path: Path) -> str:
    """The name in `LAYERS` of a file: its folder in the package, or its own name."""
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "cli" if name == "__main__" else name


def files_of(*components: str) -> list[Path]:
    found = [path for path in FILES if component(path) in components]
    assert {component(path) for path in found} == set(components)
    return found


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Full names of all that a file imports, at any depth of it."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def outside(path: Path) -> set[str]:
    """Top-level packages imported from outside of ours."""
    return {name.split(".")[0] for name in imports(path)} - {"p2ptrain"}


def attributes_of(path: Path, module: str) -> set[str]:
    """Names used as `module.name` in a file."""
    return {
        node.attr
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module
    }


def test_imports_point_up_the_list_only() -> None:
    for path in FILES:
        own = component(path)
        assert own in RANK, f"{own} has no place in LAYERS yet"
        for name in imports(path):
            package, _, inner = name.partition(".")
            other = inner.split(".")[0]
            if package == "p2ptrain" and other != own:
                assert RANK[other] < RANK[own], f"{path}: {own} imports {name}"


def test_imports_within_the_protocol_point_up_the_list_only() -> None:
    protocol = PACKAGE / "protocol"
    for path in protocol.rglob("*.py"):
        own = path.relative_to(protocol).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for name in imports(path):
            if name.startswith("p2ptrain.protocol."):
                other = name.split(".")[2]
                assert other == own or PROTOCOL.index(other) < PROTOCOL.index(own), f"{path} imports {name}"


def test_every_module_says_what_it_is() -> None:
    for path in FILES:
        assert not parsed(path).body or ast.get_docstring(parsed(path)), path


def test_every_file_of_tests_has_a_test() -> None:
    for path in Path(__file__).parent.rglob("test_*.py"):
        assert any(
            isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in ast.walk(parsed(path))
        ), path


def test_only_the_network_knows_hivemind_and_asyncio() -> None:
    for path in FILES:
        if component(path) != "network":
            assert not outside(path) & {"hivemind", "asyncio", "uvloop", "multiaddr"}, path


def test_nothing_unpickles() -> None:
    for path in FILES:
        assert not outside(path) & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, path


def test_algorithms_are_pure() -> None:
    """Torch, numpy, a hash and the quiet part of the standard library: no clock, socket, thread, file or randomness."""
    loud = {
        "time", "datetime", "random", "secrets", "uuid", "os", "io", "pathlib", "tempfile", "socket", "ssl", "select",
        "threading", "queue", "concurrent", "multiprocessing", "subprocess", "signal",
    }  # fmt: skip
    for path in files_of("algorithms"):
        ours = {name for name in imports(path) if name.startswith("p2ptrain.")}
        assert all(name.startswith(("p2ptrain.algorithms.", "p2ptrain.errors.")) for name in ours), path
        others = outside(path) - {"torch", "numpy", "blake3"}
        assert others <= sys.stdlib_module_names - loud, path
        assert not attributes_of(path, "torch") & {"rand", "randn", "randint", "randperm", "manual_seed"}, path
        assert "random" not in attributes_of(path, "np"), path


def test_tensors_of_ours_have_the_dtype_and_device_that_they_say() -> None:
    """`torch.set_default_dtype` and `set_default_device` are the user's."""
    makers = {"zeros", "ones", "empty", "full", "tensor", "as_tensor", "arange", "linspace", "eye", "scalar_tensor"}
    found = 0
    for path in files_of("algorithms", "protocol", "peer"):
        for node in ast.walk(parsed(path)):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=name)) if name in makers:
                    found += 1
                    assert {"dtype", "device"} <= {k.arg for k in node.keywords}, f"{path}:{node.lineno}: torch.{name}"
    assert found


def test_below_the_network_time_and_randomness_are_arguments() -> None:
    """So that a swarm on the memory network is the same every time."""
    for path in files_of("algorithms", "protocol", "memory_network"):
        assert not outside(path) & {"time", "datetime", "secrets", "uuid"}, path
        assert attributes_of(path, "random") <= {"Random"}, path
        assert "to_thread" not in attributes_of(path, "trio"), path


def test_what_decides_rounds_knows_neither_trio_nor_links() -> None:
    """So that it is tested without a network, and is a function of what it is given."""
    rounds = PACKAGE / "protocol" / "rounds"
    pure = [*(rounds / "deciding").glob("*.py"), rounds / "landing" / "outer_step.py"]
    assert len(pure) > 12
    for path in pure:
        assert "trio" not in outside(path), path
        assert not any(name.startswith("p2ptrain.protocol.links") for name in imports(path)), path


def test_a_round_decides_then_moves_then_lands() -> None:
    """`deciding` imports nothing else of rounds, `moving` nothing that lands, and only `driver` imports `attempts`."""
    rounds, seen = PACKAGE / "protocol" / "rounds", 0
    for path in rounds.rglob("*.py"):
        own = path.relative_to(rounds).parts[0].removesuffix(".py")
        for name in imports(path):
            if not name.startswith("p2ptrain.protocol.rounds."):
                continue
            other = name.split(".")[3]
            seen += 1
            assert own != "deciding" or other == own, f"{path} imports {name}"
            assert own != "moving" or other in ("deciding", "liveness", "context", own), f"{path} imports {name}"
            assert other != "attempts" or own == "driver", f"{path} imports {name}"
    assert seen > 50


@pytest.mark.processes
def test_importing_the_package_is_cheap() -> None:
    """`p2ptrain --help` and tab completion must not pay for torch; names are imported when they are first used."""
    script = "import sys, p2ptrain; print(sorted({'torch', 'numpy', 'hivemind', 'trio', 'click'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    import p2ptrain

    assert all(getattr(p2ptrain, name) is not None for name in p2ptrain.__all__)
    assert len(p2ptrain.__all__) <= 12
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        p2ptrain.Nothing  # noqa: B018
