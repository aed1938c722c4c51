"""Settings of a worker that holds several models.

| variable | meaning |
|---|---|
| OFFRAMP_MODELS | file that lists the models, in the place of OFFRAMP_BUNDLE |
| OFFRAMP_POOL_UID | in the place of OFFRAMP_MODELS: the list comes from the operator, signed with OFFRAMP_PUBLIC_KEY |
| OFFRAMP_BUNDLES | then, the folder that all bundles lie in |
| OFFRAMP_MODELS_BYTES | memory for all loaded models; without it all of them are kept loaded |
| OFFRAMP_LOAD_WAIT_SECONDS | how long a request may wait for its model to be loaded; default 10 |
| OFFRAMP_LOAD_WAITING | requests of one model that may wait so; default 64 |
| OFFRAMP_LOAD_SECONDS | how long a load may take before it is given up and others go on; default 300 |
| OFFRAMP_TOKEN_SHA256 | opens the admin port; its bearer may load and unload models, and is that of a model without one
of its own |
| OFFRAMP_PUBLIC_KEY | signs plans of models without a key of their own |

The file is JSON: ``{"models": [{"name": "digits", "bundle": "digits-bundle"}]}``. What else a model may have is
:class:`ListedModel`. All other variables of :mod:`offramp_worker.settings` hold for every model; those of one service
(OFFRAMP_SERVICE, OFFRAMP_SERVICE_UID, OFFRAMP_PLAN_FILE, OFFRAMP_MODEL_DIGEST) are in the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from offramp_core.errors import InvalidArgumentError, InvalidBundleError
from offramp_core.protocol import PlacedModel
from offramp_core.sharing import LEAST_SHARE, MOST_SHARE
from offramp_worker.bundle.task import declared_name
from offramp_worker.documents import parse_document
from offramp_worker.settings import MAX_CACHE_BYTES, Settings, integer_from, seconds_from, settings_from_env, token_from

NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
MAX_FILE_BYTES = 2**20
MOST_MODELS = 1000
OF_ONE_SERVICE = ("OFFRAMP_SERVICE", "OFFRAMP_SERVICE_UID", "OFFRAMP_PLAN_FILE", "OFFRAMP_MODEL_DIGEST")
OF_ONE_MODEL = ("OFFRAMP_FIXED_PLAN", "OFFRAMP_MODEL_NAME", "OFFRAMP_CORE", "OFFRAMP_EDGES")
OF_ALL = ("OFFRAMP_TOKEN_SHA256", "OFFRAMP_PUBLIC_KEY")


class ListedModel(msgspec.Struct, rename="camel", forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A model of the file."""

    #: What clients call it.
    name: str
    #: Folder of its bundle; relative to the file.
    bundle: str
    #: Of the executor, where several models want it: in proportion to the other models' shares.
    share: float = 1.0
    #: Whether it stays in memory whatever others need.
    keep_loaded: bool = False
    #: Seconds without a request after which it leaves memory until the next one; without them it stays.
    unload_after_seconds: float | None = None
    #: Its latency objective; default: OFFRAMP_LATENCY_SECONDS.
    latency_seconds: float | None = None
    #: service, service_uid: whose plans it takes; none without a uid.
    service: str = ""
    service_uid: str = ""
    #: public_key, token_sha256: of its own admin door, as the variables of these names.
    public_key: str = ""
    token_sha256: str = ""
    #: File with its signed plan document.
    plan_file: str = ""
    #: The backbone digest that it must have.
    model_digest: str = ""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    models: list[ListedModel]


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One model: ``settings`` are those of a worker that served it alone."""

    name: str
    settings: Settings
    share: float
    keep_loaded: bool
    #: As of :class:`ListedModel`.
    unload_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Of a worker whose list of models the operator brings. ``env`` holds for every model."""

    uid: str
    public_key: bytes
    bundles: Path
    env: Mapping[str, str]

    def model(self, placed: PlacedModel) -> ModelSettings:
        """Settings of a model, under the name that its bundle has.

        Raises
        ------
        InvalidBundleError, InvalidArgumentError
            No model can be served so.
        """
        bundle = self.bundles / placed.bundle
        name = declared_name(bundle)
        if not NAME.fullmatch(name):
            raise InvalidBundleError(
                f"manifest.json: there is no bundle at {placed.bundle!r} of the pool's claim"
                if not name
                else f"manifest.json: its name is {name[:80]!r}; in a worker of several models it must be lower-case "
                "letters, digits, '.', '_' and '-', at most 63"
            )
        listed = ListedModel(
            name=name,
            bundle=str(bundle),
            keep_loaded=True,  # the operator says who is here: none leaves for another
            unload_after_seconds=placed.unload_after_seconds,
            latency_seconds=placed.latency_seconds,
            service=placed.service,
            service_uid=placed.service_uid,
            token_sha256=placed.token_sha256,
            model_digest=placed.model_digest,
        )
        model = _model(self.env, _common(self.env, self.bundles) | placed.options, listed, self.bundles)
        return replace(model, settings=replace(model.settings, state_dir=self.state_of(placed.service_uid)))

    @property
    def services_dir(self) -> Path | None:
        """Where the state of all services lies."""
        state_dir = self.env.get("OFFRAMP_STATE_DIR")
        return Path(state_dir) / "services" if state_dir else None

    def state_of(self, service_uid: str) -> Path | None:
        """Where the state of a service lies: by its uid, for another one may come under the same name, or a bundle call
        its model otherwise."""
        return self.services_dir / service_uid if self.services_dir else None


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """Settings of the process. ``process`` has what all models have in common, and the token of the repository."""

    process: Settings
    models: tuple[ModelSettings, ...]
    pool: PoolSettings | None = None
    memory_bytes: int | None = None
    load_wait_seconds: float = 10.0
    load_waiting: int = 64
    load_seconds: float = 300.0

    @property
    def has_admin_port(self) -> bool:
        """Whether anybody may ask there for anything."""
        tokens = (self.process.token_sha256, *(model.settings.token_sha256 for model in self.models))
        return any(token is not None for token in tokens)


