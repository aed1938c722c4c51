"""The API server of a cluster, through the operator's own client; with the user's credentials."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from kubernetes import client as kubernetes_client
from kubernetes import config as kubernetes_config

from offramp_cli.source.source import PLUGIN, Choice, RefusedError, SourceError
from offramp_core.control.objects import Rollout
from offramp_operator.explain.family import Family, Manifest, WorkerSeen, created_at, family
from offramp_operator.kube import pods
from offramp_operator.kube.client import ApiError, ApiUnavailableError, GoneError, InvalidObjectError, KubeClient
from offramp_operator.kube.kinds import (
    CONFIG,
    MANAGED_SELECTOR,
    POD,
    ROLLOUT,
    SERVICE,
    SERVICE_LABEL,
    Kind,
    name_of,
    shared_pool_of,
    uid_of,
)
from offramp_operator.kube.manifests import holds_label
from offramp_operator.shell.manifests import REQUEST_ANNOTATION
from offramp_operator.shell.platform import ConflictError

T = TypeVar("T")
NO_CLUSTER = "point to a cluster with --kubeconfig FILE or KUBECONFIG, or read what `offramp up` left with --state DIR"


class ClusterSource:
    """Services of one namespace, or of all.

    Raises
    ------
    SourceError
        The kubeconfig cannot be used.
    """

    def __init__(self, choice: Choice) -> None:
        api, namespace, context = _load(choice)
        self._client = KubeClient(api, fenced=False)
        self._namespace = None if choice.all_namespaces else namespace
        self.where = "all namespaces" if choice.all_namespaces else f"namespace {namespace}"
        self._context = context

    def names(self) -> list[str]:
        return sorted(name_of(service) for service in self._list(SERVICE))

    def families(self, name: str | None = None) -> list[Family]:
        if name is None:
            services = self._list(SERVICE)
        else:
            services = (
                [s for s in self._list(SERVICE) if name_of(s) == name] if self._namespace is None else self._get(name)
            )
        if not services:
            return []
        only = f"{SERVICE_LABEL}={name}" if name is not None else ""
        configs, rollouts = (self._list(replace(kind, selector=only)) for kind in (CONFIG, ROLLOUT))
        # Workers that a pool shares among services carry a label for each that they serve.
        shared = name is not None and any(map(shared_pool_of, services))
        workers = self._pods(holds_label(str(name)) if shared else only)
        return [
            family(
                service,
                configs=configs,
                rollouts=rollouts,
                workers=None if workers is None else tuple(_worker(p) for p in workers if _is_of(p, service)),
            )
            for service in sorted(services, key=lambda s: (s["metadata"]["namespace"], name_of(s)))
        ]

    def change_rollout(self, family: Family, rollout: Rollout, spec: Mapping[str, Any]) -> None:
        self._merge(ROLLOUT, family, rollout.name, {"spec": dict(spec)})

    def request(self, family: Family, text: str) -> None:
        self._merge(SERVICE, family, family.name, {"metadata": {"annotations": {REQUEST_ANNOTATION: text}}})

    # --- calls -------------------------------------------------------------------------------------

    def _get(self, name: str) -> list[Manifest]:
        found = self._call(self._client.get(SERVICE, self._namespace or "", name), "get", SERVICE)
        return [] if found is None else [found]

    def _list(self, kind: Kind) -> list[Manifest]:
        return self._call(self._client.list(kind, self._namespace), "list", kind)[0]

    def _pods(self, only: str) -> list[Manifest] | None:
        """None where the user may not list pods; the service's own figures still tell how many are ready."""
        kind = replace(POD, selector=",".join(filter(None, (MANAGED_SELECTOR, only))))
        try:
            return asyncio.run(self._client.list(kind, self._namespace))[0]
        except (ApiError, ApiUnavailableError):
            return None

    def _merge(self, kind: Kind, family: Family, name: str, patch: Manifest) -> None:
        merge = self._client.merge(kind, family.service.namespace, name, patch, manager=PLUGIN)
        self._call(merge, "patch", kind)

    def _call(self, call: Coroutine[Any, Any, T], verb: str, kind: Kind) -> T:
        try:
            return asyncio.run(call)
        except (InvalidObjectError, ConflictError) as error:
            raise RefusedError(f"the API server refuses it: {getattr(error, 'message', error)}") from error
        except GoneError as error:
            hint = (
                f"{kind.plural} are not served by this cluster; install Offramp's chart, or choose another context "
                "with --context"
            )
            raise SourceError(f"context {self._context}: {hint}" if verb == "list" else error.message) from error
        except ApiError as error:
            raise SourceError(_denied(error, verb, kind, self.where)) from error
        except ApiUnavailableError as error:
            raise SourceError(f"context {self._context} does not answer ({_cause(error)}); {NO_CLUSTER}") from error


