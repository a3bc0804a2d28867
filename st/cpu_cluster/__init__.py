"""Lets the real mindformers trainers run on the MindSpore CPU backend, in one or several processes.

Test equipment. What: patches in the memory of this process only; no installed file is changed, and
no checkpoint, resume or callback code is touched, so what a system test sees of these is the
product's and mindformers' own behaviour. Why: the trainer needs operators, collectives and a
parallel front end that MindSpore offers on Ascend and GPU only, and a test must not need a device.

    python st/cpu_cluster/run.py program.py args...  # around any unmodified program, one process
    python st/cpu_cluster/launch.py 4 -- python st/cpu_cluster/run.py program.py args...

or, in a program of your own, two calls in this order:

    from st import cpu_cluster
    cpu_cluster.before_mindformers()      # then import mindformers
    cpu_cluster.after_mindformers()       # before the first build_context() / Trainer()

Modules: ``capabilities`` (what the installed release has), ``kernels`` (operators without a CPU
kernel), ``collectives`` and ``object_collectives`` (collectives the CPU library lacks), ``layouts``
(completes the layouts after that), ``semi_auto`` (the semi-auto parallel front end),
``model_build`` (Model.build and the sink loop), ``later`` (imports that a training does not use),
``hyper_parallel_standin`` (where that package is needed and not installed), ``recorder`` (exact
loss and samples of every step; kill at a step), ``run`` and ``launch`` (programs). ``pynative`` has
the same for the PyNative trainer, which ``CPU_CLUSTER_TRAINER=pynative`` chooses. Verified with
mindformers 1.8.0 on mindspore 2.7.2, 1.9.0 on 2.9.0, 2.0.0 and 2.1.0 on 2.10.0; Linux x86-64.
"""

import os


def is_distributed() -> bool:
    """True in a worker started by msrun or by ``launch``."""
    return bool(os.environ.get("MS_WORKER_NUM"))


def exchange_folder() -> str:
    """The folder in shared memory through which the ranks of this job exchange tensors; equal in
    all of them.

    ``CPU_CLUSTER_SHM`` names it under ``launch``. Under msrun all ranks and the scheduler have the
    same parent and port.
    """
    return (
        os.environ.get("CPU_CLUSTER_SHM")
        or f"/dev/shm/cpu_cluster-{os.getppid()}-{os.environ.get('MS_SCHED_PORT', '0')}"
    )


def before_mindformers() -> None:
    """Patches names that mindformers captures when it is imported: the barrier and ``Model``."""
    from . import hyper_parallel_standin, later, model_build, object_collectives, pynative

    later.install()
    if pynative.is_chosen():
        pynative.before_mindformers()
        return
    if hyper_parallel_standin.is_required():
        hyper_parallel_standin.install()
    object_collectives.install()
    model_build.install()


def after_mindformers() -> None:
    """Patches mindformers itself; in a worker of a distributed job also the parallel front end and
    the collectives."""
    from . import collectives, kernels, model_build, pynative, semi_auto

    if pynative.is_chosen():
        pynative.after_mindformers()
        return
    kernels.install()
    model_build.install_in_mindformers()
    if is_distributed():
        print("cpu_cluster: semi-auto parallel on CPU:", semi_auto.install(), flush=True)
        collectives.install_when_connected()