def shared_settings(env: Mapping[str, str]) -> SharedSettings:
    """Parse the environment and the file that OFFRAMP_MODELS names.

    Raises
    ------
    InvalidArgumentError
        Names the variable or the field, its value and what it must be.
    """
    if env.get("OFFRAMP_POOL_UID"):
        return _of_pool(env)
    file = Path(env.get("OFFRAMP_MODELS", ""))
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidArgumentError(f"OFFRAMP_MODELS: {str(file)!r} cannot be read ({error.strerror})") from error
    if len(raw) > MAX_FILE_BYTES:
        raise InvalidArgumentError(f"OFFRAMP_MODELS: {str(file)!r} is larger than {MAX_FILE_BYTES} bytes")
    try:
        listed = parse_document(raw, _File).models
    except ValueError as error:
        raise InvalidArgumentError(f"OFFRAMP_MODELS: {str(file)!r}: {error}") from error
    return settings_of_models(env, listed, folder=file.parent)


def settings_of_models(env: Mapping[str, str], listed: Sequence[ListedModel], *, folder: Path) -> SharedSettings:
    """Settings of these models; errors as of :func:`shared_settings`."""
    if env.get("OFFRAMP_BUNDLE"):
        raise InvalidArgumentError(
            "OFFRAMP_BUNDLE and OFFRAMP_MODELS are both set; a worker has one bundle, or several"
        )
    for variable in OF_ONE_SERVICE:
        if env.get(variable):
            raise InvalidArgumentError(f"{variable} is set; where there are several models it is a field of each")
    for variable in OF_ONE_MODEL:
        if env.get(variable):
            raise InvalidArgumentError(f"{variable} is set; it is for a worker of one model, leave it out")
    _check(listed)
    models = tuple(_model(env, _common(env, folder), model, folder) for model in listed)
    settings = _process(env, folder, models)
    _check_memory(settings)
    return settings


def _of_pool(env: Mapping[str, str]) -> SharedSettings:
    """Settings of a worker that is brought its list."""
    for variable in ("OFFRAMP_MODELS", "OFFRAMP_BUNDLE", *OF_ONE_SERVICE, *OF_ONE_MODEL):
        if env.get(variable):
            raise InvalidArgumentError(f"{variable} is set; a worker of a pool is brought its models, leave it out")
    for variable in ("OFFRAMP_BUNDLES", *OF_ALL):
        if not env.get(variable):
            raise InvalidArgumentError(f"{variable} is not set; a worker of a pool needs it")
    bundles = Path(env["OFFRAMP_BUNDLES"])
    key = settings_from_env({**env, "OFFRAMP_BUNDLE": str(bundles), "OFFRAMP_SERVICE_UID": "pool"}).public_key
    assert key is not None
    return _process(env, bundles, (), PoolSettings(env["OFFRAMP_POOL_UID"], key, bundles, env))


