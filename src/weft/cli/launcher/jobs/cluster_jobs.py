"""Jobs for Kubernetes, SkyPilot and Ray."""

from __future__ import annotations

import json

from weft.cli.launcher.jobs.asked import JobAsked, shell_line
from weft.errors import ConfigError

#: Seconds from SIGTERM to SIGKILL: a step and a checkpoint fit.
_GRACE_S = 600
#: How often a machine's part is started again; each time the run resumes.
_TRIES = 100
#: The same for Ray, which waits for nothing in between.
_RAY_TRIES = 10


def kubernetes_job(job: JobAsked) -> str:
    """An indexed Job and the Service under which its pods find each other; no operator is needed."""
    if job.container is None:
        raise ConfigError("--container: a pod needs an image. Use --container IMAGE, an image with Weft installed.")
    words = "\n".join(
        f"            - {json.dumps(word)}" for word in job.torchrun_words(f"{job.label}-0.{job.label}:{job.port}")
    )
    gpus = (
        f"""
          resources:
            limits:
              nvidia.com/gpu: {job.ranks}"""
        if job.on_gpus
        else ""
    )
    limit = f"\n  activeDeadlineSeconds: {job.time_s}" if job.time_s is not None else ""
    return (
        _kubernetes_service(job)
        + f"""\
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {job.label}
spec:
  completionMode: Indexed
  completions: {job.nodes}
  parallelism: {job.nodes}
  backoffLimit: {_TRIES}{limit}
  template:
    spec:
      subdomain: {job.label}
      restartPolicy: OnFailure
      terminationGracePeriodSeconds: {_GRACE_S}
      containers:
        - name: train
          image: {json.dumps(job.container)}
          workingDir: {json.dumps(job.workdir)}
          command:
{words}{gpus}
          volumeMounts:
            - name: shared
              mountPath: {json.dumps(job.workdir)}
            - name: shm
              mountPath: /dev/shm
      volumes:
        - name: shared
          persistentVolumeClaim:
            claimName: {json.dumps(job.claim)}
        - name: shm
          emptyDir:
            medium: Memory
"""
    )


def _kubernetes_service(job: JobAsked) -> str:
    return f"""\
# kubectl apply -f FILE. Kubernetes restarts a pod that ends before the run has finished, and the run resumes.
{job.limit_comment}apiVersion: v1
kind: Service
metadata:
  name: {job.label}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    job-name: {job.label}
  ports:
    - name: rendezvous
      port: {job.port}
"""


def skypilot_job(job: JobAsked) -> str:
    """A task for `sky jobs launch`, which starts it again on other machines when these are taken away."""
    place = f"{job.gpu}:{job.ranks}" if job.on_gpus else None
    image = f"\n  image_id: {json.dumps(f'docker:{job.container}')}" if job.container is not None else ""
    accelerators = f"\n  accelerators: {json.dumps(place)}" if place else f"\n  cpus: {json.dumps(f'{job.ranks}+')}"
    run = "\n".join(
        f"  {line}"
        for line in (
            "set -e",
            'HEAD=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
            *job.entering(),
            shell_line(job.torchrun_words(f"$HEAD:{job.port}")),
        )
    )
    return f"""\
# sky jobs launch FILE. SkyPilot replaces preempted machines, and the run resumes.
{job.limit_comment}name: {job.label}
num_nodes: {job.nodes}
resources:{accelerators}{image}
  job_recovery:
    max_restarts_on_errors: {_TRIES}
volumes:
  {json.dumps(job.workdir)}: {json.dumps(job.claim)}
run: |
{run}
"""


def ray_job(job: JobAsked) -> str:
    """A Python program for `ray job submit`: torchrun on each machine, all again where one is lost."""
    gpus = job.ranks if job.on_gpus else 0
    words = json.dumps(job.torchrun_words("HEAD"), indent=4)
    enter = " && ".join(["set -e", *job.entering(), 'exec "$@"'])
    return f'''\
# ray job submit --address http://HEAD:8265 --working-dir . -- python THIS_FILE
{job.limit_comment}"""Start torchrun on {job.nodes} machines of a Ray cluster; start all again if one is lost."""

import socket
import subprocess

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES, GPUS, CPUS, PORT, TRIES = {job.nodes}, {gpus}, {job.ranks}, {job.port}, {_RAY_TRIES}
COMMAND = {words}


@ray.remote(num_cpus=CPUS, num_gpus=GPUS, max_retries=0)
def train(head):
    words = [word.replace("=HEAD", f"={{head}}:{{PORT}}") for word in COMMAND]
    return subprocess.run(["bash", "-c", {json.dumps(enter)}, "torchrun", *words]).returncode


@ray.remote(num_cpus=0)
def address():
    return socket.gethostbyname(socket.gethostname())


def once():
    bundle = {{"CPU": CPUS, "GPU": GPUS}} if GPUS else {{"CPU": CPUS}}
    group = placement_group([bundle] * NODES, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready())
        places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node) for node in range(NODES)]
        head = ray.get(address.options(scheduling_strategy=places[0]).remote())
        return max(ray.get([train.options(scheduling_strategy=place).remote(head) for place in places]))
    except ray.exceptions.RayError as error:
        print(error)
        return 1
    finally:
        ray.util.remove_placement_group(group)


ray.init()
for _ in range(TRIES):
    code = once()
    if code == 0:
        break
raise SystemExit(code)
'''
