"""Grading: judge a stream of candidates with workers on one machine or many."""

import contextlib
import os
import secrets
import shlex
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fourfold.engine.verdict import Verdict
from fourfold.grading import on_ray
from fourfold.grading.candidates import BadCandidate, Submission, numbered_lines
from fourfold.grading.judging import STATIC, Settings, failure_verdict
from fourfold.grading.messages import Job, Reply
from fourfold.grading.pool import LocalWorker, NoWorkers, Pool, Task, gpus_here
from fourfold.grading.results import Graded, Results, Shelf
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.outcomes import Kind

# The most attempts to judge a candidate whose workers are lost.
MOST_ATTEMPTS = 3
# Candidates handed out for each worker: one is judged, one waits.
AHEAD = 2


def grade(
    candidates: Iterable[Submission | Mapping[str, Any]] | str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    gpus: int = 0,
    ray: str | None = None,
    seed: int | None = None,
    only: Collection[str] = (),
    **settings: Any,
) -> Generator[Graded, None, None]:
    """Judge many untrusted candidates, each in its own process, which leaves nothing behind.

    Args:
        candidates: mappings with the fields of a line of a file, see docs/grading.md; or the path of such a file. An
            iterable is advanced as workers become free.
        out: a file to which each result is appended as it comes, a line of JSON each. Candidates with a result in it
            are not judged again.
        workers: the number of concurrent workers: by default that of the processors, or of the GPUs. More workers than
            GPUs share them, except while one measures a time.
        gpus: 1 for kernels that run on a GPU, 0 for the CPU.
        ray: the address of a Ray cluster, whose machines judge.
        seed: of the generated cases, the same for all candidates; random by default.
        only: the ids of the candidates to judge; all if empty.
        **settings: `examples`, `dtypes`, `first_failure`, `refusals`, `strict_errors`, `forbid_fallback`,
            `forbid_imports` and `speed`: see `fourfold.grading.judging.Settings`.

    Returns:
        a verdict on each candidate, in the order of completion. An invalid candidate, or one that cannot be imported,
        has the kind "invalid". Identical sources are judged once.

    Raises:
        ValueError: an argument is not as described above, or different candidates share an id. The message names it.
        NoWorkers: no worker can be started.
        fourfold.grading.results.InUse: another run writes into `out`.
    """
    if unknown := settings.keys() - Settings.__dataclass_fields__.keys() - {"device"}:
        raise ValueError(f"{', '.join(sorted(unknown))}: there is no such setting")
    judged_by = Settings(device="cuda" if gpus else "cpu", **settings)
    _check(judged_by, gpus, workers)
    start = _pool_of(judged_by.device, gpus, workers, ray)
    seed = secrets.randbits(32) if seed is None else seed
    is_file = isinstance(candidates, str | os.PathLike)
    submissions = read_candidates(Path(candidates)) if is_file else _iterate(candidates)  # type: ignore[arg-type]
    repeat = _repeat_command(f"fourfold grade {shlex.quote(str(candidates))}" if is_file else "", seed, gpus, judged_by)
    return _grade(select(submissions, only), Path(out) if out is not None else None, start, judged_by, seed, repeat)


def _check(settings: Settings, gpus: int, workers: int | None) -> None:
    if gpus not in (0, 1):
        raise ValueError(f"gpus must be 0 or 1, not {gpus!r}")
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        raise ValueError(f"workers must be a number from 1, not {workers!r}")
    for name in settings.dtypes:
        if name not in DTYPES:
            raise ValueError(f"dtypes: there is no {name}: there are {', '.join(DTYPES)}")
    if settings.examples < 1:
        raise ValueError(f"examples must be a number from 1, not {settings.examples!r}")
    if settings.speed and not gpus:
        raise ValueError("speed needs gpus=1: without a GPU kernels are interpreted, which says nothing of their speed")


def _pool_of(device: str, gpus: int, workers: int | None, ray: str | None) -> Callable[[], Pool]:
    """Return a function that starts a pool of workers, here or on the machines of a cluster."""
    if ray is not None:
        cluster, places = on_ray.connect(ray, gpus)
        return lambda: Pool(lambda place: cluster.worker(device), workers or places, cluster.leave)
    if not gpus:
        return lambda: Pool(lambda place: LocalWorker(device), workers or len(os.sched_getaffinity(0)))
    devices = gpus_here()
    if not devices:
        raise ValueError("gpus=1: this machine has no GPU that may be used")
    return lambda: Pool(lambda place: LocalWorker(device, devices[place % len(devices)]), workers or len(devices))