def _common(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The variables that hold for every model."""
    return {k: v for k, v in env.items() if k not in OF_ALL} | {"OFFRAMP_BUNDLE": str(folder)}


def _process(
    env: Mapping[str, str], folder: Path, models: tuple[ModelSettings, ...], pool: PoolSettings | None = None
) -> SharedSettings:
    return SharedSettings(
        process=replace(settings_from_env(_common(env, folder)), token_sha256=token_from(env)),
        models=models,
        pool=pool,
        memory_bytes=integer_from(env, "OFFRAMP_MODELS_BYTES", 0, high=MAX_CACHE_BYTES) or None,
        load_wait_seconds=seconds_from(env, "OFFRAMP_LOAD_WAIT_SECONDS") or 10.0,
        load_waiting=integer_from(env, "OFFRAMP_LOAD_WAITING", 64, low=1, high=10_000),
        load_seconds=seconds_from(env, "OFFRAMP_LOAD_SECONDS") or 300.0,
    )


def bundle_bytes(bundle: Path) -> int:
    """Bytes of a bundle's files, 0 where there are none: what its models take in memory at least."""
    try:
        return sum(file.stat().st_size for file in bundle.iterdir() if file.is_file())
    except OSError:
        return 0


def _check(listed: Sequence[ListedModel]) -> None:
    if not 1 <= len(listed) <= MOST_MODELS:
        raise InvalidArgumentError(f"models: there are {len(listed)}; give 1 to {MOST_MODELS}")
    seen = set()
    for i, model in enumerate(listed):
        if not NAME.fullmatch(model.name):
            raise InvalidArgumentError(
                f"models[{i}].name: is {model.name[:80]!r}; it must be lower-case letters, digits, '.', '_' and '-', "
                "at most 63"
            )
        if model.name in seen:
            raise InvalidArgumentError(
                f"models[{i}].name: {model.name!r} is there twice; give one of them another name"
            )
        seen.add(model.name)
        for field, path in (("bundle", model.bundle), ("planFile", model.plan_file)):
            if "\0" in path:
                raise InvalidArgumentError(f"models[{i}].{field}: is {path[:80]!r}; no path has a NUL")
        if not LEAST_SHARE <= model.share <= MOST_SHARE:
            raise InvalidArgumentError(
                f"models[{i}].share: is {model.share}; it must be a number from {LEAST_SHARE} to {MOST_SHARE:g}"
            )
        after = model.unload_after_seconds
        if after is not None and not 0 < after < math.inf:
            raise InvalidArgumentError(f"models[{i}].unloadAfterSeconds: is {after}; it must be a number above 0")
        if after is not None and model.keep_loaded:
            raise InvalidArgumentError(f"models[{i}]: has keepLoaded and unloadAfterSeconds; leave one of them out")


def _model(env: Mapping[str, str], common: Mapping[str, str], model: ListedModel, folder: Path) -> ModelSettings:
    own = {
        "OFFRAMP_SERVICE": model.service or model.name,
        "OFFRAMP_SERVICE_UID": model.service_uid,
        "OFFRAMP_PLAN_FILE": str(folder / model.plan_file) if model.plan_file else "",
        "OFFRAMP_MODEL_DIGEST": model.model_digest,
    }
    if model.service_uid:
        own |= {
            "OFFRAMP_PUBLIC_KEY": model.public_key or env.get("OFFRAMP_PUBLIC_KEY", ""),
            "OFFRAMP_TOKEN_SHA256": model.token_sha256 or env.get("OFFRAMP_TOKEN_SHA256", ""),
        }
    elif model.public_key or model.token_sha256 or model.plan_file:
        raise InvalidArgumentError(f"models: {model.name!r} has no serviceUid, which says whose plans it takes")
    if model.latency_seconds is not None:
        own["OFFRAMP_LATENCY_SECONDS"] = str(model.latency_seconds)
    try:
        settings = settings_from_env({**common, **own})
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"models: {model.name!r}: {error}") from error
    return ModelSettings(
        name=model.name,
        settings=replace(
            settings,
            bundle=folder / model.bundle,
            model_name=model.name,
            state_dir=settings.state_dir / model.name if settings.state_dir else None,
            capture_dir=settings.capture_dir / model.name if settings.capture_dir else None,
        ),
        share=model.share,
        keep_loaded=model.keep_loaded,
        unload_after_seconds=model.unload_after_seconds,
    )


def _check_memory(settings: SharedSettings) -> None:
    if settings.memory_bytes is None:
        return
    sizes = {model.name: bundle_bytes(model.settings.bundle) for model in settings.models}
    there = [name for name, size in sizes.items() if size]  # one that is not there is told when it is asked for
    smallest = min(there, key=lambda name: sizes[name], default="")
    if smallest and sizes[smallest] > settings.memory_bytes:
        raise InvalidArgumentError(
            f"OFFRAMP_MODELS_BYTES is {settings.memory_bytes}; the smallest bundle, of {smallest!r}, has "
            f"{sizes[smallest]} bytes: give at least twice that"
        )
    kept = sum(sizes[model.name] for model in settings.models if model.keep_loaded)
    if kept > settings.memory_bytes:
        raise InvalidArgumentError(
            f"OFFRAMP_MODELS_BYTES is {settings.memory_bytes}; models with keepLoaded have bundles of {kept} "
            "bytes: keep fewer of them loaded, or give more memory"
        )
