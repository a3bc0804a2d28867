"""The manifests of docs/kubernetes.md and docs/scrub.md: they parse, their parts fit together, and
their commands are accepted by the launcher and the commands of mindresume."""

import importlib
import os
import re
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from mindresume.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / name for name in ("kubernetes.md", "kubernetes.zh.md")]


def documents(page):
    """Returns {kind: document} of the block after the marker."""
    block = re.search(
        r"<!-- needs: Kubernetes -->\n```yaml\n(.*?)```", page.read_text(), re.DOTALL
    )[1]
    return {document["kind"]: document for document in yaml.safe_load_all(block)}


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
def manifest(request):
    return documents(request.param)


def pod(manifest):
    return manifest["Job"]["spec"]["template"]["spec"]


def environment(container):
    return {entry["name"]: entry["value"] for entry in container["env"]}


def test_names_that_must_agree(manifest):
    """A pod of an Indexed Job is called {job}-{index}.{service}, if subdomain and selector name the
    service and the job."""
    service, job = manifest["Service"], manifest["Job"]
    assert service["apiVersion"] == "v1" and job["apiVersion"] == "batch/v1"
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {
        "job-name": job["metadata"]["name"]
    }
    assert pod(manifest)["subdomain"] == service["metadata"]["name"]
    assert (
        f"{job['metadata']['name']}-0.{service['metadata']['name']} "
        in pod(manifest)["containers"][0]["args"][0]
    )
    assert (
        job["spec"]["completionMode"] == "Indexed"
        and job["spec"]["completions"] == job["spec"]["parallelism"]
    )
    assert job["spec"]["backoffLimit"] > 0


def test_the_ranks_have_time_to_save_and_a_memory_that_survives_a_restart(manifest):
    container, volumes = (
        pod(manifest)["containers"][0],
        {volume.pop("name"): volume for volume in pod(manifest)["volumes"]},
    )
    assert pod(manifest)["terminationGracePeriodSeconds"] > int(
        environment(container)["MSRUN_LEAVE"]
    )
    assert pod(manifest)["restartPolicy"] == "OnFailure"
    places = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert (
        places["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        and "persistentVolumeClaim" in places["/shared"]
    )
    assert environment(container)["MSRUN_RENDEZVOUS"].startswith("/shared/")


def test_the_command_is_accepted(manifest, tmp_path):
    """The command of each pod runs with a Python that prints its arguments; ``mindresume run`` then
    parses them."""
    container = pod(manifest)["containers"][0]
    printing = tmp_path / "python"
    printing.write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    printing.chmod(0o755)
    for index in range(manifest["Job"]["spec"]["completions"]):
        done = subprocess.run(
            [*container["command"], *container["args"]],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            env={
                **os.environ,
                **environment(container),
                "JOB_COMPLETION_INDEX": str(index),
                "PYTHON": str(printing),
            },
        )
        assert done.returncode == 0, done.stderr
        words = done.stdout.split("\0")[:-1]
        options = dict(zip(words[3:11:2], words[4:11:2], strict=True))
        assert words[:3] == ["-m", "mindresume", "run"] and words[11] == "--"
        assert options == {
            "--max-restarts": "5",
            "--nodes": str(manifest["Job"]["spec"]["completions"]),
            "--node-rank": str(index),
            "--rendezvous": environment(container)["MSRUN_RENDEZVOUS"],
        }
        parsed = parse(words[2:])
        assert (
            parsed["nodes"] == manifest["Job"]["spec"]["completions"]
            and parsed["node_rank"] == index
        )


def parse(words):
    """Returns what a command of mindresume understands, without starting anything."""
    for module in ("run", "maintenance"):
        importlib.import_module(f"mindresume.cli.{module}")
    command = typer.main.get_command(app).commands[words[0]]
    return command.make_context(words[0], words[1:]).params


@pytest.mark.parametrize("name", ["scrub.md", "scrub.zh.md"])
def test_the_scrub_at_regular_times(name, manifest):
    """It mounts what the training mounts, and its command and that of crontab are accepted and mean
    the same."""
    page = ROOT / "docs" / name
    (found,) = documents(page).values()
    assert (found["apiVersion"], found["kind"], found["spec"]["concurrencyPolicy"]) == (
        "batch/v1",
        "CronJob",
        "Forbid",
    )
    job = found["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,), training = job["containers"], pod(manifest)
    assert (
        job["restartPolicy"] == "Never" and container["image"] == training["containers"][0]["image"]
    )
    assert all(
        mount in training["containers"][0]["volumeMounts"] for mount in container["volumeMounts"]
    )
    assert all(volume in training["volumes"] for volume in job["volumes"])
    line = re.search(
        r"^(\S+ \S+ \* \* \*)  nice -n 19 ionice -c 3 (mindresume .*)$",
        page.read_text(),
        re.MULTILINE,
    )
    assert line[1] == found["spec"]["schedule"] and line[2].split() == container["command"]
    parsed = parse(container["command"][1:])
    assert parsed["repair"] and (parsed["rate"], parsed["older_than"]) == (50, 20)
