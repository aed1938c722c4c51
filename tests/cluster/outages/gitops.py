"""Git, applied again and again by the tools that do it: what they see, and whether anybody takes their fields."""

from __future__ import annotations

import subprocess
import time
from typing import Any

import yaml
from stage import Stage  # type: ignore[import-not-found]

# Flux's field manager and Argo CD's. Neither forces here, so that a field which the operator has taken would be a
# conflict.
MANAGERS = ("kustomize-controller", "argocd-controller")
EVERY_SECONDS = 10.0


class GitOps:
    """Applies the user's manifest on the server every ten seconds, by both tools."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        for manager in MANAGERS:
            self._kubectl("apply", manager)  # both adopt what the user has applied
        self._adopted = self._owned()
        assert set(self._adopted) >= {*MANAGERS, "user"}
        self._next_at = 0.0
        self.applied = 0

    def keep_up(self) -> None:
        """Apply, where it is time to, and find nothing to change."""
        if time.monotonic() < self._next_at:
            return
        for manager in MANAGERS:
            # The operator may write the status between kubectl's two readings; a drift is there each time.
            assert any((seen := self._kubectl("diff", manager)) == "" for _ in range(5)), seen
            self._kubectl("apply", manager)
        self.applied += 1
        self._next_at = time.monotonic() + EVERY_SECONDS

    def check(self, *, seconds: float) -> None:
        """Over so many seconds nothing was changed by it, and nobody's fields have changed hands."""
        assert self.applied >= seconds / EVERY_SECONDS / 2
        assert self._live()["metadata"]["generation"] == 1
        assert self._owned() == self._adopted

    def _live(self) -> dict[str, Any]:
        return dict(self._stage.api.get(self._stage.path))

    def _owned(self) -> dict[str, Any]:
        """The fields of each of those who apply the manifest."""
        fields = self._live()["metadata"]["managedFields"]
        return {f["manager"]: f["fieldsV1"] for f in fields if f["manager"] in (*MANAGERS, "user")}

    def _kubectl(self, command: str, manager: str) -> str:
        """What ``kubectl diff`` tells; ``apply`` must find no conflict."""
        asked = ["kubectl", command, "--server-side", f"--field-manager={manager}", "-f", "-"]
        text = yaml.safe_dump(self._stage.manifest)
        done = subprocess.run(asked, input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or (command, done.returncode) == ("diff", 1), done.stderr
        return done.stdout if command == "diff" else ""
