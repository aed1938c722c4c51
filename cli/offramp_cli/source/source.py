"""The interface of a source, and the choice of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from offramp_core.control.objects import Rollout
from offramp_core.errors import OfframpError
from offramp_operator.explain.family import Family

LOCAL_STATE = Path(".offramp")
PLUGIN = "kubectl-offramp"


class SourceError(OfframpError):
    """The source cannot be read or written, or has no object of that name. The message says what to do next."""


class RefusedError(OfframpError):
    """What was asked for is not possible in the present state. The message says why."""


class Source(Protocol):
    """Reads families, writes what people may write."""

    @property
    def where(self) -> str:
        """For messages: ``namespace default``, ``.offramp``."""

    def names(self) -> list[str]:
        """Names of all services."""

    def families(self, name: str | None = None) -> list[Family]:
        """All services with what belongs to them, or the one called ``name`` (an empty list where there is none)."""

    def change_rollout(self, family: Family, rollout: Rollout, spec: Mapping[str, Any]) -> None:
        """Set ``paused`` or ``decision``. Raises :class:`RefusedError` when the rollout has finished meanwhile."""

    def request(self, family: Family, text: str) -> None:
        """Annotate the service with what the user asks for once; see :class:`offramp_core.control.objects.Service`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the command line says about the source."""

    state: Path | None = None
    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None
    all_namespaces: bool = False
    user: str | None = None

    @property
    def names_cluster(self) -> bool:
        return self.all_namespaces or any((self.kubeconfig, self.context, self.namespace, self.user))


def choose(choice: Choice, *, program: str) -> Source:
    """The source that is meant: ``--state``, else a cluster where one is named or as a kubectl plugin, else what
    ``offramp up`` left in this folder, else the cluster of the kubeconfig.

    Raises
    ------
    SourceError
        There is none, or both are named.
    """
    if choice.state is not None and choice.names_cluster:
        raise SourceError("--state reads a folder of this machine; leave out the flags that name a cluster")
    from offramp_cli.source.folder import FolderSource

    if choice.state is not None:
        return FolderSource(choice.state)
    if not choice.names_cluster and program != PLUGIN and FolderSource.has_services(LOCAL_STATE):
        return FolderSource(LOCAL_STATE)
    from offramp_cli.source.cluster import ClusterSource  # its library takes a second to import

    return ClusterSource(choice)
