"""The wire between control plane and worker: what the operator publishes and what workers report.

Downwards goes one signed :class:`PlanDocument` per service (ConfigMap or file, plus a poke of the admin
port). Upwards come :class:`WorkerState` (``GET /v1/state``) and :class:`Observations`
(``GET /v1/observations?after=N``). All are JSON with the field names below; shells do the (de)serialisation.

Counters are cumulative since the worker process started and belong to one (epoch, arm). A process is known
by its ``boot_id``, so a restart can never be mistaken for a counter that went backwards.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

FetchPhase = Literal["connecting", "downloading", "verifying", "unpacking"]
Arm = Literal["stable", "canary", "holdback"]


def slice_number(name: str) -> int:
    """What stands for a slice in records: the same number everywhere, whatever else is declared; 0 for requests that
    name none."""
    return zlib.crc32(name.encode()) & 0x7FFFFFFF if name else 0


def stream_number(name: str) -> int:
    """What stands for a stream in records: the same number everywhere; 0 for requests that name none."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1 if name else 0


_OF_A_CLASS = "class/"  # no request can mean it: names that services declare for requests have no slash


def class_slice(number: int) -> str:
    """The slice of the answers that name a class: ``class/3``."""
    return f"{_OF_A_CLASS}{number}"


def class_of(slice_name: str) -> int | None:
    """The class that a slice's answers name; None for a slice of requests."""
    number = slice_name.removeprefix(_OF_A_CLASS)
    return int(number) if number != slice_name and number.isascii() and number.isdigit() else None


_OF_A_TIER = "tier/"  # likewise
DEFAULT_TIER = "default"  # what a request may call the budget of everybody
OVERLOAD = "overload"  # the tier of a larger budget, which no request can ask for: workers give it where they must


def tier_slice(name: str) -> str:
    """What the audits of a tier's requests are counted under, beside slices: ``tier/strict``."""
    return f"{_OF_A_TIER}{name}"


def tier_of(slice_name: str) -> str:
    """The tier that :func:`tier_slice` is of; empty for any other slice.

    Examples
    --------
    >>> tier_of(tier_slice("strict")), tier_of("night")
    ('strict', '')
    """
    name = slice_name.removeprefix(_OF_A_TIER)
    return name if name != slice_name else ""


# --- downwards -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArmPlan:
    """A plan and what is measured while it serves.

    ``plan`` is :meth:`offramp_core.plan.Plan.to_mapping`. ``audit_rate`` is π: each request is audited with this
    probability, drawn once at admission, whether or not it leaves early; constant within an epoch so that counts are
    binomial. ``design_effect`` audits are worth one, because requests that resemble each other share their mistakes.
    ``tiers`` are those of the plan whose requests may take exits: certified for what is promised now, and not stopped.
    """

    plan: dict[str, Any]
    audit_rate: float
    design_effect: float = 1.0
    tiers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A plan that a document takes away, and why: what the pass that did so leaves to the next ones where its verdict
    cannot be stored.

    ``rollout`` is the attempt whose canary it was, and ``outcome`` how that ends; both are empty for a plan that was
    stable.
    """

    config: str
    reason: str
    message: str
    rollout: str = ""
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class PlanDocument:
    """What every worker of a service should run from ``epoch`` on.

    A batch runs under ``canary`` when ``hash(salt, worker uid, batch number)`` falls below ``weight_percent``.
    ``slow_seconds`` maps a batch size (as text) to the stable arm's p90 of execution seconds, frozen when the step
    began: a stable batch is slow above it, a canary batch above (1 + ``max_overhead``) times it. Where inputs differ in
    length ``slow_seconds_by_length`` has the same by size and length, as the text of
    a :class:`offramp_core.evidence.slow.BatchShape`, and goes before. A canary ends by itself ``canary_lease_seconds``
    after the last authenticated pull of an operator that could act on what it saw; stable exits end after
    ``stable_lease_seconds``. ``accuracy_budget`` and ``breaker_run_length`` arm the worker's own detector: a quiet
    stable plan alarms at most about once in that many audited requests. ``holdback_share`` of the batches run with
    exits off while the stable plan has exits; they are drawn before the canary is, so that the others are shared as
    ``weight_percent`` says. ``slices`` are the names whose audits are counted apart; requests of ``stopped_slices``
    take no exits of the stable plan. Some of them may be of the answers that name a class (:func:`class_slice`): a
    request that an exit would give such an answer does not leave. ``tiers`` are the budgets that a request may ask for,
    by name, each at most ``accuracy_budget``; requests of one that the plan of their batch's arm does not serve
    (:attr:`ArmPlan.tiers`) take no exits. That of :data:`OVERLOAD` is above it, and is for requests that name no budget
    while the worker cannot answer in time otherwise. ``ramp_sets`` are the digests of the ramp sets that
    audits are scored with; with those of the arms they are what a worker holds, its bundle's own where nothing is
    named. ``capture_since`` asks for inputs to be kept for training: those admitted after that time (seconds since the
    epoch); None for none at all, and what was kept is deleted. ``withdrawn`` says nothing to workers: it is the control
    plane's own note of what this document takes away.
    """

    service: str
    service_uid: str
    epoch: int
    stable: ArmPlan
    canary: ArmPlan | None
    weight_percent: int
    salt: str
    accuracy_budget: float
    slow_seconds: dict[str, float] = field(default_factory=dict)
    max_overhead: float = 0.0
    canary_lease_seconds: float = 60.0
    stable_lease_seconds: float = 86_400.0
    breaker_run_length: float = 1_000_000.0
    holdback_share: float = 0.0
    slices: tuple[str, ...] = ()
    stopped_slices: tuple[str, ...] = ()
    ramp_sets: tuple[str, ...] = ()
    capture_since: float | None = None
    withdrawn: tuple[Withdrawn, ...] = ()
    slow_seconds_by_length: dict[str, float] = field(default_factory=dict)
    tiers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A service's bundle in a worker that several services share."""

    service: str
    service_uid: str
    #: Its folder, below the one that all bundles of the worker lie in.
    bundle: str
    #: Opens the service's own admin door.
    token_sha256: str
    #: Of what is to be served: another mark is another bundle, or the same one with other options.
    mark: str
    #: The backbone digest that it must have; any where it is empty.
    model_digest: str = ""
    latency_seconds: float | None = None
    #: The service's own variables, as a worker of it alone would have them.
    options: dict[str, str] = field(default_factory=dict)
    #: It is about to go: answered as ever, but each connection ends with its answer.
    leaving: bool = False
    #: Seconds without a request after which it leaves memory until the next one; None: it stays.
    unload_after_seconds: float | None = None
    #: Where it is new, it need not be loaded before a request asks for it.
    at_rest: bool = False


