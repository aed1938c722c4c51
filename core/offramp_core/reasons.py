"""Every word that a machine may read why from: reasons, types of conditions, and what became of a request. One line
each.

Code names a word by its member, so one that is not here cannot be said; what others said (the kubelet, an autoscaler, a
release of another age) is marked as :data:`PassedOn`. Metrics have a series for every value from the start, the
documentation lists what stands here, and the page and the command line take tones from here. Words are a public
contract: people alert on them, so one is added, and seldom changed.

Where a reason appears is one word or several: ``Ready=False`` is a condition with that status, ``worker`` what keeps a
worker from running (``kubelet``: in Kubernetes' own words), ``fetch`` the same as the fetching container says it,
``rollout`` how a rollout or a trial of another model ended, ``refusal`` why a worker did not take a plan, ``tuning`` a
state of the tuner, ``event`` an Event.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NewType, TypeAlias


class Tone(StrEnum):
    """How a person should take it. ``WARNING`` is not as it should be, or not yet; ``BAD`` is a promise that is not
    kept, or somebody who must act."""

    GOOD = "good"
    NEUTRAL = "neutral"
    WARNING = "warning"
    BAD = "bad"


GOOD, NEUTRAL, WARNING, BAD = Tone


class Reason(StrEnum):
    """A reason: its word, tone, where it appears, what it means, and what to do next (empty where there is nothing to
    do)."""

    tone: Tone
    places: frozenset[str]
    meaning: str
    next_step: str

    def __new__(cls, word: str, tone: Tone, where: str, meaning: str, next_step: str = "") -> Reason:
        member = str.__new__(cls, word)
        member._value_ = word
        member.tone, member.places = tone, frozenset(where.split())
        member.meaning, member.next_step = meaning, next_step
        return member

    # fmt: off
    # --- workers that start, and that do not
    SERVING = "Serving", GOOD, "Ready=True", "Workers are ready and serve under the RampConfig that the message names."
    UNLOADED = "Unloaded", GOOD, "Ready=True", "The workers of its pool have the bundle out of memory, because no request came for `spec.sharing.unloadAfterSeconds`; the next request has it loaded, in about the time that the message says."
    ALL_READY = "AllReady", GOOD, "WorkersAvailable=True", "As many workers are ready as `spec.replicas`, or an autoscaler, asks for."
    STARTING = "Starting", NEUTRAL, "Ready=False WorkersAvailable=False VersionOnTrial=True", "No worker is ready yet and nothing has failed: images are pulled, the bundle is verified, sessions are built.", "wait"
    FETCHING_BUNDLE = "FetchingBundle", NEUTRAL, "Ready=False WorkersAvailable=False", "A new worker fetches its bundle from `https://` or `s3://`; the message says how far it is, in steps of 5 %.", "wait"
    FETCH_FAILED = "FetchFailed", WARNING, "worker fetch", "The bundle cannot be fetched for now: the name is unknown, the server does not answer, answers with an error of its own, or the download did not come to an end within the chart's `delivery.timeout`.", "check the server, the network and the NetworkPolicies; the pod tries again by itself"
    FETCH_REFUSED = "FetchRefused", BAD, "worker fetch", "The server refuses the request (401, 403, 404), redirects to another scheme, or the Secret in `spec.model.secretRef` is missing, incomplete or for another host.", "correct `spec.model.uri` or the Secret"
    ADDRESS_REFUSED = "AddressRefused", BAD, "worker fetch", "The host of `spec.model.uri` has a private, loopback, cluster-internal or link-local address, and workers may not connect there.", "keep the bundle at a public address, in an image or in a claim"
    BUNDLE_TOO_LARGE = "BundleTooLarge", BAD, "worker fetch", "The archive, or what it unpacks to, is larger than the chart's `delivery.sizeLimit`.", "raise the limit, or deliver the bundle as an image or in a claim"
    UNSCHEDULABLE = "Unschedulable", BAD, "worker", "No node has room for the pod.", "make room, or lower `spec.worker.resources.requests`"
    SCHEDULING_GATED = "SchedulingGated", WARNING, "kubelet", "The pod waits for its scheduling gates, such as a Kueue queue whose quota is used up.", "look at the queue"
    FAILED_CREATE = "FailedCreate", BAD, "worker", "The pods cannot even be created: a quota, a limit range or an admission rule refuses them.", "raise the quota, or lower requests and `replicas`"
    IMAGE_PULL_BACK_OFF = "ImagePullBackOff", BAD, "worker", "The kubelet cannot pull the worker image or the bundle image: a wrong name, a missing tag, missing credentials, or no way to the registry.", "correct `spec.model.uri` or `spec.worker.image`, or name credentials in `spec.worker.imagePullSecrets`"
    ERR_IMAGE_PULL = "ErrImagePull", BAD, "worker", "As ImagePullBackOff: the first attempt to pull has just failed.", "as for ImagePullBackOff"
    ERR_IMAGE_NEVER_PULL = "ErrImageNeverPull", BAD, "worker", "The image is not on the node and its pull policy is Never.", "load the image on the node, or change `spec.worker.imagePullPolicy`"
    REGISTRY_UNAVAILABLE = "RegistryUnavailable", BAD, "worker", "As ImagePullBackOff: the registry cannot be reached from the node.", "as for ImagePullBackOff"
    SIGNATURE_VALIDATION_FAILED = "SignatureValidationFailed", BAD, "worker", "As ImagePullBackOff: the node's policy does not accept the image's signature.", "sign it with a key that the policy trusts"
    IMAGE_INSPECT_ERROR = "ImageInspectError", BAD, "worker", "As ImagePullBackOff: the container runtime cannot read the image that it has.", "as for ImagePullBackOff"
    INVALID_IMAGE_NAME = "InvalidImageName", BAD, "worker", "As ImagePullBackOff: what is named is no image reference.", "correct `spec.model.uri` or `spec.worker.image`"
    DISK_FULL = "DiskFull", BAD, "worker fetch", "A node has no disk space left: for the image, for the worker, or so little that it evicted the pod.", "free space on the node that the message names, or add one"
    EVICTED = "Evicted", BAD, "kubelet", "The node ended the pod because it ran out of something, most often memory.", "set `spec.worker.resources.requests` to what a worker uses"
    REJECTED_BY_NODE = "RejectedByNode", BAD, "worker event", "The kubelet of a node does not admit a pod that was placed there: its device plugin refuses what the pod asks for, or what it was promised is taken or gone. After three such pods fewer are made, with pauses that double up to ten minutes.", "do what the message says, which has the node, the device and the kubelet's words; a changed spec is tried at once"
    FAILED = "Failed", BAD, "worker", "The pod ended and will not be started again; its replacement is on the way.", "read the node's message"
    QUOTA_EXCEEDED = "QuotaExceeded", BAD, "worker", "The namespace's quota is used up, or asks workers to say what they use.", "raise the quota, free some of it, or lower `spec.worker.resources` or `spec.replicas`"
    LIMIT_RANGE = "LimitRange", BAD, "worker", "The namespace's LimitRange refuses what a worker asks for.", "change `spec.worker.resources` to what the message allows"
    CREATE_CONTAINER_CONFIG_ERROR = "CreateContainerConfigError", BAD, "kubelet", "The kubelet cannot put the container together, most often because an object that it names is missing.", "make the object that the message names"
    CRASH_LOOP_BACK_OFF = "CrashLoopBackOff", BAD, "worker", "The worker ends again and again.", "read the last lines of the ended process"
    OOM_KILLED = "OOMKilled", BAD, "worker", "The worker used more memory than its limit and the kernel ended it.", "raise `spec.worker.resources.limits.memory`"
    ERROR = "Error", BAD, "worker", "The worker ended with an exit code other than 0.", "read the last lines of the ended process"
    CRASHED = "Crashed", BAD, "worker", "A worker process of `offramp up` ended.", "read the worker's log in the state folder"
    WORKER_FAILED = "WorkerFailed", BAD, "worker", "A worker cannot run and gave no reason of its own.", "look at the pod that the message names"
    EXECUTOR_FAILING = "ExecutorFailing", BAD, "worker refusal", "Every run of a worker's executor fails: three batches in a row, and then the bundle's own probe, which no request can have spoiled.", "look at the node's device and its memory, and at `executor-failing` in the worker's log"
    INVALID_BUNDLE = "InvalidBundle", BAD, "worker fetch", "A worker has the bundle and will not serve it: a file is missing, changed or foreign, a digest is wrong, or the model does not reproduce its own probe on this processor; or it was prepared for a device that the worker does not have, or the archive that it came in is refused (links, names that lead out of the folder, no manifest).", "make the bundle again and change `spec.model.uri`"
    DEVICE_UNHEALTHY = "DeviceUnhealthy", BAD, "DevicesHealthy=False", "A node reports a device that a worker has been given as unhealthy.", "look at the device, its driver and its plugin on the node that the message names, or delete the pod: another device takes its place where there is one"
    INVALID_MODEL = "InvalidModel", BAD, "worker", "`spec.model.uri` cannot be carried out where the service runs: a cluster mounts `oci://IMAGE`, and a `file://` path means nothing on a node that the scheduler picks.", "make the bundle an image, push it, and write `oci://IMAGE`"
    WORKER_CLASS_NOT_FOUND = "WorkerClassNotFound", BAD, "worker WorkerClassUsable=False", "There is no WorkerClass of the name in `spec.worker.className` or a pool's `className`, or not any more.", "make the class, or name another one"
    WORKER_CLASS_CONTRADICTED = "WorkerClassContradicted", BAD, "worker WorkerClassUsable=False", "The service and its WorkerClass say two different things about one field of the workers, which the message names.", "remove the field from `spec.worker`, or change the class"
    WORKER_CLASSES_UNREADABLE = "WorkerClassesUnreadable", BAD, "worker WorkerClassUsable=False", "`spec.worker.className` is set, and the operator may not read WorkerClasses, or the cluster does not have the kind: a release that watches some namespaces alone reads no kind of the whole cluster unless it is configured to.", "install the chart that belongs to the operator, with `scope.workerClasses: true`, or remove `className`"
    WORKER_POOL_NOT_FOUND = "WorkerPoolNotFound", BAD, "worker", "There is no WorkerPool of the name in `spec.sharing.pool` in the service's namespace, or not any more.", "make the pool, or name another one in a new service"
    NO_PLACE_IN_POOL = "NoPlaceInPool", BAD, "worker", "No worker of the WorkerPool holds the service: the message says what is lacking.", "do what the message says: give the pool more `memory` or `maxWorkers`, put the bundle into the pool's claim, or give one of two models another name"
    MEMORY_TOO_SMALL = "MemoryTooSmall", BAD, "Ready=False", "Of a WorkerPool: no bundle of its services fits into `spec.memory`.", "raise `spec.memory`, and with it the memory limit of the workers"
    SERVICES_WITHOUT_PLACE = "ServicesWithoutPlace", WARNING, "Ready=False", "Of a WorkerPool: some services are held by no worker; the others serve.", "see the message, and the conditions of those services"
    POOL_READY = "PoolReady", GOOD, "Ready=True", "Of a WorkerPool: every service is held by as many ready workers as it asks for."
    PLACING = "Placing", NEUTRAL, "Ready=False", "Of a WorkerPool: workers start, or load bundles.", "wait"
    POOL_WITHOUT_PLACE = "PoolWithoutPlace", BAD, "PoolsAvailable=False", "Workers of one of `spec.pools` find no node: none has its labels, its devices or room for them, or a quota is used up. Workers of the other pools serve on.", "label or add a node, change the pool's `nodeSelector`, `resources` or `tolerations`, or remove the pool"
    WORKER_CLASS_FULL = "WorkerClassFull", BAD, "Ready=False PoolsAvailable=False event", "A service has fewer workers than it needs: `spec.maxWorkers` of the WorkerClass is for all services that name it, and others need its workers as much. The message says how many it has and needs; `status.poolPlan` what they answer.", "raise `spec.maxWorkers` of the class and give it nodes, add a pool of another class, or lower what other services ask for (`kubectl get pods -A -l earlyexit.dev/worker-class=NAME` shows whose workers there are)"
    POOLS_PLANNED = "PoolsPlanned", NEUTRAL, "event", "Another number of workers is planned for some pool; the message says what is asked for, what the workers answer and cost, and why."
    POOLS_RECOMMENDED = "PoolsRecommended", NEUTRAL, "event", "Other numbers of workers than `spec.pools` has would be the cheapest that answer what is asked; nothing is changed.", "set `replicas` of the pools, or remove them for the operator to decide"
    FIELD_DEPRECATED = "FieldDeprecated", WARNING, "DeprecatedFields=True", "`DeprecatedFields` is True: the spec has a field that changes nothing any more, or that the next release will not read; the message says what to write instead.", "change the manifest as the message says"
    NAME_TAKEN = "NameTaken", BAD, "worker", "An object that the operator must make exists already and belongs to somebody else: a Deployment, Service or PodDisruptionBudget of the service's name.", "delete it, or give the service another name"
    INVALID_SPEC = "InvalidSpec", BAD, "Ready=False Stalled=True worker", "The API server accepted the service, but something in the spec cannot be used: it breaks a rule that an older schema did not have, or the API server refuses the Deployment made from it.", "correct the field that the message names"
    REFUSED = "Refused", BAD, "worker", "The API server refuses the workers' objects without a reason of its own.", "read the message; the operator's role may not be the chart's"
    SCALED_TO_ZERO = "ScaledToZero", NEUTRAL, "Ready=False NoExitCapacity=Unknown event", "No worker is wanted: `spec.replicas` is 0, or an autoscaler asks for none.", "raise `spec.replicas`"
    WAKING_UP = "WakingUp", GOOD, "event", "Workers are wanted again after there were none; the message names the plan that they start under."
    PROGRESSING = "Progressing", WARNING, "Reconciling=True", "`Reconciling` is True with this reason while the newest generation is not yet served as asked.", "wait for it"

    # --- workers that are updated, and models on trial
    SURGING = "Surging", NEUTRAL, "WorkersUpdating=True", "Workers are updated, each new one ready before an old one goes."
    REPLACING = "Replacing", NEUTRAL, "WorkersUpdating=True", "Workers are updated in place: one old worker goes, and the next only when its successor serves."
    REPLACING_IN_PLACE = "ReplacingInPlace", NEUTRAL, "event", "There was no room for one worker more, so that the update goes on in place."
    WAITING_FOR_ROOM = "WaitingForRoom", WARNING, "WorkersUpdating=True VersionOnTrial=True", "There is no room for one worker more, on a node or in a quota, and `spec.updatePolicy.surgeDeadline` has not passed.", "wait, or make room"
    RECREATING = "Recreating", WARNING, "WorkersUpdating=True event", "`spec.updatePolicy.type` is `Recreate` and the only worker is being ended, so that its successor has the room.", "wait: where the new worker fails or is late, what served before comes back by itself"
    RECREATED = "Recreated", GOOD, "WorkersUpdating=False event", "The only worker was replaced as `updatePolicy.type: Recreate` asks for; the message says for how long no request was answered."
    RECREATE_FAILED = "RecreateFailed", BAD, "WorkersUpdating=True Reconciling=True Stalled=True event", "The new worker refused its bundle, crashed twice or was not ready by `spec.updatePolicy.recreateDeadline`, so that the pods that served before were brought back: the same image, bundle and settings, from the ReplicaSet that Kubernetes keeps of them.", "mend what the message names in `spec.model` or `spec.worker`, or go back to the old spec"
    NEW_WORKERS_FAIL = "NewWorkersFail", BAD, "WorkersUpdating=True event", "A worker of the new bundle or image cannot serve, or the new workers fail more of their batches than the old ones beyond doubt.", "mend what the message names, or go back to what was there before"
    WAITING_FOR_TURN = "WaitingForTurn", NEUTRAL, "WorkersUpdating=True", "The administrator changed what workers run, and one service after another takes it: this one has not yet.", "wait; an image in `spec.worker.image` is taken at once"
    FLEET_UPDATE_STOPPED = "FleetUpdateStopped", WARNING, "WorkersUpdating=True", "The administrator changed what workers run, and it fails at the service that the message names: new workers do not become ready, crash or fail more batches than the old ones.", "see the failing service; where the image is at fault, install the chart with another one"
    NO_ROOM_TO_SURGE = "NoRoomToSurge", BAD, "WorkersUpdating=True VersionOnTrial=True Reconciling=True Stalled=True event", "There has been no room for one worker more until `spec.updatePolicy.surgeDeadline`, and no old one may go first: there is only one, the policy is `Availability`, or the others are too busy to do without one.", "make room, raise the quota, or set the policy that the message names"
    COMPARING = "Comparing", NEUTRAL, "VersionOnTrial=True", "`VersionOnTrial`: a changed model serves beside the old one (`spec.updatePolicy.sideBySide`), and both are compared by failures and by requests that were refused or late.", "wait"
    PROMOTING = "Promoting", NEUTRAL, "VersionOnTrial=True", "`VersionOnTrial`: the model on trial has passed, and the other workers follow it one by one.", "wait"
    VERSION_ON_TRIAL = "VersionOnTrial", NEUTRAL, "event", "As an Event: a trial of a changed model began."
    VERSION_PROMOTED = "VersionPromoted", GOOD, "event", "As an Event: all workers serve the model that was on trial."
    VERSION_REJECTED = "VersionRejected", BAD, "Stalled=True event", "A model that was tried beside the one that serves was rejected: the message says by what.", "mend the model and ask for it anew, or go back to the old one"
    START_TIMEOUT = "StartTimeout", BAD, "rollout", "Workers of a model on trial were not ready within `sideBySide.deadline`.", "mend the bundle, or raise the deadline where it takes longer to load"
    OBJECTIVE_REJECTED = "ObjectiveRejected", BAD, "rollout", "Of a model on trial, more requests were refused or late than the latency objective allows and than the other version had in the same time.", "compare the times of both models alone; a slower one needs more workers or another objective"
    ANOTHER_AUTOSCALER = "AnotherAutoscaler", BAD, "AutoscalingActive=False", "A HorizontalPodAutoscaler that Offramp did not make targets the workers' Deployment, and the service has `spec.autoscaling` as well.", "delete the other autoscaler, or remove `spec.autoscaling`"
    NO_GATEWAY_API = "NoGatewayAPI", BAD, "RouteAccepted=False", "`spec.route` asks for an HTTPRoute, and the cluster has no `gateway.networking.k8s.io/v1`.", "install Gateway API and a Gateway, or remove `spec.route`"
    ROUTE_NAME_TAKEN = "RouteNameTaken", BAD, "RouteAccepted=False", "An HTTPRoute of the service's name, or a Service named `NAME-main` or `NAME-next`, exists and belongs to somebody else.", "delete it or give it another name"
    ROUTE_REFUSED = "RouteRefused", BAD, "RouteAccepted=False", "The API server refuses the HTTPRoute, or one of the two Services for it.", "correct `spec.route`, or install the chart that belongs to the operator"
    ROUTES_UNREADABLE = "RoutesUnreadable", BAD, "RouteAccepted=False", "The operator may not read HTTPRoutes: its role has lost them.", "install the chart that belongs to the operator, with `rbac.httpRoutes: true`"
    ROUTE_NOT_ACCEPTED = "RouteNotAccepted", BAD, "RouteAccepted=False", "The HTTPRoute is there, and a Gateway refuses it, or none has taken it.", "compare `route.parentRefs` and `hostnames` with the Gateway's listeners"

    # --- promises
    WITHIN_OBJECTIVE = "WithinObjective", GOOD, "LatencyObjectiveMet=True", "The percentile you named is within your threshold."
    OBJECTIVE_MISSED = "ObjectiveMissed", BAD, "LatencyObjectiveMet=False", "`LatencyObjectiveMet` is False: the percentile you named, from admission to reply, is above your threshold under the plan that serves; of generated answers the same of a time of tokens, and the message names it.", "compare p95 with exits off; if requests queue, add workers"
    WITHIN_BUDGET = "WithinBudget", GOOD, "AccuracyWithinBudget=True", "Audits do not show that the stable plan breaks its budget."
    EXITS_OFF = "ExitsOff", GOOD, "AccuracyWithinBudget=True event", "Every request is answered by the model itself, so nothing can disagree. As an Event: exits went off because the spec asks for it."
    BUDGET_EXCEEDED = "BudgetExceeded", BAD, "AccuracyWithinBudget=False", "`AccuracyWithinBudget` is False: audits prove with the budget's own confidence that the stable plan disagrees with the model more often than `maxDisagreement` allows.", "nothing by hand; to be sure at once, switch exits off"
    INSUFFICIENT_SAMPLES = "InsufficientSamples", NEUTRAL, "LatencyObjectiveMet=Unknown AccuracyWithinBudget=Unknown", "Fewer than 100 requests (for latency) or 100 audited requests (for accuracy) have been seen under this plan, so there is no verdict yet.", "send traffic, or wait"
    SUFFICIENT = "Sufficient", GOOD, "NoExitCapacity=True", "The ready workers answer the peak of the last hour also with exits off."
    EXITS_OFF_WOULD_OVERLOAD = "ExitsOffWouldOverload", WARNING, "NoExitCapacity=False", "The most requests of the last hour are more than the ready workers answer with exits off.", "add the workers that the message asks for"
    OVERLOADED = "Overloaded", BAD, "NoExitCapacity=False", "As ExitsOffWouldOverload, and exits are off: after a rollback, or before the first plan.", "add the workers that the message asks for"
    CAPACITY_UNKNOWN = "CapacityUnknown", NEUTRAL, "NoExitCapacity=Unknown", "No worker has reported yet how long its model takes, so how much the workers answer with exits off is not known.", "wait until a worker is ready"
    IMPOSSIBLE_COUNTS = "ImpossibleCounts", BAD, "WorkersQuarantined=True", "`WorkersQuarantined` is True: a worker reports counts that cannot be true, such as more disagreements than audits, counters that went backwards, or counts for a plan that was never published.", "find out what image the worker runs, then delete its pod"
    FOREIGN_MODEL = "ForeignModel", BAD, "WorkersQuarantined=True", "`WorkersQuarantined` is True: a worker of the present template serves another model or ramp set than most of the others.", "set `spec.model.digest`, name images by digest, and delete the pod that the message names"
    WORKER_QUARANTINED = "WorkerQuarantined", WARNING, "event", "A worker's counts are no longer pooled: ImpossibleCounts.", "see the condition `WorkersQuarantined`"
    MEASURED_BY_HOLDBACK = "MeasuredByHoldback", WARNING, "ExitsCostTime=True", "`ExitsCostTime` is True: compared with the batches that are held back from it (`spec.ramps.holdback`), the pinned plan answers later than exits off would, or takes more of the engine's time than `spec.ramps.maxOverhead` allows.", "look at what each ramp saves, then change the pin, or let Offramp tune"
    PIN_REJECTED = "PinRejected", BAD, "Stalled=True event", "`Stalled` is True: the thresholds in `spec.ramps.pin` were refused, by recorded traffic before they served anyone, or by the canary.", "lower the thresholds, loosen the budget, or go back to `mode: Auto`"
    SLICE_STOPPED = "SliceStopped", WARNING, "event", "The audits of a slice (`spec.objective.accuracy.slices`), of the requests of a tier (`spec.objective.tiers`; reported as `tier/strict`) or under overload (`spec.objective.overload`), or of the answers that name a class (`classes`, `everyClass`; reported as `class/3`), are over its budget, beyond doubt."
    OVERLOAD_BEGAN = "OverloadBegan", WARNING, "event", "Workers could not answer in time otherwise, so requests that name no budget have that of `spec.objective.overload`. The message has the numbers."
    OVERLOAD_ENDED = "OverloadEnded", NEUTRAL, "event", "Every worker answers within the budget in `spec.objective.accuracy` again; the message says how many requests were answered for that of `spec.objective.overload` under this plan."
    RAMP_DOES_NOT_PAY = "RampDoesNotPay", NEUTRAL, "event", "Of the inputs that reach a ramp of the stable plan fewer leave there than its cost is worth, beyond doubt."
    REQUEST_REFUSED = "RequestRefused", WARNING, "event", "The annotation `earlyexit.dev/request` asks for something that is not known.", "use the command, which writes it rightly"

    # --- rollouts, how they go and how they end
    RAMP_PROPOSED = "RampProposed", GOOD, "event", "A plan was certified, or a known one comes back, and its rollout begins."
    CANARY_STARTED = "CanaryStarted", NEUTRAL, "event", "The first step's share of batches runs the new plan."
    STEP_ADVANCED = "StepAdvanced", NEUTRAL, "event", "A step passed and the next one begins."
    CANARY_RENEWED = "CanaryRenewed", NEUTRAL, "event", "Nobody pulled the workers for a minute, so they left the canary by themselves.", "find out why the operator was away"
    AWAITING_PROMOTION = "AwaitingPromotion", NEUTRAL, "VersionOnTrial=True event", "Every step has passed and `rollout.promotion` is Manual.", "promote or abort it"
    PROMOTED = "Promoted", GOOD, "event", "The new plan serves all traffic."
    ROLLING_BACK = "RollingBack", WARNING, "event", "A rollout has begun to end; its weight is 0 from the next epoch on.", "see the reason in the RampRollout"
    ROLLED_BACK = "RolledBack", BAD, "event", "Every worker has left a canary that was rejected.", "see the reason in the RampRollout"
    ABORTED = "Aborted", WARNING, "event", "Every worker has left a canary that ended without a verdict on the plan.", "see the reason in the RampRollout"
    SUPERSEDED = "Superseded", NEUTRAL, "event", "A newer intent has ended a rollout."
    ACCURACY_REJECTED = "AccuracyRejected", BAD, "rollout", "The canary's audits disagree with the model more often than the budget allows, with more evidence than chance gives."
    DRIFT_REJECTED = "DriftRejected", BAD, "rollout", "The detector that watches a resting canary (paused, or waiting for a person) has seen its answers change."
    SLOWNESS_REJECTED = "SlownessRejected", BAD, "rollout", "Of the slow batches more belong to the canary than its weight explains.", "check whether the profile was measured on the machines that serve"
    FAILURES_REJECTED = "FailuresRejected", BAD, "rollout", "Of the failed batches more belong to the canary than its weight explains; in a step of weight 100, where no stable arm serves beside it, surely more than one batch in a thousand fails.", "read the workers' logs for the cause"
    WORKER_CRASHED = "WorkerCrashed", BAD, "rollout", "A worker died while it executed a canary batch; it left a marker that says so.", "read the ended process's log"
    WORKER_RESTARTED = "WorkerRestarted", BAD, "rollout", "A worker restarted during the canary, whatever the cause.", "find out why it restarted"
    ACK_TIMEOUT = "AckTimeout", BAD, "rollout", "Some worker did not run the step's epoch within two minutes.", "check whether the operator reaches the pod's admin port (8081)"
    INCONCLUSIVE = "Inconclusive", WARNING, "rollout", "The step's deadline passed before the gates had seen enough.", "give steps more time, larger weights, or `onInconclusive: Hold`"
    DECISION_ABORT = "DecisionAbort", NEUTRAL, "rollout", "A person set `spec.decision: Abort`, for example with `offramp abort`."
    NEWER_INTENT = "NewerIntent", NEUTRAL, "rollout", "The service's budget, confidence, mode, pin, execution, overhead or precision changed, so what was begun for the old values is no longer wanted."
    MODEL_CHANGED = "ModelChanged", NEUTRAL, "rollout", "The workers serve another model or ramp set now."
    STABLE_CHANGED = "StableChanged", NEUTRAL, "rollout", "The plan that the canary was compared with is no longer the stable one."
    DRIFT_DETECTED = "DriftDetected", BAD, "rollout event", "The inputs have changed under the stable plan: a worker's own detector, the audits of all workers together, or newer records say that the budget is broken."
    EXITS_COST_TIME = "ExitsCostTime", WARNING, "rollout event", "The stable plan costs time, beyond doubt: compared with the batches that are held back from it, its answers come later than with exits off, or it takes more of the engine's time than `spec.ramps.maxOverhead` allows.", "when it comes again, profile the bundle where it serves"
    ANOTHER_IS_ACTIVE = "AnotherIsActive", NEUTRAL, "rollout", "Two unfinished rollouts of one service were found, for example after a restore."
    CONFIG_GONE = "ConfigGone", WARNING, "rollout", "The RampConfig that the rollout was about has been deleted."
    WITHDRAWN = "Withdrawn", NEUTRAL, "rollout", "A recommendation that nobody had answered no longer holds: newer records favor another plan, or none."

    # --- plans that a worker refuses
    UNKNOWN_RAMP = "UnknownRamp", BAD, "refusal", "The plan names a ramp that the loaded bundle does not have.", "print a pin from the plan that serves, or name the ramp set with `ramps.pin.rampSetDigest`"
    DIGEST_MISMATCH = "DigestMismatch", BAD, "refusal worker fetch", "The plan belongs to another backbone or ramp set than the one that the worker has loaded. As a worker's reason: the bundle, or its image, does not have the digest that was asked for.", "take a pin's digest from `kubectl offramp export`; for a bundle, push it again or correct `spec.model`"
    RAMP_SET_NOT_HELD = "RampSetNotHeld", BAD, "refusal", "The plan, or a ramp set on trial, needs a ramp set that the ramp-set store cannot give: it is damaged, was made for another bundle, or could not be read for a minute.", "put the set's folder back into the store if the plan that serves needs it"
    TOO_MANY_RAMP_SETS = "TooManyRampSets", BAD, "refusal", "The document needs more ramp sets than the two that a worker holds.", "report it, with the operator's version"
    BAD_SIGNATURE = "BadSignature", BAD, "refusal", "The plan was not signed with the key that the worker trusts.", "check whether every operator mounts the same signing key"
    FOREIGN_SERVICE = "ForeignService", BAD, "refusal", "The plan was signed for another service, or for an earlier service of the same name.", "look for something that copies ConfigMaps between services, if it lasts"
    STALE_EPOCH = "StaleEpoch", NEUTRAL, "refusal", "The plan is older than the one that the worker has."
    MALFORMED = "Malformed", BAD, "refusal", "The plan document does not parse, or holds values out of range.", "check whether operator and workers are of versions that go together"
    UNSUPPORTED = "Unsupported", BAD, "refusal", "The worker's executor cannot run this plan on this machine, or the plan's stages do not reproduce the model's answers on the bundle's probe.", "prepare the bundle on the same kind of processor that serves"

    # --- tuning and training
    IDLE = "Idle", NEUTRAL, "tuning", "No plan is searched for now; the message says how the last tuning ended."
    TUNING = "Tuning", NEUTRAL, "tuning", "A search and its certificate are being computed."
    ROLLING_OUT = "RollingOut", NEUTRAL, "tuning", "A rollout is under way; tuning waits for its end."
    COLLECTING_LABELS = "CollectingLabels", NEUTRAL, "tuning", "Too few labels for a certificate yet.", "wait, or see how the number depends on the budget"
    COOLING_DOWN = "CoolingDown", NEUTRAL, "tuning", "The best plan found was rolled back lately and is not proposed again yet.", "wait"
    RECOMMENDED = "Recommended", NEUTRAL, "tuning", "`ramps.mode` is Recommend and a plan waits for a person.", "look at it, then approve or abort it"
    SUSPENDED = "Suspended", NEUTRAL, "tuning", "`spec.suspend` is true: nothing is tuned and rollouts rest.", "set it to false when you are ready"
    DISABLED = "Disabled", NEUTRAL, "tuning", "`ramps.mode` is Disabled: exits are off and nothing is tuned.", "`mode: Auto` turns tuning on again"
    ANOTHER_TASK = "AnotherTask", BAD, "tuning", "The bundle answers with something else than `objective.accuracy.output` names, so that no budget is about it: exits are off.", "set `output` to what the message names, or serve a bundle that was prepared for this task"
    PINNED = "Pinned", NEUTRAL, "tuning", "`ramps.mode` is Pinned: your thresholds serve, or are being judged, and nothing is tuned."
    STREAMS_ALL_DIFFER = "StreamsAllDiffer", WARNING, "event", "Nearly every request names a stream of its own, so that streams do not tell which requests resemble each other.", "name the source in `parameters.stream`: the camera, the user or the conversation, never the request"
    NO_BETTER_PLAN = "NoBetterPlan", NEUTRAL, "event", "A tuning ended and proposes nothing: no plan saves time within the budget, or none saves at least one point more than the one that serves, or none could be certified.", "if you expected savings, look at `report.json` of the bundle, and at the budget"
    TRAINING_STARTED = "TrainingStarted", NEUTRAL, "event", "Enough inputs were captured (`spec.ramps.training: LiveTraffic`), and ramps are being trained on them: in a process of low priority, or in a Job."
    RAMPS_TRAINED = "RampsTrained", GOOD, "event", "A new ramp set is on trial: workers hold it beside the one that serves, audits are scored with both, and a plan of it is canaried once it is certified on the new set's own records."
    NO_BETTER_RAMPS = "NoBetterRamps", NEUTRAL, "event", "On captured inputs that trained nothing, plans could hardly save more with the newly trained ramps than with those that serve."
    TRAINING_FAILED = "TrainingFailed", WARNING, "RampTraining=False event", "A training ended with an error, or took longer than an hour, or its Job could not be made.", "read the message, and the training's log"
    TRAINING_WAITS = "TrainingWaits", WARNING, "RampTraining=False", "The Job that trains ramps has a pod that does not run: no node has room for it, its image or the store cannot be had.", "do what the message says"
    RAMP_SET_DISCARDED = "RampSetDiscarded", NEUTRAL, "event", "The ramp set on trial is gone: no plan of it was certified or saved more than the one that serves, its canary was rolled back, or a worker could not load it."
    RAMP_SET_GONE = "RampSetGone", BAD, "event", "The plan that serves needs a ramp set that no worker can load any more: its folder is missing from the store, or damaged.", "restore the store from a backup, or wait"
    NO_RAMP_STORE = "NoRampStore", WARNING, "RampTraining=False event", "`spec.ramps.training` is LiveTraffic, and there is no ramp-set store.", "name a claim in `spec.ramps.store.claimName`, or train offline"
    # fmt: on

    @classmethod
    def of(cls, word: str) -> Reason | None:
        """The registered reason that a word is, or None: others may say what they like."""
        found = cls._value2member_map_.get(word)
        return found if isinstance(found, Reason) else None

    @classmethod
    def at(cls, place: str) -> tuple[Reason, ...]:
        """Everything that may be said in one place, such as ``refusal``."""
        return tuple(reason for reason in cls if place in reason.places)


PassedOn = NewType("PassedOn", str)
"""Somebody else's word, unchanged: Kubernetes', an autoscaler's, or one that was read back and may be of another
release. Never a literal."""
AnyReason: TypeAlias = Reason | PassedOn
MaybeReason: TypeAlias = Reason | PassedOn | Literal[""]


def parse_reason(word: str) -> AnyReason:
    """A word that came from elsewhere: one that is known here, or the word itself."""
    return Reason.of(word) or PassedOn(word)


class ConditionType(StrEnum):
    """A condition of an EarlyExitService: the status that it has when all is well, whether another one degrades health,
    and what it says."""

    well: Literal["True", "False"]
    degrades: bool
    meaning: str

    def __new__(cls, word: str, well: Literal["True", "False"], degrades: bool, meaning: str) -> ConditionType:
        member = str.__new__(cls, word)
        member._value_ = word
        member.well, member.degrades, member.meaning = well, degrades, meaning
        return member

    # fmt: off
    READY = "Ready", "True", True, "At least one worker answers under a plan. False only while nobody does."
    WORKERS_AVAILABLE = "WorkersAvailable", "True", True, ("As many workers are " "ready " "as " "`spec.replicas`, " "or " "an " "autoscaler, " "asks " "for.")
    LATENCY_OBJECTIVE_MET = "LatencyObjectiveMet", "True", True, ("The " "latency " "objective, " "measured " "from " "admission " "to " "reply " "under " "the " "stable " "plan. " "It " "informs; " "it " "rolls " "nothing " "back.")
    ACCURACY_WITHIN_BUDGET = "AccuracyWithinBudget", "True", True, "The accuracy budget, by audits of the stable plan."
    NO_EXIT_CAPACITY = "NoExitCapacity", "True", False, ("Whether " "the " "ready " "workers " "answer " "the " "peak " "of " "the " "last " "hour " "when " "exits " "go " "off. " "A " "forecast: " "it " "degrades " "no " "health.")
    WORKERS_QUARANTINED = "WorkersQuarantined", "False", False, "There while some worker's counts are not pooled."
    DEVICES_HEALTHY = "DevicesHealthy", "True", False, "There, and False, while a node reports a device of a worker as unhealthy. It informs: workers that serve go on."
    EXITS_COST_TIME = "ExitsCostTime", "False", False, ("There " "while " "a " "pinned " "plan " "takes " "more " "time " "than " "exits " "off, " "by " "its " "holdback. " "It " "informs; " "a " "tuned " "plan " "is " "switched " "off " "instead.")
    RAMP_TRAINING = "RampTraining", "True", False, ("There, " "and " "False, " "while " "something " "keeps " "ramps " "from " "being " "trained " "on " "live " "traffic. " "It " "degrades " "no " "health.")
    WORKERS_UPDATING = "WorkersUpdating", "False", False, ("There " "while " "workers " "with " "another " "bundle " "or " "image " "replace " "those " "that " "serve; " "False " "once " "the " "only " "one " "was " "replaced, " "with " "the " "length " "of " "the " "interruption.")
    VERSION_ON_TRIAL = "VersionOnTrial", "False", False, ("There " "while " "two " "versions " "of " "the " "model " "serve " "side " "by " "side " "(`spec.updatePolicy.sideBySide`).")
    ROUTE_ACCEPTED = "RouteAccepted", "True", True, ("There, " "and " "False, " "while " "requests " "through " "a " "Gateway " "are " "not " "shared " "by " "weight " "although " "`spec.route` " "asks " "for " "it.")
    WORKER_CLASS_USABLE = "WorkerClassUsable", "True", True, ("There, " "and " "False, " "while " "the " "WorkerClass " "that " "`spec.worker.className` " "names " "cannot " "be " "used. " "Workers " "that " "serve " "go " "on " "as " "they " "are.")
    POOLS_AVAILABLE = "PoolsAvailable", "True", True, "There, and False, while workers of one of `spec.pools` find no place, or other services have those of its WorkerClass that are needed. What there is serves on."
    DEPRECATED_FIELDS = "DeprecatedFields", "False", False, ("There " "while " "the " "spec " "has " "fields " "that " "change " "nothing " "any " "more, " "or " "that " "the " "next " "release " "will " "not " "read.")
    AUTOSCALING_ACTIVE = "AutoscalingActive", "True", True, ("There " "while " "an " "autoscaler " "cannot " "do " "its " "work. " "A " "HorizontalPodAutoscaler's " "own " "words " "are " "passed " "on.")
    RECONCILING = "Reconciling", "False", True, "There while the newest generation is not served as asked."
    STALLED = "Stalled", "False", True, ("There " "when " "the " "newest " "generation " "cannot " "be " "served " "as " "asked " "and " "waiting " "will " "not " "help.")
    # fmt: on

    @classmethod
    def of(cls, word: str) -> ConditionType | None:
        """The type that a word is, or None."""
        found = cls._value2member_map_.get(word)
        return found if isinstance(found, ConditionType) else None


def condition_tone(kind: str, status: str, reason: str) -> Tone:
    """How to take a condition: as its reason says; where that is somebody else's word, good or bad by its status."""
    known = Reason.of(reason)
    if known is not None:
        return known.tone
    asked = ConditionType.of(kind)
    if status == "Unknown" or asked is None:
        return NEUTRAL
    return GOOD if status == asked.well else BAD


class RequestOutcome(StrEnum):
    """What became of a request, or of one of its rows. Requests that were never read into rows have no rows to
    count."""

    tone: Tone
    meaning: str

    def __new__(cls, word: str, tone: Tone, meaning: str) -> RequestOutcome:
        member = str.__new__(cls, word)
        member._value_ = word
        member.tone, member.meaning = tone, meaning
        return member

    OK = "ok", GOOD, "answered"
    FAILED = "failed", BAD, "a batch of it failed"
    EXPIRED = "expired", BAD, "its timeout ran out in the queue"
    CANCELLED = "cancelled", NEUTRAL, "the client went away"
    REJECTED = "rejected", BAD, "shed: too much waits, or the worker is not there to serve"
    INVALID = "invalid", NEUTRAL, "malformed, too large, or for an unknown model"
