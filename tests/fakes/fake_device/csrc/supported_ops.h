// The ops this device has, and how each runs. Everything else raises NotImplementedError;
// composites of these work. Structured ops need only their out= form here: torch makes the
// functional and in-place ones from it.
#pragma once

// Output metadata from the op's meta kernel (on the host), the computation from its CPU kernel (on
// the stream).
constexpr const char* kAsynchronousOps[] = {
    // pointwise, one operand
    "abs.out", "acos.out", "acosh.out", "angle", "angle.out", "asin.out", "asinh.out", "atan.out",
    "atanh.out", "bitwise_not.out", "ceil.out", "conj_physical.out", "cos.out", "cosh.out",
    "digamma.out", "erf.out", "erfc.out", "erfinv.out", "exp.out", "exp2.out", "expm1.out",
    "floor.out", "frac.out", "isnan", "isneginf.out", "isposinf.out", "lgamma.out", "log.out",
    "log10.out", "log1p.out", "log2.out", "logical_not.out", "nan_to_num.out", "neg.out",
    "reciprocal.out", "round.out", "round.decimals_out", "rsqrt.out", "sgn.out", "sigmoid.out",
    "sign.out", "signbit.out", "sin.out", "sinc.out", "sinh.out", "sqrt.out", "tan.out", "tanh.out",
    "trunc.out", "fill_.Scalar", "fill_.Tensor", "zero_", "frexp.Tensor_out", "logit", "logit.out",
    "logit_", "clamp.out", "clamp.Tensor_out", "clamp_min.out", "clamp_min.Tensor_out",
    "clamp_max.out", "clamp_max.Tensor_out", "tril.out", "triu.out",
    // pointwise, several operands
    "add.out", "addcdiv.out", "addcmul.out", "atan2.out", "bitwise_and.Tensor_out",
    "bitwise_left_shift.Tensor_out", "bitwise_or.Tensor_out", "bitwise_right_shift.Tensor_out",
    "bitwise_xor.Tensor_out", "complex.out", "copysign.out", "div.out", "div.out_mode",
    "eq.Scalar_out", "eq.Tensor_out", "floor_divide", "floor_divide.out", "floor_divide_.Tensor",
    "fmax.out", "fmin.out", "fmod.Tensor_out", "ge.Scalar_out", "ge.Tensor_out", "gt.Scalar_out",
    "gt.Tensor_out", "hypot.out", "le.Scalar_out", "le.Tensor_out", "lerp.Scalar_out",
    "lerp.Tensor_out", "logaddexp.out", "logaddexp2.out", "logical_and.out", "logical_or.out",
    "logical_xor.out", "lt.Scalar_out", "lt.Tensor_out", "maximum.out", "minimum.out", "mul.out",
    "ne.Scalar_out", "ne.Tensor_out", "nextafter.out", "polar.out", "pow.Scalar_out",
    "pow.Tensor_Scalar_out", "pow.Tensor_Tensor_out", "remainder.Scalar_Tensor",
    "remainder.Tensor_out", "rsub.Tensor", "sub.out", "where.self", "where.self_out",
    "xlogy.OutTensor", "__lshift__.Scalar", "__lshift__.Tensor", "__rshift__.Scalar",
    "__rshift__.Tensor", "__ilshift__.Scalar", "__ilshift__.Tensor", "__irshift__.Scalar",
    "__irshift__.Tensor",
    // factories that write into an out tensor
    "arange.start_out", "eye.out", "eye.m_out", "linspace.out", "logspace.out", "range.out",
    // reductions and scans
    "all.out", "all.all_out", "all.dims_out", "amax.out", "amin.out", "_aminmax", "_aminmax.dim",
    "aminmax.out", "any.out", "any.all_out", "any.dims_out", "argmax.out", "argmin.out",
    "count_nonzero.dim_IntList", "cumprod.out", "cumsum.out", "_cummax_helper", "_cummin_helper",
    "kthvalue.values", "linalg_vector_norm.out", "max", "max.dim_max", "max.unary_out", "mean.out",
    "median", "median.dim_values", "min", "min.dim_min", "min.unary_out", "nansum", "nansum.out",
    "norm.out", "norm.dtype_out", "prod", "prod.int_out", "std.correction", "std.correction_out",
    "std_mean.correction", "sum.IntList_out", "var.correction", "var.correction_out",
    "var_mean.correction",
    // layout, gathering, sorting
    "bucketize.Scalar", "bucketize.Tensor", "bucketize.Tensor_out", "cat.out", "_stack", "flip",
    "gather.out", "index.Tensor_out", "index_add.out", "index_copy.out", "index_fill_.int_Scalar",
    "index_fill_.int_Tensor", "_index_put_impl_", "index_reduce.out", "index_select",
    "index_select.out", "isin.Tensor_Tensor_out", "isin.Tensor_Scalar_out",
    "isin.Scalar_Tensor_out", "masked_fill_.Scalar", "masked_fill_.Tensor", "masked_scatter_",
    "put_", "roll", "scatter.src_out", "scatter.value_out", "scatter.reduce_out",
    "scatter.value_reduce_out", "scatter_add.out", "scatter_reduce.two_out", "searchsorted.Scalar",
    "searchsorted.Tensor", "searchsorted.Tensor_out", "sort.values_stable", "take", "take.out",
    "topk.values", "trace", "tril_indices", "triu_indices", "unfold_backward", "nonzero_static",
    "histc", "histc.out", "im2col", "im2col.out", "col2im", "col2im.out",
    // matrices
    "addbmm", "addbmm.out", "addbmm_", "addmm.out", "_addmm_activation.out", "addmv.out", "addr",
    "addr.out", "baddbmm.out", "bmm.out", "dot", "linalg_cross.out", "mm.out", "vdot",
    // networks
    "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "adaptive_avg_pool2d.out",
    "avg_pool2d.out", "avg_pool2d_backward.grad_input", "binary_cross_entropy",
    "binary_cross_entropy.out", "binary_cross_entropy_backward",
    "binary_cross_entropy_backward.grad_input", "elu.out", "elu_backward.grad_input",
    "embedding_dense_backward", "gelu.out", "gelu_backward.grad_input", "glu.out", "glu_backward",
    "glu_backward.grad_input", "hardsigmoid.out", "hardsigmoid_backward.grad_input", "hardswish",
    "hardswish.out", "hardswish_", "hardswish_backward", "hardtanh", "hardtanh.out", "hardtanh_",
    "hardtanh_backward", "hardtanh_backward.grad_input", "huber_loss", "huber_loss.out",
    "huber_loss_backward.out", "leaky_relu.out", "leaky_relu_backward.grad_input",
    "log_sigmoid_backward", "log_sigmoid_backward.grad_input", "log_sigmoid_forward",
    "log_sigmoid_forward.output", "_log_softmax.out", "_log_softmax_backward_data.out",
    "max_pool2d_with_indices.out", "max_pool2d_with_indices_backward.grad_input", "mish.out",
    "mish_backward", "mse_loss.out", "mse_loss_backward", "mse_loss_backward.grad_input",
    "native_batch_norm", "native_batch_norm.out", "native_batch_norm_backward",
    "_native_batch_norm_legit", "_native_batch_norm_legit.no_stats", "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd", "native_group_norm", "native_group_norm_backward",
    "native_layer_norm", "native_layer_norm_backward", "nll_loss_forward.output",
    "nll_loss_backward.grad_input", "nll_loss2d_forward", "nll_loss2d_forward.output",
    "nll_loss2d_backward", "nll_loss2d_backward.grad_input", "_prelu_kernel",
    "_prelu_kernel_backward", "relu", "relu_", "sigmoid_backward.grad_input", "silu.out",
    "silu_backward.grad_input", "smooth_l1_loss.out", "smooth_l1_loss_backward.grad_input",
    "_softmax.out", "_softmax_backward_data.out", "softplus.out", "softplus_backward.grad_input",
    "tanh_backward.grad_input", "threshold.out", "threshold_backward.grad_input",
    "adaptive_max_pool2d.out", "adaptive_max_pool2d_backward.grad_input", "hardshrink.out",
    "hardshrink_backward.grad_input", "softshrink.out", "softshrink_backward.grad_input",
    "logit_backward.grad_input", "reflection_pad1d.out", "reflection_pad1d_backward.grad_input",
    "reflection_pad2d", "reflection_pad2d.out", "reflection_pad2d_backward",
    "reflection_pad2d_backward.grad_input", "replication_pad1d.out",
    "replication_pad1d_backward.grad_input", "replication_pad2d.out", "replication_pad2d_backward",
    "replication_pad2d_backward.grad_input", "upsample_bilinear2d.out",
    "upsample_bilinear2d_backward.grad_input", "upsample_nearest1d.out",
    "upsample_nearest1d_backward.grad_input", "renorm.out", "embedding_renorm_",
    "upsample_nearest2d.out", "upsample_nearest2d_backward.grad_input", "_weight_norm_interface",
    "_weight_norm_interface_backward",
    // optimizers and loss scaling
    "_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_", "_fused_adagrad_",
    "_fused_adagrad_.tensor_lr", "_fused_adam_", "_fused_adam_.tensor_lr", "_fused_adamw_",
    "_fused_adamw_.tensor_lr", "_fused_sgd_", "_fused_sgd_.tensor_lr"};

