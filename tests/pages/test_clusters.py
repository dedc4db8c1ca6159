"""Do the examples of clusters train as they stand? This machine plays SLURM and Kubernetes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from partita.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples/clusters"

SRUN = """#!{python}
import os, subprocess, sys
command = [word for word in sys.argv[1:] if word != "--kill-on-bad-exit=0"]
assert command[0] == "torchrun", command
torchrun = [{python!r}, "-m", "torch.distributed.run", "--local-addr=127.0.0.1", *command[1:]]
nodes = [subprocess.Popen(torchrun) for _ in range(int(os.environ["SLURM_NNODES"]))]
sys.exit(max(node.wait() for node in nodes))
"""
SCONTROL = """#!/bin/sh
test "$*" = "show hostnames node[1-2]" && printf '127.0.0.1\\n127.0.0.2\\n'
"""


def find_job() -> int:
    """The number of a job whose port is free."""
    for job in range(4000 + os.getpid() % 1000, 6000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", 29500 + job % 1000))
            except OSError:
                continue
            return job
    raise AssertionError("no port is free")


@pytest.mark.slow
def test_the_batch_script_trains_on_two_nodes_and_goes_on_where_it_was_ended(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("one work made of parts\n" * 400)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, program in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(program.replace("{python!r}", repr(sys.executable)).replace(
            "{python}", sys.executable))  # fmt: skip
        (commands / name).chmod(0o755)
    slurm = {
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": str(find_job()),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "RANKS_PER_NODE": "2",
        "PATH": f"{commands}:{os.environ['PATH']}",
    }
    small = "--device cpu --layers 1 --width 16 --heads 2 --context 16 --batch 4 --sample 0"
    outputs = []
    for steps in ("2", "4"):
        outputs.append(
            subprocess.run(
                ["bash", EXAMPLES / "train.sbatch", *small.split()]
                + ["--data", str(text), "--steps", steps, "--save-every", "1"],
                env={**os.environ, **slurm},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=250,
            )
        )
        assert outputs[-1].returncode == 0, outputs[-1].stderr
    steps = [re.findall(r"^step +(\d+) +loss", done.stdout, re.MULTILINE) for done in outputs]
    assert steps == [["0", "1"], ["2", "3"]]


def test_the_manifest_describes_pods_that_find_each_other(capsys):
    service, job = yaml.safe_load_all((EXAMPLES / "train.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    command = container["command"]
    at = command.index("-m")
    given = dict(word.removeprefix("--").split("=", 1) for word in command[1:at])
    # A pod of an indexed job is named by the job and its number, within the service.
    name = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert given["rdzv-endpoint"].startswith(f"{name}:")
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert int(given["nnodes"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(given["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == volumes
    assert command[at : at + 3] == ["-m", "partita", "train"]
    assert main(["train", *command[at + 3 :], "--print-config"]) in (None, 0)
    options = tomllib.loads(capsys.readouterr().out)
    assert options["mesh"] == f"dp={given['nnodes']},tp={given['nproc-per-node']}"
    assert options["save"].startswith(mounts["shared"]) and options["resume"]


def test_the_manifests_labels_are_those_that_the_service_selects():
    service, job = yaml.safe_load_all((EXAMPLES / "train.yaml").read_text())
    assert service["spec"]["selector"] == job["spec"]["template"].get("metadata", {}).get("labels")
