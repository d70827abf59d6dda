"""Names of JAX's primitives, and of functions written in them, by what they make of forms."""

from __future__ import annotations


def names(text: str) -> frozenset[str]:
    """A set of names from one line of them."""
    return frozenset(text.split())


# Every entry of the output is an entry of the input, or a constant.
PLACED = names(
    "broadcast_in_dim reshape transpose squeeze expand_dims slice rev copy copy_p reduce_precision device_put "
    "sharding_constraint split stop_gradient tile pvary pcast real"
)
MOVED = PLACED | names("gather dynamic_slice concatenate stack pad")
# Every entry of the output is a function of the operands' entries at its own place.
ENTRYWISE = names(
    "add sub add_any mul div neg integer_pow square sqrt rsqrt cbrt pow exp exp2 log log1p expm1 logistic tanh erf erfc "
    "erf_inv sin cos tan asin acos atan sinh cosh asinh acosh atanh atan2 lgamma digamma abs sign max min clamp floor ceil "
    "round rem select_n convert_element_type eq ne lt le gt ge and or not xor is_finite nextafter"
)
MIXED = names("reduce_sum cumsum reduce_window_sum fft imag")
SMOOTH = names(
    "exp exp2 log log1p expm1 logistic tanh erf erfc erf_inv sin cos tan asin acos atan sinh cosh asinh acosh atanh atan2 "
    "sqrt rsqrt cbrt pow lgamma digamma polygamma igamma igammac regularized_incomplete_beta_integral bessel_i0e bessel_i1e "
    "reduce_prod cumprod cumlogsumexp div integer_pow square mul dot_general reduce_logsumexp zeta"
)
KINKS = names(
    "abs sign max min clamp floor ceil round rem eq ne lt le gt ge eq_to le_to lt_to reduce_max reduce_min cummax cummin "
    "argmax argmin sort top_k approx_top_k reduce_and reduce_or reduce_xor and or not xor nextafter select_and_scatter_add "
    "select_and_gather_add reduce_window_max reduce_window_min is_finite population_count shift_left "
    "shift_right_logical shift_right_arithmetic clz"
)
# Of JAX's own functions whose jaxprs have kinks and whose values have none.
CALLS = names(
    "jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr remat remat2 checkpoint"
)
KINKLESS = names(
    "softplus logaddexp logaddexp2 log_sigmoid log_softmax softmax _softmax logsumexp ndtr _ndtr log_ndtr ndtri silu gelu "
    "xlogy xlog1py entr rel_entr gammaln betaln"
)
