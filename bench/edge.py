"""Edge and core over a narrow uplink: ``python -m bench.edge [NAME] [--only PART...] [--rows 2000] [--outage 60]``.

The core runs in a network of its own behind a link of 1, 10 and 100 Mbit/s (a token bucket in each direction; the
kernel's scheduler of delays is not needed: a bucket delays by bytes). The edge is here, as fast as the core, and with a
quarter of a processor. One client asks for one row at a time. Arms take turns, 20 rows at a time (``bench.turns``),
with the same rows:

    edge     a worker on the box, with the plan, that computes everything
    core     the core itself, over the uplink, with the same plan
    by way   the core, by way of a process on the box that hands bytes on and nothing else
    split    an edge of that core (`--residue Auto`)

The core has a processor of its own, and the client and what runs on the box have another one; of a limited one each
arm has as much, and spends no other arm's. The split is judged once it has answered 400 rows; what it took until then,
while it learns what both ways take, is told beside it.

Reported: mean latency of the split over the smaller of all-edge's and all-core's, with an interval; the same where the
core is reached by way of the box, as clients of an edge reach it; the core's processor time by row
against answering everything there, with exits and without, where the edge has the plan that is made for edges and
sends inputs or features, and with the split; and what becomes of requests while the uplink is cut.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from bench.engine import BUDGET, request_of
from bench.front import on_core
from bench.load import encode
from bench.provenance import provenance
from bench.served import Prepared, prepared
from bench.subjects import SUBJECTS, make_subject
from bench.turns import BLOCK, compared, in_turns
from bench.uplink import THERE, NoNetworksError, Uplink, share_of_a_processor, uplink
from bench.validate_simulator import LoopbackWorker
from offramp_core.certify.expected import expected_path
from offramp_core.evaluate import evaluate
from offramp_core.plan import Plan
from offramp_core.precision import EXACT
from offramp_core.tuning import Proposed, gain, tune
from offramp_worker.bundle.load import load_bundle

FEW_ROWS = 1200
OUT = Path("build/bench/edge.json")
RATES_MBIT = (1.0, 10.0, 100.0)
SHARES = (1.0, 0.25)  # of a processor, that the edge has
OUTAGE_MBIT = 10.0
PARTS = ("latency", "computing", "outage")
BOX_CORE, CORE_CORE = 0, 1  # processors
WARM_UP, LEARNING, AUDIT_RATE = 60, 400, 0.02  # rows, and the split's until it is judged
AFTER_SECONDS = 5.0  # of an outage: the core is asked for once a second
ANSWER_SECONDS = 30.0
SETTLE_SECONDS = 5.0  # in which a core builds, once, the piece of the model that takes features


@dataclass
class Asked:
    """A client of one worker, which asks for one row at a time on one connection."""

    worker: LoopbackWorker
    made: Prepared
    #: In the place of the worker's own.
    address: str = ""
    path: str = field(init=False)

    def __post_init__(self) -> None:
        address = self.address or self.worker.url.removeprefix("http://")
        self._connection = http.client.HTTPConnection(address, timeout=ANSWER_SECONDS)
        self.path = f"/v2/models/{self.made.bundle.manifest.name}/infer"
        self._name = self.made.bundle.manifest.inputs[0].name

    def row(self, x: Any) -> tuple[float, int, Mapping[str, Any]]:
        """Seconds, the status and what the reply says."""
        body, length = encode(x, self._name)
        headers = {"Inference-Header-Content-Length": str(length)}
        began = time.perf_counter()
        self._connection.request("POST", self.path, body, headers)
        reply = self._connection.getresponse()
        told = json.loads(reply.read())
        return time.perf_counter() - began, reply.status, told


def mean_seconds(asked: Asked, x: Any) -> float:
    """Of rows (n, ...), one by one."""
    return float(np.mean([asked.row(row[None])[0] for row in x]))


def relayed(worker: LoopbackWorker) -> float:
    """Requests that an edge has handed to its core as they came."""
    with urllib.request.urlopen(f"{worker.url}/metrics", timeout=ANSWER_SECONDS) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    return sum(s.value for f in families for s in f.samples if s.name == "earlyexit_relayed_requests_total")


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Site:
    """The core, and edges of it that are started by and by."""

    def __init__(self, made: Prepared, plan: Plan, link: Uplink, stack: ExitStack) -> None:
        self.made, self.plan, self.link = made, plan, link
        with on_core(CORE_CORE):
            settings = {"OFFRAMP_EDGES": "true"}
            worker = LoopbackWorker(made.bundle.path, host=THERE, within=link.within, settings=settings)
        self.core = stack.enter_context(worker)
        self.core.put_in_force(plan, audit_rate=AUDIT_RATE)

    def box(self, stack: ExitStack, within: Sequence[str], **settings: str) -> Asked:
        """A worker on the box; with OFFRAMP_CORE an edge."""
        worker = stack.enter_context(LoopbackWorker(self.made.bundle.path, within=within, settings=settings))
        worker.put_in_force(self.plan, audit_rate=AUDIT_RATE)
        return Asked(worker, self.made)

    def by_way(self, stack: ExitStack, within: Sequence[str]) -> Asked:
        """The core, through the box."""
        command = [*within, sys.executable, "-m", "bench.forwarder", self.core.url.removeprefix("http://")]
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(process.kill)
        assert process.stdout is not None
        return Asked(self.core, self.made, f"127.0.0.1:{process.stdout.readline().strip()}")

    @property
    def of_core(self) -> dict[str, str]:
        return {"OFFRAMP_CORE": self.core.url}


def latencies(
    site: Site, x: Any, *, shares: Sequence[float], rates: Sequence[float], rows: int, console: Console
) -> Iterator[dict[str, Any]]:
    """By share of a processor and rate: the means of the arms, how the split compares, and the core's processor time
    by row of an edge that splits over that where all is sent there."""
    for share in shares:
        with ExitStack() as stack:
            names = ("edge", "forwarder", "split")
            within = {name: stack.enter_context(share_of_a_processor(share, name)) for name in names}
            arms = {
                "edge": site.box(stack, within["edge"]),
                "core": Asked(site.core, site.made),
                "by way": site.by_way(stack, within["forwarder"]),
            }
            for rate in rates:
                site.link.shape(rate)
                for arm in arms.values():
                    mean_seconds(arm, x[:BLOCK])
                with ExitStack() as own:
                    split = site.box(own, within["split"], **site.of_core)
                    found = {"share": share, "mbit": rate, **_cell(site, {**arms, "split": split}, x, rows)}
                console.print(found)
                yield found


def _cell(site: Site, arms: Mapping[str, Asked], x: Any, rows: int) -> dict[str, Any]:
    split, spent, asked = arms["split"], dict.fromkeys(arms, 0.0), dict.fromkeys(arms, 0)
    learning = mean_seconds(split, x[:LEARNING])

    def block(name: str, begin: int) -> list[float]:
        before = processor_seconds(site.core.pid)
        took = [1e3 * arms[name].row(x[(begin + i) % len(x)][None])[0] for i in range(BLOCK)]
        spent[name] += processor_seconds(site.core.pid) - before
        asked[name] += BLOCK
        return took

    before = relayed(split.worker)
    blocks = {name: partial(block, name) for name in arms}
    means = in_turns(blocks, rounds=rows // BLOCK, judged="split")
    ms = {name: float(np.nanmean(of)) for name, of in means.items()}
    by_row = {name: spent[name] / asked[name] for name in arms}
    return {
        "ms": ms,
        "rows": asked,
        "ratio": asdict(compared(means, "split", ("edge", "core"))),
        "by_way": asdict(compared(means, "split", ("edge", "by way"))),
        "learning": 1e3 * learning / min(ms["edge"], ms["core"]),
        "relayed": (relayed(split.worker) - before) / asked["split"],
        "core_computes": by_row["split"] / by_row["core"],
    }


def edge_plan(made: Prepared) -> Plan | None:
    """The plan that an edge's own control loop finds on the first half of the inputs. Where too few labels certify one,
    as for ``made.plans`` that of its path which is worth most and holds the budget on the inputs that are sent; None
    for none."""
    half = len(made.records) // 2
    first, sent = made.records.take(slice(0, half)), made.records.take(slice(half, None))
    request = replace(request_of(made.bundle, (EXACT,)), computed_again=True)
    outcome = tune(first, request)
    if isinstance(outcome, Proposed):
        return outcome.plan
    a, b = first.at(EXACT), sent.at(EXACT)
    path = expected_path(
        a, max_disagreement=BUDGET, max_ramps=request.max_ramps, max_overhead=request.max_overhead, stay=1.0
    )
    seen = [(evaluate(b, step.active, step.thresholds), step) for step in path]
    kept = [(gain(e, True), step) for e, step in seen if e.disagreement <= BUDGET and e.saving > 0]
    if not kept:
        return None
    best = max(kept, key=itemgetter(0))[1]
    return request.subject(a).plan(best.active, best.thresholds)


def computing(site: Site, x: Any, *, console: Console) -> dict[str, Any]:
    """The core's processor seconds by row: all of them there, without exits, with the plan of one worker and with that
    of an edge; and as the core of an edge with that plan that sends inputs, or features, of what leaves at no exit."""
    site.link.shape(max(RATES_MBIT))
    pid, found, own = site.core.pid, dict[str, Any](), edge_plan(site.made) or site.plan
    plans = {"exact": Plan(own.backbone_digest, own.ramp_set_digest), "plan": site.plan, "edge plan": own}
    for name, plan in plans.items():
        site.core.put_in_force(plan, audit_rate=AUDIT_RATE if plan.ramps else 0.0)
        found[name] = _spent(Asked(site.core, site.made), pid, x)
    for residue in ("Input", "Features"):
        with ExitStack() as stack:
            asked = site.box(stack, (), OFFRAMP_RESIDUE=residue, **site.of_core)
            asked.worker.put_in_force(own, audit_rate=AUDIT_RATE)
            mean_seconds(asked, x[:WARM_UP])
            time.sleep(SETTLE_SECONDS)
            found[residue] = _spent(asked, pid, x)
    site.core.put_in_force(site.plan, audit_rate=AUDIT_RATE)
    console.print(found)
    return found


def _spent(asked: Asked, pid: int, x: Any) -> dict[str, float]:
    mean_seconds(asked, x[: WARM_UP // 2])
    before, final = processor_seconds(pid), 0
    for row in x:
        final += asked.row(row[None])[2]["parameters"]["exit"] == "final"
    return {"ms_by_row": 1e3 * (processor_seconds(pid) - before) / len(x), "final": final / len(x)}


def outage(site: Site, x: Any, *, seconds: float, offline: str, console: Console) -> dict[str, Any]:
    """The uplink is cut for so long while a client goes on asking."""
    site.link.shape(OUTAGE_MBIT)
    told: dict[str, int] = {"asked": 0, "answered": 0, "answered_offline": 0, "refused": 0, "other": 0}
    longest, sent_again = 0.0, None
    with ExitStack() as stack:
        settings = {"OFFRAMP_RESIDUE": "Input", "OFFRAMP_OFFLINE": offline, **site.of_core}
        asked = site.box(stack, (), **settings)
        mean_seconds(asked, x[:WARM_UP])
        site.link.cut()
        began, mended, number = time.perf_counter(), 0.0, 0
        while not mended or time.perf_counter() - mended < AFTER_SECONDS:
            if not mended and time.perf_counter() - began >= seconds:
                site.link.mend()
                mended = time.perf_counter()
            took, status, reply = asked.row(x[number % len(x)][None])
            number, longest = number + 1, max(longest, took)
            parameters = reply.get("parameters", {})
            told["asked"] += 1
            told["answered"] += status == 200
            told["answered_offline"] += bool(parameters.get("offline"))
            told["refused"] += status == 503 and "is out of reach" in reply["error"]
            told["other"] += status not in (200, 503)
            if mended and sent_again is None and parameters.get("exit") == "final":
                sent_again = time.perf_counter() - mended
    found = {"offline": offline, "seconds": seconds, **told, "longest": longest, "sent_again": sent_again}
    console.print(found)
    return found


def _parts(site: Site, x: Any, options: argparse.Namespace, console: Console) -> dict[str, Callable[[], Any]]:
    few = x[:FEW_ROWS]
    shares, rates, rows, seconds = options.shares, options.rates, options.rows, options.outage
    return {
        "latency": lambda: list(latencies(site, x, shares=shares, rates=rates, rows=rows, console=console)),
        "computing": lambda: computing(site, few, console=console),
        "outage": lambda: [
            outage(site, few, seconds=seconds, offline=offline, console=console) for offline in ("Answer", "Refuse")
        ],
    }


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 1 where no networks can be made, or no plan is certified."""
    parser = argparse.ArgumentParser(prog="bench.edge", description="edge and core over a narrow uplink")
    parser.add_argument("name", nargs="?", default="video", choices=list(SUBJECTS))
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS, help="what else --out says stands")
    parser.add_argument("--rows", type=int, default=2000, help="of the split in each setting")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="of a processor")
    parser.add_argument("--rates", nargs="+", type=float, default=RATES_MBIT, help="Mbit/s")
    parser.add_argument("--outage", type=float, default=60.0, help="seconds")
    parser.add_argument("--price-seconds", type=float, default=30.0, help="to measure what the pieces cost, about")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    console = Console()
    subject = make_subject(options.name, console)
    made = prepared(load_bundle(subject.bundle), subject.x, seconds=options.price_seconds)
    name = next((arm for arm in ("fp32", "fp32-uncertified") if arm in made.plans), None)
    if name is None:
        print(f"bench.edge: no plan for {options.name} within the budget", file=sys.stderr)
        return 1
    x = np.ascontiguousarray(subject.x[len(subject.x) // 2 :])
    found = json.loads(options.out.read_text()) if options.out.is_file() else {}
    found |= {"subject": options.name, "plan": name}
    try:
        with uplink() as link, ExitStack() as stack:
            site = Site(made, made.plans[name], link, stack)
            stack.enter_context(on_core(BOX_CORE))
            for part, measure in _parts(site, x, options, console).items():
                if part in options.only:
                    found[part] = measure()
                    found["measured"] = {**found.get("measured", {}), part: provenance()}
    except NoNetworksError as error:
        print(f"bench.edge: {error}", file=sys.stderr)
        return 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
