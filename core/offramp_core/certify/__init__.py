"""Certificates: a held-out test that a plan keeps its accuracy budget, and what makes one trustworthy.

A plan found by search looks better on its own records than it is. So the records are split by time: the older
part (A) finds plans, the newer part (B) tests them (:mod:`~offramp_core.certify.rank_path`). What passed is
written down in a :class:`Certificate` that anybody can check again. Groups of requests with a promise of their own
are tested along (:mod:`~offramp_core.certify.slices`), and smaller budgets that a request may ask for
(:mod:`~offramp_core.certify.tiers`). Losses that lie between 0 and 1 are tested by
betting (:mod:`~offramp_core.certify.means`, :mod:`~offramp_core.certify.betting`).

betting.py      a test for values that are no counts
certificate.py  what is written down of a passed test, and how anybody checks it again
dependence.py   how many labels there really are, where requests resemble their neighbors
expected.py     plans of least *expected* cost, from cautious to bold
lags.py         runs of records, and sums of products of values within them
means.py        whether the mean loss of a plan is within its budget
planner.py      how many labels a certificate takes
rank_path.py    the test: plans from cautious to bold
resemblance.py  what named streams without mistakes are worth, by their scores
slices.py       groups with a promise of their own
tiers.py        smaller budgets that requests may ask for
"""

from offramp_core.certify.betting import betting_p_value
from offramp_core.certify.certificate import (
    METHOD,
    METHOD_LOSSES,
    Certificate,
    allowance,
    records_digest,
    verify_certificate,
)
from offramp_core.certify.dependence import INDEPENDENT, Dependence, all_streams_differ, dependence
from offramp_core.certify.expected import expected_path
from offramp_core.certify.means import Losses, p_value, passing_steps
from offramp_core.certify.planner import fewest_for_count, fewest_labels, labels_for, largest_passing_count, more_labels
from offramp_core.certify.rank_path import (
    BOLD_SCALES,
    PATH_SCALES,
    Certified,
    DesignEffects,
    Menu,
    NotCertified,
    Subject,
    rank_path,
    test_path,
)
from offramp_core.certify.slices import SliceBudget, SliceResult
from offramp_core.certify.tiers import TierBudget, TierResult

__all__ = [
    "BOLD_SCALES",
    "INDEPENDENT",
    "METHOD",
    "METHOD_LOSSES",
    "PATH_SCALES",
    "Certificate",
    "Certified",
    "Dependence",
    "DesignEffects",
    "Losses",
    "Menu",
    "NotCertified",
    "SliceBudget",
    "SliceResult",
    "Subject",
    "TierBudget",
    "TierResult",
    "all_streams_differ",
    "allowance",
    "betting_p_value",
    "dependence",
    "expected_path",
    "fewest_for_count",
    "fewest_labels",
    "labels_for",
    "largest_passing_count",
    "more_labels",
    "p_value",
    "passing_steps",
    "rank_path",
    "records_digest",
    "test_path",
    "verify_certificate",
]
