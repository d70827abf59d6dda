"""The exact side: a partitioned model as log-likelihoods of single groups, packed rows, and the structure they have."""

from ..handlers import Partition
from ._arguments import join_arguments, split_arguments
from ._arrival import Arrival, arrive, count_rows, nobody, pad_rows, padded_length, without_labels
from ._checks import HOSTILE
from ._claims import Claim, claimed_exact_prior, claimed_prior_factor, claimed_rows, claimed_term, claims_likelihood
from ._degrees import forms_of
from ._enumerate import enumerated, summed_out
from ._enumeration import Enumeration
from ._forms import Form, Statistics, is_affine, marked, unmarked
from ._model import (
    FlatLatents,
    Layout,
    LocalLayout,
    ModelCall,
    abstract_trace,
    base_distribution,
    is_latent,
    is_observed,
    model_work,
    observed_log_likelihood,
    row_log_likelihood,
    site_log_prob,
)
from ._packing import Packing, choose_chunk_rows, gather_rows, pack_rows
from ._plan import PartitionPlan
from ._planner import (
    Planned,
    make_plan,
    model_layout,
    move_to_prior_factor,
    plan_factors,
    refuse_unsupported,
    with_expectation,
)
from ._prior import exact_diagonal_prior, exact_log_constant, exact_prior, prior_factor_log_density
from ._probe import GAUSSIAN
from ._reading import GroupMasks, Reading, slice_rows
from ._refusals import KeyWatch, check_observed_shapes, explained, refuse_randomness
from ._row_sites import look_at_rows, num_elements, read_row_prior, read_rows, why_not_rows
from ._terms import DerivedLeaf, Predictor, TermData, TermSpec, prepare_term, term_log_prob
from ._tracing import check_data, trace_arguments
from ._validate import (
    ArgumentSignature,
    LeafSignature,
    as_arrays,
    check_finite_arguments,
    check_same_signature,
    signature_of,
)
from ._value_terms import SeenFactor, predictor_terms
from ._values import Instead, SeenCall, ValueCall, chunk_log_likelihood, prior_log_density, take_rows, with_values_held

# A handler cannot import the planner, which is a later room: the planner hands itself over.
Partition.planner = staticmethod(make_plan)

__all__ = [
    "GAUSSIAN",
    "choose_chunk_rows",
    "pack_rows",
    "base_distribution",
    "is_observed",
    "site_log_prob",
    "ArgumentSignature",
    "LeafSignature",
    "DerivedLeaf",
    "Predictor",
    "Reading",
    "Arrival",
    "Claim",
    "Enumeration",
    "Form",
    "GroupMasks",
    "HOSTILE",
    "KeyWatch",
    "Layout",
    "LocalLayout",
    "ModelCall",
    "Packing",
    "PartitionPlan",
    "Planned",
    "Statistics",
    "TermData",
    "TermSpec",
    "Instead",
    "SeenCall",
    "SeenFactor",
    "ValueCall",
    "abstract_trace",
    "arrive",
    "as_arrays",
    "check_data",
    "check_finite_arguments",
    "check_observed_shapes",
    "check_same_signature",
    "chunk_log_likelihood",
    "claimed_exact_prior",
    "claimed_prior_factor",
    "claimed_rows",
    "claimed_term",
    "predictor_terms",
    "claims_likelihood",
    "count_rows",
    "enumerated",
    "summed_out",
    "exact_diagonal_prior",
    "exact_log_constant",
    "exact_prior",
    "explained",
    "forms_of",
    "gather_rows",
    "is_affine",
    "is_latent",
    "join_arguments",
    "look_at_rows",
    "make_plan",
    "marked",
    "model_layout",
    "model_work",
    "move_to_prior_factor",
    "nobody",
    "num_elements",
    "FlatLatents",
    "observed_log_likelihood",
    "pad_rows",
    "padded_length",
    "plan_factors",
    "prepare_term",
    "prior_factor_log_density",
    "read_row_prior",
    "read_rows",
    "prior_log_density",
    "row_log_likelihood",
    "signature_of",
    "refuse_randomness",
    "refuse_unsupported",
    "slice_rows",
    "split_arguments",
    "take_rows",
    "trace_arguments",
    "why_not_rows",
    "without_labels",
    "with_expectation",
    "with_values_held",
    "term_log_prob",
    "unmarked",
]
