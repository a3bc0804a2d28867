"""The manifest of docs/kubernetes.md: it parses, its parts fit together, and its command is one that the launcher and
``mindresume run`` accept."""
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


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
def manifest(request):
    """Returns {kind: document} of the block after the marker."""
    block = re.search(r"<!-- needs: Kubernetes -->\n```yaml\n(.*?)```", request.param.read_text(), re.DOTALL)[1]
    return {document["kind"]: document for document in yaml.safe_load_all(block)}


def pod(manifest):
    return manifest["Job"]["spec"]["template"]["spec"]


def environment(container):
    return {entry["name"]: entry["value"] for entry in container["env"]}


def test_names_that_must_agree(manifest):
    """A pod of an Indexed Job is called {job}-{index}.{service}, if subdomain and selector name the service and the job."""
    service, job = manifest["Service"], manifest["Job"]
    assert service["apiVersion"] == "v1" and job["apiVersion"] == "batch/v1"
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod(manifest)["subdomain"] == service["metadata"]["name"]
    assert f"{job['metadata']['name']}-0.{service['metadata']['name']} " in pod(manifest)["containers"][0]["args"][0]
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["completions"] == job["spec"]["parallelism"]
    assert job["spec"]["backoffLimit"] > 0


def test_the_ranks_have_time_to_save_and_a_memory_that_survives_a_restart(manifest):
    container, volumes = pod(manifest)["containers"][0], {volume.pop("name"): volume for volume in pod(manifest)["volumes"]}
    assert pod(manifest)["terminationGracePeriodSeconds"] > int(environment(container)["MSRUN_LEAVE"])
    assert pod(manifest)["restartPolicy"] == "OnFailure"
    places = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert places["/dev/shm"]["emptyDir"]["medium"] == "Memory" and "persistentVolumeClaim" in places["/shared"]
    assert environment(container)["MSRUN_RENDEZVOUS"].startswith("/shared/")


def test_the_command_is_accepted(manifest, tmp_path):
    """The command of each pod runs with a Python that prints its arguments; ``mindresume run`` then parses them."""
    container = pod(manifest)["containers"][0]
    printing = tmp_path / "python"
    printing.write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    printing.chmod(0o755)
    for index in range(manifest["Job"]["spec"]["completions"]):
        done = subprocess.run([*container["command"], *container["args"]], cwd=ROOT, capture_output=True, text=True, timeout=120,
                              env={**os.environ, **environment(container), "JOB_COMPLETION_INDEX": str(index),
                                   "PYTHON": str(printing)})
        assert done.returncode == 0, done.stderr
        words = done.stdout.split("\0")[:-1]
        options = dict(zip(words[3:11:2], words[4:11:2], strict=True))
        assert words[:3] == ["-m", "mindresume", "run"] and words[11] == "--"
        assert options == {"--max-restarts": "5", "--nodes": str(manifest["Job"]["spec"]["completions"]),
                           "--node-rank": str(index), "--rendezvous": environment(container)["MSRUN_RENDEZVOUS"]}
        parsed = parse(words[3:])
        assert parsed["nodes"] == manifest["Job"]["spec"]["completions"] and parsed["node_rank"] == index


def parse(words):
    """Returns what ``mindresume run`` understands, without starting anything."""
    importlib.import_module("mindresume.cli.run")
    found = typer.main.get_command(app)         # of the commands that are imported
    return getattr(found, "commands", {"run": found})["run"].make_context("run", words).params