@dataclass(frozen=True, slots=True)
class ModelList:
    """What one worker of a pool holds from ``epoch`` on. ``uid`` is the worker's own."""

    pool_uid: str
    uid: str
    epoch: int
    models: tuple[PlacedModel, ...]


@dataclass(frozen=True, slots=True)
class SignedDocument:
    """``payload`` is the exact JSON text of a :class:`PlanDocument`, or of a :class:`ModelList`; ``signature`` its
    Ed25519 signature, base64."""

    payload: str
    signature: str


# --- upwards ---------------------------------------------------------------------------------------

ModelStanding = Literal["Loading", "Serving", "Unloaded", "Failed"]  # of Unloaded ones a request begins the load


@dataclass(frozen=True, slots=True)
class HeldModel:
    """How a placed model stands in its worker.

    ``mark`` is what serves, empty before anything does; ``model`` what clients call it, empty before its bundle was
    read. ``message`` says what is wrong with what was asked for last, also where something earlier serves on. ``bytes``
    are what it takes in memory once it is loaded, ``busy_seconds`` how long it has had the executor, ``load_seconds``
    what its last load took. An ``Unloaded`` one is ``wanted`` where requests have come for it: it is being loaded, or
    there was no room.
    """

    service_uid: str
    standing: ModelStanding
    mark: str = ""
    model: str = ""
    message: str = ""
    bytes: int = 0
    busy_seconds: float = 0.0
    load_seconds: float = 0.0
    wanted: bool = False


