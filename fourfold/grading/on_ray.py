"""Workers on the machines of a Ray cluster: each is an actor with a worker process on its machine.

Ray places the actors, and reports the loss of a machine. The parts that a single machine also uses do the rest: the
worker ends the processes that a candidate started, and the pool hands a candidate to another worker.

Source: P. Moritz et al., Ray: A Distributed Framework for Emerging AI Applications, OSDI 2018.
"""

import contextlib
from typing import Any

from fourfold.grading.messages import Job, Reply
from fourfold.grading.pool import ANSWERING_SECONDS, LocalWorker, Lost

MISSING = "ray is not installed: pip install 'fourfold[ray]'"


class Actor:
    """The actor that Ray starts on a machine of the cluster."""

    def __init__(self, device: str) -> None:
        self.worker = LocalWorker(device)  # Ray sets CUDA_VISIBLE_DEVICES

    def ready(self) -> bool:
        """Return True once the actor has started."""
        return True

    def judge(self, job: Job) -> Reply:
        """Return the answer on a candidate."""
        return self.worker.judge(job)


class Cluster:
    """A cluster that this process has joined.

    Args:
        ray: the module.
        gpus: the number of GPUs that each worker needs for itself.
    """

    def __init__(self, ray: Any, gpus: int) -> None:
        self.ray, self.gpus = ray, gpus
        self.waited_for: set[Any] = set()
        self.left = False

    def worker(self, device: str) -> "RayWorker":
        """Return a new worker for "cpu" or "cuda", once the cluster has a place for it."""
        return RayWorker(self, device)

    def leave(self) -> None:
        """Stop waiting for places: Ray fails a process that waits while it leaves the cluster."""
        self.left = True
        for actor in list(self.waited_for):
            self.end(actor)

    def end(self, actor: Any) -> None:
        """End an actor and the processes that it started."""
        with contextlib.suppress(Exception):  # the cluster may have gone
            self.ray.kill(actor)


class RayWorker:
    """A worker somewhere in a cluster.

    Raises:
        Lost: the worker does not start.
    """

    def __init__(self, cluster: Cluster, device: str) -> None:
        self.cluster, self.ray, self.end_reason = cluster, cluster.ray, ""
        kind = self.ray.remote(num_cpus=1, num_gpus=cluster.gpus, max_restarts=0)(Actor)
        self.actor = kind.remote(device)
        cluster.waited_for.add(self.actor)
        try:
            if cluster.left:
                cluster.end(self.actor)
            # This may wait for a place in the cluster. No candidate waits with it.
            self._get(self.actor.ready.remote(), None)
        finally:
            cluster.waited_for.discard(self.actor)

    def judge(self, job: Job) -> Reply:
        """Return the answer on a candidate."""
        answer = self._get(self.actor.judge.remote(job), job.candidate.seconds + 2 * ANSWERING_SECONDS)
        self.end_reason = answer.end_reason
        return answer

    def _get(self, promised: Any, seconds: float | None) -> Any:
        try:
            return self.ray.get(promised, timeout=seconds)
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Lost) else error
            raise Lost(str(cause).strip().splitlines()[-1]) from None
        except self.ray.exceptions.RayError as error:
            raise Lost(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from None

    def close(self) -> None:
        """End the worker and the processes that it started."""
        self.cluster.end(self.actor)


def connect(address: str, gpus: int) -> tuple[Cluster, int]:
    """Join a cluster; return it and the number of workers that it has places for.

    Args:
        address: as ``ray.init`` takes it, such as "auto".
        gpus: the number of GPUs that each worker needs for itself.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ConnectionError: there is no cluster at the address.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise ModuleNotFoundError(MISSING) from None
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, logging_level="error", _temp_dir=None)
    resources = ray.cluster_resources()
    places = int(resources.get("GPU", 0) // gpus) if gpus else int(resources.get("CPU", 0))
    if not places:
        raise ConnectionError(f"the cluster at {address} has no {'GPU' if gpus else 'CPU'}: {resources}")
    return Cluster(ray, gpus), places