def _repeat_command(command: str, seed: int, gpus: int, settings: Settings) -> Callable[[str], str]:
    """Return a function from a candidate's id to the command, or without a file the call, that judges it again."""
    if not command:
        return lambda id: f"fourfold.grade([candidate], seed={seed}{', gpus=1' if gpus else ''})"
    usual = Settings(device=settings.device)
    options = [f"--seed {seed}", *(["--gpus 1"] if gpus else [])]
    options += [f"--dtype {name}" for name in settings.dtypes]
    options += [f"--forbid-imports {','.join(settings.forbid_imports)}"] if settings.forbid_imports else []
    options += [f"--examples {settings.examples}"] if settings.examples != usual.examples else []
    flags = {"first_failure": "--all-failures", "refusals": "--no-refusals", "strict_errors": "--strict-errors"}
    flags |= {"forbid_fallback": "--forbid-fallback", "speed": "--speed"}
    options += [flag for name, flag in flags.items() if getattr(settings, name) != getattr(usual, name)]
    return lambda id: " ".join([command, "--id", shlex.quote(id), *options])


# ---- the candidates


Given = tuple[str, Submission | BadCandidate]  # an id, and the candidate or the error in it


def read_candidates(file: Path) -> Iterator[Given]:
    """Yield the candidates of a file with a line of JSON for each. Paths in it are relative to its folder."""
    for number, value in numbered_lines(file):
        yield _parse(value, f"line {number}", file.parent)


def _iterate(candidates: Iterable[Any]) -> Iterator[Given]:
    for number, value in enumerate(candidates, 1):
        yield (value.id, value) if isinstance(value, Submission) else _parse(value, f"candidate {number}", Path())


def select(candidates: Iterator[Given], only: Collection[str]) -> Iterator[Given]:
    """Yield the candidates with the given ids, or all candidates if there are no ids.

    Raises:
        ValueError: no candidate has one of the ids.
    """
    unseen = set(only)
    for name, candidate in candidates:
        if not only or name in only:
            unseen.discard(name)
            yield name, candidate
    if unseen:
        raise ValueError(f"id: there is no candidate {', '.join(sorted(unseen))}")


def _parse(value: Any, default_name: str, folder: Path) -> Given:
    name = value.get("id") if isinstance(value, Mapping) else None
    identity = name if isinstance(name, str) and name else default_name
    try:
        return (identity, value) if isinstance(value, BadCandidate) else (identity, Submission.of(value, folder))
    except BadCandidate as error:
        return identity, error


# ---- the run


def _grade(
    candidates: Iterator[Given],
    out: Path | None,
    start: Callable[[], Pool],
    settings: Settings,
    seed: int,
    repeat: Callable[[str], str],
) -> Generator[Graded, None, None]:
    with contextlib.nullcontext() if out is None else Results(out) as results:
        yield from _Run(results, settings, seed, repeat).all(candidates, start)


