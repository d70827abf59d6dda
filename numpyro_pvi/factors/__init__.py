"""The exact side: a partitioned model as log-likelihoods of single groups, packed rows, and the structure they have."""

from ..handlers import Partition
from ._arguments import (
    ArgumentSignature,
    LeafSignature,
    as_arrays,
    check_finite_arguments,
    check_same_signature,
    frames_named,
    join_arguments,
    positional_names,
    signature_of,
    split_arguments,
)
from ._chunks import (
    GroupMasks,
    Packing,
    Reading,
    choose_chunk_rows,
    even_packing,
    gather_rows,
    pack_rows,
    plate_rows,
    slice_rows,
)
from ._enumerate import enumerated, summed_out
from ._log_densities import (
    Claim,
    Instead,
    SeenCall,
    ValueCall,
    chunk_log_likelihood,
    claimed_by_slopes,
    claimed_exact_prior,
    claimed_prior_factor,
    claimed_rows,
    claimed_term,
    claims_likelihood,
    may_jump,
    prior_log_density,
    rise,
    rows_log_likelihood,
    take_rows,
    with_values_held,
)
from ._mechanism import row_arguments
from ._model import (
    Enumeration,
    FlatLatents,
    Layout,
    LocalLayout,
    ModelCall,
    abstract_trace,
    base_distribution,
    exact_diagonal_prior,
    exact_log_constant,
    exact_prior,
    is_latent,
    is_observed,
    model_work,
    observed_log_likelihood,
    over_plates,
    prior_factor_log_density,
    row_log_likelihood,
    site_log_prob,
)
from ._plan import (
    Arrival,
    PartitionPlan,
    arrive,
    count_rows,
    look_at_rows,
    nobody,
    num_elements,
    pad_rows,
    padded_length,
    places_of_elements,
    read_row_prior,
    read_rows,
    why_not_rows,
    without_labels,
)
from ._planner import (
    KeyWatch,
    Planned,
    check_data,
    check_observed_shapes,
    explained,
    far_worse,
    lengths_named,
    make_plan,
    masks_named,
    model_layout,
    move_to_prior_factor,
    plan_factors,
    proved_only,
    refuse_randomness,
    refuse_reads_of_what_is_not_missing,
    refuse_unheld,
    refuse_unsupported,
    trace_arguments,
    with_expectation,
)
from ._probe import GAUSSIAN, NUM_DIRECTIONS, SeenFactor, predictor_terms
from ._proof import CALLS, Form, Statistics, called_jaxpr, forms_of, is_affine, marked, unmarked
from ._structure import OWN_VALUE, DerivedLeaf, Predictor, TermData, TermSpec, prepare_term, term_log_prob, unread_held

# A handler cannot import the planner, which is a later room: the planner hands itself over.
Partition.planner = staticmethod(make_plan)
