"""What deploy/ says fits together and fits the command line. Nothing is built or applied here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from rocstar.cli.verbs import sandbox
from rocstar.sandbox.settings import Settings

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))
DEPLOYMENTS = [document for document in DOCUMENTS if document["kind"] in ("Deployment", "StatefulSet")]
INSTRUCTION = re.compile(r"^([A-Z]+) (.*?)(?<!\\)$", re.MULTILINE | re.DOTALL)
DOCKERFILE = INSTRUCTION.findall(
    re.sub(r"^#.*\n", "", (ROOT / "deploy" / "Dockerfile").read_text(), flags=re.MULTILINE)
)


def options() -> set[str]:
    """Of `rocstar sandbox serve`."""
    commands: Any = typer.main.get_command(sandbox.app)
    return {name for parameter in commands.commands["serve"].params for name in parameter.opts}


def given(arguments: list[str]) -> set[str]:
    return {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}


def test_the_image_is_made_of_files_that_exist_and_starts_a_command_that_exists() -> None:
    instructions = dict(DOCKERFILE)
    assert DOCKERFILE[0][0] == "FROM"
    sources = [word for name, rest in DOCKERFILE if name == "COPY" for word in rest.split()[:-1]]
    assert sources and all((ROOT / source).exists() for source in sources)
    assert "PRETEND_VERSION_FOR_ROCSTAR=${VERSION:?" in DOCKERFILE[DOCKERFILE.index(("ARG", "VERSION")) + 1][1]
    entrypoint, command = json.loads(instructions["ENTRYPOINT"]), json.loads(instructions["CMD"])
    assert entrypoint[:3] == ["rocstar", "sandbox", "serve"]
    assert given(entrypoint + command) <= options()
    assert "--token" not in given(entrypoint + command), "a secret on a command line can be read by every user"


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: str(deployment["metadata"]["name"]))
def test_a_deployment_holds_together(deployment: dict[str, Any]) -> None:
    template = deployment["spec"]["template"]
    pod = template["spec"]
    (container,) = pod["containers"]
    assert deployment["apiVersion"] == "apps/v1"
    assert deployment["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    assert given(container["args"]) <= options()
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {"http": 8700}
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/ping", "port": "http"}
    (mounted,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mounted["name"] == volume["name"]
    assert mounted["mountPath"] == "/run/secrets/token", "where the image's --token-file is"
    assert volume["secret"] == {"secretName": "sandbox-token"}
    assert pod["terminationGracePeriodSeconds"] > 120, "--drain-seconds"


def test_the_unit_ends_the_service_alone_and_gives_it_time_to_drain() -> None:
    unit = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / "deploy" / "rocstar-sandbox.service").read_text(), re.MULTILINE))
    assert given(unit["ExecStart"].split()) <= options()
    assert (unit["KillMode"], unit["OOMPolicy"], unit["Delegate"]) == ("mixed", "continue", "yes")
    assert int(unit["TimeoutStopSec"]) > Settings().drain_seconds


def test_callers_reach_the_gateway_and_that_its_nodes_by_name() -> None:
    front, behind = [document for document in DOCUMENTS if document["kind"] == "Service"]
    gateway, node = DEPLOYMENTS
    for service, served in ((front, gateway), (behind, node)):
        assert service["spec"]["selector"] == served["spec"]["template"]["metadata"]["labels"]
        assert [port["port"] for port in service["spec"]["ports"]] == [8700]
    domain, name = behind["metadata"]["name"], node["metadata"]["name"]
    assert node["spec"]["serviceName"] == domain
    addresses = [f"http://{name}-{number}.{domain}:8700" for number in range(node["spec"]["replicas"])]
    assert gateway["spec"]["template"]["spec"]["containers"][0]["args"] == [f"--nodes={','.join(addresses)}"]
