"""What a spec's options are called in a worker's environment. Both shells start workers with them."""

from __future__ import annotations

from offramp_core.control.spec import GENERATED, ServiceSpec


def option_variables(spec: ServiceSpec) -> dict[str, str]:
    """The options that differ from the defaults: a default that is named would replace every worker when Offramp is
    upgraded."""
    return {
        **({"OFFRAMP_CACHE_BYTES": str(spec.cache_bytes)} if spec.cache_bytes else {}),
        **({"OFFRAMP_DEADLINE_ANSWERS": "always"} if spec.deadline_answers == "Always" else {}),
        **({"OFFRAMP_OUTPUT": spec.output} if spec.output in GENERATED else {}),
        **({"OFFRAMP_ANSWER_PATTERN": spec.answer_pattern} if spec.answer_pattern else {}),
        **({"OFFRAMP_LOSSY_SAMPLING": "1"} if spec.sampled_answers == "Lossy" else {}),
        **({"OFFRAMP_FIRST_TOKEN_SECONDS": f"{spec.first_token_seconds:g}"} if spec.first_token_seconds else {}),
        **({"OFFRAMP_TOKEN_SECONDS": f"{spec.token_seconds:g}"} if spec.token_seconds else {}),
        **({"OFFRAMP_FEEDBACK_ROWS": str(spec.feedback_answers)} if spec.feedback_answers else {}),
    }