class _Run:
    """The state of a run: its verdicts, and the candidates that wait for one."""

    def __init__(self, results: Results | None, settings: Settings, seed: int, repeat: Callable[[str], str]) -> None:
        self.results = results
        self.settings, self.seed, self.repeat = settings, seed, repeat
        self.keys: dict[str, str] = {}  # by id, of the candidates so far
        self.judged = Shelf()  # by key
        self.waiting: defaultdict[str, list[Submission]] = defaultdict(list)  # by key, candidates of one verdict
        if self.results is not None:
            for name, key in self.results.keys.items():
                if key not in self.judged:
                    self.judged[key] = self.results.known[name]

    def all(self, candidates: Iterator[Given], start: Callable[[], Pool]) -> Iterator[Graded]:
        """Judge all candidates; yield each verdict as it comes."""
        pool: Pool | None = None
        ready: deque[Graded] = deque()
        failed_starts, reasons, has_more = 0, list[str](), True
        try:
            while has_more or self.waiting or ready:
                places = pool.places if pool else 1
                while has_more and not ready and len(self.waiting) < AHEAD * places:
                    candidate = next(candidates, None)
                    has_more = candidate is not None
                    if candidate is not None and (task := self._make_task(*candidate, ready)):
                        pool = pool or start()
                        places = pool.places
                        pool.tasks.put(task)
                if ready:
                    yield ready.popleft()
                elif self.waiting and pool:
                    event = pool.events.get()
                    if event.task is None:
                        failed_starts, reasons = failed_starts + 1, [*reasons, event.reason]
                        if failed_starts == places:
                            raise NoWorkers(f"no worker can be started: {reasons[-1]}")
                    elif event.answer is not None and event.answer.verdict:
                        ready += self._verdicts(event.task, event.answer)
                    else:
                        reason = event.answer.loss_reason if event.answer is not None else event.reason
                        results = self._again(event.task, reason)
                        if results is None:
                            pool.tasks.put(event.task)
                        else:
                            ready += results
        finally:
            if pool is not None:
                pool.close()

    def _make_task(self, name: str, candidate: Submission | BadCandidate, ready: deque[Graded]) -> Task | None:
        """Return a candidate's task, or None if its verdict is known or an identical candidate is being judged."""
        if isinstance(candidate, BadCandidate):
            key = f"no candidate: {candidate}"
        else:
            key = candidate.key(self.settings.as_dict())
        if not self._take(name, key):
            return None
        if self.results is not None and self.results.keys.get(name) == key:
            ready.append(self.results.known[name])
        elif isinstance(candidate, BadCandidate):
            nobody = Submission(id=name)
            verdict = failure_verdict(nobody, self.settings.device, self.seed, Kind.INVALID, f"it is {key}")
            ready.append(self._append(nobody, key, verdict, STATIC))
        elif key in self.judged:
            ready.append(self._copy(candidate, self.judged[key]))
        else:
            self.waiting[key].append(candidate)
            if len(self.waiting[key]) == 1:
                return Task(Job(candidate, self.settings, self.seed), key)
        return None

    def _take(self, name: str, key: str) -> bool:
        """Return whether an id is new: a repeated candidate is judged and reported once.

        Raises:
            ValueError: a different candidate has the id.
        """
        if name not in self.keys:
            self.keys[name] = key
            return True
        if self.keys[name] != key:
            raise ValueError(f"id: two candidates that differ are called {name!r}")
        return False

    def _verdicts(self, task: Task, answer: Reply) -> list[Graded]:
        """Return the verdict on a candidate and on its duplicates."""
        verdict = replace(Verdict.from_json(answer.verdict), seconds=round(answer.seconds, 3))
        first, *copies = self.waiting.pop(task.key)
        details = {"attempts": task.attempts, "worker": answer.worker}
        graded = self._append(first, task.key, verdict, answer.stage, **details)
        self.judged[task.key] = graded
        return [graded, *(self._copy(copy, graded) for copy in copies)]

    def _again(self, task: Task, reason: str) -> list[Graded] | None:
        """Return None to begin a candidate again after the loss of its worker, or else the final verdict on it."""
        task.losses.append(reason)
        if task.attempts < MOST_ATTEMPTS:
            return None
        first = self.waiting[task.key][0]
        reasons = "; ".join(dict.fromkeys(task.losses))
        message = f"crashed: its worker was lost {task.attempts} times: {reasons}"
        verdict = failure_verdict(first, self.settings.device, self.seed, Kind.CRASHED, message)
        return self._verdicts(task, Reply(worker="", verdict=verdict.json()))

    def _copy(self, candidate: Submission, first: Graded) -> Graded:
        """Copy the verdict of an identical candidate."""
        return self._append(
            candidate, first.key, first, first.stage, same_as=first.same_as or first.id, worker=first.worker
        )

    def _append(self, candidate: Submission, key: str, verdict: Verdict, stage: str, **details: Any) -> Graded:
        """Turn a verdict into a result, and append it to the file."""
        graded = Graded.of(verdict, id=candidate.id, key=key, stage=stage, repeat=self.repeat(candidate.id), **details)
        if self.results is not None:
            self.results.append(graded)
        return graded
