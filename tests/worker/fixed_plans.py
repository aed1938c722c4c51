"""RampConfigs as the control plane stores them, certified for bundles of the tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from processes import manifest_of, plan_for

from offramp_core.certify import METHOD, Certificate, p_value
from offramp_core.certify.certificate import allowance

BUDGET = 0.02


def certified(
    bundle: Path, thresholds: dict[str, str], *, budgets: tuple[float, ...] = (BUDGET,), **certificate: Any
) -> dict[str, Any]:
    """A RampConfig whose certificates hold for its plan; keyword arguments change fields of them."""
    plan, manifest, n = plan_for(bundle, thresholds), manifest_of(bundle), 2000
    level = allowance(0.05, 1)
    proofs = [
        replace(
            Certificate(
                METHOD,
                plan.content_hash,
                budget,
                0.05,
                1,
                level,
                n,
                0,
                p_value(0, n, budget=budget),
                manifest.backbone_digest,
                manifest.ramp_set_digest,
                "sha256:" + "c" * 64,
            ),
            **certificate,
        )
        for budget in budgets
    ]
    return {
        "apiVersion": "earlyexit.dev/v1alpha1",
        "kind": "RampConfig",
        "metadata": {"name": plan.name("tiny")},
        "spec": plan.to_mapping(),
        "status": {"state": "Stable", "certificates": [proof.to_mapping() for proof in proofs]},
    }