@dataclass(frozen=True, slots=True)
class HeldModels:
    """What a worker of a pool holds, ``now`` by its own clock. ``epoch`` is that of the newest list it took."""

    uid: str
    boot_id: str
    epoch: int
    now: float
    models: tuple[HeldModel, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a worker did not take a document (see :class:`offramp_core.errors.PlanRefusedError`)."""

    epoch: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class RampInfo:
    """A column of the records: a ramp the loaded bundle offers, or (head ``final``) what another precision's whole
    backbone answers.

    ``precision`` names the graph of the backbone that feeds it; empty where it reads the input, which all of them
    share. See :mod:`offramp_core.columns`.
    """

    id: str
    position: int
    depth: float
    head: str
    precision: str = ""


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """How far a worker has come with fetching its bundle. ``total_bytes`` is None where the server has not said it."""

    phase: FetchPhase
    done_bytes: int = 0
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker as it sees itself.

    ``canary_hash`` is empty without a canary, and once its lease has ended: then the operator has to begin the step
    again. ``epoch`` is the one in force (0: none yet, exits off). ``breaker_open`` says that the worker switched the
    exits of ``epoch`` off because its own detector alarmed; ``crashed_epoch`` that an earlier process of this worker
    died while executing a canary batch of that epoch. ``ramps`` are the columns of its records. ``costs`` has the
    per-batch cost arrays of a records file as nested lists. ``fetching`` is said only by a worker that has no bundle
    yet. ``suspicion`` is how far its detector has come towards its alarm, in tenths: the share of logarithms, 1 where
    the breaker is open. ``ramp_set_digest`` is the bundle's own set, ``ramp_sets`` are those that are held now: columns
    and costs are the same for all of them. ``captures`` inputs are kept for training, of ``capture_since`` on (None:
    none are asked for). ``newest_epoch`` is the newest one that this worker ever took, as far as it remembers: it
    refuses older ones. ``output`` is the task of its bundle, see :mod:`offramp_core.task`.
    ``stopped_tiers`` are those of ``stable_hash`` whose exits it switched off because their own detectors alarmed.
    ``overload_seconds`` is for how long it has answered by the thresholds for overload; None where it does not.
    ``failing`` says why it takes no requests although its bundle is sound: every run fails. (``message`` of an unready
    worker is of its bundle.) ``missing_device`` is the kind of device that its bundle was prepared for, where there is
    none. ``pace`` is what whole batches of the exact model took here before the first request, in times of what
    ``costs`` say, at least ``SHORTEST_PACE`` and at most ``LONGEST_PACE``; 0 where nobody measured. ``at_edge``: a core
    answers, by the whole model, what leaves at no exit here.
    """

    uid: str
    boot_id: str
    service_uid: str
    model: str
    ready: bool
    backbone_digest: str
    ramp_set_digest: str
    ramps: tuple[RampInfo, ...]
    costs: dict[str, list[Any]]
    epoch: int = 0
    stable_hash: str = ""
    canary_hash: str = ""
    refused: Refusal | None = None
    breaker_open: bool = False
    crashed_epoch: int | None = None
    message: str = ""
    fetching: FetchProgress | None = None
    suspicion: float = 0.0
    ramp_sets: tuple[str, ...] = ()
    captures: int = 0
    capture_since: float | None = None
    newest_epoch: int = 0
    failing: str = ""
    output: str = "Top1"
    stopped_tiers: tuple[str, ...] = ()
    missing_device: str = ""
    pace: float = 0.0
    overload_seconds: float | None = None
    at_edge: bool = False


SHORTEST_PACE, LONGEST_PACE = 1e-3, 1e3

TimeName = Literal["latency", "first_token", "per_token"]
TIMES: tuple[TimeName, ...] = get_args(TimeName)
"""Histograms of :class:`ArmCounts` that are over requests, and that an objective may be about."""


@dataclass(frozen=True, slots=True)
class ArmCounts:
    """Counters of one (epoch, arm) since the process started. What is called a request on this wire is a row: one
    input, however many came together.

    ``drawn`` requests were drawn for audit, ``audited`` of them have been compared, ``disagreements`` differed; those
    that asked for a tier are in ``tier_audited`` and ``tier_disagreements`` by its name instead.
    ``judged_batches`` had a limit among the document's; ``slow_batches`` of them exceeded it. ``execution`` maps a
    batch size (text) to sketch counts (bucket index as text → count, see :mod:`offramp_core.sketch`), ``latency`` is
    the same over requests, from admission to reply. Of generated answers ``first_token`` is the same from admission to
    the first token, ``per_token`` over the mean times between tokens of one answer. Where inputs differ in length
    ``execution_by_length`` has the batches of ``execution`` by size and length.
    """

    epoch: int
    arm: Arm
    plan_hash: str
    requests: int = 0
    exits: dict[str, int] = field(default_factory=dict)
    drawn: int = 0
    audited: int = 0
    disagreements: int = 0
    batches: int = 0
    judged_batches: int = 0
    slow_batches: int = 0
    failed_batches: int = 0
    busy_seconds: float = 0.0
    execution: dict[str, dict[str, int]] = field(default_factory=dict)
    latency: dict[str, int] = field(default_factory=dict)
    execution_by_length: dict[str, dict[str, int]] = field(default_factory=dict)
    first_token: dict[str, int] = field(default_factory=dict)
    per_token: dict[str, int] = field(default_factory=dict)
    tier_audited: dict[str, int] = field(default_factory=dict)
    tier_disagreements: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TimeSums:
    """The sums of a :class:`offramp_core.evidence.savings.SavingsState`, in times of what a held-back batch of the same
    size takes."""

    saved: float = 0.0
    saved_surprise: float = 0.0
    spent: float = 0.0
    spent_surprise: float = 0.0


@dataclass(frozen=True, slots=True)
class SliceCounts:
    """Audits of one slice's requests, or of the answers that name its class, and the disagreements among them.
    ``requests`` were answered in all, which is told of those of :data:`OVERLOAD` alone."""

    audited: int = 0
    disagreements: int = 0
    requests: int = 0


@dataclass(frozen=True, slots=True)
class PlanCounts:
    """What one plan did as the stable one since the process started, over all epochs, and how that compares with the
    holdback.

    ``requests`` were answered under it, ``exits`` of them by ramp, those under its thresholds for overload aside.
    ``batches`` could have been held back, with probability ``holdback_share``, and ``held_back`` of them were: all that
    ran under it or were held back from it, without those that have a deadline to keep or came under overload.
    ``answer_time`` is about the time from the beginning of a batch to its replies, ``engine_time`` about the time that
    it keeps the engine busy. ``audit_seconds`` went into audits of requests that it or its holdback answered, where
    their batches would have taken ``exact_seconds`` with exits off; workers of before tell neither, and are left out by
    telling none.
    """

    plan_hash: str = ""
    holdback_share: float = 0.0
    requests: int = 0
    exits: dict[str, int] = field(default_factory=dict)
    batches: int = 0
    held_back: int = 0
    answer_time: TimeSums = TimeSums()
    engine_time: TimeSums = TimeSums()
    slices: dict[str, SliceCounts] = field(default_factory=dict)
    audit_seconds: float = 0.0
    exact_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RouteCounts:
    """What one route of generated answers did since the process started: a variant, with the draft that helps it, or
    several variants in turn.

    ``tokens`` of answers that ended by themselves, their first ones apart, were written in ``seconds``. The model
    accepted ``accepted`` of ``proposed`` tokens of the draft.
    """

    route: str
    tokens: int = 0
    seconds: float = 0.0
    proposed: int = 0
    accepted: int = 0


# Columns of records about answers: name, type, and whether there is one for each ramp.
LABELS = (("prediction", "<i4", True), ("final", "<i4", False), ("reference", "<i4", False))
LOSSES = (("loss", "<f4", True), ("final_loss", "<f4", False))


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """Equal-weight records, columns as base64 little-endian arrays, rows in order of completion.

    ``slice`` int32 [n] has the :func:`slice_number` of what the request named, ``stream`` int64 [n]
    the :func:`stream_number`, ``repeats`` uint8 [n] is 1 where the three requests before it, recorded or not, named
    the same one, and one drawn from hundreds before it another. ``draw`` and ``audit_rate`` float32 [n] are the number
    that was drawn for the request and the probability it was compared with. Workers of before leave some of these out.
    ``time`` float64 [n] (worker's clock, seconds since the epoch, at admission), ``uncertainty`` float32 [n, R],
    ``prediction`` int32 [n, R], ``final`` int32 [n] (what the served executor says at the end), ``reference`` int32
    [n]. Where an answer is no single number there are ``loss`` float32 [n, R] and ``final_loss`` float32 [n] in their
    place: what answers lose against the reference's; ``zero_one`` says that by the task this is all or nothing, so that
    losses may be counted. R and the order of columns are those of the worker's state at ``ramp_set_digest``. ``first``
    is the sequence number of row 0, ``next`` the one to ask for next; a gap between what was asked and ``first`` means
    that older records were dropped from the ring.
    """

    first: int
    next: int
    ramp_set_digest: str
    time: str = ""
    uncertainty: str = ""
    prediction: str = ""
    final: str = ""
    reference: str = ""
    slice: str = ""
    stream: str = ""
    repeats: str = ""
    draw: str = ""
    audit_rate: str = ""
    loss: str = ""
    final_loss: str = ""
    zero_one: bool = False


@dataclass(frozen=True, slots=True)
class Observations:
    """One pull: counters of the recent epochs, and records since ``after``.

    ``held_back`` counts the batches that ran with exits off beside a stable plan, ``plans`` the newest plans that had a
    holdback. They stand apart from ``counts`` for operators of before, which know two arms.
    ``refused`` counts rows of requests that were turned away at once since the process started; together with those
    that were answered they are the demand. ``other_seconds`` went into answers that count for no plan, and so are not
    in ``counts``: to requests that take no exits, and to edges. ``records`` are those of the bundle's own ramp set,
    ``more_records`` those of others that are held. ``state`` comes along where it was asked for (``&state=1``), so that
    a pull is one request; a worker that is older than this leaves it out. ``routes`` are those of generated answers.
    """

    uid: str
    boot_id: str
    now: float
    counts: tuple[ArmCounts, ...]
    records: RecordBlock
    held_back: tuple[ArmCounts, ...] = ()
    plans: tuple[PlanCounts, ...] = ()
    refused: int = 0
    other_seconds: float = 0.0
    state: WorkerState | None = None
    more_records: tuple[RecordBlock, ...] = ()
    routes: tuple[RouteCounts, ...] = ()
