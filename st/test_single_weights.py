"""Weights alone in Checkpoint 1.0, one process, the real Trainer: what four ranks saved, damage, and what is missing."""
from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from st.copies import finished, flip, said, steps_of, succeeded, together
from st.jobs import ROOT, Run

FIXTURES = ROOT / "st" / "fixtures"
FOUR = FIXTURES / "mf190_10_safetensors_dp2tp2"                     # written by mindformers without us
ALONE = "--use_parallel False --batch_size 8 --resume_training False --runner_config.epochs 1 --callbacks []"


@pytest.fixture(scope="module")
def run(tmp_path_factory, device, graphs) -> Run:
    data = tmp_path_factory.mktemp("sequences")
    subprocess.run([sys.executable, str(FIXTURES / "make_sequences.py"), str(data)], check=True)
    return Run(tmp_path_factory.mktemp("run"), str(FOUR / "config.yaml"), data, device=device, graphs=graphs)


def bits(run: Run) -> list[tuple[int, str]]:
    return [(row["step"], row["hex"]) for row in run.steps(-1)]


def test_the_folder_of_four_ranks_is_loaded_as_mindformers_loads_it_merged(run, tmp_path):
    """Without auto_trans_ckpt; the same losses bit for bit."""
    source = shutil.copytree(FOUR / "output", tmp_path / "output") / "checkpoint"
    ours, theirs = run.like(tmp_path / "ours"), run.like(tmp_path / "theirs")
    assert ours.mindresume("merge", str(source), str(tmp_path / "merged")).returncode == 0
    together(lambda: succeeded(ours, f"{ALONE} --load_checkpoint {source}"),
             lambda: succeeded(theirs, f"{ALONE} --load_checkpoint {tmp_path / 'merged'} --no-mindresume"))
    assert steps_of(ours)[0] == 1 and bits(ours) == bits(theirs)
    said(ours, "mindresume: weights of step 15,")
    assert (tmp_path / "output" / "strategy").is_dir()


def test_damage_and_what_is_missing_are_errors_by_name(run, tmp_path):
    """Of merged weights of ours. A network of one layer more lacks that layer; allowed, it begins as it is initialised."""
    merged, damaged = tmp_path / "merged", tmp_path / "damaged"
    runs = [run.like(tmp_path / name) for name in ("damaged_run", "larger", "allowed")]
    assert runs[0].mindresume("merge", str(FOUR / "output" / "checkpoint"), str(merged)).returncode == 0
    shutil.copytree(merged, damaged)
    flip(damaged / "part0.safetensors")
    larger = f"{ALONE} --load_checkpoint {merged} --model.model_config.num_hidden_layers 3"
    together(lambda: finished(runs[0], f"{ALONE} --load_checkpoint {damaged}"), lambda: finished(runs[1], larger),
             lambda: finished(runs[2], larger, MINDRESUME_ALLOW_MISSING="decoder.layers.2.*"))
    assert runs[0].process.returncode not in (0, None) and runs[1].process.returncode not in (0, None)
    assert steps_of(runs[0]) == steps_of(runs[1]) == []
    said(runs[0], "part0.safetensors: ", " of rank 0 is not what was written: checksum ")
    said(runs[1], "is not in the checkpoint", "set mindresume: {allow_missing: [", '"decoder.layers.*.')
    assert runs[2].process.returncode == 0 and steps_of(runs[2])[0] == 1
    said(runs[2], "so they keep their initial values: ", "decoder.layers.2.")
