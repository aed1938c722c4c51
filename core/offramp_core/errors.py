"""The error tree of every Offramp package.

    OfframpError
    ├── InvalidArgumentError (ValueError)   an argument is outside its documented range
    ├── InvalidRecordsError (ValueError)    a records file breaks its contract; names the array and the row
    ├── InvalidSpecError (ValueError)       a manifest breaks a rule; names the field
    ├── InvalidBundleError (ValueError)     an exit bundle is broken, tampered with or foreign; names the file
    │   ├── StoreUnreadableError            the ramp-set store gives no file; it may later
    │   └── OtherModelError                 the core of an edge serves another model, or takes no edges
    ├── PlanRefusedError (ValueError)       a worker cannot or must not run a plan; carries a machine-readable reason
    │   └── PlanPostponedError              it may run the plan later without being asked again
    ├── ModelRefusedError (ValueError)      `prepare` cannot attach exits to this model; says why
    ├── DeliveryError                       a bundle could not be fetched; carries a machine-readable reason
    ├── UnavailableError                    something outside did not answer; retrying may help
    │   ├── AnswerRefusedError              a worker's answer is larger than allowed or not bounded
    │   └── ApiUnavailableError             the API server did not answer
    │       └── BusyError                   it turned the request away unread (429)
    ├── ApiError                            the API server refused a request for good
    │   ├── GoneError                       the object does not exist
    │   ├── InvalidObjectError              the object is invalid (422, or a malformed 400)
    │   ├── TooLargeError                   the object is larger than the API server or its store takes
    │   └── ExpiredError                    a resource version is too old to watch from (410)
    ├── NameTakenError                      an object of the name that a child needs belongs to somebody else
    ├── StateFolderError                    the state folder of `offramp up` is in use, damaged or of another service
    ├── ExecutorLostError                   every run of an executor failed for too long; the process must begin again
    ├── OverloadedError                     a request was not taken: too many others wait
    │   └── UnableError                     a request was not taken, and repeating it here would not help
    ├── CoreAwayError                       the core of an edge does not answer, or not now
    ├── CoreRefusedError                    it answers, and does not take this request
    ├── CoreBusyError                       it answers, and has no room or no time for this request
    ├── UnreadableReplyError                what it answers cannot be read
    ├── EdgeRefusedError                    a core refuses a request of an edge, with a status
    ├── ClosedError                         a request for generation comes at a bad time; says when to come again
    ├── BadRequestError                     a request is malformed; names the field
    │   └── UnsupportedEncodingError        its Content-Encoding is not understood
    ├── UnreadableError                     a string of a request is no image or text that the model takes
    ├── RequestError                        a request for generation is malformed; names the field
    ├── NoRoomError                         the caches of what is generated leave no room for a sequence; later they do
    │   └── AwayError                       what computes a variant is away, nobody knows for how long
    ├── BrokenLogitsError (ArithmeticError) a model that generates answered with what is no number
    ├── TooMuchError (YAMLError)            a text is YAML and larger or deeper than a manifest may be
    ├── SourceError                         the command line's source cannot be read or written
    └── RefusedError                        a command is not possible in the present state

An error that one package alone raises is defined there, beside what raises it.

Too few samples is never an error: it is the value ``Undecided`` or "no certificate yet".
"""

from __future__ import annotations

from offramp_core.reasons import AnyReason, Reason


class OfframpError(Exception):
    """Base of all errors Offramp raises on purpose."""


class InvalidArgumentError(OfframpError, ValueError):
    """An argument is outside its documented range."""


class InvalidRecordsError(OfframpError, ValueError):
    """A records file breaks its contract. The message names the array and the first bad row."""


class InvalidSpecError(OfframpError, ValueError):
    """A manifest breaks a rule. ``field`` is its JSON path, e.g. ``spec.objective.accuracy.maxDisagreement``."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


OR_ANOTHER_MODEL = "or set spec.model.digest to the one to serve from now on"
"""The last words about a bundle of another model. A pool whose bundle has to have the model of all pools says others
(:func:`of_all_pools`)."""


def of_all_pools(message: str) -> str:
    """What is said of a pool's own bundle that has another model."""
    return message.replace(OR_ANOTHER_MODEL, "made from the one of spec.model.uri with `offramp prepare --remeasure`")


class InvalidBundleError(OfframpError, ValueError):
    """An exit bundle is broken, tampered with or foreign. The message names the file; ``remedy`` is the next step.
    ``device`` is what a whole one was prepared for and does not find."""

    remedy = "pack what `offramp prepare` wrote once more and name it in spec.model.uri"
    device = ""

    @classmethod
    def foreign(cls, message: str) -> InvalidBundleError:
        """A whole bundle, but not the one that was asked for."""
        error = cls(message)
        error.remedy = f"put that bundle there, {OR_ANOTHER_MODEL}"
        return error

    @classmethod
    def needing(cls, message: str, *, remedy: str) -> InvalidBundleError:
        """A whole bundle that something is missing for here; ``remedy`` says how to get it."""
        error = cls(message)
        error.remedy = remedy
        return error

    @classmethod
    def elsewhere(cls, message: str, *, device: str) -> InvalidBundleError:
        """A whole bundle, but for a device that is not here."""
        error = cls(message)
        error.device = device
        error.remedy = "or name a bundle in spec.model.uri that `offramp prepare` made for a device that is here"
        return error


class PlanRefusedError(OfframpError, ValueError):
    """A worker refuses a plan document; it goes on serving under the one it has.

    ``reason`` is one of the registered ones for refusals, see Conditions and reasons.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ModelRefusedError(OfframpError, ValueError):
    """``offramp prepare`` cannot attach exits to this model. The message says why and what would help."""


class DeliveryError(OfframpError):
    """A bundle could not be fetched. The message is the cause and, after a semicolon, the next step; it holds no
    secret.

    ``reason`` is one of the registered ones that a fetch may end with, see Conditions and reasons.
    """

    def __init__(self, reason: AnyReason, cause: str, remedy: str) -> None:
        super().__init__(f"{cause}; {remedy}")
        self.reason, self.cause, self.remedy = reason, cause, remedy


class UnavailableError(OfframpError):
    """Something outside (a worker, the API server) did not answer; retrying may help."""
