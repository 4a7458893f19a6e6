"""``fourfold accuracy``: a table of the errors of kernels and of their counterparts in torch and other libraries."""

import argparse
import functools
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from fourfold import backends
from fourfold.checks.records import operations
from fourfold.cli.source import NotThere, require_function, require_operation
from fourfold.engine.cells import CANDIDATE, Selection, SelectionError, operation_in
from fourfold.engine.exact_math import computing_exactly
from fourfold.engine.tables import table_lines
from fourfold.performance.accuracy import EXPLANATION, Accuracy, MeasuredCases, measure, measure_in_children, table
from fourfold.performance.timings import OWN
from fourfold.processes.child import Child
from fourfold.processes.messages import Connection
from fourfold.pytest_plugin.preparation import triton_for


def command(args: argparse.Namespace) -> int:
    """Run ``fourfold accuracy``; return 0 if all was measured, 1 if not, 2 for bad arguments."""
    if args.kernel:
        try:
            require_function(args.kernel)
            require_operation(args.operation)
        except NotThere as error:
            args.error(str(error))
        args.candidate.append(f"{args.operation}={args.kernel}")
    if args.examples < 0:
        args.error(f"--examples must be at least 0, not {args.examples}")
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        args.error("--device cuda: torch finds no GPU")
    triton_for(device)
    os.environ.setdefault("FOURFOLD_CUDA_ON_CPU", "fast")  # the checks look for errors of other kinds
    try:
        selection = select_cells(args)
        for candidate in selection.candidates.values():
            candidate.load()
    except SelectionError as error:
        args.error(str(error))
    options = {name: getattr(args, name) for name in ("op", "backend", "dtype", "candidate", "examples", "seed")}
    start = functools.partial(start_child, {**options, "device": device})
    accuracy = measure_in_children(start, lambda line: print(line, file=sys.stderr))
    facts = describe_run(device, args.examples, args.seed)
    print(f"accuracy: {', '.join(f'{key} {value}' for key, value in facts.items())}")
    for line in lines(accuracy):
        print(line)
    if args.json is not None:
        content = {**facts, "rows": [row.as_dict() for row in accuracy.rows()], "not_measured": accuracy.not_measured}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if accuracy.is_complete else 1


def start_child(options: Mapping[str, Any], connection: Connection, progress: MeasuredCases) -> Child:
    """Start a process that measures with these options, and sends the results."""
    texts = (json.dumps(each, default=list) for each in (options, asdict(progress)))
    return Child.spawn("fourfold.cli.accuracy", connection.fileno(), *texts, files=[connection.fileno()])


def main(descriptor: str, options: str, progress: str) -> int:
    """Measure in this process for `start_child`."""
    args, connection = argparse.Namespace(**json.loads(options)), Connection(int(descriptor))
    triton_for(args.device)
    earlier = MeasuredCases(**{name: {tuple(key) for key in keys} for name, keys in json.loads(progress).items()})
    with computing_exactly():
        for found in measure(select_cells(args), args.device, args.examples, args.seed, earlier, connection.send):
            connection.send(found)
    return 0


def select_cells(args: argparse.Namespace) -> Selection:
    """Return the cells that the options select.

    Raises:
        SelectionError: an option names something unknown.
    """
    names = args.backend or ([] if args.candidate else [name for name in backends.BACKENDS if name in OWN])
    return Selection.of(
        operations(),
        args.candidate,
        op=args.op or [operation_in(text) for text in args.candidate],
        backend=[*names, *([CANDIDATE] if args.candidate else [])],
        dtype=args.dtype,
    )


def describe_run(device: str, examples: int, seed: int) -> dict[str, Any]:
    """Return what the figures depend on: device, versions, number of cases and seed."""
    machine = torch.cuda.get_device_name() if device == "cuda" else "cpu (Triton interpreted, CUDA C++ emulated)"
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton", "hypothesis")}
    return {"device": machine, **versions, "generated cases": examples, "seed": seed}


# ---- the table


def lines(accuracy: Accuracy) -> Iterator[str]:
    """Yield the table, with the kernels farthest behind torch first, and what was not measured."""
    rows = accuracy.rows()
    yield EXPLANATION
    yield from table_lines(table([row.cells for row in rows]))
    behind = sum(row.is_behind for row in rows)
    yield f"{behind} of {len(rows)} results are less exact than torch's, {len(rows) - behind} as exact or more"
    for cell, count in accuracy.not_measured.items():
        yield f"not measured: {cell}" + (f" ({count} cases)" if count > 1 else "")