// Every list op there is: one launch for the whole list.
constexpr const char* kAsynchronousPrefix = "aten::_foreach_";

// Another op's CPU kernel under a name that only devices outside of torch are given.
constexpr const char* kRenamedOps[][2] = {{"convolution_overrideable", "convolution"}};

// The result's shape, or the result itself, depends on values: the host waits, and it is counted
// (data_dependent, for _local_scalar_dense item).
constexpr const char* kWaitingOps[] = {"_local_scalar_dense",
                                       "bincount",
                                       "equal",
                                       "masked_select",
                                       "nonzero",
                                       "_unique",
                                       "repeat_interleave.Tensor",
                                       "_unique2",
                                       "unique_consecutive",
                                       "unique_dim"};

// Fill their first argument with random numbers and read nothing of the device.
constexpr const char* kRandomOps[] = {"bernoulli_.float", "cauchy_", "exponential_", "geometric_",
                                      "log_normal_",      "normal_", "random_",      "random_.from",
                                      "random_.to",       "uniform_"};

// Take index tensors that are still on the host, as CUDA does, and masks.
constexpr const char* kIndexOps[] = {"index.Tensor_out", "_index_put_impl_"};

// Resize their output to the inputs' shape and back, which memory that isn't theirs can't follow.
constexpr const char* kScratchOutOps[] = {"mse_loss.out", "smooth_l1_loss.out"};
