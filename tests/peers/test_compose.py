"""What `peers/` promises: settings that load, and a compose file in which workers can find their bootstrap node."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from p2ptrain.network.addresses import check_initial_peers
from p2ptrain.settings.initial_peers import write_addresses
from p2ptrain.settings.table import CONFIG_VARIABLE, Settings, merge

PEERS = Path(__file__).parents[2] / "peers"
ROOT = PEERS.parent
PEER_ID = "QmPBZF7ViE2U1E52e3j6vGy7uCQvjodvzjvDWz2Cj7VGTQ"


def _services() -> dict[str, Any]:
    services: dict[str, Any] = _compose()["services"]
    return services


def _compose() -> dict[str, Any]:
    compose: dict[str, Any] = yaml.safe_load((PEERS / "compose.yaml").read_text(encoding="utf-8"))
    return compose


def _mounts(service: str) -> dict[str, tuple[str, str]]:
    """By path in the container: what is mounted there, and how."""
    mounts = (volume.split(":") for volume in _services()[service]["volumes"])
    return {target: (source, *(mode or ["rw"])) for source, target, *mode in mounts}


def _settings(service: str) -> Settings:
    """The settings of a service, read as its container reads them."""
    environment = dict(_services()[service]["environment"])
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    source, _ = _mounts(service)[environment.pop(CONFIG_VARIABLE)]
    return merge({}, environment, str(PEERS / source))


def test_the_settings_of_each_service_are_a_role() -> None:
    assert {_mounts(service)["/etc/p2ptrain.toml"] for service in _services()} == {
        ("./bootstrap.toml", "ro"),
        ("./worker.toml", "ro"),
    }


def test_workers_find_the_address_that_the_bootstrap_node_writes(tmp_path: Path) -> None:
    bootstrap, worker = _settings("bootstrap"), _settings("worker")
    written = Path(str(bootstrap.values["write_addresses"]))
    assert worker.values["initial_peers"] == (str(written),)
    shared = str(written.parent)
    assert _mounts("bootstrap")[shared] == ("rendezvous", "rw")
    assert _mounts("worker")[shared] == ("rendezvous", "ro")

    (announced,) = bootstrap.values["announce_maddrs"]  # type: ignore[misc]
    (listening,) = bootstrap.values["host_maddrs"]  # type: ignore[misc]
    port = listening.rpartition("/")[2]
    assert announced == f"/dns4/bootstrap/tcp/{port}"
    assert port in _services()["bootstrap"]["healthcheck"]["test"]

    file = tmp_path / "bootstrap"
    write_addresses(file, [f"{announced}/p2p/{PEER_ID}"])
    found = merge({"initial_peers": str(file)}, {}).network_config().initial_peers
    assert found == (f"{announced}/p2p/{PEER_ID}",)
    check_initial_peers(found)


def test_workers_start_when_the_bootstrap_node_is_healthy() -> None:
    assert _services()["worker"]["depends_on"] == {"bootstrap": {"condition": "service_healthy"}}


def test_workers_can_be_scaled() -> None:
    worker = _services()["worker"]
    assert worker["deploy"]["replicas"] == 4
    # One name, one port of the host or one identity would be enough for one worker only.
    assert "container_name" not in worker
    assert "ports" not in worker
    settings = _settings("worker")
    for own in ("identity", "out", "metrics", "seed", "host_maddrs", "announce_maddrs"):
        assert not settings.explicit(own), own


def test_what_a_peer_keeps_is_in_a_named_volume() -> None:
    workdir = re.findall(r"^WORKDIR (\S+)", _dockerfile(), re.MULTILINE)[-1]
    volumes = {service: _mounts(service)[workdir] for service in ("bootstrap", "worker")}
    assert volumes == {"bootstrap": ("bootstrap", "rw"), "worker": ("workers", "rw")}
    assert {source for source, _ in volumes.values()} < set(_compose()["volumes"])
    # Nothing is told to be kept elsewhere.
    assert not any(_settings(service).explicit(name) for service in volumes for name in ("identity", "out", "metrics"))


def test_the_page_is_for_browsers_on_this_machine() -> None:
    dashboard = _services()["dashboard"]
    assert dashboard["ports"] == ["127.0.0.1:${DASHBOARD_PORT-8080}:8080"]
    assert dashboard["command"][-1] == dashboard["healthcheck"]["test"][-1] == "8080"
    # It finds the run as the workers do.
    assert dashboard["environment"] == _services()["worker"]["environment"]


def test_the_worker_on_a_gpu_trains_in_the_same_run_and_starts_only_on_demand() -> None:
    worker, on_gpu = _services()["worker"], _services()["worker-gpu"]
    assert on_gpu["profiles"] == ["gpu"]
    assert not any("profiles" in _services()[service] for service in ("bootstrap", "worker", "dashboard"))
    assert _settings("worker-gpu").values | {"device": "cpu"} == _settings("worker").values
    assert _settings("worker-gpu").values["device"] == "cuda"
    assert {**on_gpu["environment"], **worker["environment"]} == on_gpu["environment"]
    for same in ("volumes", "depends_on", "healthcheck", "tmpfs", "cap_drop"):
        assert on_gpu[same] == worker[same], same
    (device,) = on_gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    # An image of its own: that of the others may have a CPU build of torch.
    assert on_gpu["image"] not in {_services()[service]["image"] for service in ("bootstrap", "worker", "dashboard")}
    assert on_gpu["build"]["args"] == {"GPU": "1", "TORCH_INDEX": "${GPU_TORCH_INDEX-}"}
    assert re.findall(r"^ARG GPU=$", _dockerfile(), re.MULTILINE) == ["ARG GPU="] * 2  # of both stages


@pytest.mark.parametrize("service", ["bootstrap", "worker", "worker-gpu", "dashboard"])
def test_a_service_is_a_command_with_a_check_and_time_to_leave(service: str) -> None:
    definition = _services()[service]
    assert definition["command"][0] == {"worker": "join", "worker-gpu": "join"}.get(service, service)
    assert definition["stop_grace_period"] == ("2m" if service == "worker-gpu" else "20s")
    script = definition["healthcheck"]["test"][2]
    assert f"COPY peers/healthcheck.py {script}\n" in _dockerfile()


def test_both_versions_of_compose_read_the_file() -> None:
    # Compose 2 calls `version` obsolete; 1.29 takes the Compose specification without it, but not `name`.
    assert set(_compose()) == {"services", "volumes", "x-peer"}


def test_the_image_does_not_run_as_root_and_stops_on_sigterm() -> None:
    final_stage = _dockerfile().rpartition("\nFROM ")[2]
    assert re.search(r"^USER peer$", final_stage, re.MULTILINE)
    assert re.search(r"^STOPSIGNAL SIGTERM$", final_stage, re.MULTILINE)


def test_the_index_of_torch_can_be_overridden() -> None:
    (argument, value), *others = _services()["worker"]["build"]["args"].items()
    assert not others
    default = re.search(rf"^ARG {argument}=(\S*)$", _dockerfile(), re.MULTILINE)
    assert default is not None
    assert value == f"${{{argument}-{default[1]}}}"  # with a dash alone, an empty value counts


def test_what_the_image_is_built_from_is_sent_to_the_builder() -> None:
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = {pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!")}
    assert "*" in patterns
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", _dockerfile(), re.MULTILINE):
        for source in sources.split():
            assert source == "." or source in sent or source.partition("/")[0] in sent, source


def _dockerfile() -> str:
    return (ROOT / "Dockerfile").read_text(encoding="utf-8")
