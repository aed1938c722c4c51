"""The plan as one graph, as Triton's backend runs it, against the same plan in the engine; both over the exact fp32
executor without exits.

    python -m bench.exported [NAME...] [--pairs 9] [--seconds 20] [--out build/bench/exported.json]

Names are those of :mod:`bench.subjects`. Plans are the certified ones of :mod:`bench.engine`, found anew for every
batch size, and timed as it times them. ONNX Runtime runs both, with one thread; there is no Triton here.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from rich.console import Console

from bench.engine import BATCHES, compare, keep, measured_profile, plans, scored, serve_plan
from bench.subjects import SUBJECTS, make_subject
from offramp_core.plan import Plan
from offramp_core.records import records_from_arrays
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.engine.execution.execute import Leave
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.prepare.measuring.profiling import clock_of
from offramp_worker.triton.repository import write_repository

Array = npt.NDArray[Any]
CERTIFIED = ("fp32 certified", "any certified")


@dataclass(frozen=True, slots=True)
class Exported:
    """A plan as one session; its rows are answered all at once."""

    session: ort.InferenceSession
    entry: str

    @classmethod
    def of(cls, bundle: Bundle, plan: Plan) -> Exported:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        with tempfile.TemporaryDirectory() as folder:
            written = write_repository(bundle, plan, Path(folder))
            session = ort.InferenceSession(str(written.folder / "1" / "model.onnx"), options)
        return cls(session, bundle.manifest.inputs[0].name)

    def run(self, x: Array) -> Iterator[Leave]:
        yield Leave(np.arange(len(x)), None, self.session.run(None, {self.entry: x})[0])


def bench(bundle: Bundle, x: Array, *, pairs: int, seconds: float, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Ratios to the exact executor's time, by batch size and plan."""
    sessions = Sessions(bundle, threads=1)
    profile = measured_profile(bundle, x, seconds=seconds)
    arrays, half, spec = scored(sessions, bundle, x, profile), len(x) // 2, bundle.manifest.inputs[0]
    exact, clock, rows = sessions.exact_stage(), clock_of(bundle.device, threads=1), list[dict[str, Any]]()
    for batch in BATCHES:
        everything = records_from_arrays(arrays, batch_size=batch)
        found = plans(everything.take(slice(0, half)), everything.take(slice(half, None)), bundle)
        for name in CERTIFIED:
            plan = found.get(name, "one precision")
            if isinstance(plan, str):
                tell(f"batch {batch:2d} {name}: {plan}")
                continue
            row: dict[str, Any] = {"batch": batch, "plan": name, "ramps": [ramp.id for ramp in plan.ramps]}
            subjects = {"engine": serve_plan(sessions, bundle, plan, profile), "graph": Exported.of(bundle, plan)}
            for which, subject in subjects.items():
                ratio, _ = compare(exact, subject, x[half:], spec, batch=batch, pairs=pairs, clock=clock)
                row[which] = asdict(ratio)
            rows.append(row)
            said = ", ".join(f"{k} {row[k]['median']:.3f} ({row[k]['low']:.3f}-{row[k]['high']:.3f})" for k in subjects)
            tell(f"batch {batch:2d} {name}: {said}; {plan.precision} {row['ramps']}")
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="bench.exported", description="a plan as one graph against the engine")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(SUBJECTS)} (default: all)")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--rows", type=int, default=2000, help="held-out rows to use, at most")
    parser.add_argument("--seconds", type=float, default=20.0, help="to measure what the pieces cost, about")
    parser.add_argument("--out", type=Path, default=Path("build/bench/exported.json"))
    options = parser.parse_args(arguments)
    for name in options.names or SUBJECTS:
        subject = make_subject(name, Console(stderr=True))
        bundle, x = load_bundle(subject.bundle), np.ascontiguousarray(subject.x[: options.rows])
        print(f"{name}: {len(x)} rows", flush=True)
        rows = bench(bundle, x, pairs=options.pairs, seconds=options.seconds, tell=lambda line: print(line, flush=True))
        keep(options.out, bundle.manifest.name, {"plans": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
