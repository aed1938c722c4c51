"""Settings of a worker that generates, beside :mod:`offramp_worker.settings`.

| variable | meaning |
|---|---|
| OFFRAMP_CACHE_MIB | memory for keys and values of all answers that are being written; default 1024 |
| OFFRAMP_RUNNING | answers that are computed side by side; default 8 |
| OFFRAMP_WAITING | answers that may wait for their turn; default 64 |
| OFFRAMP_PATIENCE_SECONDS | how long a request may be expected to wait until it begins; default 30 |
| OFFRAMP_FIRST_TOKEN_SECONDS | objective: the time to the first token; who cannot have it in time is turned away |
| OFFRAMP_TOKEN_SECONDS | objective: the time per token; no more answers are written at once than keep it |
| OFFRAMP_REPLY_MIB | memory for replies that their clients have not taken yet; default 64 |
| OFFRAMP_AUDIT_SHARE | share of the engine's time for audits while requests are served; default 0.1 |
| OFFRAMP_OUTPUT | what of an answer the budget is about: ExactAnswer (default), TokenF1 or RougeL |
| OFFRAMP_ANSWER_PATTERN | for ExactAnswer: a regular expression whose last match is what counts of an answer; default:
all of it |
| OFFRAMP_LOSSY_SAMPLING | 1: the plan's lossy parts answer requests with a temperature as well; default 0 |
| OFFRAMP_ROUTE | how requests are computed, VARIANT or VARIANT+DRAFT:TOKENS, such as fp32+ngram:4; with a control plane
the variant must be fp32; default: fp32, with the drafts that pay |
| OFFRAMP_VLLM_PYTHON | for a bundle that vLLM computes: the Python of an environment that has vLLM; default: the
worker's own |
| OFFRAMP_VLLM_START_SECONDS | how long one configuration may take until it answers; default 1800 |
| OFFRAMP_AUDIT_RATE | without a control plane: share of greedy requests that are audited; default 0 |
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from offramp_core.errors import InvalidArgumentError
from offramp_core.generation.losses import Output, answer_pattern
from offramp_worker.generate.vllm.load import VllmSettings
from offramp_worker.settings import integer_from, seconds_from, share_from

MIB = 2**20


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """See the module. Memory in bytes."""

    cache_bytes: int = 1024 * MIB
    running: int = 8
    waiting: int = 64
    patience_seconds: float = 30.0
    first_token_seconds: float | None = None
    token_seconds: float | None = None
    reply_bytes: int = 64 * MIB
    audit_share: float = 0.1
    output: Output = Output.EXACT_ANSWER
    answer_pattern: str = ""
    lossy_sampling: bool = False
    route: str = ""
    audit_rate: float = 0.0


def generation_settings(env: Mapping[str, str]) -> GenerationSettings:
    """Parse the environment.

    Raises
    ------
    InvalidArgumentError
        Names the variable, its value and what it must be.
    """
    route, rate = env.get("OFFRAMP_ROUTE", ""), share_from(env, "OFFRAMP_AUDIT_RATE", 0.0, highest=1.0)
    if rate and not route:
        raise InvalidArgumentError(
            "OFFRAMP_AUDIT_RATE is set and OFFRAMP_ROUTE is not; the reference has nothing to be compared with"
        )
    return GenerationSettings(
        cache_bytes=MIB * integer_from(env, "OFFRAMP_CACHE_MIB", 1024, low=1, high=2**24),
        running=integer_from(env, "OFFRAMP_RUNNING", 8, low=1, high=1024),
        waiting=integer_from(env, "OFFRAMP_WAITING", 64, low=1, high=100_000),
        patience_seconds=seconds_from(env, "OFFRAMP_PATIENCE_SECONDS") or 30.0,
        first_token_seconds=seconds_from(env, "OFFRAMP_FIRST_TOKEN_SECONDS"),
        token_seconds=seconds_from(env, "OFFRAMP_TOKEN_SECONDS"),
        reply_bytes=MIB * integer_from(env, "OFFRAMP_REPLY_MIB", 64, low=1, high=2**20),
        audit_share=share_from(env, "OFFRAMP_AUDIT_SHARE", 0.1, highest=0.9),
        output=_output(env.get("OFFRAMP_OUTPUT", "") or Output.EXACT_ANSWER),
        answer_pattern=_pattern(env.get("OFFRAMP_ANSWER_PATTERN", "")),
        lossy_sampling=integer_from(env, "OFFRAMP_LOSSY_SAMPLING", 0, low=0, high=1) == 1,
        route=route,
        audit_rate=rate,
    )


def vllm_settings(env: Mapping[str, str]) -> VllmSettings:
    """Parse the environment; errors as :func:`generation_settings` has them."""
    return VllmSettings(
        python=env.get("OFFRAMP_VLLM_PYTHON", "") or sys.executable,
        running=integer_from(env, "OFFRAMP_RUNNING", 8, low=1, high=1024),
        start_seconds=seconds_from(env, "OFFRAMP_VLLM_START_SECONDS") or 1800.0,
    )


def _output(text: str) -> Output:
    try:
        return Output(text)
    except ValueError as error:
        raise InvalidArgumentError(f"OFFRAMP_OUTPUT is {text!r}; it must be {', '.join(Output)}") from error


def _pattern(text: str) -> str:
    if text:
        try:
            answer_pattern(text)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"OFFRAMP_ANSWER_PATTERN: {error}") from error
    return text