def _denied(error: ApiError, verb: str, kind: Kind, where: str) -> str:
    if error.status == 401:
        return "the cluster does not know these credentials (401); log in again, or choose another --context"
    if error.status == 403:
        return (
            f"you may not {verb} {kind.plural} in {where}; ask its administrator for the verb {verb} on "
            f"{kind.plural}.{kind.group}"
        )
    return str(error)


def _cause(error: ApiUnavailableError) -> str:
    cause = error.__cause__
    reason = getattr(cause, "reason", None) or cause or error
    return (
        type(reason).__name__
        if isinstance(reason, Exception) and not isinstance(reason, ApiUnavailableError)
        else str(reason)
    )


def _load(choice: Choice) -> tuple[kubernetes_client.ApiClient, str, str]:
    """Client, namespace and name of the context; inside a pod those of its service account."""
    configuration = kubernetes_client.Configuration()
    file = str(choice.kubeconfig) if choice.kubeconfig is not None else None
    try:
        kubernetes_config.load_kube_config(file, choice.context, client_configuration=configuration)
        contexts, active = kubernetes_config.list_kube_config_contexts(file)
        context = next((c for c in contexts if c["name"] == choice.context), active)
        name, namespace = str(context["name"]), context["context"].get("namespace") or "default"
    except (kubernetes_config.ConfigException, OSError) as error:
        if file is not None or choice.context is not None:
            raise SourceError(f"kubeconfig: {_one_line(error)}; {NO_CLUSTER}") from error
        configuration, name, namespace = _in_cluster(error)
    configuration.retries = False
    api = kubernetes_client.ApiClient(configuration)
    if choice.user is not None:
        api.set_default_header("Impersonate-User", choice.user)
    return api, choice.namespace or namespace, name


def _in_cluster(error: Exception) -> tuple[kubernetes_client.Configuration, str, str]:
    configuration = kubernetes_client.Configuration()
    try:
        kubernetes_config.load_incluster_config(client_configuration=configuration)
    except kubernetes_config.ConfigException:
        raise SourceError(f"no cluster ({_one_line(error)}); {NO_CLUSTER}") from error
    return configuration, "in-cluster", "default"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _is_of(pod: Manifest, service: Manifest) -> bool:
    metadata = pod["metadata"]
    labels = metadata.get("labels") or {}
    if shared_pool_of(service):
        mine = labels.get(holds_label(name_of(service))) == uid_of(service)
    else:
        mine = labels.get(SERVICE_LABEL) == name_of(service)
    return mine and metadata.get("namespace") == service["metadata"].get("namespace")


def _worker(pod: Manifest) -> WorkerSeen:
    seen = pods.endpoint(pod, current=True)
    state = "Ready" if seen.ready else seen.failure_reason or str((pod.get("status") or {}).get("phase") or "Pending")
    restarts = f"{seen.restarts} restarts" if seen.restarts else ""
    return WorkerSeen(seen.name, "Pod", state, "; ".join(filter(None, (restarts, seen.failure))), created_at(pod))
