"""The manifests of docs/kubernetes.md, docs/scrub.md and configs/kubernetes: they have the form
that Kubernetes asks for, their parts fit together, and their commands are accepted by the launcher
and the commands of mindresume.

The form is compared with the schemas of the Python package kubernetes-validate, if it is installed.
A PodGroup of Volcano has no schema there: its keys are compared with a list.
"""

import importlib
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from mindresume.cli import app

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "configs" / "kubernetes").glob("*.yaml"))
VERSIONS = ("1.28", "1.31")  # of Kubernetes
POD_GROUP = {"minMember", "queue", "minResources", "priorityClassName", "minTaskMember"}
PAGES = [ROOT / "docs" / name for name in ("kubernetes.md", "kubernetes.zh.md")]


def documents(page):
    """Returns {kind: document} of the block after the marker."""
    block = re.search(
        r"<!-- needs: Kubernetes -->\n```yaml\n(.*?)```", page.read_text(), re.DOTALL
    )[1]
    return {document["kind"]: document for document in yaml.safe_load_all(block)}


@pytest.fixture(params=[*PAGES, FILES[-1]], ids=lambda page: page.name)
def manifest(request):
    path = request.param
    return documents(path) if path.suffix == ".md" else in_file(path)


def in_file(path):
    """Returns {kind: document} of a file."""
    return {document["kind"]: document for document in yaml.safe_load_all(path.read_text("utf-8"))}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", [*FILES, *PAGES], ids=lambda path: path.name)
def test_the_form_is_that_of_the_schemas(path, version):
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is missing")
    found = in_file(path) if path.suffix == ".yaml" else documents(path)
    for kind, document in found.items():
        if kind != "PodGroup":
            schemas.validate(document, version, strict=True)


def test_a_wrong_form_is_noticed():
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is missing")
    job = in_file(FILES[0])["Job"]
    job["spec"]["backoffLimits"] = job["spec"].pop("backoffLimit")
    with pytest.raises(schemas.ValidationError):
        schemas.validate(job, VERSIONS[0], strict=True)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_all_pods_start_together(path):
    """A pod names its group and Volcano; the group is not larger than the job, nor smaller than
    what the supervisors need."""
    found = in_file(path)
    group, spec = found["PodGroup"], found["Job"]["spec"]
    assert group["apiVersion"] == "scheduling.volcano.sh/v1beta1"
    assert set(group["spec"]) <= POD_GROUP
    assert pod(found)["schedulerName"] == "volcano"
    assert spec["template"]["metadata"]["annotations"] == {
        "scheduling.k8s.io/group-name": group["metadata"]["name"]
    }
    least = re.search(r"--min-nodes (\d+)", pod(found)["containers"][0]["args"][0])
    assert group["spec"]["minMember"] == (int(least[1]) if least else spec["completions"])
    assert spec["backoffLimit"] == 50 * spec["completions"]
    assert found["Service"]["spec"]["publishNotReadyAddresses"] is True
    # one user owns what is in /dev/shm, in each start
    assert pod(found)["securityContext"]["runAsUser"] != 0
    limits = pod(found)["containers"][0]["resources"]
    assert limits["limits"] == limits["requests"]


def test_the_elastic_job_differs_by_its_command_alone():
    fixed, elastic = (
        in_file(ROOT / "configs/kubernetes" / name) for name in ("job.yaml", "elastic.yaml")
    )
    for found in (fixed, elastic):
        container = pod(found)["containers"][0]
        del container["args"], container["env"], found["PodGroup"]["spec"]["minMember"]
    assert fixed == elastic


def test_the_elastic_command_is_accepted():
    text = pod(in_file(ROOT / "configs/kubernetes/elastic.yaml"))["containers"][0]["args"][0]
    words = shlex.split(text.replace("$JOB_COMPLETION_INDEX", "3"))
    assert words[:4] == ["exec", "python", "-m", "mindresume"]
    parsed = parse(words[4:])
    assert (parsed["nodes"], parsed["min_nodes"], parsed["node_rank"]) == (64, 60, 3)
    assert parsed["node_address"] == "qwen3-3.qwen3" and parsed["local_workers"] == 8


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
def test_the_scrub_at_regular_times(name):
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
    (container,), training = job["containers"], pod(documents(PAGES[0]))
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
