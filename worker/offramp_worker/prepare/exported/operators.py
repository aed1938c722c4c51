"""Operators that a program may call: those that compute tensors, or numbers of shapes, from their arguments and do
nothing else.

torch looks an operator's name up attribute by attribute in its own modules, so that ``torch.os.system`` is one, too,
and even ``aten`` has operators that read and write files (``from_file``, ``save``). Only the names here are handed on.
They are what torch's converter can express in ONNX, what it takes apart into that, and the checks that programs carry.
"""

from __future__ import annotations

import re

OVERLOAD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
ATEN = frozenset(
    """
    __and__ __lshift__ __or__ __rshift__ __xor__ _adaptive_avg_pool2d _adaptive_avg_pool3d _add_relu _assert_async
    _assert_scalar _assert_tensor_metadata _cdist_forward _conj _convolution _convolution_mode _embedding_bag
    _embedding_bag_forward_only _euclidean_dist _fft_c2c _fft_c2r _fft_r2c _fused_rms_norm _grouped_mm _linalg_det
    _local_scalar_dense _log_softmax _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _native_multi_head_attention _pad_circular _pad_enum _prelu_kernel
    _reshape_alias _safe_softmax _scaled_dot_product_attention_math _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _shape_as_tensor _softmax
    _to_copy _transformer_encoder_layer_fwd _trilinear _unique _unique2 _unsafe_index _unsafe_index_put _unsafe_view
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d _weight_norm _weight_norm_interface abs absolute acos acosh adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d add addbmm
    addcdiv addcmul addmm addmv addr affine_grid_generator alias alias_copy all allclose alpha_dropout amax amin
    aminmax angle any arange arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argsort argwhere
    as_strided as_strided_copy asin asinh atan atan2 atanh atleast_1d atleast_2d atleast_3d avg_pool1d avg_pool2d
    avg_pool3d baddbmm batch_norm bernoulli bilinear binary_cross_entropy binary_cross_entropy_with_logits bincount
    bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor blackman_window block_diag
    bmm broadcast_tensors broadcast_to bucketize cat cdist ceil celu channel_shuffle chunk clamp clamp_max clamp_min
    clip clone col2im column_stack complex concat concatenate conj constant_pad_nd contiguous conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d convolution copy copysign cos cosh cosine_similarity
    count_nonzero cross cross_entropy_loss cummax cummin cumprod cumsum deg2rad det detach detach_copy diag
    diag_embed diagflat diagonal diagonal_copy diagonal_scatter diff dist div divide dot dropout dstack einsum elu
    embedding embedding_bag embedding_renorm empty empty_like empty_permuted empty_strided eq equal erf erfc erfinv
    exp exp2 expand expand_as expand_copy expm1 eye fake_quantize_per_channel_affine
    fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine
    fake_quantize_per_tensor_affine_cachemask feature_alpha_dropout feature_dropout fft_fft fft_fft2 fft_fftn
    fft_fftshift fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2
    fft_rfftn fill fix flatten flip fliplr flipud float_power floor floor_divide fmax fmin fmod frac frobenius_norm
    full full_like gather ge gelu ger glu greater greater_equal grid_sampler grid_sampler_2d grid_sampler_3d
    group_norm gru gru_cell gt hamming_window hann_window hardshrink hardsigmoid hardswish hardtanh
    hardtanh_backward heaviside histc hstack huber_loss hypot im2col index index_add index_copy index_fill index_put
    index_reduce index_select inner instance_norm inverse is_nonzero isclose isfinite isin isinf isnan isneginf
    isposinf isreal istft item kl_div kron kthvalue l1_loss layer_norm le leaky_relu lerp less less_equal lift
    lift_fresh lift_fresh_copy linalg_cross linalg_det linalg_inv linalg_inv_ex linalg_matmul linalg_matrix_norm
    linalg_norm linalg_vecdot linalg_vector_norm linear linspace log log10 log1p log2 log_sigmoid
    log_sigmoid_forward log_softmax logaddexp logaddexp2 logcumsumexp logdet logical_and logical_not logical_or
    logical_xor logit logsumexp lstm lstm_cell lt mH mT masked_fill masked_scatter masked_select matmul max
    max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices maximum
    mean median meshgrid min minimum mish mm moveaxis movedim mse_loss msort mul multinomial multiply mv nan_to_num
    nanmean nansum narrow narrow_copy native_batch_norm native_channel_shuffle native_dropout native_group_norm
    native_layer_norm ne neg negative new_empty new_empty_strided new_full new_ones new_zeros nll_loss nll_loss2d
    nll_loss_forward nll_loss_nd nonzero nonzero_numpy nonzero_static norm norm_except_dim normal normal_functional
    not_equal nuclear_norm numel numpy_T one_hot ones ones_like outer pad pairwise_distance pdist permute
    permute_copy pixel_shuffle pixel_unshuffle polar positive pow prelu prod rad2deg rand rand_like randint
    randint_like randn randn_like randperm ravel real reciprocal reflection_pad1d reflection_pad2d reflection_pad3d
    relu relu6 remainder renorm repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d
    reshape reshape_as resolve_conj resolve_neg rms_norm rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell roll rot90
    round row_stack rrelu rsqrt rsub scalar_tensor scaled_dot_product_attention scatter scatter_add scatter_reduce
    searchsorted select select_copy select_scatter selu sgn sigmoid sign signbit silu sin sinc sinh size slice
    slice_copy slice_scatter smooth_l1_loss softmax softplus softshrink sort special_entr special_erf special_erfc
    special_erfcx special_erfinv special_exp2 special_expit special_expm1 special_log1p special_log_softmax
    special_logit special_logsumexp special_ndtr special_round special_sinc special_softmax special_xlog1py
    special_xlogy split split_copy split_with_sizes split_with_sizes_copy sqrt square squeeze squeeze_copy stack std
    std_mean stft stride sub subtract sum sum_to_size swapaxes swapdims sym_constrain_range
    sym_constrain_range_for_size sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride t t_copy take
    take_along_dim tan tanh tensor tensor_split tensordot threshold tile to topk trace transpose transpose_copy tril
    tril_indices triu triu_indices true_divide trunc type_as unbind unbind_copy unflatten unfold unfold_copy
    unique_consecutive unique_dim unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze unsqueeze_copy
    upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_trilinear3d var var_mean vdot view view_as view_as_complex view_as_complex_copy
    view_as_real view_as_real_copy view_copy vstack where xlogy zero zeros zeros_like
    """.split()  # noqa: SIM905
)
# Of the sizes of tensors: plain arithmetic.
SYMBOLIC = frozenset(
    """
    _operator.add _operator.and_ _operator.eq _operator.floordiv _operator.ge _operator.getitem _operator.gt
    _operator.le _operator.lt _operator.mod _operator.mul _operator.ne _operator.neg _operator.or_ _operator.pos
    _operator.pow _operator.sub _operator.truediv math.ceil math.floor math.trunc torch.sym_float torch.sym_int
    torch.sym_ite torch.sym_max torch.sym_min torch.sym_not torch.sym_sqrt torch.sym_sum
    """.split()  # noqa: SIM905
)
# Operators around graphs, which are read like the one that calls them.
HIGHER_ORDER = frozenset({"cond", "scan", "while_loop", "wrap_with_autocast", "wrap_with_set_grad_enabled"})


def check_operator(target: str) -> None:
    """Refuse an operator that is none of those here.

    Raises
    ------
    ValueError
        Names it, and says what could be done.

    Examples
    --------
    >>> check_operator("torch.ops.aten.relu_.default")
    >>> check_operator("torch.os.system")
    Traceback (most recent call last):
    ...
    ValueError: is torch.os.system, which is no operator that conversion takes; export the model with aten operators
    alone, or as ONNX
    """
    match target.split("."):
        case ["torch", "ops", "aten", name, overload] if _base(name) in ATEN and _is_overload(name, overload):
            return
        case ["torch", "ops", "higher_order", name] if name in HIGHER_ORDER:
            return
    if target not in SYMBOLIC:
        raise ValueError(
            f"is {target[:120]}, which is no operator that conversion takes; export the model with aten operators "
            "alone, or as ONNX"
        )


def _base(name: str) -> str:
    """An operator without the mark of those that write into their argument."""
    return name if name in ATEN else name.removesuffix("_")


def _is_overload(name: str, overload: str) -> bool:
    """Whether the installed torch has it; attributes of Python objects are none, whatever they are called."""
    import torch

    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and bool(OVERLOAD.fullmatch(overload)) and overload in packet.overloads()
